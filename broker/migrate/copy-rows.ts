// Copies the rows of the history from one database to another, in pages of limited size. Computes digests, with which
// the caller compares the copy with the original.
import { createHash, type Hash } from 'node:crypto';
import type { Value } from '../history/database-interface.ts';
import type { History, HistoryTransaction, Row } from '../history/history-database.ts';

/** A table that both databases have. */
export interface Table {
  name: string;
  /** All columns except generated ones. If SQLite numbers the rows in a hidden column, its name `rowid` comes last. */
  columns: readonly string[];
  /** The columns by which pages are ordered. */
  key: readonly string[];
  /** The columns with texts or bytes, whose values can be long. */
  long: readonly string[];
}

/** Maximum number of bytes in the `long` columns of a page. A page of one row may have more. */
const mostBytes = 8 * 1024 * 1024;
export const mostRows = 500;
/** Maximum number of values in a statement; SQLite allows 32,766. */
const mostValues = 30_000;

/** Tables that are not copied, because each database has its own rows there. */
const own = ['installation', 'migrations'];

const list = (names: readonly string[]): string => names.map((name) => `"${name}"`).join(', ');
const places = (count: number): string => `(${Array(count).fill('?').join(', ')})`;

/**
 * Returns the tables of a history.db that are to be copied. `counted` must be copied last: while it is empty, the
 * triggers that count rows do nothing. Otherwise they would add the copied rows to the copied counts.
 */
export async function tablesOf(sqlite: History): Promise<Table[]> {
  const found = await sqlite.all(
    `SELECT name, wr FROM pragma_table_list WHERE schema = 'main' AND type = 'table' AND name NOT LIKE 'sqlite%'
     ORDER BY name = 'counted', name`,
  );
  const tables = found.filter(({ name }) => !own.includes(String(name)));
  return await Promise.all(tables.map(({ name, wr }) => describe(sqlite, String(name), wr === 1)));
}

async function describe(sqlite: History, name: string, withoutRowid: boolean): Promise<Table> {
  const columns = await sqlite.all(
    'SELECT name, type, pk FROM pragma_table_xinfo(?) WHERE hidden = 0 ORDER BY cid',
    name,
  );
  const namesOf = (rows: readonly Row[]): string[] => rows.map((row) => String(row.name));
  const primary = columns.filter(({ pk }) => Number(pk) > 0).sort((a, b) => Number(a.pk) - Number(b.pk));
  // In SQLite, a primary key of one INTEGER column is the row number itself. `rowid` is then only another name of that
  // column.
  const isNumber = !withoutRowid && primary.length === 1 && primary[0]?.type === 'INTEGER';
  const numbered = withoutRowid || isNumber ? [] : ['rowid'];
  return {
    name,
    columns: [...namesOf(columns), ...numbered],
    key: numbered.length > 0 ? numbered : namesOf(primary),
    long: namesOf(columns.filter(({ type }) => type === 'TEXT' || type === 'BLOB')),
  };
}

/** Copies all rows. Returns their number and digest. */
export async function copyTable(
  table: Table,
  from: History,
  to: History,
): Promise<{ rows: number; digest: string }> {
  const { name, columns } = table;
  const hash = createHash('sha256');
  let count = 0;
  for await (const rows of pagesOf(table, from)) {
    await to.write((transaction) => insert(name, columns, rows, transaction));
    add(hash, rows, columns);
    count += rows.length;
  }
  return { rows: count, digest: hash.digest('hex') };
}

export function insert(
  table: string,
  columns: readonly string[],
  rows: readonly Row[],
  transaction: HistoryTransaction,
): void {
  const sql = `INSERT INTO ${table} (${list(columns)}) VALUES ${rows.map(() => places(columns.length)).join(', ')}`;
  transaction.run(sql, ...rows.flatMap((row) => valuesOf(row, columns)));
}

export async function digestOf(table: Table, history: History): Promise<string> {
  const hash = createHash('sha256');
  for await (const rows of pagesOf(table, history)) add(hash, rows, table.columns);
  return hash.digest('hex');
}

async function* pagesOf(table: Table, history: History): AsyncGenerator<Row[]> {
  const { name, columns, key } = table;
  const limit = await rowsOfPage(table, history);
  const select = `SELECT ${list(columns)} FROM ${name}`;
  const order = `ORDER BY ${list(key)} LIMIT ${limit}`;
  let rows = await history.all(`${select} ${order}`);
  while (rows.length > 0) {
    yield rows;
    const last = rows.at(-1) ?? {};
    const after = `WHERE (${list(key)}) > ${places(key.length)}`;
    rows =
      rows.length < limit ? [] : await history.all(`${select} ${after} ${order}`, ...valuesOf(last, key));
  }
}

/** Returns how many rows fit into a page even if all of them are as long as the longest row. */
async function rowsOfPage({ name, columns, long }: Table, history: History): Promise<number> {
  const bytes = ['0', ...long.map((column) => `coalesce(octet_length("${column}"), 0)`)].join(' + ');
  const row = await history.get(`SELECT coalesce(max(${bytes}), 0) AS longest FROM ${name}`);
  const fitting = Math.floor(mostBytes / Math.max(1, Number(row?.longest)));
  return Math.max(1, Math.min(mostRows, fitting, Math.floor(mostValues / columns.length)));
}

const valuesOf = (row: Row, columns: readonly string[]): Value[] => columns.map((name) => row[name] ?? null);

function add(hash: Hash, rows: readonly Row[], columns: readonly string[]): void {
  for (const row of rows) hash.update(JSON.stringify(valuesOf(row, columns).map(plain)));
}

/** The two drivers return bytes as objects of different classes, so bytes are compared as base64. */
const plain = (value: Value): unknown =>
  value instanceof Uint8Array ? Buffer.from(value).toString('base64') : value;
