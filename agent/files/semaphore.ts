// A semaphore: limits how many calls run at once. Further calls wait in order; a cancelled call leaves the
// queue.
import { AppError } from '../../shared/errors.ts';

export class Semaphore {
  readonly #atOnce: number;
  readonly #mostWaiting: number;
  /** Waiting calls, oldest first. */
  readonly #waiting = new Set<() => void>();
  #inside = 0;

  constructor(atOnce: number, mostWaiting = Number.POSITIVE_INFINITY) {
    this.#atOnce = atOnce;
    this.#mostWaiting = mostWaiting;
  }

  /** Waits for a slot, then runs `work`. Throws `unavailable` if too many calls wait. */
  async run<T>(signal: AbortSignal, work: () => Promise<T>): Promise<T> {
    signal.throwIfAborted();
    if (this.#inside < this.#atOnce) this.#inside += 1;
    else await this.#turn(signal);
    try {
      return await work();
    } finally {
      const [next] = this.#waiting;
      // The slot passes directly to the next waiting call, so that no later call takes it.
      if (next) next();
      else this.#inside -= 1;
    }
  }

  #turn(signal: AbortSignal): Promise<void> {
    if (this.#waiting.size >= this.#mostWaiting) {
      const message = `too many long file operations are waiting on this machine (limit ${this.#mostWaiting}); try again later`;
      throw new AppError('unavailable', message);
    }
    return new Promise((resolve, reject) => {
      const enter = (): void => {
        signal.removeEventListener('abort', leave);
        this.#waiting.delete(enter);
        resolve();
      };
      const leave = (): void => {
        this.#waiting.delete(enter);
        reject(signal.reason);
      };
      this.#waiting.add(enter);
      signal.addEventListener('abort', leave, { once: true });
    });
  }
}
