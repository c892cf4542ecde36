// Limits how long a command waits for an offline machine, and how long the broker keeps sending a command that the
// machine refuses to start.
import { monotonic, now } from '../../shared/clock.ts';

/**
 * Milliseconds that a command without queue_for waits if its machine goes offline or refuses to start the command. For
 * example, this happens during a restart of the agent or broker.
 */
const returnMs = 60_000;

export class QueueTimeout {
  readonly #queueUntil: number | null;
  /** Monotonic time until which a command without queue_for waits for its offline machine. */
  #returnUntil = 0;
  /**
   * Monotonic time until which a command without queue_for is sent again after its machine refused to start it. It is
   * set at the first refusal.
   */
  #retryUntil: number | undefined;

  /** `queueUntil` is the time until which the command may wait; null without queue_for. */
  constructor(queueUntil: number | null) {
    this.#queueUntil = queueUntil;
  }

  /**
   * Gives a command without queue_for another `returnMs` to wait for its machine. Called when the machine goes offline
   * or refuses the command, and when this broker starts or takes over the machine.
   */
  awaitReturn(): void {
    this.#returnUntil = monotonic() + returnMs;
  }

  /** Milliseconds that the command may still wait while its machine is offline. */
  offlineMs(): number {
    return this.#queueUntil === null ? this.#returnUntil - monotonic() : this.#queueUntil - now();
  }

  /** True if the command may be sent again although the machine refused its start. */
  mayRetry(): boolean {
    this.#retryUntil ??= monotonic() + returnMs;
    return this.#queueUntil === null ? monotonic() < this.#retryUntil : this.#queueUntil > now();
  }
}
