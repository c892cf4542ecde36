// The history of what was observed: commands, events, sessions and logs, in a database. Modules read and write it
// through the class History.
import { createHash } from 'node:crypto';
import { every, nextTurn, now } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type {
  Connection,
  Database,
  HistoryTransaction,
  OutboxEntry,
  Query,
  Row,
  RowReader,
  Value,
} from './database-interface.ts';
import { type Applier, type Fence, GroupCommit } from './group-commit.ts';
import { type CountedTable, countNext, dropEmptyCounts } from './row-counts.ts';

export type { Connection, HistoryTransaction, OutboxEntry, Row, RowReader } from './database-interface.ts';

/** Reads a text column. Throws for another type, which means that the database was changed by hand. */
export function textIn(row: Row, column: string): string {
  const value = row[column];
  if (typeof value !== 'string') throw new Error(`a row of the history has no text in column ${column}`);
  return value;
}

/** Parses a JSON column that the broker wrote. */
export function jsonIn(row: Row, column: string): unknown {
  return JSON.parse(textIn(row, column));
}

/** Decides which rows of a table are deleted. The oldest rows are deleted first. */
export interface Retention {
  table: string;
  /** The column with the time of a row, in milliseconds since 1970. */
  column: string;
  keepMs: number;
  /** Maximum number of rows of the table. If there are more, the oldest rows are deleted, whatever their age. */
  keepRows?: number;
  /**
   * The column with the row numbers. Set it only if rows are numbered in the order of their times. Old rows are then
   * found by their numbers, without an index of times.
   */
  ordered?: 'seq' | 'rowid';
  /** Extra SQL condition that a row must meet to be deleted for its age. */
  where?: string;
  /** Is called with the deleted rows after the commit, and deletes files that belong to these rows. */
  removed?(rows: Row[]): void;
}

const pruneStep = 500;
const pruneMs = 3_600_000;
/** Milliseconds between two attempts to count rows. */
const countMs = 5_000;

export class History implements RowReader {
  readonly #database: Database;
  readonly #appliers = new Map<string, Applier>();
  readonly #retentions: Retention[] = [];
  readonly #counted: CountedTable[] = [];
  #isCounting = false;
  #isClosed = false;
  readonly #stops: (() => void)[];
  readonly #writes: GroupCommit;

  constructor(database: Database, log: Logger) {
    this.#database = database;
    this.#writes = new GroupCommit(database, this.#appliers, log);
    this.#stops = [
      every(pruneMs, () => {
        this.prune().catch((err: unknown) =>
          log.error({ err }, 'old history rows could not be deleted; trying again in an hour'),
        );
      }),
      every(countMs, () => {
        if (!this.connection.isReady) return;
        this.countRows().catch((err: unknown) =>
          log.error(
            { err },
            'history rows could not be counted in advance; trying again in 5 s. Until then lists are slower, because they count the rows',
          ),
        );
      }),
    ];
  }

  /** True if the data is in a database server, and not in files of this broker. */
  get isRemote(): boolean {
    return this.#database.isRemote;
  }

  /** The connection that writes to the database. */
  get connection(): Connection {
    return this.#database.writer;
  }

  /**
   * Applies the missing migration steps of a module's tables, in order. A released step must never change. `first` is
   * the number of steps[0], into which all earlier steps were merged.
   */
  migrate(noun: string, steps: readonly string[], first = 1): Promise<void> {
    return this.#database.migrate(noun, steps, first);
  }

  /** Reads what is committed. With PostgreSQL, these reads wait only for each other, not for writes or other reads. */
  get committed(): RowReader {
    return this.#database.committed;
  }

  async get(sql: string, ...values: Value[]): Promise<Row | undefined> {
    if (this.#database.isRemote) await this.#writes.settled();
    return await this.#database.get(sql, ...values);
  }

  async all(sql: string, ...values: Value[]): Promise<Row[]> {
    if (this.#database.isRemote) await this.#writes.settled();
    return await this.#database.all(sql, ...values);
  }

  /**
   * Reads the rows of lists. This may take long, but it does not block the event loop. All queries see the same state
   * of the database, which includes every resolved write.
   */
  async read(queries: readonly Query[]): Promise<Row[][]> {
    if (this.#database.isRemote) await this.#writes.settled();
    return await this.#database.read(queries);
  }

  /**
   * Runs `change` in a transaction. Resolves when the change is on disk. If `change` throws, only its own writes are
   * undone. `change` may await only calls of its transaction.
   */
  write<T>(change: (transaction: HistoryTransaction) => Promise<T> | T): Promise<T> {
    return this.#writes.write(change);
  }

  /**
   * Writes the entries of the outbox of state.json to the history, each exactly once. The history stores a digest of
   * the last written outbox. A restart thus writes no entry again, even if its row was deleted because of its age.
   */
  async applyOutbox(entries: readonly OutboxEntry[]): Promise<void> {
    const digest = createHash('sha256').update(JSON.stringify(entries)).digest('hex');
    await this.write(async (transaction) => {
      const installation = await transaction.get('SELECT outbox FROM installation');
      if (installation?.outbox === digest) return;
      for (const entry of entries) transaction.append(entry);
      transaction.run('UPDATE installation SET outbox = ?', digest);
    });
  }

  /**
   * Sets the function that writes entries of a kind. The function must be idempotent. Like a change given to write(),
   * it may await only calls of its transaction.
   */
  onEntry(
    kind: string,
    apply: (entry: never, transaction: HistoryTransaction) => Promise<void> | void,
  ): void {
    // The cast is safe: an entry's kind decides its type, and the module that appends entries also registers
    // the function for them.
    this.#appliers.set(kind, apply as Applier);
  }

  /** Sets the check of a machine's owner. From then on, a change about a machine fails unless this broker owns it. */
  fenceWith(fence: Fence): void {
    this.#writes.fence = fence;
  }

  /** True if this broker owns the machine, as far as it knows. */
  owns(machineId: string): boolean {
    return !this.#writes.fence || this.#writes.fence(machineId) !== undefined;
  }

  /** Deletes old rows of a table every hour, in small steps. */
  retain(retention: Retention): void {
    this.#retentions.push(retention);
  }

  /**
   * Freezes a view of the database. The returned function, which can be called once, writes that view to the file
   * `copy`. Only the broker's user can read this file.
   */
  snapshot(): (copy: string) => Promise<void> {
    return this.#database.snapshot();
  }

  /** Counts the rows of a table from now on, in the background. */
  count(table: CountedTable): void {
    this.#counted.push(table);
  }

  /** Counts rows, in small steps. A timer and tests call this. */
  async countRows(): Promise<void> {
    if (this.#isCounting) return;
    this.#isCounting = true;
    try {
      for (const table of this.#counted) {
        const next = (): Promise<boolean> => this.write((transaction) => countNext(table, transaction));
        while (!this.#isClosed && (await next())) await nextTurn();
      }
    } finally {
      this.#isCounting = false;
    }
  }

  /** Deletes the rows that retain() selects. An hourly timer and tests call this. */
  async prune(): Promise<void> {
    for (const retention of this.#retentions) {
      for (const prune of [pruneOld, pruneSurplus])
        while ((await this.write((transaction) => prune(retention, transaction))) === pruneStep)
          await nextTurn();
    }
    for (const table of this.#counted) await this.write((transaction) => dropEmptyCounts(table, transaction));
    await this.#database.shrink();
  }

  async close(): Promise<void> {
    this.#isClosed = true;
    for (const stop of this.#stops) stop();
    await this.#writes.close();
    await this.#database.close();
  }
}

async function pruneOld(
  { table, column, keepMs, where = 'TRUE', ordered, removed }: Retention,
  transaction: HistoryTransaction,
): Promise<number> {
  const old = `${column} < ?1 AND ${where}`;
  // The inner query takes the rows with the lowest numbers. It skips rows with times in the future (above ?2), which
  // stem from a wrong clock. These rows are not old, and could fill the whole result of the inner query.
  const some = ordered
    ? `${old} AND ${ordered} IN (SELECT ${ordered} FROM ${table} WHERE ${column} <= ?2 ORDER BY ${ordered} LIMIT ${pruneStep})`
    : `rowid IN (SELECT rowid FROM ${table} WHERE ${old} ORDER BY ${column} LIMIT ${pruneStep})`;
  const times = ordered ? [now() - keepMs, now()] : [now() - keepMs];
  const rows = await transaction.all(`DELETE FROM ${table} WHERE ${some} RETURNING *`, ...times);
  transaction.committed(() => removed?.(rows));
  return rows.length;
}

/**
 * Deletes the rows beyond `keepRows`. Rows with the lowest numbers are deleted first, because numbers follow
 * the order of insertion.
 */
async function pruneSurplus(
  { table, keepRows, ordered = 'rowid' }: Retention,
  transaction: HistoryTransaction,
): Promise<number> {
  if (keepRows === undefined) return 0;
  const all = await transaction.get(`SELECT count(*) AS n FROM ${table}`);
  const count = Math.min(Math.max(Number(all?.n) - keepRows, 0), pruneStep);
  const oldest = `SELECT ${ordered} FROM ${table} ORDER BY ${ordered} LIMIT ?`;
  transaction.run(`DELETE FROM ${table} WHERE ${ordered} IN (${oldest})`, count);
  return count;
}
