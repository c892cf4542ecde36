// Lets callers wait until something changes: a log, a stream, or any other state.
import type { Readable } from 'node:stream';
import { after } from './clock.ts';

/** Lets callers, such as the readers of a log, wait until wake() is called. Several logs may share an instance. */
export class Wake {
  readonly #waiting = new Set<() => void>();

  wake(): void {
    const waiting = [...this.#waiting];
    this.#waiting.clear();
    for (const run of waiting) run();
  }

  /**
   * Resolves at the next wake(), or when the signal fires. Await nothing between checking your state and this call, or
   * you could miss a wake().
   */
  wait(signal?: AbortSignal): Promise<void> {
    return new Promise((resolve) => {
      if (signal?.aborted) return resolve();
      const done = (): void => {
        this.#waiting.delete(done);
        signal?.removeEventListener('abort', done);
        resolve();
      };
      this.#waiting.add(done);
      signal?.addEventListener('abort', done, { once: true });
    });
  }

  /**
   * Resolves when `test` returns true (checked at every wake()), after `ms` milliseconds, or when the signal fires.
   */
  async until(test: () => boolean, ms: number, signal?: AbortSignal): Promise<void> {
    let late = ms <= 0;
    if (late || test()) return;
    const cancel = after(ms, () => {
      late = true;
      this.wake();
    });
    while (!late && !signal?.aborted && !test()) await this.wait(signal);
    cancel();
  }
}

/** Events of a stream after which readStream() looks at the stream again. */
const changes = ['readable', 'end', 'close', 'error'];

/**
 * Yields a stream's items until its end. Throws the signal's reason when the signal fires. Unlike the stream's own
 * iterator, does not destroy the stream.
 */
export async function* readStream<T>(stream: Readable, signal: AbortSignal): AsyncGenerator<T> {
  const changed = new Wake();
  const wake = (): void => changed.wake();
  for (const event of changes) stream.on(event, wake);
  try {
    while (!stream.readableEnded && !stream.destroyed && !stream.errored) {
      signal.throwIfAborted();
      // The cast is safe if the caller has named the type of the stream's items correctly.
      const item = stream.read() as T | null;
      if (item === null) await changed.wait(signal);
      else yield item;
    }
    signal.throwIfAborted();
  } finally {
    for (const event of changes) stream.off(event, wake);
  }
}
