// Runs that an earlier broker left open: until their machine has told, they may long be over there.
import { after, monotonic } from '../../shared/clock.ts';
import type { Presence } from '../presence/index.ts';
import { returnMs } from './launch.ts';
import type { ScheduleRecords, ScheduleRun } from './records.ts';

export interface Doubts {
  /** Whether all of these may be over. */
  about(open: readonly ScheduleRun[]): boolean;
  stop(): void;
}

/** What ended while it was away a machine tells within this after it has linked. */
const tellMs = 5_000;

export function openDoubts({ presence, records }: { presence: Presence; records: ScheduleRecords }): Doubts {
  const left = new Set<string>(records.openIds());
  const linked = new Map<string, number>();
  const stopWatching = presence.watch((machineId, online) => {
    if (online) linked.set(machineId, monotonic());
    else linked.delete(machineId);
  });
  const cancel = after(returnMs, stop);

  function stop(): void {
    cancel();
    stopWatching();
    left.clear();
    linked.clear();
  }

  function told(machineId: string): boolean {
    const at = linked.get(machineId);
    return at !== undefined && monotonic() - at >= tellMs;
  }

  return {
    about: (open) => open.every(({ id, machine_id }) => left.has(id) && !told(machine_id)),
    stop,
  };
}
