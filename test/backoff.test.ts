// Delays of clients that connect again until they succeed.
import { afterEach, expect, test, vi } from 'vitest';
import { backoff } from '../shared/backoff.ts';
import { fakeClock } from './fake-clock.ts';

afterEach(() => vi.restoreAllMocks());

test('quick refusals do not make a delay longer than the time since the first of them', async () => {
  const clock = fakeClock(0);
  vi.spyOn(Math, 'random').mockReturnValue(0.1);
  const pause = backoff();
  let longest = 0;
  while (clock.now() < 8_000) {
    const ms = pause.next();
    longest = Math.max(longest, ms);
    await clock.advance(ms);
  }
  expect(longest).toBeLessThanOrEqual(800);
});

test('a delay doubles with each attempt up to 30 seconds, and is short again after a success', async () => {
  const clock = fakeClock(0);
  vi.spyOn(Math, 'random').mockReturnValue(1);
  const pause = backoff();
  expect(pause.next()).toBe(500);
  await clock.advance(3_600_000);
  expect([1, 2, 3, 4, 5, 6].map(() => pause.next())).toEqual([1_000, 2_000, 4_000, 8_000, 16_000, 30_000]);
  pause.reset();
  expect(pause.next()).toBe(500);
});
