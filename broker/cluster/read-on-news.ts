// Reads what other brokers have written, soon after their notification. Each kind of data has its own reader, so a slow
// reader delays no other.
import { sleep } from '../../shared/clock.ts';

/**
 * Milliseconds to wait between two reads. A busy broker commits a thousand times a second. Because of this wait, one
 * read covers many of its commits.
 */
const betweenMs = 20;

export class NewsReader {
  readonly #read: () => Promise<void>;
  readonly #onError: (error: unknown) => void;
  #hasNews = false;
  #reading: Promise<void> | undefined;
  #isClosed = false;

  constructor(read: () => Promise<void>, onError: (error: unknown) => void) {
    this.#read = read;
    this.#onError = onError;
  }

  /** Starts a read soon. Calls during a read start exactly one more read after it. */
  wake(): void {
    this.#hasNews = true;
    if (this.#isClosed) return;
    this.#reading ??= this.#readAll().finally(() => {
      this.#reading = undefined;
    });
  }

  /** Starts no further read, and waits for the one in progress. */
  async close(): Promise<void> {
    this.#isClosed = true;
    await this.#reading;
  }

  async #readAll(): Promise<void> {
    while (this.#hasNews && !this.#isClosed) {
      this.#hasNews = false;
      await this.#read().catch(this.#onError);
      await sleep(betweenMs);
    }
  }
}
