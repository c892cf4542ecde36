// Result acknowledgements: an agent hears which results the broker has on its own disk, and removes its copies.
import { newId } from '../../shared/ids.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Presence } from '../presence/index.ts';

/** Of one message, which may have 64 KiB. */
const mostIds = 1000;

/** Nothing waits for it. An agent that is offline lists what it still has in its hello when it is back. */
export function acknowledge(
  presence: Presence,
  machineId: string,
  ids: readonly string[],
  log: Logger,
): void {
  for (let at = 0; at < ids.length && presence.online(machineId); at += mostIds) {
    presence
      .get(machineId)
      .stub.forgetProcesses({ ids: ids.slice(at, at + mostIds) }, { request_id: newId('request') })
      .catch((error: unknown) => log.debug({ err: error, machine_id: machineId }, 'not acknowledged'));
  }
}
