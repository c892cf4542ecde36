// A common limit on what many callers may hold at once: refused when it is used up, never waited for.
import { AppError } from './errors.ts';

export class Budget {
  readonly #limit: number;
  readonly #what: string;
  #used = 0;

  /** `what` says what there is too much of: "answers wait for slow readers". */
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

export const openBudget = (limit: number, what: string): Budget => new Budget(limit, what);
