// Iterates all items of a list page by page, each once even while items are created and deleted.
import type { ListResult } from './call-types.ts';

/** Most items of a page that the broker returns. */
const pageSize = 100;
/** Most ids that are remembered to skip repeats; more items created between two pages may cause repeats. */
const remembered = 10_000;

/**
 * Yields all items. An item created meanwhile moves later items back: repeats are skipped by id. A deleted
 * item moves later items forward: when `total` has decreased, an earlier offset is read again.
 */
export async function* allItems(
  page: (paging: { limit: number; offset: number }) => Promise<ListResult<unknown>>,
  { limit = pageSize, offset: first = 0 }: { limit?: number; offset?: number },
): AsyncGenerator<unknown> {
  const seen = new Set<unknown>();
  for (let offset = first, known = 0; ; ) {
    const { items, total, has_more } = await page({ limit, offset });
    const deleted = known - total;
    known = total;
    if (deleted > 0 && offset > first) {
      offset = Math.max(first, offset - deleted);
      continue;
    }
    for (const item of items) {
      const id = idOf(item);
      if (id !== undefined && seen.has(id)) continue;
      seen.add(id);
      if (seen.size > remembered) seen.delete(seen.values().next().value);
      yield item;
    }
    if (!has_more || items.length === 0) return;
    offset += items.length;
  }
}

function idOf(item: unknown): unknown {
  return typeof item === 'object' && item !== null && 'id' in item ? item.id : undefined;
}
