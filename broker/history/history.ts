// The history of what was observed: commands, events, sessions and logs, in the database history.db. Everything
// that the rest of the broker may do with it is in this file, asynchronously, so that another database fits behind it.
import { createHash } from 'node:crypto';
import { closeSync, openSync } from 'node:fs';
import { backup, DatabaseSync, type SQLInputValue } from 'node:sqlite';
import { every, nextTurn, now } from '../../shared/clock.ts';
import { StartError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import { HistoryReader, type Query } from './reader.ts';
import type { HistoryTransaction, OutboxEntry, Row, RowReader } from './transaction.ts';
import { type Applier, Statements, WriteQueue } from './write-queue.ts';

export type { HistoryTransaction, OutboxEntry, Row, RowReader } from './transaction.ts';

/** Reads a text column. Throws for another type, which means that the file was changed by hand. */
export function textIn(row: Row, column: string): string {
  const value = row[column];
  if (typeof value !== 'string') throw new Error(`a row of history.db has no text in column ${column}`);
  return value;
}

/** Parses a JSON column that the broker wrote. */
export function jsonIn(row: Row, column: string): unknown {
  return JSON.parse(textIn(row, column));
}

/** Which rows of a table to delete, oldest first. */
export interface Retention {
  table: string;
  /** A column of times in milliseconds. */
  column: string;
  keepMs: number;
  /** The most rows that the table may have; beyond it the oldest are deleted whatever their age. */
  keepRows?: number;
  /**
   * True if rowids follow `column`, apart from times later than now.
   * If so, only the first rows are checked, without an index.
   */
  ordered?: boolean;
  /** Extra SQL condition that a row must meet to be deleted for its age. */
  where?: string;
  /** Called with the deleted rows after the commit, to delete files that belong to them. */
  removed?(rows: Row[]): void;
}

const pruneStep = 500;
const pruneMs = 3_600_000;
/**
 * Most prepared statements in the cache.
 * Lists have one for each combination of filters; the oldest is dropped.
 */
const mostStatements = 500;
/** Pages that a backup copies at a time, so that other work gets its turn at the disk. */
const copyPages = 256;

export class History implements RowReader {
  readonly #database: DatabaseSync;
  readonly #file: string;
  readonly #log: Logger;
  readonly #statements: Statements;
  readonly #appliers = new Map<string, Applier>();
  readonly #retentions: Retention[] = [];
  readonly #stopPruning: () => void;
  readonly #reader: HistoryReader;
  readonly #writes: WriteQueue;

  constructor(database: DatabaseSync, file: string, log: Logger) {
    this.#database = database;
    this.#file = file;
    this.#log = log;
    this.#statements = new Statements(database, mostStatements);
    this.#reader = new HistoryReader(file);
    this.#writes = new WriteQueue(database, this.#statements, this.#appliers, log);
    this.#stopPruning = every(pruneMs, () => {
      this.prune().catch((err: unknown) => log.error({ err }, 'old history rows could not be deleted'));
    });
  }

  /**
   * Applies the missing migration steps of a module's tables, in order. A released step must never change,
   * except that the steps which every release has applied can become one: `first` is the number of that one.
   */
  async migrate(noun: string, steps: readonly string[], first = 1): Promise<void> {
    await this.#writes.idle();
    migrate(this.#database, noun, steps, first);
  }

  async get(sql: string, ...values: SQLInputValue[]): Promise<Row | undefined> {
    await this.#writes.idle();
    return this.#statements.of(sql).get(...values);
  }

  async all(sql: string, ...values: SQLInputValue[]): Promise<Row[]> {
    await this.#writes.idle();
    return this.#statements.of(sql).all(...values);
  }

  /**
   * Reads the rows of lists, which may take long, without delaying other requests. All queries see one state, with
   * every resolved write.
   */
  read(queries: readonly Query[]): Promise<Row[][]> {
    return this.#reader.read(queries);
  }

  /**
   * Runs `change` in a transaction that all writes of the same turn of the event loop share. Resolves once
   * the change is on disk. A change that throws undoes only its own writes. A change that waits for anything but its
   * transaction fails.
   */
  write<T>(change: (transaction: HistoryTransaction) => Promise<T> | T): Promise<T> {
    return this.#writes.write(change);
  }

  /**
   * Writes the outbox of state.json once:
   * not again after a restart, nor after its rows were deleted for their age.
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
   * Sets the function that writes entries of a kind. The function must be idempotent. Like a change, it awaits only
   * its transaction.
   */
  onEntry(
    kind: string,
    apply: (entry: never, transaction: HistoryTransaction) => Promise<void> | void,
  ): void {
    // The kind decides the type of the entry:
    // the module that appends entries also registers the function for them.
    this.#appliers.set(kind, apply as Applier);
  }

  /** Deletes old rows of a table every hour, in small steps. */
  retain(retention: Retention): void {
    this.#retentions.push(retention);
  }

  /**
   * Freezes a view of the database as it is now, while writes go on. The returned function writes one copy of
   * the view. It resolves once the copy is on disk, readable only by this user.
   */
  snapshot(): (copy: string) => Promise<void> {
    // In WAL mode a reader sees only what was committed when its transaction began.
    const reader = new DatabaseSync(this.#file, { readOnly: true });
    reader.exec('BEGIN');
    reader.prepare('SELECT id FROM installation').get();
    return async (copy) => {
      try {
        closeSync(openSync(copy, 'wx', 0o600));
        await backup(reader, copy, { rate: copyPages });
        const made = new DatabaseSync(copy);
        made.exec('UPDATE installation SET running = 0');
        made.close();
      } finally {
        reader.close();
      }
    };
  }

  /** Prunes now; called by the hourly timer and by tests. */
  async prune(): Promise<void> {
    for (const retention of this.#retentions) {
      while ((await this.write((transaction) => pruneOld(retention, transaction))) === pruneStep)
        await nextTurn();
      while ((await this.write((transaction) => pruneSurplus(retention, transaction))) === pruneStep)
        await nextTurn();
    }
    await this.all('PRAGMA incremental_vacuum(256)');
  }

  async close(): Promise<void> {
    this.#stopPruning();
    // SQLite removes the -wal file only when the last connection is closed.
    await this.#reader.close();
    await this.#writes.close();
    try {
      this.#statements.of('UPDATE installation SET running = 0').run();
      this.#database.close();
    } catch (error) {
      // The database stays open until the process ends, and the -wal file stays as after a crash.
      this.#log.error({ err: error }, 'history.db could not be closed; the next start recovers it');
    }
  }
}

async function pruneOld(
  { table, column, keepMs, where = '1', ordered, removed }: Retention,
  transaction: HistoryTransaction,
): Promise<number> {
  const old = `${column} < ?1 AND ${where}`;
  const some = ordered
    ? `${old} AND rowid IN (SELECT rowid FROM ${table} WHERE ${column} <= ?2 ORDER BY rowid LIMIT ${pruneStep})`
    : `rowid IN (SELECT rowid FROM ${table} WHERE ${old} ORDER BY ${column} LIMIT ${pruneStep})`;
  const times = ordered ? [now() - keepMs, now()] : [now() - keepMs];
  const rows = await transaction.all(`DELETE FROM ${table} WHERE ${some} RETURNING *`, ...times);
  transaction.committed(() => removed?.(rows));
  return rows.length;
}

/**
 * Deletes rows beyond `keepRows`. The rows with the lowest rowids go first,
 * because rowids follow the order of insertion.
 */
async function pruneSurplus(
  { table, keepRows }: Retention,
  transaction: HistoryTransaction,
): Promise<number> {
  if (keepRows === undefined) return 0;
  const all = await transaction.get(`SELECT count(*) AS n FROM ${table}`);
  const count = Math.min(Math.max(Number(all?.n) - keepRows, 0), pruneStep);
  const oldest = `SELECT rowid FROM ${table} ORDER BY rowid LIMIT ?`;
  transaction.run(`DELETE FROM ${table} WHERE rowid IN (${oldest})`, count);
  return count;
}

/** Applies the steps from `first` on that the database lacks. */
export function migrate(database: DatabaseSync, noun: string, steps: readonly string[], first = 1): void {
  const row = database.prepare('SELECT steps FROM migrations WHERE noun = ?').get(noun);
  const done = Number(row?.steps ?? 0);
  const last = first + steps.length - 1;
  if (done > last)
    throw new StartError(`history.db has ${noun} of a newer farhand-broker: install that version again`);
  if (done === last) return;
  // The rows that a new index sorts may exceed the memory.
  database.exec('PRAGMA temp_store = FILE; BEGIN IMMEDIATE');
  for (const step of steps.slice(Math.max(0, done - first + 1))) database.exec(step);
  database.prepare('INSERT OR REPLACE INTO migrations VALUES (?, ?)').run(noun, last);
  database.exec('COMMIT; PRAGMA temp_store = MEMORY');
}
