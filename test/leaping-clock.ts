// A clock for tests that runs in real time and leaps when the test says so. Brokers in separate processes can use it
// too.
import { setClock } from '../shared/clock.ts';

export interface LeapingClock {
  leap(ms: number): void;
  set(wall: number): void;
}

/**
 * Starts a clock that runs in real time and that leap() moves forward. A leap fires the timers that are due, in order.
 * With `still` the clock moves only by leap(). `set` sets the wall clock and changes no duration.
 */
export function startLeapingClock({ still = false } = {}): LeapingClock {
  let ahead = 0;
  let turned = 0;
  const timers = new Set<{ at: number; fire(): void; arm(): void }>();
  const monotonic = (): number => (still ? 0 : performance.now()) + ahead;
  setClock({
    now: () => Date.now() + ahead + turned,
    monotonic,
    after(ms, run, hold = false) {
      const at = monotonic() + ms;
      let real: NodeJS.Timeout | undefined;
      const cancel = (): void => {
        clearTimeout(real);
        timers.delete(timer);
      };
      const timer = {
        at,
        fire() {
          cancel();
          run();
        },
        arm() {
          clearTimeout(real);
          const left = at - monotonic();
          if (left >= 2 ** 31) return;
          real = setTimeout(timer.fire, Math.max(0, left));
          if (!hold) real.unref();
        },
      };
      timers.add(timer);
      timer.arm();
      return cancel;
    },
  });
  return {
    set(wall) {
      turned = wall - Date.now() - ahead;
    },
    leap(ms) {
      ahead += ms;
      const due = [...timers].filter(({ at }) => at <= monotonic()).sort((a, b) => a.at - b.at);
      // A timer that fires may cancel one that is also due.
      for (const timer of due) if (timers.has(timer)) timer.fire();
      for (const timer of timers) timer.arm();
    },
  };
}
