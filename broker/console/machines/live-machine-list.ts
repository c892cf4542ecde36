// A live list of machines for a page. It loads the parts of a long list that come into view, and updates the
// machines that report.
import { signal } from '@preact/signals';
import { useCallback, useEffect, useRef, useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { listen, useTopic } from '../live-updates.ts';
import { every, now, soon } from '../timers.ts';

type Statuses = Awaited<ReturnType<typeof client.machines.statuses>>;
type Listed = Statuses['items'][number];
export type MachineRow = Listed & {
  /** Time of the last message of the machine, by this browser's clock, in milliseconds since 1970. */
  heardAt: number;
};
export type MachineQuery = NonNullable<Parameters<typeof client.machines.statuses>[0]>;

/** Number of machines in one request, the maximum that the broker allows. */
const pageSize = 100;
/**
 * Milliseconds after which the machines in view are loaded again, to update the graphs of the last hour and
 * the order.
 */
const refreshMs = 60_000;
/** Milliseconds until machines that have just joined are loaded, so that one request loads many of them. */
const joinedMs = 500;

export class Fleet {
  readonly #query: MachineQuery;
  readonly #arrived: () => void;
  readonly total = signal<number | undefined>(undefined);
  readonly error = signal<unknown>(undefined);
  /**
   * A counter of changes. Components that read the machines read it too, so that they are drawn again when it grows.
   */
  readonly #version = signal(0);
  readonly #stop = new AbortController();
  readonly #rows = new Map<number, MachineRow>();
  readonly #indexes = new Map<string, number>();
  /** The number of the latest request for each page. An answer to an earlier request is ignored. */
  readonly #asked = new Map<number, number>();
  #requests = 0;
  /**
   * Ids of machines that sent an update but were not in this list. The first update of such a machine reloads the list.
   * Its further updates do not, because the query may exclude this machine.
   */
  readonly #foreign = new Set<string>();
  #view = { first: 0, last: pageSize - 1 };

  /** `arrived` is called after each answer of the broker. */
  constructor(query: MachineQuery, arrived: () => void) {
    this.#query = query;
    this.#arrived = arrived;
  }

  row(index: number): MachineRow | undefined {
    void this.#version.value;
    return this.#rows.get(index);
  }

  /** True if `holds` is true for every machine that was loaded so far. */
  every(holds: (machine: MachineRow) => boolean): boolean {
    void this.#version.value;
    for (const machine of this.#rows.values()) if (!holds(machine)) return false;
    return true;
  }

  /** Loads the rows in view and the next page in the direction of scrolling, unless they were requested before. */
  show(first: number, last: number): void {
    const ahead = Math.sign(first - this.#view.first) * pageSize;
    this.#view = { first, last };
    // The next page is loaded before its rows come into view. Otherwise the broker's answer would fill all rows in view
    // in one frame, and the browser would draw this frame late.
    const next = this.#pagesOf(
      Math.max(0, first + ahead),
      Math.min(last + ahead, (this.total.peek() ?? 0) - 1),
    );
    for (const page of [...this.#pagesInView(), ...next]) if (!this.#asked.has(page)) void this.#read(page);
  }

  /** Loads the rows in view again. Other rows are loaded when they come into view. */
  refresh(): void {
    const inView = this.#pagesInView();
    for (const page of [...this.#asked.keys()]) if (!inView.includes(page)) this.#asked.delete(page);
    for (const page of inView) void this.#read(page);
  }

  /** Updates the rows of machines that have reported. The order of the rows does not change before the next refresh. */
  update(changed: readonly Omit<Listed, 'hour'>[], removed: readonly string[]): void {
    for (const machine of changed) {
      const index = this.#indexes.get(machine.id);
      const before = index === undefined ? undefined : this.#rows.get(index);
      if (index !== undefined && before) this.#rows.set(index, { ...before, ...heard(machine) });
    }
    const unknown = changed.filter(({ id }) => !this.#indexes.has(id) && !this.#foreign.has(id));
    const isNew = unknown.length > 0 && (this.total.peek() ?? pageSize) < pageSize;
    if (isNew) for (const { id } of unknown) this.#foreign.add(id);
    if (isNew || this.error.peek() !== undefined || removed.some((id) => this.#indexes.has(id)))
      this.refresh();
    this.#version.value += 1;
  }

  close(): void {
    this.#stop.abort();
  }

  #pagesInView(): number[] {
    return this.#pagesOf(this.#view.first, this.#view.last);
  }

  /** The numbers of the pages with these rows. */
  #pagesOf(firstRow: number, lastRow: number): number[] {
    const [first, last] = [Math.floor(firstRow / pageSize), Math.floor(lastRow / pageSize)];
    return Array.from({ length: Math.max(0, last - first + 1) }, (_, index) => first + index);
  }

  async #read(page: number): Promise<void> {
    this.#requests += 1;
    const request = this.#requests;
    this.#asked.set(page, request);
    try {
      const offset = page * pageSize;
      const input = { ...this.#query, limit: pageSize, offset };
      const { items, total } = await client.machines.statuses(input, { signal: this.#stop.signal });
      if (this.#stop.signal.aborted || this.#asked.get(page) !== request) return;
      if (total < (this.total.peek() ?? 0)) this.#forget(total);
      this.total.value = total;
      this.error.value = undefined;
      for (const [index, machine] of items.entries()) {
        this.#rows.set(offset + index, heard(machine));
        this.#indexes.set(machine.id, offset + index);
      }
    } catch (error) {
      if (this.#stop.signal.aborted) return;
      this.#asked.delete(page);
      this.error.value = error;
    }
    this.#arrived();
    this.#version.value += 1;
  }

  #forget(total: number): void {
    for (const [index, { id }] of this.#rows) {
      if (index < total) continue;
      this.#rows.delete(index);
      this.#indexes.delete(id);
    }
  }
}

const heard = <T extends { stale_ms: number }>(machine: T): T & { heardAt: number } => ({
  ...machine,
  heardAt: now() - machine.stale_ms,
});

/**
 * Returns the list of machines that match a query. After a change of the query, the old rows are displayed until the
 * first new rows arrive.
 */
export function useFleet(query: MachineQuery): { fleet: Fleet; show: (first: number, last: number) => void } {
  useTopic('machines');
  const text = JSON.stringify(query);
  const [visible, setVisible] = useState(() => new Fleet(query, () => {}));
  const next = useRef<Fleet | undefined>(undefined);
  useEffect(() => {
    const fleet = new Fleet(query, () => setVisible(fleet));
    next.current = fleet;
    fleet.show(0, 0);
    const joined = soon(joinedMs, () => fleet.refresh());
    const stop = [
      listen(
        ({ machines = [], removed = [], event }) => {
          if (machines.length + removed.length > 0) fleet.update(machines, removed);
          if (event?.type === 'machine.registered' || event?.type === 'machine.removed') joined();
        },
        () => fleet.refresh(),
      ),
      joined.cancel,
      every(refreshMs, () => !document.hidden && fleet.refresh()),
    ];
    return () => {
      fleet.close();
      for (const end of stop) end();
    };
  }, [text]);
  const show = useCallback((first: number, last: number) => next.current?.show(first, last), []);
  return { fleet: visible, show };
}
