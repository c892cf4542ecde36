// The database history.db, which contains commands, events, sessions and logs: migrations, grouped writes,
// pruning, snapshots.
import { createHash } from 'node:crypto';
import { closeSync, openSync, statSync } from 'node:fs';
import {
  backup,
  DatabaseSync,
  type SQLInputValue,
  type SQLOutputValue,
  type StatementSync,
} from 'node:sqlite';
import type { Journal } from '../../shared/api/route-table.ts';
import { every, nextTurn, now } from '../../shared/clock.ts';
import { StartError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import { HistoryReader, type Query } from './reader.ts';

export type Row = Record<string, SQLOutputValue>;

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

/** A row for history.db that can wait in the outbox of state.json. Writing the row twice must be harmless. */
export interface OutboxEntry {
  kind: string;
}

/** A transaction of history.db. Entries appended to it are committed with it. */
export interface HistoryTransaction extends Journal {
  append(entry: OutboxEntry): void;
  /** Runs a function after the commit, in the order of the calls. The function must not throw. */
  committed(run: () => void): void;
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
  /** Called with the ids of the deleted rows, to delete files that belong to them. */
  removed?(ids: string[]): void;
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
const schemaVersion = 1;
/**
 * `running` is 1 from a start to a clean stop, when SQLite removes the -wal file. If `running` is 1 and the
 * -wal is missing, the last changes are lost.
 */
const installationSteps = ['ALTER TABLE installation ADD COLUMN running INTEGER'];

interface Pending {
  /** Makes the change. The returned function resolves the caller's promise with the result. */
  run(transaction: HistoryTransaction): () => void;
  reject(error: unknown): void;
}

type Applier = (entry: OutboxEntry, transaction: HistoryTransaction) => void;

/** Losses of data that the operator accepts at a start. */
interface Accepted {
  /** Accepts a history.db that is missing or empty. */
  isNew?: boolean;
  /** Accepts a history.db that lacks its last changes. */
  isOld?: boolean;
}

/**
 * Opens the database, or creates it. Throws StartError for a file of another installation or of a newer
 * version, and for a loss that is not accepted.
 */
export function openHistory(
  file: string,
  installId: string,
  log: Logger,
  { isNew = true, isOld = false }: Accepted = {},
): History {
  if (!isNew && sizeOf(file) === 0) throw lost(file);
  // Checked before SQLite creates a -wal of its own.
  const hasWal = sizeOf(`${file}-wal`) > 0;
  closeSync(openSync(file, 'a', 0o600));
  const database = new DatabaseSync(file);
  setUp(database, file, installId, { isNew, isOld: isOld || hasWal });
  return new History(database, file, log);
}

export class History {
  readonly #database: DatabaseSync;
  readonly #file: string;
  readonly #log: Logger;
  readonly #statements = new Map<string, StatementSync>();
  readonly #appliers = new Map<string, Applier>();
  readonly #retentions: Retention[] = [];
  readonly #stopPruning: () => void;
  readonly #reader: HistoryReader;
  #queue: Pending[] = [];

  constructor(database: DatabaseSync, file: string, log: Logger) {
    this.#database = database;
    this.#file = file;
    this.#log = log;
    this.#reader = new HistoryReader(file);
    this.#stopPruning = every(pruneMs, () => {
      this.prune().catch((err: unknown) => log.error({ err }, 'old history rows could not be deleted'));
    });
  }

  /**
   * Applies the missing migration steps of a module's tables, in order. A released step must never change,
   * except that the steps which every release has applied can become one: `first` is the number of that one.
   */
  migrate(noun: string, steps: readonly string[], first = 1): void {
    migrate(this.#database, noun, steps, first);
  }

  /** Returns a prepared statement from the cache. */
  sql(text: string): StatementSync {
    const prepared = this.#statements.get(text);
    if (prepared) return prepared;
    const statement = this.#database.prepare(text);
    const [oldest] = this.#statements.keys();
    if (oldest !== undefined && this.#statements.size >= mostStatements) this.#statements.delete(oldest);
    this.#statements.set(text, statement);
    return statement;
  }

  /** Reads rows without delaying other requests. All queries see one state, with every resolved write. */
  read(queries: readonly Query[]): Promise<Row[][]> {
    return this.#reader.read(queries);
  }

  /**
   * Runs `change` in a transaction that all writes of the same turn of the event loop share. Resolves once
   * the change is on disk. A change that throws undoes only its own writes.
   */
  write<T>(change: (transaction: HistoryTransaction) => T): Promise<T> {
    const { promise, resolve, reject } = Promise.withResolvers<T>();
    const run = (transaction: HistoryTransaction): (() => void) => {
      const result = change(transaction);
      return () => resolve(result);
    };
    if (!this.#database.isOpen) reject(new Error('history.db is closed'));
    else if (this.#queue.push({ run, reject }) === 1) setImmediate(() => this.#flush());
    return promise;
  }

  /** Writes a row, over one with the same values in the columns `key`. Call put() inside a transaction. */
  put(table: string, key: string, row: Readonly<Record<string, SQLInputValue>>): void {
    const names = Object.keys(row);
    const places = names.map(() => '?').join(', ');
    const changes = names.map((name) => `${name} = excluded.${name}`).join(', ');
    const sql = `INSERT INTO ${table} (${names.join(', ')}) VALUES (${places}) ON CONFLICT (${key}) DO UPDATE SET ${changes}`;
    this.sql(sql).run(...Object.values(row));
  }

  /**
   * Writes the outbox of state.json once:
   * not again after a restart, nor after its rows were deleted for their age.
   */
  async applyOutbox(entries: readonly OutboxEntry[]): Promise<void> {
    const digest = createHash('sha256').update(JSON.stringify(entries)).digest('hex');
    await this.write((transaction) => {
      if (this.sql('SELECT outbox FROM installation').get()?.outbox === digest) return;
      for (const entry of entries) transaction.append(entry);
      this.sql('UPDATE installation SET outbox = ?').run(digest);
    });
  }

  /** Sets the function that writes entries of a kind. The function must be idempotent. */
  onEntry(kind: string, apply: (entry: never, transaction: HistoryTransaction) => void): void {
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
      while ((await this.write(() => this.#pruneOld(retention))) === pruneStep) await nextTurn();
      while ((await this.write(() => this.#pruneSurplus(retention))) === pruneStep) await nextTurn();
    }
    this.sql('PRAGMA incremental_vacuum(256)').all();
  }

  async close(): Promise<void> {
    this.#stopPruning();
    // SQLite removes the -wal file only when the last connection is closed.
    await this.#reader.close();
    // Nothing may be queued between this and the end: its turn would find a closed database.
    this.#flush();
    try {
      this.sql('UPDATE installation SET running = 0').run();
      this.#database.close();
    } catch (error) {
      // The database stays open until the process ends, and the -wal file stays as after a crash.
      this.#log.error({ err: error }, 'history.db could not be closed; the next start recovers it');
    }
  }

  #flush(): void {
    const group = this.#queue;
    this.#queue = [];
    if (group.length === 0) return;
    try {
      this.sql('BEGIN IMMEDIATE').run();
      const done = group.map((member) => this.#attempt(member));
      this.sql('COMMIT').run();
      for (const run of done.flatMap(({ hooks }) => hooks)) run();
      for (const { resolve } of done) resolve();
    } catch (error) {
      this.#log.error({ err: error }, 'history.db could not be written, so the changes are undone');
      if (this.#database.isTransaction) this.sql('ROLLBACK').run();
      for (const member of group) member.reject(error);
    }
  }

  /** Runs one change of a group. A change that fails undoes only its own rows and hooks. */
  #attempt(member: Pending): { hooks: (() => void)[]; resolve(): void } {
    const hooks: (() => void)[] = [];
    const transaction: HistoryTransaction = {
      append: (entry) => {
        const apply = this.#appliers.get(entry.kind);
        if (!apply) throw new Error(`no function writes history entries of kind ${entry.kind}`);
        apply(entry, transaction);
      },
      committed: (run) => void hooks.push(run),
    };
    this.sql('SAVEPOINT member').run();
    try {
      return { hooks, resolve: member.run(transaction) };
    } catch (error) {
      this.sql('ROLLBACK TO member').run();
      member.reject(error);
      return { hooks: [], resolve: () => {} };
    } finally {
      this.sql('RELEASE member').run();
    }
  }

  #pruneOld({ table, column, keepMs, where = '1', ordered, removed }: Retention): number {
    const old = `${column} < ?1 AND ${where}`;
    const some = ordered
      ? `${old} AND rowid IN (SELECT rowid FROM ${table} WHERE ${column} <= ?2 ORDER BY rowid LIMIT ${pruneStep})`
      : `rowid IN (SELECT rowid FROM ${table} WHERE ${old} ORDER BY ${column} LIMIT ${pruneStep})`;
    const deletion = this.sql(`DELETE FROM ${table} WHERE ${some} RETURNING *`);
    const rows = ordered ? deletion.all(now() - keepMs, now()) : deletion.all(now() - keepMs);
    removed?.(rows.map((row) => String(row.id)));
    return rows.length;
  }

  /**
   * Deletes rows beyond `keepRows`. The rows with the lowest rowids go first,
   * because rowids follow the order of insertion.
   */
  #pruneSurplus({ table, keepRows }: Retention): number {
    if (keepRows === undefined) return 0;
    const surplus = Number(this.sql(`SELECT count(*) AS n FROM ${table}`).get()?.n) - keepRows;
    const count = Math.min(Math.max(surplus, 0), pruneStep);
    this.sql(`DELETE FROM ${table} WHERE rowid IN (SELECT rowid FROM ${table} ORDER BY rowid LIMIT ?)`).run(
      count,
    );
    return count;
  }
}

function setUp(database: DatabaseSync, file: string, installId: string, accepted: Accepted): void {
  // Deleted rows may contain secrets, such as the environment of a command, so SQLite overwrites them.
  // With recursive_triggers, INSERT OR REPLACE counts the row that it replaces as deleted.
  // In temp_store SQLite saves the pages that each change of a group overwrites, some 25 for a command.
  database.exec(
    'PRAGMA synchronous = FULL; PRAGMA secure_delete = FAST; PRAGMA recursive_triggers = ON; PRAGMA temp_store = MEMORY',
  );
  // Checked before anything is written:
  // a write creates a -wal, and the next start would not notice that one was lost.
  const isFound = refuseOther(database, file, installId, accepted);
  database.exec(`PRAGMA auto_vacuum = INCREMENTAL; PRAGMA journal_mode = WAL;
    CREATE TABLE IF NOT EXISTS installation (id TEXT NOT NULL, outbox TEXT);
    CREATE TABLE IF NOT EXISTS migrations (noun TEXT PRIMARY KEY, steps INTEGER NOT NULL) WITHOUT ROWID`);
  migrate(database, 'history', installationSteps);
  if (!isFound) database.prepare('INSERT INTO installation (id) VALUES (?)').run(installId);
  // From here on the file records that a -wal must exist.
  database.exec(`PRAGMA user_version = ${schemaVersion};
    UPDATE installation SET running = 1; PRAGMA wal_checkpoint`);
}

/**
 * True if the file already belongs to this installation.
 * Throws StartError for a loss that is not accepted. Writes nothing.
 */
function refuseOther(database: DatabaseSync, file: string, installId: string, accepted: Accepted): boolean {
  const { user_version: version } = database.prepare('PRAGMA user_version').get() as { user_version: number };
  if (version > schemaVersion) {
    throw new StartError(`${file} was written by a newer farhand-broker: install that version again`);
  }
  const table = database.prepare("SELECT 1 FROM sqlite_master WHERE name = 'installation'").get();
  const row = table && database.prepare('SELECT * FROM installation').get();
  if (row && row.id !== installId) {
    throw new StartError(
      `${file} and state.json belong to two installations: restore both from the same backup`,
    );
  }
  if (!row && !accepted.isNew) throw lost(file);
  if (row?.running === 1 && !accepted.isOld) {
    throw new StartError(
      `${file} lacks its last changes because ${file}-wal is missing or empty: put that file back, or restore both from a backup, or start once with --old-history to go on without those changes`,
    );
  }
  return row !== undefined;
}

function lost(file: string): StartError {
  const state = statSync(file, { throwIfNoEntry: false }) ? 'empty' : 'missing';
  return new StartError(
    `${file} is ${state}, though a broker has run here: put it back from a backup, or start once with --new-history to go on without past commands and events`,
  );
}

/** The size of a file in bytes; 0 when it does not exist. */
function sizeOf(file: string): number {
  return statSync(file, { throwIfNoEntry: false })?.size ?? 0;
}

function migrate(database: DatabaseSync, noun: string, steps: readonly string[], first = 1): void {
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
