// A common limit on what many callers may hold at once: refused when it is used up, never waited for.
import { AppError } from './errors.ts';

export interface Budget {
  /** Takes a share; the result gives it back, once. Throws unavailable when there is not so much left. */
  take(amount: number): () => void;
}

/** `what` says what there is too much of: "answers wait for slow readers". */
export function openBudget(limit: number, what: string): Budget {
  let used = 0;
  return {
    take(amount) {
      if (used + amount > limit) throw new AppError('unavailable', `too many ${what}: try again later`);
      used += amount;
      let held = amount;
      return () => {
        used -= held;
        held = 0;
      };
    },
  };
}
