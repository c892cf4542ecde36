// Lets so many pass at once; others wait in turn, and leave the queue when their call ends.
import { AppError } from '../../shared/errors.ts';

export class Turnstile {
  readonly #atOnce: number;
  readonly #mostWaiting: number;
  /** In the order in which they came. */
  readonly #waiting = new Set<() => void>();
  #inside = 0;

  constructor(atOnce: number, mostWaiting = Number.POSITIVE_INFINITY) {
    this.#atOnce = atOnce;
    this.#mostWaiting = mostWaiting;
  }

  /** Does the work when its turn has come. */
  async pass<T>(signal: AbortSignal, work: () => Promise<T>): Promise<T> {
    await this.enter(signal);
    try {
      return await work();
    } finally {
      this.leave();
    }
  }

  /** Whoever has entered leaves once. */
  async enter(signal: AbortSignal): Promise<void> {
    signal.throwIfAborted();
    if (this.#inside < this.#atOnce) this.#inside += 1;
    else if (this.#waiting.size < this.#mostWaiting) await this.#turn(signal);
    else
      throw new AppError(
        'unavailable',
        'too much is under way on the disks of this machine: try again later',
      );
  }

  leave(): void {
    const [next] = this.#waiting;
    // The place goes from hand to hand, so that nobody slips in between.
    if (next) next();
    else this.#inside -= 1;
  }

  #turn(signal: AbortSignal): Promise<void> {
    return new Promise((resolve, reject) => {
      const settle = (): void => {
        this.#waiting.delete(go);
        signal.removeEventListener('abort', giveUp);
      };
      const go = (): void => {
        settle();
        resolve();
      };
      const giveUp = (): void => {
        settle();
        reject(signal.reason);
      };
      this.#waiting.add(go);
      signal.addEventListener('abort', giveUp, { once: true });
    });
  }
}
