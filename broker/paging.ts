// One page of a list from memory or from history.db, with filters and a sort field.
// Equal items are sorted by id.

import type { Route } from '../shared/api/route.ts';
import type { Page } from '../shared/api/route-table.ts';
import type { History, Row } from './history.ts';

interface PageInput {
  limit: number;
  offset: number;
  /** Name of a field; a minus in front means descending. */
  sort: string;
}

type Filtered = Pick<Route, 'filters'>;

interface Selection {
  /** As in PageInput. */
  sort: string;
  since?: Date | undefined;
  until?: Date | undefined;
}

/** A page of items that are all in memory. `field` reads the fields for filters and sorting. */
export function pageOf<T extends { id: string; created_at: string }>(
  route: Filtered,
  items: T[],
  input: PageInput & Selection,
  field: (item: T, name: string) => unknown = (item, name) => Reflect.get(item, name),
): Page<T> {
  const selected = selectFrom(route, items, input, field);
  return { items: selected.slice(input.offset, input.offset + input.limit), total: selected.length };
}

/** All items that match the filters, sorted. `field` reads the fields for filters and sorting. */
export function selectFrom<T extends { id: string; created_at: string }>(
  { filters = [] }: Filtered,
  items: T[],
  input: Selection,
  field: (item: T, name: string) => unknown,
): T[] {
  const given = filters.filter((name) => Reflect.get(input, name) !== undefined);
  const from = input.since?.getTime() ?? Number.NEGATIVE_INFINITY;
  const to = input.until?.getTime() ?? Number.POSITIVE_INFINITY;
  const timed = input.since ?? input.until;
  const matching = items.filter((item) => {
    const at = timed ? Date.parse(item.created_at) : from;
    return at >= from && at < to && given.every((name) => field(item, name) === Reflect.get(input, name));
  });
  const descending = input.sort.startsWith('-');
  const name = input.sort.replace('-', '');
  const keyed = matching.map((item) => ({ item, key: sortable(field(item, name)) }));
  keyed.sort((a, b) => {
    const order = a.key < b.key ? -1 : a.key > b.key ? 1 : a.item.id < b.item.id ? -1 : 1;
    return descending ? -order : order;
  });
  return keyed.map(({ item }) => item);
}

function sortable(value: unknown): string | number {
  return typeof value === 'string' || typeof value === 'number' ? value : '';
}

/** An SQL condition with its values. Undefined ones are ignored. */
export type Condition = readonly [sql: string, ...values: (string | number)[]] | undefined;

const times: Readonly<Record<string, string>> = { since: 'created_at >= ?', until: 'created_at < ?' };

/**
 * The conditions for the filters in a request to a list route. Columns have the names of the filters; `own`
 * holds the conditions of filters without such a column.
 */
export function filtersOf(
  { filters = [] }: Filtered,
  input: object,
  own: Readonly<Record<string, Condition>> = {},
): Condition[] {
  return [...filters, ...Object.keys(times)].map((name) => {
    if (Object.hasOwn(own, name)) return own[name];
    const value: unknown = Reflect.get(input, name);
    // SQL has times as milliseconds, and true as 1.
    const plain = value instanceof Date || typeof value === 'boolean' ? Number(value) : value;
    if (typeof plain !== 'string' && typeof plain !== 'number') return undefined;
    return [times[name] ?? `${name} = ?`, plain];
  });
}

/**
 * A page of rows of a history table. `sort` must come from the route's list of fields, because it becomes
 * part of the SQL text. Equal rows are sorted by `tie`: the id, or the row's number if the order of writing
 * matters.
 */
export function pageOfRows(
  history: History,
  from: { table: string; columns: string },
  conditions: readonly Condition[],
  input: PageInput,
  tie: 'id' | 'rowid' | 'seq' = 'id',
): Page<Row> {
  const [where, values] = allOf(conditions);
  const direction = input.sort.startsWith('-') ? 'DESC' : 'ASC';
  const column = input.sort.replace('-', '');
  const rows = history
    .sql(
      `SELECT ${from.columns} FROM ${from.table} WHERE ${where} ORDER BY ${column} ${direction}, ${tie} ${direction} LIMIT ? OFFSET ?`,
    )
    .all(...values, input.limit, input.offset);
  const total = history.sql(`SELECT count(*) AS n FROM ${from.table} WHERE ${where}`).get(...values)?.n;
  return { items: rows, total: Number(total) };
}

/** Joins conditions with AND, and collects their values. */
export function allOf(conditions: readonly Condition[]): [where: string, values: (string | number)[]] {
  const used = conditions.filter((condition) => condition !== undefined);
  return [used.map(([sql]) => sql).join(' AND ') || '1', used.flatMap(([, ...values]) => values)];
}

/** The condition that selects only machines that a key reaches. */
export function reachableOnly(machines: readonly string[] | undefined): Condition {
  return machines && ['machine_id IN (SELECT value FROM json_each(?))', JSON.stringify(machines)];
}
