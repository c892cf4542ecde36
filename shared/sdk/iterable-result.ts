// The result of the SDK's list and stream calls: a promise that can also be iterated. Iterating over a list requests
// page after page.
/* oxlint-disable unicorn/no-thenable -- it is a promise */
import type { ListResult } from './call-types.ts';
import { propertyOf } from './error.ts';

/** A promise whose request starts when it is awaited or iterated. Iterating yields the items of the answer. */
export class Lazy<T, Item> implements Promise<T>, AsyncIterable<Item> {
  readonly [Symbol.toStringTag] = 'Promise';
  readonly #begin: () => Promise<T>;
  readonly #items: (begun: () => Promise<T>) => AsyncIterator<Item>;
  #begun: Promise<T> | undefined;

  constructor(begin: () => Promise<T>, items: (begun: () => Promise<T>) => AsyncIterator<Item>) {
    this.#begin = begin;
    this.#items = items;
  }

  #start(): Promise<T> {
    this.#begun ??= this.#begin();
    return this.#begun;
  }

  // biome-ignore lint/suspicious/noThenProperty: it is a promise
  then<A = T, B = never>(
    resolved?: ((value: T) => A | PromiseLike<A>) | null,
    rejected?: ((reason: unknown) => B | PromiseLike<B>) | null,
  ): Promise<A | B> {
    return this.#start().then(resolved, rejected);
  }

  catch<B = never>(rejected?: ((reason: unknown) => B | PromiseLike<B>) | null): Promise<T | B> {
    return this.#start().catch(rejected);
  }

  finally(done?: (() => void) | null): Promise<T> {
    return this.#start().finally(done);
  }

  [Symbol.asyncIterator](): AsyncIterator<Item> {
    return this.#items(() => this.#start());
  }
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
    // Items were deleted since the previous request, and all items after them have moved towards the start of the list.
    // The page is requested again at an offset that is smaller by the number of deletions. So no item is skipped.
    if (deleted > 0 && offset > first) {
      offset = Math.max(first, offset - deleted);
      continue;
    }
    for (const item of items) {
      const id = propertyOf(item, 'id');
      // A new item moves the items after it towards the end of the list. So an item of the previous page may be on this
      // page too.
      if (id !== undefined && seen.has(id)) continue;
      seen.add(id);
      if (seen.size > remembered) seen.delete(seen.values().next().value);
      yield item;
    }
    if (!has_more || items.length === 0) return;
    offset += items.length;
  }
}
