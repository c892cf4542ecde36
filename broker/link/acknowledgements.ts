// Result acknowledgements: agents hear which results the broker has on its own disk, many at a time, for nobody waits.
import { after } from '../../shared/clock.ts';
import { newId } from '../../shared/ids.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Presence } from './presence.ts';

const coalesceMs = 50;
/** Of one message, which may have 64 KiB. */
const mostIds = 1000;

export class ResultAcknowledgements {
  readonly #presence: Presence;
  readonly #log: Logger;
  readonly #pending = new Map<string, string[]>();
  #cancel: (() => void) | undefined;

  constructor(presence: Presence, log: Logger) {
    this.#presence = presence;
    this.#log = log;
  }

  /** The agent may remove its copies. One that is offline lists them in its hello when it is back. */
  add(machineId: string, ids: readonly string[]): void {
    if (ids.length === 0) return;
    this.#pending.set(machineId, [...(this.#pending.get(machineId) ?? []), ...ids]);
    this.#cancel ??= after(coalesceMs, () => this.#flush());
  }

  close(): void {
    this.#cancel?.();
  }

  #flush(): void {
    this.#cancel = undefined;
    for (const [machineId, ids] of this.#pending) {
      this.#pending.delete(machineId);
      while (ids.length > 0) this.#send(machineId, ids.splice(0, mostIds));
    }
  }

  #send(machineId: string, ids: string[]): void {
    if (!this.#presence.online(machineId)) return;
    this.#presence
      .get(machineId)
      .stub.forgetProcesses({ ids }, { request_id: newId('request') })
      .catch((error: unknown) => this.#log.debug({ err: error, machine_id: machineId }, 'not acknowledged'));
  }
}
