// A clock that moves only when the test moves it.
import { onTestFinished } from 'vitest';
import { setClock } from '../shared/clock.ts';

export interface FakeClock {
  now(): number;
  /** Moves wall and monotonic time forward. Fires the timers that are due, in order, and lets their callbacks run. */
  advance(ms: number): Promise<void>;
}

/** Replaces the clock of this process until the test ends. */
export function fakeClock(start: number): FakeClock {
  let current = start;
  const timers = new Set<{ at: number; run(): void }>();
  setClock({
    now: () => current,
    monotonic: () => current - start,
    after(ms, run) {
      const timer = { at: current + ms, run };
      timers.add(timer);
      return () => timers.delete(timer);
    },
  });
  onTestFinished(() => setClock());
  return {
    now: () => current,
    async advance(ms) {
      const end = current + ms;
      for (;;) {
        const [next] = [...timers].filter(({ at }) => at <= end).sort((a, b) => a.at - b.at);
        if (!next) break;
        timers.delete(next);
        current = next.at;
        next.run();
        await new Promise((resolve) => setImmediate(() => setImmediate(resolve)));
      }
      current = end;
    },
  };
}
