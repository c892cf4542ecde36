// Acknowledges results, so that an agent removes its copy of a result once the broker has the result on disk.
import { after } from '../../shared/clock.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Presence } from '../presence/index.ts';

/**
 * Milliseconds in which results of a machine are collected for one message. Each message costs both sides 0.1 to 0.2
 * ms of CPU.
 */
const coalesceMs = 50;
/** Maximum number of ids in one message, whose limit is 64 KiB. */
const mostIds = 1000;

export class Acknowledgements {
  readonly #presence: Presence;
  readonly #log: Logger;
  /** For each machine, the ids of processes whose results still have to be acknowledged. */
  readonly #waiting = new Map<string, string[]>();

  constructor(presence: Presence, log: Logger) {
    this.#presence = presence;
    this.#log = log;
  }

  /**
   * Acknowledges these results soon. An offline agent gets no message: its next hello lists the results that
   * it still has.
   */
  add(machineId: string, ids: readonly string[]): void {
    const waiting = this.#waiting.get(machineId);
    if (waiting) return void waiting.push(...ids);
    if (ids.length === 0) return;
    this.#waiting.set(machineId, [...ids]);
    after(coalesceMs, () => this.#send(machineId));
  }

  #send(machine_id: string): void {
    const ids = this.#waiting.get(machine_id) ?? [];
    this.#waiting.delete(machine_id);
    const link = this.#presence.find(machine_id);
    for (let at = 0; link && at < ids.length; at += mostIds) {
      link.stub
        .forgetProcesses({ ids: ids.slice(at, at + mostIds) }, { request_id: newId('request') })
        .catch((error: unknown) =>
          this.#log.debug(
            { err: error, machine_id },
            'results of a machine could not be acknowledged; the machine lists them again when it next connects',
          ),
        );
    }
  }
}
