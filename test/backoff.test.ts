// Delays of clients that connect again until they succeed.
import { afterEach, expect, test, vi } from 'vitest';
import { backoff } from '../shared/backoff.ts';
import { setClock } from '../shared/clock.ts';

afterEach(() => {
  setClock();
  vi.restoreAllMocks();
});

/** A clock that starts at 0 and stands still until a test sets it. */
function clockAt(): { ms: number } {
  const clock = { ms: 0 };
  setClock({ now: () => clock.ms, monotonic: () => clock.ms, after: () => () => {} });
  return clock;
}

test('quick refusals do not make a delay longer than the time since the first of them', () => {
  const clock = clockAt();
  vi.spyOn(Math, 'random').mockReturnValue(0.1);
  const pause = backoff();
  let longest = 0;
  while (clock.ms < 8_000) {
    const ms = pause.next();
    longest = Math.max(longest, ms);
    clock.ms += ms;
  }
  expect(longest).toBeLessThanOrEqual(800);
});

test('a delay doubles with each attempt up to 30 seconds, and is short again after a success', () => {
  const clock = clockAt();
  vi.spyOn(Math, 'random').mockReturnValue(1);
  const pause = backoff();
  expect(pause.next()).toBe(500);
  clock.ms = 3_600_000;
  expect([1, 2, 3, 4, 5, 6].map(() => pause.next())).toEqual([1_000, 2_000, 4_000, 8_000, 16_000, 30_000]);
  pause.reset();
  expect(pause.next()).toBe(500);
});
