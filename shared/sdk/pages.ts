// All items of a list, page after page, though things are made and removed meanwhile.
import type { ListResult } from './shape.ts';

/** As many as the broker gives at once. */
const pageSize = 100;
/** Items whose ids are remembered: as many may be made between two pages. */
const remembered = 10_000;

/**
 * What is made meanwhile moves the others back: those come again and are passed over by their ids. What is removed moves
 * them forward: `total` tells how far, and the page before is read again so far.
 */
export async function* allItems(
  page: (paging: { limit: number; offset: number }) => Promise<ListResult<unknown>>,
  { limit = pageSize, offset: first = 0 }: { limit?: number; offset?: number },
): AsyncGenerator<unknown> {
  const seen = new Set<unknown>();
  for (let offset = first, known = 0; ; ) {
    const { items, total, has_more } = await page({ limit, offset });
    const gone = known - total;
    known = total;
    if (gone > 0 && offset > first) {
      offset = Math.max(first, offset - gone);
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
