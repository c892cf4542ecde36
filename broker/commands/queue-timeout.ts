// Computes how long a command waits for its machine before it starts.
import { monotonic, now } from '../../shared/clock.ts';

/**
 * Time that a command without queue_for waits for a machine that has gone offline, or that refuses its start, for
 * example because the agent or the broker restarts.
 */
const returnMs = 60_000;

export class QueueTimeout {
  readonly #queueUntil: number | null;
  /** Monotonic time until which a command without queue_for waits for its offline machine. */
  #returnUntil = 0;
  /** Monotonic time until which a command without queue_for is sent again; set when its start was refused. */
  #retryUntil: number | undefined;

  /** `queueUntil` is the time until which the command may wait; null without queue_for. */
  constructor(queueUntil: number | null) {
    this.#queueUntil = queueUntil;
  }

  /** Lets the command wait for its machine, which has just gone offline or is not back yet. */
  awaitReturn(): void {
    this.#returnUntil = monotonic() + returnMs;
  }

  /** Milliseconds that the command may still wait while its machine is offline. */
  offlineMs(): number {
    return this.#queueUntil === null ? this.#returnUntil - monotonic() : this.#queueUntil - now();
  }

  /** True if the command, whose start was refused, may be sent again. */
  mayRetry(): boolean {
    this.#retryUntil ??= monotonic() + returnMs;
    return this.#queueUntil === null ? monotonic() < this.#retryUntil : this.#queueUntil > now();
  }
}
