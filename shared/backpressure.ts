// Backpressure around a log: readers sleep until there are bytes, a writer waits for its readers.
import type { Readable } from 'node:stream';
import { after, monotonic } from './clock.ts';

/** Lets readers sleep until something happened; one may be shared by several sources. */
export class Wake {
  readonly #waiting = new Set<() => void>();

  wake(): void {
    const waiting = [...this.#waiting];
    this.#waiting.clear();
    for (const run of waiting) run();
  }

  /** Resolves at the next wake(), or when the signal fires. Look at the state, then wait, in one turn. */
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

  /** Resolves when `test` holds, as looked at with every wake(), after `ms`, or when the signal fires. */
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

/** Of a stream that is read. */
const changes = ['readable', 'end', 'close', 'error'];

/**
 * What a stream brings, to its end or until `signal` fires, which throws its reason. Unlike the stream's own iterator it
 * can be left while it waits, and does not destroy the stream.
 */
export async function* readStream<T>(stream: Readable, signal: AbortSignal): AsyncGenerator<T> {
  const changed = new Wake();
  const wake = (): void => changed.wake();
  for (const event of changes) stream.on(event, wake);
  try {
    while (!stream.readableEnded && !stream.destroyed && !stream.errored) {
      signal.throwIfAborted();
      // The caller names the type of the events that the stream brings.
      const item = stream.read() as T | null;
      if (item === null) await changed.wait(signal);
      else yield item;
    }
    signal.throwIfAborted();
  } finally {
    for (const event of changes) stream.off(event, wake);
  }
}

/** Offset of a reader, and when it last read. */
export interface ReaderPosition {
  position: number;
  readAt: number;
}

/** Holds up a writer while all its readers are far behind, but none that has stopped reading. */
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

  /** Resolves once the writer may go on. */
  async hold(end: () => number): Promise<void> {
    for (let ms = this.#holdMs(end()); ms > 0; ms = this.#holdMs(end())) {
      const stalled = new AbortController();
      const cancel = after(ms, () => stalled.abort());
      await this.#moved.wait(stalled.signal);
      cancel();
    }
  }

  /** Milliseconds that the writer waits at most if no reader moves meanwhile. */
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
