// Waiting that ends with the call: a disk that hangs must not hold a caller who has left.

/**
 * The result of `work`, or the signal's reason as soon as it fires. The work itself cannot be stopped: what it
 * still brings goes to `release`.
 */
export function unlessAborted<T>(
  signal: AbortSignal,
  work: Promise<T>,
  release?: (late: T) => unknown,
): Promise<T> {
  return new Promise((resolve, reject) => {
    const leave = (): void => {
      reject(signal.reason);
      work.then(release).catch(() => undefined);
    };
    if (signal.aborted) return leave();
    signal.addEventListener('abort', leave, { once: true });
    const settle = (): void => signal.removeEventListener('abort', leave);
    work.finally(settle).then(resolve, reject);
  });
}
