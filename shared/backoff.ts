// How long to wait before trying again: exponential with full jitter, for ever.

export interface Backoff {
  /** Milliseconds to wait before the next attempt. */
  next(): number;
  /** After a success: start small again. */
  reset(): void;
}

/** Full jitter: a random share of a ceiling that doubles from `first` to `most` milliseconds. */
export function backoff({ first = 500, most = 30_000, random = Math.random } = {}): Backoff {
  let ceiling = first;
  return {
    next() {
      const wait = random() * ceiling;
      ceiling = Math.min(most, ceiling * 2);
      return wait;
    },
    reset() {
      ceiling = first;
    },
  };
}
