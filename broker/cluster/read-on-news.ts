// Reads what other brokers have written, soon after their notification. Each kind of data has its own reader, so a slow
// reader delays no other.
import { sleep } from '../../shared/clock.ts';

/**
 * Milliseconds to wait between two reads. A busy broker commits a thousand times a second. Because of this wait, one
 * read covers many of its commits.
 */
const betweenMs = 20;

export type NewsReader = ReturnType<typeof createNewsReader>;

export function createNewsReader(read: () => Promise<void>, onError: (error: unknown) => void) {
  let hasNews = false;
  let reading: Promise<void> | undefined;
  let isClosed = false;
  const readAll = async (): Promise<void> => {
    while (hasNews && !isClosed) {
      hasNews = false;
      await read().catch(onError);
      await sleep(betweenMs);
    }
    reading = undefined;
  };
  return {
    /** Starts a read soon. If a read is in progress, any number of calls together start one more read after it. */
    wake(): void {
      hasNews = true;
      reading ??= readAll();
    },
    /** Starts no further read, and waits for the one in progress. */
    async close(): Promise<void> {
      isClosed = true;
      await reading;
    },
  };
}
