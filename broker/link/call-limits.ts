// Limits the number of open calls to one machine. Further calls wait up to 10 s for a free slot. Exception: calls of
// the classes in `unqueued`, such as those of terminals, are refused at once, because such calls last long.
import type { Lane } from '../../shared/agent-rpcs.ts';
import { after } from '../../shared/clock.ts';
import { openTerminals, terminalClients } from '../../shared/command-and-terminal-limits.ts';
import { AppError } from '../../shared/errors.ts';
import { Semaphore } from '../../shared/semaphore.ts';

/**
 * Maximum number of open calls of each concurrency class, except `short` and `bulk` (see `mostOfHello`). Separate
 * limits keep stalled downloads from delaying a listing.
 */
const mostOpen = {
  ...{ control: 64, single: 64 },
  // Older agents refuse a heavy file operation if 8 run and 32 wait. This limit is lower, so that they refuse none.
  long: 32,
  ...{ process: 96, terminal: openTerminals + terminalClients, watch: 32 },
};
/**
 * Classes whose calls never wait for a slot. Open calls of these classes last so long that no slot would become free in
 * time.
 */
const unqueued: readonly Lane[] = ['process', 'terminal', 'watch'];
/** Maximum number of calls that may wait for one machine. */
const mostQueued = 256;
/** Longest wait for a slot, in milliseconds. */
const queueMs = 10_000;

export class CallLimits {
  readonly #machineId: string;
  readonly #mostOfHello: number;
  readonly #places = new Map<Lane, Semaphore>();
  #queued = 0;

  /**
   * `mostOfHello`: maximum number of open calls in each of the classes `short` and `bulk`. The agent can lower it in
   * its hello.
   */
  constructor(machineId: string, mostOfHello: number) {
    this.#machineId = machineId;
    this.#mostOfHello = mostOfHello;
  }

  /**
   * Takes a slot of the class, and returns a function that releases it. If no slot is free, waits up to 10 s for one.
   * Rejects with unavailable after these 10 s, or at once if the queue is full or calls of the class never wait. If
   * `abort` fires, rejects with its reason.
   */
  async enter(lane: Lane, abort: AbortController): Promise<() => void> {
    const place = this.#semaphoreOf(lane).acquire(abort.signal);
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

  #semaphoreOf(lane: Lane): Semaphore {
    const existing = this.#places.get(lane);
    if (existing) return existing;
    const most = lane === 'short' || lane === 'bulk' ? this.#mostOfHello : mostOpen[lane];
    const places = new Semaphore(most, () => {
      if (unqueued.includes(lane))
        return this.#full(
          `this machine has ${most} open requests of the concurrency class ${lane}, the most allowed`,
        );
      return this.#queued < mostQueued
        ? undefined
        : this.#full(`${mostQueued} requests wait for this machine already, the most allowed`);
    });
    this.#places.set(lane, places);
    return places;
  }

  #full(why: string): AppError {
    return new AppError('unavailable', `${why}; try again later`, { machine_id: this.#machineId });
  }
}
