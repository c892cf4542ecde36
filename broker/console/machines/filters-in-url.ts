// Search, filters and order of the list of machines, read from the URL of the page.
import type { MachineQuery } from './live-machine-list.ts';

export const sorts = [
  ['name', 'Name'],
  ['status', 'Status'],
  ['cpu', 'CPU'],
  ['memory', 'Memory'],
  ['disk', 'Disk'],
  ['last_seen', 'Last seen'],
  ['hostname', 'Host name'],
  ['created_at', 'Joined'],
] as const;
export type SortField = (typeof sorts)[number][0];

export const filterNames = ['q', 'tags', 'status'] as const;

export function queryOf(given: URLSearchParams): MachineQuery {
  const [search, tags, status, sort] = [...filterNames, 'sort'].map((name) => given.get(name) ?? '');
  const field = sorts.find(([name]) => name === sort?.replace('-', ''))?.[0];
  return {
    sort: field === undefined ? 'name' : sort?.startsWith('-') ? `-${field}` : field,
    ...(search && { search }),
    ...(tags && { tags }),
    ...((status === 'online' || status === 'offline') && { status }),
  };
}

/**
 * Returns the order of the list when the user starts to sort it by a field. Names and the status are ascending.
 * Numbers and times are descending, because their largest values matter most.
 */
export const firstSort = (field: SortField): string =>
  ['name', 'hostname', 'status'].includes(field) ? field : `-${field}`;
