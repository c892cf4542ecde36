// Counts rows in the background and stores the counts, so that a list can get its exact total without a scan of the
// table. The query for that total adds up stored counts. It counts rows only where the stored counts do not suffice:
// the newest rows, and the rows near `since` and `until`.
//
// Transactions that write must run one after another (see commitLock). Rows then become visible in the order of their
// numbers, and do not change while they are counted.
import type { HistoryTransaction, Row } from './database-interface.ts';

export interface CountedTable {
  table: string;
  /** The column with the time of a row, in milliseconds. */
  time: string;
  /** The column whose values grow from row to row. */
  number: 'rowid' | 'seq';
  /** Columns that filters compare. They are never null. */
  columns: readonly string[];
  /**
   * The column in `columns` by which every list filters, such as `schedule_id`; undefined if there is none. It is the
   * first column of the primary key of the count tables. A query thus reads only the counts of one value.
   */
  scope?: string;
}

/** An SQL condition with its values. */
type Clause = readonly [sql: string, values: readonly (string | number)[]];

/** Bounds of the times of a list: `since` or later, and before `until`. */
export interface Bounds {
  since?: Date | undefined;
  until?: Date | undefined;
}

/**
 * A new row gets the sequence number *its time in milliseconds × this factor*. If an earlier row has this number or a
 * higher one, the new row gets the next number. This happens in a burst of rows, or after the clock was set back.
 */
export const sequencesPerMs = 1_000;
/**
 * Rows are counted per quarter of an hour. A stored count covers a whole quarter. If `since` or `until` lies inside a
 * quarter, the query itself counts the rows of that quarter before that time.
 */
const quarterMs = 900_000;
/** Maximum number of rows that one step counts. A step takes some 3 ms. */
const rowsOfStep = 1_000;

/** The table that contains the number of the last counted row of each table. */
export const countedTable =
  'CREATE TABLE IF NOT EXISTS counted (name TEXT PRIMARY KEY, last INTEGER NOT NULL) WITHOUT ROWID';

const quarterOf = (counted: CountedTable, row = ''): string => `${row}${counted.time} / ${quarterMs}`;
const lastOf = ({ table }: CountedTable): string => `(SELECT last FROM counted WHERE name = '${table}')`;

/** Returns the definition of a column of a table of counts. */
function typed(column: string): string {
  return `${column} ${/^quarter$|_truncated$/.test(column) ? 'INTEGER' : 'TEXT'} NOT NULL`;
}

/**
 * Returns the two tables of counts. One counts rows by quarter of an hour, the other by machine. Both have a count for
 * each combination of values of `columns`.
 */
function groupsOf(counted: CountedTable) {
  const { table, columns, scope } = counted;
  const rest = columns.filter((column) => column !== scope);
  const keys = (first: string): string[] => [...(scope === undefined ? [] : [scope]), first, ...rest];
  const valuesOf = (names: readonly string[], row: string): string[] =>
    names.map((name) => {
      if (name === 'quarter') return quarterOf(counted, row);
      return name === 'machine_id' ? `coalesce(${row}machine_id, '')` : `${row}${name}`;
    });
  return ['quarter', 'machine_id'].map((first) => ({
    name: `${table}_by_${first}`,
    keys: keys(first),
    values: (row: string) => valuesOf(keys(first), row),
  }));
}

/**
 * Returns SQL that creates the count tables of `counted`, and the triggers that keep its counts up to date. The SQL
 * must never change, because released migration steps contain it.
 */
export function createCounts(counted: CountedTable): string {
  const { table, number, columns, time } = counted;
  const groups = groupsOf(counted);
  const tables = groups.map(
    ({
      name,
      keys,
    }) => `CREATE TABLE ${name} (${keys.map(typed).join(', ')}, n INTEGER NOT NULL, last INTEGER NOT NULL,
      PRIMARY KEY (${keys.join(', ')})) WITHOUT ROWID;`,
  );
  // The triggers correct the counts when counted rows change. countNext() counts new rows later.
  const add = groups.map(
    ({ name, keys, values }) => `INSERT INTO ${name} VALUES (${values('new.').join(', ')}, 1, new.${number})
      ON CONFLICT (${keys.join(', ')})
      DO UPDATE SET n = ${name}.n + 1, last = max(${name}.last, excluded.last);`,
  );
  const subtract = groups.map(
    ({ name, keys, values }) =>
      `UPDATE ${name} SET n = n - 1 WHERE (${keys.join(', ')}) = (${values('old.').join(', ')});`,
  );
  const trigger = (event: string, on: string, row: string, changes: readonly string[]): string =>
    `CREATE TRIGGER ${table}_counted_${event} AFTER ${on} ON ${table} WHEN ${row}.${number} <= ${lastOf(counted)}
      BEGIN ${changes.join(' ')} END;`;
  const update = `UPDATE OF ${[...columns, 'machine_id', time].join(', ')}`;
  return [
    ...tables,
    `INSERT INTO counted VALUES ('${table}', 0);`,
    trigger('insert', 'INSERT', 'new', add),
    trigger('delete', 'DELETE', 'old', subtract),
    trigger('update', update, 'old', [...subtract, ...add]),
  ].join('\n');
}

/** Counts the next `rowsOfStep` rows. If there are fewer, counts none and resolves with false. */
export async function countNext(counted: CountedTable, transaction: HistoryTransaction): Promise<boolean> {
  const { table, number } = counted;
  const uncounted = `FROM ${table} NOT INDEXED WHERE ${number} > ${lastOf(counted)}`;
  const row = await transaction.get(
    `SELECT ${number} AS last ${uncounted} ORDER BY ${number} LIMIT 1 OFFSET ${rowsOfStep - 1}`,
  );
  if (!row) return false;
  const last = Number(row.last);
  for (const { name, keys, values } of groupsOf(counted)) {
    transaction.run(
      `INSERT INTO ${name} SELECT ${values('').join(', ')}, count(*), max(${number}) ${uncounted} AND ${number} <= ?
       GROUP BY ${keys.map((_, index) => index + 1).join(', ')}
       ON CONFLICT (${keys.join(', ')}) DO UPDATE SET n = ${name}.n + excluded.n, last = excluded.last`,
      last,
    );
  }
  transaction.run('UPDATE counted SET last = ? WHERE name = ?', last, table);
  return true;
}

/** Deletes counts that are zero because their rows were deleted. */
export function dropEmptyCounts(counted: CountedTable, transaction: HistoryTransaction): void {
  for (const { name } of groupsOf(counted)) transaction.run(`DELETE FROM ${name} WHERE n = 0`);
}

/**
 * Returns an SQL query for the total of a list: the number of rows within the bounds that meet the condition `where`.
 * Returns undefined if no stored counts fit the bounds and `columns`, which are the columns in `where`. sumOf()
 * computes the total from the query's row.
 */
export function totalOf(
  counted: CountedTable,
  columns: readonly string[],
  [where, values]: Clause,
  { since, until }: Bounds,
): Clause | undefined {
  const { table, columns: known, time, number } = counted;
  const ofMachine = columns.includes('machine_id');
  const isKnown = columns.every((column) => column === 'machine_id' || known.includes(column));
  if (!isKnown || (ofMachine && (since || until))) return undefined;
  const group = `${table}_by_${ofMachine ? 'machine_id' : 'quarter'}`;
  const clause: Clause = [where, values];
  const all: Clause = [`(SELECT coalesce(sum(n), 0) FROM ${group} WHERE ${where})`, values];
  const upTo = until ? countedBefore(counted, clause, until) : all;
  const from: Clause = since ? countedBefore(counted, clause, since) : ['0', []];
  const bounds = [since && `${time} >= ${since.getTime()}`, until && `${time} < ${until.getTime()}`];
  const rest = [`${number} > ${lastOf(counted)}`, ...bounds.filter((bound) => bound), where].join(' AND ');
  return [
    `SELECT ${upTo[0]} AS upto, ${from[0]} AS earlier,
      (SELECT count(*) FROM ${table} NOT INDEXED WHERE ${rest}) AS uncounted`,
    [...upTo[1], ...from[1], ...values],
  ];
}

/** Computes the total from the row that the query of totalOf() returns. */
export function sumOf({ upto, earlier, uncounted }: Row): number {
  return Math.max(0, Number(upto) - Number(earlier)) + Number(uncounted);
}

/**
 * Returns SQL for the number of counted rows before a time: the rows in earlier quarters of an hour, and the earlier
 * rows in the quarter of that time.
 */
function countedBefore(counted: CountedTable, [where, values]: Clause, until: Date): Clause {
  const { table, time, number } = counted;
  const at = until.getTime();
  const quarter = Math.floor(at / quarterMs);
  const begun = quarter * quarterMs;
  const whole = `(SELECT coalesce(sum(n), 0) FROM ${table}_by_quarter WHERE quarter < ${quarter} AND ${where})`;
  // The quarter's counted rows are found by their sequence numbers, so that no index of times is needed. The range
  // begins with the lowest possible number of the quarter. It ends with the highest number of a counted row of the
  // quarter.
  const found =
    number === 'seq'
      ? `seq >= ${begun * sequencesPerMs} AND seq <= ${lastUntil(counted, '=', quarter)}`
      : `+rowid <= ${lastOf(counted)}`;
  const part = `(SELECT count(*) FROM ${table}
    WHERE ${time} >= ${begun} AND ${time} < ${at} AND ${found} AND ${where})`;
  return [`(${whole} + ${part})`, [...values, ...values]];
}

/**
 * Returns SQL for the highest row number among the counted rows of a quarter of an hour. With `<=`, earlier quarters
 * are included.
 */
function lastUntil({ table }: CountedTable, how: '=' | '<=', quarter: number): string {
  return `(SELECT coalesce(max(last), 0) FROM ${table}_by_quarter WHERE quarter ${how} ${quarter})`;
}

/**
 * Returns an SQL condition on `seq` that all rows before `until` meet. Some later rows may meet it too, so the caller
 * also compares the times. The condition needs no index of times.
 */
export function numberedBefore(counted: CountedTable, until: Date): string {
  const at = until.getTime();
  const { table, time } = counted;
  return `seq <= (SELECT max(last) FROM (SELECT ${lastUntil(counted, '<=', Math.floor(at / quarterMs))} AS last
    UNION ALL SELECT coalesce(max(seq), 0) FROM ${table} NOT INDEXED
      WHERE seq > ${lastOf(counted)} AND ${time} < ${at}) AS numbers)`;
}
