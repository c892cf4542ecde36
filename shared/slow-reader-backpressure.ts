// Lets readers of a log wait for new bytes, and its writer wait for slow readers.
import type { Readable } from 'node:stream';
import { after, endsWithin, monotonic } from './clock.ts';

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

/** A reader's offset in the log, and the time of its last read in milliseconds of the monotonic clock. */
export interface ReaderPosition {
  position: number;
  readAt: number;
}

/**
 * Makes the writer of a log wait while each reader is more than `farBytes` behind the end. A reader that has not read
 * for `stallMs` is ignored.
 */
export class Backpressure {
  readonly #places = new Set<ReaderPosition>();
  readonly #moved = new Wake();
  readonly #farBytes: number;
  readonly #stallMs: number;
  #released = false;

  constructor(farBytes: number, stallMs: number) {
    this.#farBytes = farBytes;
    this.#stallMs = stallMs;
  }

  join(position: number): ReaderPosition {
    const place = { position, readAt: monotonic() };
    this.#places.add(place);
    return place;
  }

  moved(place: ReaderPosition, position: number): void {
    place.position = position;
    place.readAt = monotonic();
    this.#moved.wake();
  }

  leave(place: ReaderPosition): void {
    this.#places.delete(place);
    this.#moved.wake();
  }

  release(): void {
    this.#released = true;
    this.#moved.wake();
  }

  /** Resolves when the writer may continue. `end` returns the offset of the end of the log. */
  async hold(end: () => number): Promise<void> {
    // Each read, and each reader that leaves, ends the wait early. Then the time is computed again.
    for (let ms = this.#holdMs(end()); ms > 0; ms = this.#holdMs(end()))
      await endsWithin(ms, this.#moved.wait());
  }

  /**
   * Returns the milliseconds after which all readers are ignored as stalled, if none of them reads meanwhile. Returns 0
   * if the writer need not wait.
   */
  #holdMs(end: number): number {
    if (this.#released || this.#places.size === 0) return 0;
    let longest = 0;
    for (const { position, readAt } of this.#places) {
      const ms = readAt + this.#stallMs - monotonic();
      if (ms > 0 && end - position <= this.#farBytes) return 0;
      longest = Math.max(longest, ms);
    }
    return longest;
  }
}
