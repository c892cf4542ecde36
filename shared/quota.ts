// A quota that many callers share. A request beyond the quota is refused at once, never queued.
import { AppError } from './errors.ts';

export class Quota {
  readonly #limit: number;
  readonly #message: string;
  #used = 0;

  /** `message` is the message of the error for a request beyond the limit. */
  constructor(limit: number, message: string) {
    this.#limit = limit;
    this.#message = message;
  }

  /** Adds `amount`, which may be negative. Throws `unavailable` if the sum would exceed the limit. */
  add(amount: number): void {
    if (amount > 0 && this.#used + amount > this.#limit) throw new AppError('unavailable', this.#message);
    this.#used += amount;
  }

  /** Adds `amount` as add() does. Returns a function that subtracts it; further calls of that function do nothing. */
  take(amount: number): () => void {
    this.add(amount);
    let added = amount;
    return () => {
      this.add(-added);
      added = 0;
    };
  }
}
