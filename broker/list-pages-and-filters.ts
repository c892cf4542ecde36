// Makes one page of a list, with filters and a sort field, from items in memory or from rows of the history.
// Items with equal sort values are sorted by id.

import type { Route } from '../shared/api/route.ts';
import type { Page } from '../shared/api/route-table.ts';
import type { History, Row } from './history/history-database.ts';
import { type Bounds, type CountedTable, sumOf, totalOf } from './history/row-counts.ts';

interface PageInput {
  limit: number;
  offset: number;
  /** Name of a field; a minus in front means descending. */
  sort: string;
}

type Filtered = Pick<Route, 'filters'>;

interface Selection {
  /** Name of a field; a minus in front means descending. */
  sort: string;
  since?: Date | undefined;
  until?: Date | undefined;
}

interface Item {
  id: string;
  /** Missing in lists without `since` and `until`. */
  created_at?: string;
}

/** Returns a page of items that are all in memory. `field` reads a field of an item, for filters and sorting. */
export function pageOf<T extends Item>(
  route: Filtered,
  items: T[],
  input: PageInput & Selection,
  field: (item: T, name: string) => unknown = (item, name) => Reflect.get(item, name),
): Page<T> {
  const selected = selectFrom(route, items, input, field);
  return { items: selected.slice(input.offset, input.offset + input.limit), total: selected.length };
}

/**
 * Returns all items that match the filters, sorted. `field` reads a field of an item, for filters and sorting. Items
 * whose sort field is empty come last in both directions.
 */
export function selectFrom<T extends Item>(
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
    const at = timed ? Date.parse(item.created_at ?? '') : from;
    return at >= from && at < to && given.every((name) => field(item, name) === Reflect.get(input, name));
  });
  const descending = input.sort.startsWith('-');
  const name = input.sort.replace('-', '');
  const keyed = matching.map((item) => {
    const value = field(item, name);
    const isEmpty = typeof value !== 'string' && typeof value !== 'number';
    return { item, isEmpty, key: isEmpty ? '' : value };
  });
  keyed.sort((a, b) => {
    if (a.isEmpty !== b.isEmpty) return a.isEmpty ? 1 : -1;
    const order = a.key < b.key ? -1 : a.key > b.key ? 1 : a.item.id < b.item.id ? -1 : 1;
    return descending ? -order : order;
  });
  return keyed.map(({ item }) => item);
}

/** An SQL condition with its values. Undefined stands for no condition. */
export type Condition = readonly [sql: string, ...values: (string | number)[]] | undefined;

/**
 * Returns the conditions for the filters in a request to a list route. A filter compares the column of the
 * same name, unless `own` has a condition for it.
 */
export function filtersOf(
  { filters = [] }: Filtered,
  input: object,
  own: Readonly<Record<string, Condition>> = {},
): Condition[] {
  return filters.map((name) => {
    if (Object.hasOwn(own, name)) return own[name];
    const value: unknown = Reflect.get(input, name);
    // A boolean is written into the SQL text. With a parameter instead, the database could not use a partial index.
    if (typeof value === 'boolean') return [`${name} = ${Number(value)}`];
    return typeof value === 'string' || typeof value === 'number' ? [`${name} = ?`, value] : undefined;
  });
}

interface RowSource {
  table: string;
  columns: string;
  /** Columns that order the rows whose sort fields are equal; by default `id`. */
  tie?: readonly string[];
  /** How the rows are counted in the background. If undefined, the query for each page counts the rows itself. */
  counted?: CountedTable;
  /**
   * Returns the SQL conditions for `since` and `until` of a request. Without this function, `since` and `until` are
   * compared with the table's column of times.
   */
  within?(bounds: Bounds): Condition[];
  /**
   * Indexed columns, the most selective first. This order decides which index SQLite uses, because SQLite itself does
   * not know which column selects the fewest rows.
   */
  findBy?: readonly string[];
}

/**
 * Returns the column of a condition such as `status = ?` or `id IN (…)`; an empty text for a condition of another form.
 */
function columnOf([sql]: NonNullable<Condition>): string {
  return /^\w+(?= (?:=|IN) )/.exec(sql)?.[0] ?? '';
}

/**
 * Lets SQLite use the index of only one column: the first of `findBy` that has a condition. A unary plus in front of
 * the other columns excludes their indexes.
 */
function withBestIndex({ findBy = [] }: RowSource, conditions: readonly Condition[]): Condition[] {
  const columns = conditions.map((condition) => condition && columnOf(condition));
  const best = findBy.find((column) => columns.includes(column));
  return conditions.map((condition, index) => {
    const column = columns[index] ?? '';
    if (!condition || column === best || !findBy.includes(column)) return condition;
    const [sql, ...values] = condition;
    return [`+${sql}`, ...values];
  });
}

/**
 * Returns a page of rows, and the total number of matching rows; the total comes from row-counts.ts if possible. `sort`
 * becomes part of the SQL text, so the route must validate it.
 */
export async function pageOfRows(
  history: History,
  from: RowSource,
  conditions: readonly Condition[],
  input: PageInput & Bounds,
): Promise<Page<Row>> {
  const { table, columns, tie = ['id'], counted } = from;
  const within = from.within?.(input) ?? boundsOf(counted?.time ?? 'created_at', input);
  const [where, values] = allOf(withBestIndex(from, [...conditions, ...within]));
  const direction = input.sort.startsWith('-') ? 'DESC' : 'ASC';
  const fields = new Set([input.sort.replace('-', ''), ...tie]);
  const order = [...fields].map((column) => `${column} ${direction}`).join(', ');
  const page = `FROM ${table} WHERE ${where} ORDER BY ${order} LIMIT ? OFFSET ?`;
  const number = counted?.number;
  // The inner query finds the row numbers of the page, often from an index alone, without reading the table. The outer
  // query then reads only the rows of the page.
  const sql = number
    ? `SELECT ${columns} FROM ${table} WHERE ${number} IN (SELECT ${number} ${page}) ORDER BY ${order}`
    : `SELECT ${columns} ${page}`;
  const given = conditions.filter((condition) => condition !== undefined);
  const total = counted && totalOf(counted, given.map(columnOf), allOf(given), input);
  const [items = [], [count = {}] = []] = await history.read([
    { sql, values: [...values, input.limit, input.offset] },
    total
      ? { sql: total[0], values: total[1] }
      : { sql: `SELECT count(*) AS n FROM ${table} WHERE ${where}`, values },
  ]);
  return { items, total: total ? sumOf(count) : Number(count.n) };
}

function boundsOf(time: string, { since, until }: Bounds): Condition[] {
  return [since && [`${time} >= ?`, since.getTime()], until && [`${time} < ?`, until.getTime()]];
}

/** Joins conditions with AND, and collects their values. */
export function allOf(conditions: readonly Condition[]): [where: string, values: (string | number)[]] {
  const used = conditions.filter((condition) => condition !== undefined);
  return [used.map(([sql]) => sql).join(' AND ') || 'TRUE', used.flatMap(([, ...values]) => values)];
}

/** Returns the condition that selects only rows of machines that a key may use. */
export function reachableOnly(machines: readonly string[] | undefined): Condition {
  return machines && among('machine_id', machines);
}

/** Returns the SQL condition that the column has one of these values. */
export function among(column: string, values: readonly string[]): NonNullable<Condition> {
  return [`${column} IN (SELECT value FROM json_each(?))`, JSON.stringify(values)];
}
