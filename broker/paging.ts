// One page of a list, from memory or from history: sorted by a field, ties by id.
import type { Page } from '../shared/api/index.ts';
import type { History, Row } from './history.ts';

interface PageInput {
  limit: number;
  offset: number;
  /** A field, with a minus in front for descending. */
  sort: string;
}

/** A page of items that are all in memory; `field` reads what is sorted by. */
export function pageOf<T extends { id: string }>(
  items: T[],
  input: PageInput,
  field: (item: T, name: string) => string | number | null,
): Page<T> {
  const descending = input.sort.startsWith('-');
  const name = input.sort.replace('-', '');
  const keyed = items.map((item) => ({ item, key: field(item, name) ?? '' }));
  keyed.sort((a, b) => {
    const order = a.key < b.key ? -1 : a.key > b.key ? 1 : a.item.id < b.item.id ? -1 : 1;
    return descending ? -order : order;
  });
  const page = keyed.slice(input.offset, input.offset + input.limit);
  return { items: page.map(({ item }) => item), total: items.length };
}

/** A condition with its values; undefined ones are left out. */
export type Condition = readonly [sql: string, ...values: (string | number)[]] | undefined;

/**
 * A page of rows of a history table; `sort` must come from a route's own list of fields. Ties go by `tie`: the id,
 * or where the order of writing tells more the row's number.
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

/** Conditions as one, with its values. */
export function allOf(conditions: readonly Condition[]): [where: string, values: (string | number)[]] {
  const used = conditions.filter((condition) => condition !== undefined);
  return [used.map(([sql]) => sql).join(' AND ') || '1', used.flatMap(([, ...values]) => values)];
}

/** The condition that leaves only machines a key reaches. */
export function reachableOnly(machines: readonly string[] | undefined): Condition {
  return machines && ['machine_id IN (SELECT value FROM json_each(?))', JSON.stringify(machines)];
}
