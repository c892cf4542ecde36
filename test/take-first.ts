// Reads the beginning of a stream.

/** Returns the first `count` items; fewer if the stream ends before. Ends the iteration. */
export async function takeFirst<T>(
  count: number,
  items: AsyncIterable<T> | Promise<AsyncIterable<T>>,
): Promise<T[]> {
  const taken: T[] = [];
  for await (const item of await items) if (taken.push(item) === count) break;
  return taken;
}
