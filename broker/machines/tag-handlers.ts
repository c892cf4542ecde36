// The REST handler of tags: their names, and the number of machines with each.
import type { Handlers } from '../../shared/api/route-table.ts';
import { tags as routes } from '../../shared/api/tags-in-use.ts';
import { pageOf } from '../list-pages-and-filters.ts';
import type { State } from '../state/index.ts';

export function tagHandlers(state: State): Handlers['tags'] {
  return {
    list({ search = '', ...input }, caller) {
      const counts = new Map<string, number>();
      for (const { id, tags } of state.machines.values()) {
        if (!caller.reaches(id)) continue;
        for (const tag of tags) counts.set(tag, (counts.get(tag) ?? 0) + 1);
      }
      const part = search.toLowerCase();
      const found = [...counts].filter(([name]) => name.toLowerCase().includes(part));
      const tags = found.map(([name, machines]) => ({ id: name, name, machines }));
      const { items, total } = pageOf(routes.list, tags, input);
      return { items: items.map(({ name, machines }) => ({ name, machines })), total };
    },
  };
}
