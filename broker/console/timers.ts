// Timers and the current time. Pages call now() instead of Date.now().
import { signal } from '@preact/signals';

export const now = (): number => Date.now();

export const secondMs = 1_000;
export const minuteMs = 60_000;
export const hourMs = 3_600_000;
export const dayMs = 86_400_000;

/** Calls `run` once after `ms` milliseconds. The returned function cancels the timer. */
export function after(ms: number, run: () => void): () => void {
  const timer = setTimeout(run, ms);
  return () => clearTimeout(timer);
}

/** Returns a function that calls `run` after `ms` milliseconds. Further calls in this time have no effect. */
export function soon(ms: number, run: () => void): { (): void; cancel(): void } {
  let stop: (() => void) | undefined;
  const cancel = (): void => {
    stop?.();
    stop = undefined;
  };
  const ask = (): void => {
    stop ??= after(ms, () => {
      stop = undefined;
      run();
    });
  };
  return Object.assign(ask, { cancel });
}

/** Calls `run` every `ms` milliseconds. The returned function stops the timer. */
export function every(ms: number, run: () => void): () => void {
  const timer = setInterval(run, ms);
  return () => clearInterval(timer);
}

/** The current time in steps of 5 s. Components that read it are drawn again at each step. */
export const clock = signal(now());
every(5_000, () => {
  clock.value = now();
});
