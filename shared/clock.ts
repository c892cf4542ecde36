// The only source of time, so that tests can move it.

/** Longest delay a Node timer takes; a longer one would fire at once. We re-arm hourly. */
const longestTimer = 3_600_000;

export interface Clock {
  /** Milliseconds since 1970, wall time. */
  now(): number;
  /** Milliseconds that never jump, for durations. */
  monotonic(): number;
  /** Calls `run` once after `ms`; keeps the process alive only with `hold`. Call the result to cancel. */
  after(ms: number, run: () => void, hold?: boolean): () => void;
}

const system: Clock = {
  now: () => Date.now(),
  monotonic: () => performance.now(),
  after(ms, run, hold = false) {
    let left = ms;
    let timer = arm();
    function arm(): NodeJS.Timeout {
      const step = Math.min(left, longestTimer);
      left -= step;
      const next = setTimeout(() => {
        if (left > 0) timer = arm();
        else run();
      }, step);
      return hold ? next : next.unref();
    }
    return () => clearTimeout(timer);
  },
};

let current = system;

/** Replaces the clock (tests only); without an argument the system's own comes back. */
export function setClock(clock: Clock = system): void {
  current = clock;
}

export const now = (): number => current.now();
export const monotonic = (): number => current.monotonic();
export const after = (ms: number, run: () => void): (() => void) => current.after(ms, run);

/** Clocks that are further apart are worth a word. */
export const mostSkewMs = 30_000;

/** The last millisecond that a calendar has (ECMA-262, time values). */
export const latestInstant = 8.64e15;

/** Wall time as ISO 8601 in UTC; of this moment by default. */
export function iso(ms: number = now()): string {
  return new Date(ms).toISOString();
}

/** Calls `run` every `ms` until cancelled. */
export function every(ms: number, run: () => void): () => void {
  let cancel = after(ms, tick);
  function tick(): void {
    cancel = after(ms, tick);
    run();
  }
  return () => cancel();
}

/** Lets everything else that is due run first. */
export const nextTurn = (): Promise<void> => new Promise((resolve) => setImmediate(resolve));

/** Resolves after `ms`, or at once when the signal fires; the process lives at least that long. */
export function sleep(ms: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    if (signal?.aborted) return resolve();
    const done = (): void => {
      cancel();
      signal?.removeEventListener('abort', done);
      resolve();
    };
    const cancel = current.after(ms, done, true);
    signal?.addEventListener('abort', done, { once: true });
  });
}
