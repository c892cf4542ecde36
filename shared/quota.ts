// A quota that many callers share: a request beyond it is refused at once, never queued.
import { AppError } from './errors.ts';

export class Quota {
  readonly #limit: number;
  readonly #what: string;
  #used = 0;

  /** `what` completes the message "too many …: try again later", as in "answers wait for slow readers". */
  constructor(limit: number, what: string) {
    this.#limit = limit;
    this.#what = what;
  }

  /** Takes a share; a negative one gives it back. Throws unavailable when there is not so much left. */
  add(amount: number): void {
    if (amount > 0 && this.#used + amount > this.#limit)
      throw new AppError('unavailable', `too many ${this.#what}: try again later`);
    this.#used += amount;
  }

  /** Takes a share; the result gives it back, once. */
  take(amount: number): () => void {
    this.add(amount);
    let held = amount;
    return () => {
      this.add(-held);
      held = 0;
    };
  }
}
