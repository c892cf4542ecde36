// A semaphore: limits how many calls work at once; others wait in order, and leave the queue when they are cancelled.
import { AppError } from '../../shared/errors.ts';

export class Semaphore {
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
  async run<T>(signal: AbortSignal, work: () => Promise<T>): Promise<T> {
    signal.throwIfAborted();
    if (this.#inside < this.#atOnce) this.#inside += 1;
    else await this.#turn(signal);
    try {
      return await work();
    } finally {
      const [next] = this.#waiting;
      // The slot is handed over, so that no later call takes it.
      if (next) next();
      else this.#inside -= 1;
    }
  }

  #turn(signal: AbortSignal): Promise<void> {
    if (this.#waiting.size >= this.#mostWaiting) {
      const message = 'too much is under way on the disks of this machine: try again later';
      throw new AppError('unavailable', message);
    }
    const { promise, resolve, reject } = Promise.withResolvers<void>();
    const giveUp = (): void => reject(signal.reason);
    this.#waiting.add(resolve);
    signal.addEventListener('abort', giveUp, { once: true });
    const settle = (): void => {
      this.#waiting.delete(resolve);
      signal.removeEventListener('abort', giveUp);
    };
    return promise.finally(settle);
  }
}
