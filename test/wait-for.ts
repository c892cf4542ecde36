// Waits until an assertion passes, for as long as a busy machine may need.
import { vi } from 'vitest';

/**
 * Milliseconds. Shorter than the time limit of a test, so that the test reports the failed assertion and not its
 * timeout.
 */
const longestMs = 30_000;

/** Like vi.waitFor(), but with a longer limit than one second. */
export function waitFor<T>(
  look: () => T | Promise<T>,
  { timeout = longestMs, interval = 50 }: { timeout?: number; interval?: number } = {},
): Promise<T> {
  return vi.waitFor(look, { timeout, interval });
}
