// Makes the writer of a log wait while all readers are far behind.
import { endsWithin, monotonic } from './clock.ts';
import { Wake } from './wait-for-change.ts';

/** A reader's offset in the log, and the time of its last read in milliseconds of the monotonic clock. */
export interface ReaderPosition {
  position: number;
  readAt: number;
}

/**
 * Makes the writer of a log wait while all readers are more than `farBytes` behind the end of the log. A reader that
 * has not read for `stallMs` is ignored.
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
   * Returns the maximum time in milliseconds for which the writer must wait; 0 if it need not wait. After this time all
   * readers are ignored as stalled, unless one of them reads meanwhile.
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
