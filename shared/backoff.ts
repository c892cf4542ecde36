// Computes the delays of a client that tries to connect again until it succeeds: backoff with full jitter.
import { monotonic } from './clock.ts';

/** Shortest and longest ceiling of a delay in milliseconds. */
const firstMs = 500;
const mostMs = 30_000;

export interface Backoff {
  /** Returns the next delay in milliseconds. */
  next(): number;
  /** Makes the next delay short again; called after a success. */
  reset(): void;
}

/**
 * Each delay is random, from 0 to a ceiling. The ceiling is the time since the first failure, so a client is back after
 * at most twice the outage. A ceiling that doubled with each attempt would grow to 30 s during an outage of 8 s.
 */
export function backoff(): Backoff {
  let failedAt: number | undefined;
  return {
    next() {
      failedAt ??= monotonic();
      return Math.random() * Math.min(mostMs, Math.max(firstMs, monotonic() - failedAt));
    },
    reset() {
      failedAt = undefined;
    },
  };
}
