// The REST handler of tags: their names, and the number of machines with each.
import type { Handlers } from '../../shared/api/route-table.ts';
import type { State } from '../state/index.ts';

export function tagHandlers(state: State): Handlers['tags'] {
  return {
    list({ search = '', sort, limit, offset }, caller) {
      const counts = new Map<string, number>();
      for (const { id, tags } of state.machines.values()) {
        if (!caller.reaches(id)) continue;
        for (const tag of tags) counts.set(tag, (counts.get(tag) ?? 0) + 1);
      }
      const part = search.toLowerCase();
      const found = [...counts].filter(([name]) => name.toLowerCase().includes(part));
      const direction = sort.startsWith('-') ? -1 : 1;
      const byName = (a: string, b: string): number => (a < b ? -1 : a > b ? 1 : 0);
      found.sort(
        ([a, n], [b, m]) => direction * (sort.endsWith('machines') ? n - m : 0) || direction * byName(a, b),
      );
      const items = found.slice(offset, offset + limit).map(([name, machines]) => ({ name, machines }));
      return { items, total: found.length };
    },
  };
}
