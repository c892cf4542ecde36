// Waiting that ends with the call: a disk that hangs must not hold a caller who has left.
import { fromErrno } from '../../shared/errors.ts';
import { type Bytes, shown } from './beneath/path.ts';

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

/**
 * What a generator yields, until the signal fires: then its reason is thrown at once. `rested` runs when the
 * generator has come to its own end, which may hang with the disk.
 */
export async function* untilAborted<T>(
  signal: AbortSignal,
  source: AsyncGenerator<T, void, void>,
  rested: () => void,
): AsyncGenerator<T, void, void> {
  try {
    for (;;) {
      const next = await unlessAborted(signal, source.next());
      if (next.done) return;
      yield next.value;
    }
  } finally {
    source
      .return()
      .catch(() => undefined)
      .finally(rested);
  }
}

/** What a call about a path fails with: the signal's reason once that has fired, else a documented code. */
export async function failingAs<T>(path: Bytes, signal: AbortSignal, work: () => Promise<T>): Promise<T> {
  try {
    signal.throwIfAborted();
    return await work();
  } catch (error) {
    throw signal.aborted ? signal.reason : fromErrno(error, shown(path));
  }
}
