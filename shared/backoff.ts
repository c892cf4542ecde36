// Computes the delays between retries: exponential backoff with full jitter, without a limit on retries.

export interface Backoff {
  next(): number;
  /** Makes the next delay short again; called after a success. */
  reset(): void;
}

/** Each delay is random, from 0 to a ceiling. The ceiling doubles from `first` to `most` milliseconds. */
export function backoff({ first = 500, most = 30_000 } = {}): Backoff {
  let ceiling = first;
  return {
    next() {
      const wait = Math.random() * ceiling;
      ceiling = Math.min(most, ceiling * 2);
      return wait;
    },
    reset() {
      ceiling = first;
    },
  };
}
