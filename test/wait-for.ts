// Waits until an assertion passes, for as long as a busy machine may need.
import { vi } from 'vitest';

/** Milliseconds, shorter than the limit of a test, so that the failed assertion is what a test reports. */
const longestMs = 30_000;

/** Like vi.waitFor(), which gives up after one second. */
export function waitFor<T>(
  look: () => T | Promise<T>,
  { timeout = longestMs, interval = 50 }: { timeout?: number; interval?: number } = {},
): Promise<T> {
  return vi.waitFor(look, { timeout, interval });
}
