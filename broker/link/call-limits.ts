// Limits the calls that one machine has at once. A call over the limit waits up to 10 s for a free slot, in the order
// of arrival. In the concurrency classes process, terminal and watch such a call is refused at once.
import type { Lane } from '../../shared/agent-rpcs.ts';
import { after } from '../../shared/clock.ts';
import { openTerminals, terminalClients } from '../../shared/command-and-terminal-limits.ts';
import { AppError } from '../../shared/errors.ts';
import { Semaphore } from '../../shared/semaphore.ts';

/**
 * Maximum number of open calls of each class. The limits of `short` and `bulk` are agreed in the hello. The classes are
 * separate, so that stalled downloads do not delay a listing. An agent's own limit on open calls allows all classes to
 * reach their limits at once. An agent runs 8 heavy file operations at once, such as copies, queues 32 more and refuses
 * the rest. These operations are in the class `long`. Its limit is below 8 + 32, so that further operations wait at the
 * broker, and the agent refuses none.
 */
const mostOpen = {
  ...{ control: 64, single: 64, long: 32 },
  ...{ process: 96, terminal: openTerminals + terminalClients, watch: 32 },
};
/** Classes whose calls never wait, because open calls of these classes last too long. */
const unqueued: readonly Lane[] = ['process', 'terminal', 'watch'];
/** Maximum number of calls that may wait for one machine. */
const mostQueued = 256;
/** Longest wait for a slot, in milliseconds. */
const queueMs = 10_000;

export class CallLimits {
  readonly #machineId: string;
  readonly #mostOfHello: number;
  readonly #places = new Map<Lane, Semaphore>();
  /** Number of calls that wait for a slot. */
  #queued = 0;

  /** `mostOfHello`: maximum number of calls in each of the classes `short` and `bulk`. */
  constructor(machineId: string, mostOfHello: number) {
    this.#machineId = machineId;
    this.#mostOfHello = mostOfHello;
  }

  /**
   * Waits for a free slot in a concurrency class. Call the returned function to release the slot. Rejects with the
   * reason of `abort` if that fires, and with `unavailable` if the queue is full or the wait is too long.
   */
  async enter(lane: Lane, abort: AbortController): Promise<() => void> {
    const place = this.#placesOf(lane).acquire(abort.signal);
    if (!(place instanceof Promise)) return place;
    this.#queued += 1;
    const late = `the request waited ${queueMs / 1000} s for other requests to this machine, and was not sent`;
    const cancelTimeout = after(queueMs, () => abort.abort(this.#full(late)));
    try {
      return await place;
    } finally {
      this.#queued -= 1;
      cancelTimeout();
    }
  }

  #placesOf(lane: Lane): Semaphore {
    const existing = this.#places.get(lane);
    if (existing) return existing;
    const most = lane === 'short' || lane === 'bulk' ? this.#mostOfHello : mostOpen[lane];
    const places = new Semaphore(most, () => {
      if (unqueued.includes(lane))
        return this.#full(
          `this machine has ${most} open requests of the concurrency class ${lane}, which is the limit`,
        );
      return this.#queued < mostQueued
        ? undefined
        : this.#full(`${mostQueued} requests wait for this machine already, which is the limit`);
    });
    this.#places.set(lane, places);
    return places;
  }

  #full(why: string): AppError {
    return new AppError('unavailable', `${why}; try again later`, { machine_id: this.#machineId });
  }
}
