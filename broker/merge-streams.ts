// Merges async generators into one. If the merged stream is read slowly, so are its sources.
import { Wake } from '../shared/wait-for-change.ts';

/**
 * Yields the items of all sources as they come, reading each source at most one item ahead. Throws the error of a
 * failed source, or the signal's reason.
 */
export function mergeStreams<T>(
  sources: readonly AsyncGenerator<T>[],
  signal: AbortSignal,
): AsyncGenerator<T> {
  const changed = new Wake();
  const ready: { item: T; source: AsyncGenerator<T> }[] = [];
  let open = sources.length;
  let failure: { error: unknown } | undefined;
  const read = (source: AsyncGenerator<T>): void => {
    const next = source.next().then((result) => {
      if (result.done) open -= 1;
      else ready.push({ item: result.value, source });
    });
    const failed = (error: unknown): void => {
      failure ??= { error };
    };
    next.catch(failed).finally(() => changed.wake());
  };
  for (const source of sources) read(source);
  return (async function* () {
    try {
      while (open > 0) {
        signal.throwIfAborted();
        if (failure) throw failure.error;
        const next = ready.shift();
        if (next) {
          yield next.item;
          read(next.source);
        } else await changed.wait(signal);
      }
    } finally {
      // return() is not awaited. If a source waits for its next item, return() resolves only after that item, which may
      // never come.
      for (const source of sources) source.return(undefined).catch(() => {});
    }
  })();
}
