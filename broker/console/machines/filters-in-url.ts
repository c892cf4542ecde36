// Search, filters and order of the list of machines, read from the URL of the page.
import type { MachineQuery } from './live-machine-list.ts';

/** The columns by which the broker can sort the list. */
const sortFields = [
  'name',
  'status',
  'cpu',
  'memory',
  'disk',
  'last_seen',
  'hostname',
  'created_at',
] as const;

export const isSortable = (column: string): boolean => sortFields.some((field) => field === column);

export const filterNames = ['q', 'tags', 'status'] as const;

export function queryOf(given: URLSearchParams): MachineQuery {
  const [search, tags, status, sort] = [...filterNames, 'sort'].map((name) => given.get(name) ?? '');
  const field = sortFields.find((name) => name === sort?.replace('-', ''));
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
export const firstSort = (field: string): string =>
  ['name', 'hostname', 'status'].includes(field) ? field : `-${field}`;
