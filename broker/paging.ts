// One page of a list from memory or from history.db, with filters and a sort field.
// Equal items are sorted by id.

import type { Route } from '../shared/api/route.ts';
import type { Page } from '../shared/api/route-table.ts';
import type { History, Row } from './history/history.ts';

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

/** An SQL condition with its values. Undefined stands for no condition. */
export type Condition = readonly [sql: string, ...values: (string | number)[]] | undefined;

const times: Readonly<Record<string, string>> = { since: 'created_at >= ?', until: 'created_at < ?' };

/**
 * Returns the conditions for the filters in a request to a list route. A filter compares the column of the
 * same name, unless `own` has a condition for it.
 */
export function filtersOf(
  { filters = [] }: Filtered,
  input: object,
  own: Readonly<Record<string, Condition>> = {},
): Condition[] {
  return [...filters, ...Object.keys(times)].map((name) => {
    if (Object.hasOwn(own, name)) return own[name];
    const value: unknown = Reflect.get(input, name);
    // The tables store times as milliseconds, and true as 1.
    const plain = value instanceof Date || typeof value === 'boolean' ? Number(value) : value;
    if (typeof plain !== 'string' && typeof plain !== 'number') return undefined;
    return [times[name] ?? `${name} = ?`, plain];
  });
}

/**
 * SQL that counts the rows of a table by `columns`, which are never null: the table NAME_counts has a row for each
 * combination of their values, and triggers maintain it in the transaction of each change. As part of a released
 * migration step, the text must not change.
 */
export function countRows(table: string, columns: readonly string[]): string {
  const list = columns.join(', ');
  const valuesOf = (row: string): string => columns.map((column) => `${row}.${column}`).join(', ');
  const where = columns.map((column) => `${column} = old.${column}`).join(' AND ');
  const add = `INSERT INTO ${table}_counts VALUES (${valuesOf('new')}, 1) ON CONFLICT DO UPDATE SET n = n + 1;`;
  const subtract = `UPDATE ${table}_counts SET n = n - 1 WHERE ${where};
    DELETE FROM ${table}_counts WHERE ${where} AND n = 0;`;
  return `CREATE TABLE ${table}_counts (${list}, n INTEGER NOT NULL, PRIMARY KEY (${list})) WITHOUT ROWID;
    INSERT INTO ${table}_counts SELECT ${list}, count(*) FROM ${table} GROUP BY ${list};
    CREATE TRIGGER ${table}_count_insert AFTER INSERT ON ${table} BEGIN ${add} END;
    CREATE TRIGGER ${table}_count_delete AFTER DELETE ON ${table} BEGIN ${subtract} END;
    CREATE TRIGGER ${table}_count_update AFTER UPDATE OF ${list} ON ${table} BEGIN ${subtract} ${add} END`;
}

interface RowSource {
  table: string;
  columns: string;
  /** Columns by which countRows() counts the rows. */
  counted?: readonly string[];
  /** True if an index finds the rows of a machine. */
  byMachine?: boolean;
}

/** The column that a condition compares with given values; empty for any other condition. */
function columnOf([sql]: NonNullable<Condition>): string {
  return /^\w+(?= (?:=|IN) )/.exec(sql)?.[0] ?? '';
}

/** The SQL that counts the rows which meet the conditions. */
function countOf({ table, counted = [] }: RowSource, conditions: readonly Condition[]): string {
  const given = conditions.filter((condition) => condition !== undefined);
  const isCounted = counted.length > 0 && given.every((condition) => counted.includes(columnOf(condition)));
  return isCounted
    ? `SELECT coalesce(sum(n), 0) AS n FROM ${table}_counts`
    : `SELECT count(*) AS n FROM ${table}`;
}

/**
 * Returns the conditions, with a plus before counted columns if one machine's rows are wanted. The plus makes
 * SQLite find the rows by their machine. Otherwise it may read all rows of a status, because it does not know
 * how many there are.
 */
function withMachineFirst(
  { counted = [], byMachine }: RowSource,
  conditions: readonly Condition[],
): Condition[] {
  const ofMachine =
    byMachine && conditions.some((condition) => condition && columnOf(condition) === 'machine_id');
  return conditions.map((condition) => {
    if (!condition || !ofMachine || !counted.includes(columnOf(condition))) return condition;
    const [sql, ...values] = condition;
    return [`+${sql}`, ...values];
  });
}

/**
 * A page of rows of a history table. If all conditions are about counted columns, the total is read from the
 * table of counts. `sort` must come from the route's list of fields, because it becomes part of the SQL text.
 * Equal rows are sorted by the column `tie`: the id, or the row's number if the order of writing matters.
 */
export async function pageOfRows(
  history: History,
  from: RowSource,
  conditions: readonly Condition[],
  input: PageInput,
  tie: 'id' | 'rowid' | 'seq' = 'id',
): Promise<Page<Row>> {
  const [where, values] = allOf(withMachineFirst(from, conditions));
  const direction = input.sort.startsWith('-') ? 'DESC' : 'ASC';
  const column = input.sort.replace('-', '');
  const [items = [], counted = []] = await history.read([
    {
      sql: `SELECT ${from.columns} FROM ${from.table} WHERE ${where} ORDER BY ${column} ${direction}, ${tie} ${direction} LIMIT ? OFFSET ?`,
      values: [...values, input.limit, input.offset],
    },
    { sql: `${countOf(from, conditions)} WHERE ${where}`, values },
  ]);
  return { items, total: Number(counted[0]?.n) };
}

/** Joins conditions with AND, and collects their values. */
export function allOf(conditions: readonly Condition[]): [where: string, values: (string | number)[]] {
  const used = conditions.filter((condition) => condition !== undefined);
  return [used.map(([sql]) => sql).join(' AND ') || 'TRUE', used.flatMap(([, ...values]) => values)];
}

/** Returns the condition that selects only rows of machines that a key may use. */
export function reachableOnly(machines: readonly string[] | undefined): Condition {
  return machines && ['machine_id IN (SELECT value FROM json_each(?))', JSON.stringify(machines)];
}
