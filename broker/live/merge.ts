// Merges streams of updates into one at the pace of its reader.
import { Wake } from '../../shared/backpressure.ts';

/**
 * Yields `first`, then the items of all sources as they come, until the signal fires. At most one item of each source
 * waits. Begins to read the sources at once; a source that fails ends the stream with its error.
 */
export function merge<T>(first: T, sources: AsyncGenerator<T>[], signal: AbortSignal): AsyncGenerator<T> {
  const changed = new Wake();
  const ready: { item: T; next(): void }[] = [];
  let failure: { error: unknown } | undefined;
  const read = (source: AsyncGenerator<T>): void => {
    source
      .next()
      .then(
        (result) => void (result.done || ready.push({ item: result.value, next: () => read(source) })),
        (error: unknown) => {
          failure ??= { error };
        },
      )
      .finally(() => changed.wake());
  };
  for (const source of sources) read(source);
  return (async function* () {
    try {
      yield first;
      for (;;) {
        signal.throwIfAborted();
        if (failure) throw failure.error;
        const next = ready.shift();
        if (!next) await changed.wait(signal);
        else {
          yield next.item;
          next.next();
        }
      }
    } finally {
      // A source that waits ends by the signal.
      for (const source of sources) source.return(undefined).catch(() => {});
    }
  })();
}
