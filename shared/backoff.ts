// Computes the delays of a client that tries to connect again until it succeeds: backoff with full jitter.
import { monotonic } from './clock.ts';

/** Smallest and largest ceiling in milliseconds. The ceiling is the maximum of the next random delay. */
const firstMs = 500;
const mostMs = 30_000;

/**
 * Computes the delays of one client. Each delay is random, from 0 to a ceiling. The ceiling begins at 500 ms and
 * doubles with each attempt. Above 500 ms, it never exceeds the time since the first failure. Without this rule, quick
 * refusals during an outage of 8 s would raise the ceiling to 30 s.
 */
export function backoff() {
  let failedAt: number | undefined;
  let ceiling = firstMs;
  return {
    /** Returns the next delay in milliseconds. */
    next(): number {
      failedAt ??= monotonic();
      const most = Math.min(ceiling, Math.max(firstMs, monotonic() - failedAt));
      ceiling = Math.min(mostMs, ceiling * 2);
      return Math.random() * most;
    },
    /** Makes the next delay short again; called after a success. */
    reset(): void {
      failedAt = undefined;
      ceiling = firstMs;
    },
  };
}
