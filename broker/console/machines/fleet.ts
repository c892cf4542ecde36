// The machines that a page shows: parts of a long list, read as they come into view, and changed as they report.
import { useCallback, useEffect, useReducer, useRef } from 'preact/hooks';
import { client } from '../client.ts';
import { listen, onReturn, useTopic } from '../live.ts';
import { after, every } from '../time.ts';

type Statuses = Awaited<ReturnType<typeof client.machines.statuses>>;
export type MachineRow = Statuses['items'][number];
export type MachineQuery = NonNullable<Parameters<typeof client.machines.statuses>[0]>;

/** Machines per request, the most that the broker answers. */
const pageSize = 100;
/** Milliseconds between two readings of what is in view, for the lines of the last hour and the order. */
const refreshMs = 60_000;
/** Milliseconds until machines that have just joined are read, so that many of them are one request. */
const joinedMs = 500;

class Fleet {
  total: number | undefined;
  error: unknown;
  readonly #query: MachineQuery;
  readonly #changed: () => void;
  readonly #stop = new AbortController();
  readonly #rows = new Map<number, MachineRow>();
  readonly #indexes = new Map<string, number>();
  /** The number of the last request for each page; an older answer that arrives late is ignored. */
  readonly #asked = new Map<number, number>();
  #requests = 0;
  /** Machines that are not in this list although they reported; each is looked for once. */
  readonly #foreign = new Set<string>();
  #view = { first: 0, last: pageSize - 1 };

  constructor(query: MachineQuery, changed: () => void) {
    this.#query = query;
    this.#changed = changed;
  }

  row(index: number): MachineRow | undefined {
    return this.#rows.get(index);
  }

  /** The machines that have been read so far. */
  known(): MachineRow[] {
    return [...this.#rows.values()];
  }

  /** Reads the rows in view that are not here yet. */
  show(first: number, last: number): void {
    this.#view = { first, last };
    for (const page of this.#pagesInView()) if (!this.#asked.has(page)) void this.#read(page);
  }

  /** Reads the rows in view again; those out of view are read when they come into view. */
  refresh(): void {
    const inView = this.#pagesInView();
    for (const page of [...this.#asked.keys()]) if (!inView.includes(page)) this.#asked.delete(page);
    for (const page of inView) void this.#read(page);
  }

  /** Takes over the values of machines that reported. The order stays until the next refresh. */
  update(changed: readonly Omit<MachineRow, 'hour'>[], removed: readonly string[]): void {
    for (const machine of changed) {
      const index = this.#indexes.get(machine.id);
      const before = index === undefined ? undefined : this.#rows.get(index);
      if (index !== undefined && before) this.#rows.set(index, { ...before, ...machine });
    }
    const unknown = changed.filter(({ id }) => !this.#indexes.has(id) && !this.#foreign.has(id));
    const isNew = unknown.length > 0 && this.total !== undefined && this.total < pageSize;
    if (isNew) for (const { id } of unknown) this.#foreign.add(id);
    if (isNew || this.error !== undefined || removed.some((id) => this.#indexes.has(id))) this.refresh();
    this.#changed();
  }

  close(): void {
    this.#stop.abort();
  }

  #pagesInView(): number[] {
    const [first, last] = [Math.floor(this.#view.first / pageSize), Math.floor(this.#view.last / pageSize)];
    return Array.from({ length: last - first + 1 }, (_, index) => first + index);
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
      if (total < (this.total ?? 0)) this.#forget(total);
      this.total = total;
      this.error = undefined;
      for (const [index, machine] of items.entries()) {
        this.#rows.set(offset + index, machine);
        this.#indexes.set(machine.id, offset + index);
      }
    } catch (error) {
      if (this.#stop.signal.aborted) return;
      this.#asked.delete(page);
      this.error = error;
    }
    this.#changed();
  }

  #forget(total: number): void {
    for (const [index, { id }] of this.#rows) {
      if (index < total) continue;
      this.#rows.delete(index);
      this.#indexes.delete(id);
    }
  }
}

/** The machines of a query. The old ones stay until the first of the new are here. */
export function useFleet(query: MachineQuery): { fleet: Fleet; show: (first: number, last: number) => void } {
  const [, count] = useReducer((drawn: number, _: undefined) => drawn + 1, 0);
  const draw = (): void => count(undefined);
  useTopic('machines');
  const text = JSON.stringify(query);
  const visible = useRef<Fleet | undefined>(undefined);
  const next = useRef<Fleet | undefined>(undefined);
  visible.current ??= new Fleet(query, draw);
  useEffect(() => {
    const fleet = new Fleet(query, () => {
      visible.current = fleet;
      draw();
    });
    next.current = fleet;
    fleet.show(0, 0);
    let cancel: (() => void) | undefined;
    const soon = (): void => {
      cancel ??= after(joinedMs, () => {
        cancel = undefined;
        fleet.refresh();
      });
    };
    const stop = [
      listen(({ machines = [], removed = [], event }) => {
        if (machines.length + removed.length > 0) fleet.update(machines, removed);
        if (event?.type === 'machine.registered' || event?.type === 'machine.removed') soon();
      }),
      () => cancel?.(),
      onReturn(() => fleet.refresh()),
      every(refreshMs, () => !document.hidden && fleet.refresh()),
    ];
    return () => {
      fleet.close();
      for (const end of stop) end();
    };
  }, [text]);
  const show = useCallback((first: number, last: number) => next.current?.show(first, last), []);
  return { fleet: visible.current, show };
}
