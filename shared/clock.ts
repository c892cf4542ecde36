// The only source of time in this code. Tests can replace it.

/**
 * Longest delay of one Node timer, in milliseconds. A longer delay is split over several timers, because Node fires
 * immediately if a delay is over 2147483647 ms.
 */
const longestTimer = 3_600_000;

export interface Clock {
  /** Wall time in milliseconds since 1970. */
  now(): number;
  /** Milliseconds since an arbitrary moment, to measure durations. Changes of the system time do not affect it. */
  monotonic(): number;
  /**
   * Calls `run` once after `ms` milliseconds. Returns a function that cancels the call. With `hold` the process does
   * not exit before the call.
   */
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

/** Replaces the clock (tests only). Restores the system clock if called without an argument. */
export function setClock(clock: Clock = system): void {
  current = clock;
}

export const now = (): number => current.now();
export const monotonic = (): number => current.monotonic();
export const after = (ms: number, run: () => void): (() => void) => current.after(ms, run);

/** Milliseconds by which two clocks may differ before a warning is due. */
export const mostSkewMs = 30_000;

/** The last millisecond that a Date can represent (ECMA-262, time values). */
export const latestInstant = 8.64e15;

/** Wall time as ISO 8601 in UTC; the current time by default. */
export function iso(ms: number = now()): string {
  return new Date(ms).toISOString();
}

/** Converts a stored time to ISO 8601 in UTC; null stays null. */
export const isoOrNull = (ms: number | null): string | null => (ms === null ? null : iso(ms));

/** Calls `run` every `ms` milliseconds. Returns a function that stops the calls. */
export function every(ms: number, run: () => void): () => void {
  let cancel = after(ms, tick);
  function tick(): void {
    cancel = after(ms, tick);
    run();
  }
  return () => cancel();
}

/** Resolves after all callbacks that are already due have run. */
export const nextTurn = (): Promise<void> => new Promise((resolve) => setImmediate(resolve));

/** Milliseconds for which long work may keep other requests waiting. */
const longestWorkMs = 5;

/**
 * Returns a function that long work calls and awaits often. If the work has lasted 5 ms since the last pause, the
 * function waits for the next turn of the event loop, so that other requests can run. Otherwise it does not wait.
 */
export function pausesInLongWork(): () => Promise<void> {
  let begun = monotonic();
  return async () => {
    if (monotonic() - begun < longestWorkMs) return;
    await nextTurn();
    begun = monotonic();
  };
}

/** Resolves after `ms` milliseconds, or at once when the signal fires. Until then the process does not exit. */
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

/**
 * Waits for `work`, but at most `ms` milliseconds. Returns false if `work` has not resolved by then. Rejects as
 * `work` does.
 */
export function endsWithin(ms: number, work: Promise<unknown>): Promise<boolean> {
  const late = Promise.withResolvers<false>();
  const cancel = after(ms, () => late.resolve(false));
  return Promise.race([work.then(() => true), late.promise]).finally(cancel);
}
