// Reads what other brokers have written, soon after each news of them. Every part of a broker has a reader of its own,
// so that a slow one delays no other: a revoked key is refused while the open work of many machines is still loading.
import { sleep } from '../../shared/clock.ts';

/**
 * Shortest time in milliseconds between two reads of changes of other brokers. A busy broker commits a
 * thousand times a second.
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

  /** Reads soon. Calls during a read share the next one. */
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
