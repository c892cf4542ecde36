// Collects the machines that change while a client follows them. Updates leave out machines that the client's key may
// not use.

import type { Caller } from '../../shared/api/route-table.ts';
import type { MachineId } from '../../shared/api/shared-schemas.ts';
import { Wake } from '../../shared/wait-for-change.ts';
import { type LiveMachine, liveOf, type MachineSources } from '../machines/machine-to-json.ts';
import type { Machine, State } from '../state/index.ts';

/**
 * Maximum number of machines in one update; the next update has the others. A fleet of 10,000 machines sends some 700
 * reports per second.
 */
const mostAtOnce = 200;

type Services = MachineSources & { state: State };

/**
 * The machines that a client may see. Each change creates a new `machines` or a new `reachable`, so a comparison of
 * references finds it.
 */
interface Seen {
  machines: State['machines'];
  reachable: readonly MachineId[] | undefined;
}

export class MachineChanges {
  readonly #services: Services;
  readonly #caller: Caller;
  readonly #stops: (() => void)[];
  readonly #woken = new Wake();
  /**
   * `#changed`: machines that went online or offline or were edited. `#reported`: machines that sent a report. Oldest
   * first.
   */
  readonly #changed = new Set<string>();
  readonly #reported = new Set<string>();
  readonly #removed = new Set<MachineId>();
  #seen: Seen;

  constructor(services: Services, caller: Caller) {
    const { state, presence, machineFacts } = services;
    this.#services = services;
    this.#caller = caller;
    this.#seen = { machines: state.machines, reachable: caller.reachable() };
    this.#stops = [
      machineFacts.watch((id) => this.#add(this.#reported, id)),
      presence.watch((id) => this.#add(this.#changed, id)),
      presence.watchElsewhere((id) => this.#add(this.#changed, id)),
      state.watch(() => this.#woken.wake()),
    ];
  }

  /** Resolves when there may be a change, or when the signal fires. */
  wait(signal: AbortSignal): Promise<void> {
    const waiting = this.#changed.size + this.#reported.size + this.#removed.size > 0;
    return waiting || this.#next() ? Promise.resolve() : this.#woken.wait(signal);
  }

  /** Returns the oldest changes that were not sent yet and that the key may see; undefined if there are none. */
  take(): { machines?: LiveMachine[]; removed?: MachineId[] } | undefined {
    this.#compare();
    const machines: LiveMachine[] = [];
    for (const id of [...this.#changed, ...this.#reported]) {
      if (machines.length === mostAtOnce) break;
      this.#changed.delete(id);
      this.#reported.delete(id);
      const machine = this.#services.state.machines.get(id);
      if (machine && this.#caller.reaches(machine.id)) machines.push(liveOf(this.#services, machine));
    }
    const removed = [...this.#removed];
    this.#removed.clear();
    if (machines.length + removed.length === 0) return undefined;
    return { ...(machines.length > 0 && { machines }), ...(removed.length > 0 && { removed }) };
  }

  close(): void {
    for (const stop of this.#stops) stop();
  }

  #add(to: Set<string>, id: string): void {
    to.add(id);
    this.#woken.wake();
  }

  /** Returns the machines that the client may see now; undefined if they are unchanged. */
  #next(): Seen | undefined {
    const { machines, reachable } = this.#seen;
    const next = { machines: this.#services.state.machines, reachable: this.#caller.reachable() };
    return next.machines === machines && next.reachable === reachable ? undefined : next;
  }

  /**
   * Finds machines that were added, edited or removed. A machine that the key may use from now on counts as added, and
   * one that it may no longer use counts as removed.
   */
  #compare(): void {
    const before = this.#seen;
    const after = this.#next();
    if (!after) return;
    this.#seen = after;
    const old = visibleOf(before);
    const visible = visibleOf(after);
    for (const [id, machine] of visible) if (old.get(id) !== machine) this.#changed.add(id);
    for (const [id, { id: machineId }] of old) if (!visible.has(id)) this.#removed.add(machineId);
    for (const id of visible.keys()) this.#removed.delete(id as MachineId);
  }
}

function visibleOf({ machines, reachable }: Seen): ReadonlyMap<string, Machine> {
  if (!reachable) return machines;
  return new Map(
    reachable.flatMap((id) => {
      const machine = machines.get(id);
      return machine ? [[id, machine] as const] : [];
    }),
  );
}
