// Tells agents which results the broker has on its own disk: many at a time, for nobody waits for it.
import { after } from '../../shared/clock.ts';
import { newId } from '../../shared/ids.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Presence } from '../presence/index.ts';

export interface Forgetting {
  /** One that is away is told when it is back, for it names what it keeps. */
  add(machineId: string, ids: readonly string[]): void;
  close(): void;
}

const gatherMs = 50;
/** Of one message, which may have 64 KiB. */
const mostIds = 1000;

export function openForgetting(presence: Presence, log: Logger): Forgetting {
  const gathered = new Map<string, string[]>();
  let cancel: (() => void) | undefined;

  function tell(): void {
    cancel = undefined;
    for (const [machineId, ids] of gathered) {
      gathered.delete(machineId);
      while (ids.length > 0) send(machineId, ids.splice(0, mostIds));
    }
  }

  function send(machineId: string, ids: string[]): void {
    if (!presence.online(machineId)) return;
    presence
      .get(machineId)
      .stub.forgetProcesses({ ids }, { request_id: newId('request') })
      .catch((error: unknown) => log.debug({ err: error, machine_id: machineId }, 'not forgotten'));
  }

  return {
    add(machineId, ids) {
      if (ids.length === 0) return;
      gathered.set(machineId, [...(gathered.get(machineId) ?? []), ...ids]);
      cancel ??= after(gatherMs, tell);
    },
    close: () => cancel?.(),
  };
}
