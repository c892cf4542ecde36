// The result of the SDK's list and stream calls: a promise that can also be iterated. Iterating over a list requests
// page after page.
/* oxlint-disable unicorn/no-thenable -- it is a promise */
import type { ListResult } from './call-types.ts';
import { propertyOf } from './errors-and-envelopes.ts';

/** Returns a promise whose request starts when it is awaited or iterated. Iterating yields the items of the answer. */
export function lazy<T, Item>(
  begin: () => Promise<T>,
  items: (begun: () => Promise<T>) => AsyncIterator<Item>,
): Promise<T> & AsyncIterable<Item> {
  let begun: Promise<T> | undefined;
  const start = (): Promise<T> => (begun ??= begin());
  return {
    [Symbol.toStringTag]: 'Promise',
    // biome-ignore lint/suspicious/noThenProperty: it is a promise
    then: (resolved, rejected) => start().then(resolved, rejected),
    catch: (rejected) => start().catch(rejected),
    finally: (done) => start().finally(done),
    [Symbol.asyncIterator]: () => items(start),
  };
}

/** Maximum number of items that the broker returns in one page. */
const pageSize = 100;
/**
 * Number of yielded items whose ids are remembered, so that an item on two pages is yielded once. If more items than
 * this are created between two requests, some items are yielded twice.
 */
const remembered = 10_000;

/** Yields all items of a list, even if the list changes between two pages. */
export async function* allItems(
  page: (paging: { limit: number; offset: number }) => Promise<ListResult<unknown>>,
  { limit = pageSize, offset: first = 0 }: { limit?: number; offset?: number },
): AsyncGenerator<unknown> {
  const seen = new Set<unknown>();
  for (let offset = first, known = 0; ; ) {
    const { items, total, has_more } = await page({ limit, offset });
    const deleted = known - total;
    known = total;
    // If items were deleted since the previous request, all items after them have moved towards the start of the list.
    // The page is then requested again, at an offset smaller by the number of deletions, so that no item is skipped.
    if (deleted > 0 && offset > first) {
      offset = Math.max(first, offset - deleted);
      continue;
    }
    for (const item of items) {
      // Items such as tags have no id.
      const id = propertyOf(item, 'id') ?? JSON.stringify(item);
      // A new item moves the items after it towards the end of the list. So an item of the previous page may be on this
      // page too.
      if (seen.has(id)) continue;
      seen.add(id);
      if (seen.size > remembered) seen.delete(seen.values().next().value);
      yield item;
    }
    if (!has_more || items.length === 0) return;
    offset += items.length;
  }
}
