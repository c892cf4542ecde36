// What is observed: history.db. Opens, migrates, groups writes, prunes; each noun owns its tables and its SQL.
import { createHash } from 'node:crypto';
import { closeSync, openSync, statSync } from 'node:fs';
import { backup, DatabaseSync, type SQLOutputValue, type StatementSync } from 'node:sqlite';
import type { Journal } from '../shared/api/index.ts';
import { every, now } from '../shared/clock.ts';
import { StartError } from '../shared/errors.ts';
import type { Logger } from '../shared/logger.ts';

export type Row = Record<string, SQLOutputValue>;

/** A text column; another type means that somebody changed the file by hand. */
export function textIn(row: Row, column: string): string {
  const value = row[column];
  if (typeof value !== 'string') throw new Error(`${column} holds no text`);
  return value;
}

/** A column of JSON that we wrote. */
export function jsonIn(row: Row, column: string): unknown {
  return JSON.parse(textIn(row, column));
}

/** An observation that can also wait in the outbox of state.json; `id` makes applying it twice harmless. */
export interface Entry {
  kind: string;
}

/** One transaction. Entries appended to it are committed with it. */
export interface HistoryTransaction extends Journal {
  append(entry: Entry): void;
  /** Runs after the commit, in order; must not throw. */
  committed(run: () => void): void;
}

/** What to delete, oldest first. */
export interface Retention {
  table: string;
  /** A column of milliseconds. */
  column: string;
  keepMs: number;
  /** So many rows stay at most, whatever their age. */
  keepRows?: number;
  /** Rows stand in the order they came: but for those of a time to come only the first ones are looked at. */
  ordered?: boolean;
  /** Extra condition that a row must meet to go. */
  where?: string;
  /** Called with the ids that went, for what lies beside the database. */
  removed?(ids: string[]): void;
}

export interface History {
  /** Applies the steps a noun's tables still lack, in order. A step never changes once released. */
  migrate(noun: string, steps: readonly string[]): void;
  /** A prepared statement, kept for the next time. */
  sql(text: string): StatementSync;
  /**
   * Runs `change` inside a transaction that it shares with whatever arrives in the same turn of the loop, and
   * resolves once that is on disk. A change that throws undoes only itself.
   */
  write<T>(change: (transaction: HistoryTransaction) => T): Promise<T>;
  /**
   * Applies an outbox of state.json, once: what was applied before and has gone for its age since does not come back
   * at a start.
   */
  applyOutbox(entries: readonly Entry[]): Promise<void>;
  /** Says how entries of a kind become rows. Must be idempotent. */
  onEntry(kind: string, apply: (entry: never, transaction: HistoryTransaction) => void): void;
  /** Deletes what is older, in small steps, hourly. */
  retain(retention: Retention): void;
  /** The database as it is now, which can be copied while it is written on. */
  snapshot(): Snapshot;
  /** Prunes now (tests, and the hourly timer). */
  prune(): Promise<void>;
  close(): void;
}

/** To be copied once. */
export interface Snapshot {
  /** Resolves when the copy is on disk, for the eyes of this user alone. */
  copyTo(file: string): Promise<void>;
}

const pruneStep = 500;
/** Lists have a statement for each combination of filters: the oldest one goes. */
const mostStatements = 500;
/** Copied at once by another thread, which then lets others at the disk. */
const copyPages = 256;
const schemaVersion = 1;
/** `running`: 1 from a start to its clean end, when SQLite removes the -wal; in the file itself, not in its -wal alone. */
const installationSteps = ['ALTER TABLE installation ADD COLUMN running INTEGER'];

interface Pending {
  run(transaction: HistoryTransaction): void;
  resolve(): void;
  reject(error: unknown): void;
}

/** What a start accepts. */
interface Accepted {
  /** A history.db that is missing or empty. */
  isNew?: boolean;
  /** One that lacks its last changes. */
  isOld?: boolean;
}

/**
 * Opens the database, new where there is none. Throws StartError for one of another installation or a newer version, and
 * for one that has lost something and is not accepted.
 */
export function openHistory(
  file: string,
  installId: string,
  log: Logger,
  { isNew = true, isOld = false }: Accepted = {},
): History {
  if (!isNew && sizeOf(file) === 0) throw lost(file);
  // Before SQLite makes one.
  const hasWal = sizeOf(`${file}-wal`) > 0;
  closeSync(openSync(file, 'a', 0o600));
  const database = new DatabaseSync(file);
  setUp(database, file, installId, { isNew, isOld: isOld || hasWal });
  const statements = new Map<string, StatementSync>();
  const appliers = new Map<string, (entry: Entry, transaction: HistoryTransaction) => void>();
  const retentions: Retention[] = [];
  let queue: Pending[] = [];

  function sql(text: string): StatementSync {
    const known = statements.get(text);
    if (known) return known;
    const statement = database.prepare(text);
    const [oldest] = statements.keys();
    if (oldest !== undefined && statements.size >= mostStatements) statements.delete(oldest);
    statements.set(text, statement);
    return statement;
  }

  function flush(): void {
    const group = queue;
    queue = [];
    if (group.length === 0) return;
    const after: (() => void)[] = [];
    try {
      sql('BEGIN IMMEDIATE').run();
      const failed = new Map(group.flatMap((member) => attempt(member, after, group.length === 1)));
      // One that failed alone has taken the transaction with it.
      if (database.isTransaction) sql('COMMIT').run();
      for (const run of after) run();
      for (const member of group) {
        if (failed.has(member)) member.reject(failed.get(member));
        else member.resolve();
      }
    } catch (error) {
      log.error({ err: error }, 'history could not be written');
      if (database.isTransaction) sql('ROLLBACK').run();
      for (const member of group) member.reject(error);
    }
  }

  /** Runs one member; its failure undoes its own rows only, and nobody is told of them. `alone`: no other shares it. */
  function attempt(member: Pending, after: (() => void)[], alone: boolean): [Pending, unknown][] {
    const hooks: (() => void)[] = [];
    const transaction: HistoryTransaction = {
      append: (entry) => applierOf(entry.kind)(entry, transaction),
      committed: (run) => void hooks.push(run),
    };
    if (!alone) sql('SAVEPOINT member').run();
    try {
      member.run(transaction);
      after.push(...hooks);
      return [];
    } catch (error) {
      sql(alone ? 'ROLLBACK' : 'ROLLBACK TO member').run();
      return [[member, error]];
    } finally {
      if (!alone) sql('RELEASE member').run();
    }
  }

  function applierOf(kind: string): (entry: Entry, transaction: HistoryTransaction) => void {
    const apply = appliers.get(kind);
    if (!apply) throw new Error(`nobody applies entries of kind ${kind}`);
    return apply;
  }

  async function prune(): Promise<void> {
    for (const retention of retentions) {
      while ((await history.write(() => pruneSome(retention))) === pruneStep) await turn();
      while ((await history.write(() => pruneSurplus(retention))) === pruneStep) await turn();
    }
    sql('PRAGMA incremental_vacuum(256)').all();
  }

  function pruneSome({ table, column, keepMs, where = '1', ordered, removed }: Retention): number {
    const old = `${column} < ?1 AND ${where}`;
    const some = ordered
      ? `${old} AND rowid IN (SELECT rowid FROM ${table} WHERE ${column} <= ?2 ORDER BY rowid LIMIT ${pruneStep})`
      : `rowid IN (SELECT rowid FROM ${table} WHERE ${old} ORDER BY ${column} LIMIT ${pruneStep})`;
    const deletion = sql(`DELETE FROM ${table} WHERE ${some} RETURNING *`);
    const rows = ordered ? deletion.all(now() - keepMs, now()) : deletion.all(now() - keepMs);
    removed?.(rows.map((row) => String(row.id)));
    return rows.length;
  }

  /** Rows are numbered as they come, and those that go are the first. */
  function pruneSurplus({ table, keepRows }: Retention): number {
    if (keepRows === undefined) return 0;
    const surplus = Number(sql(`SELECT count(*) AS n FROM ${table}`).get()?.n) - keepRows;
    const count = Math.min(Math.max(surplus, 0), pruneStep);
    sql(`DELETE FROM ${table} WHERE rowid IN (SELECT rowid FROM ${table} ORDER BY rowid LIMIT ?)`).run(count);
    return count;
  }

  const stopPruning = every(3_600_000, () => {
    prune().catch((error: unknown) => log.error({ err: error }, 'history could not be pruned'));
  });

  const history: History = {
    migrate: (noun, steps) => migrate(database, noun, steps),
    sql,
    write(change) {
      return new Promise((resolve, reject) => {
        if (!database.isOpen) return reject(new Error('history is closed'));
        let result: ReturnType<typeof change>;
        queue.push({
          run: (transaction) => {
            result = change(transaction);
          },
          resolve: () => resolve(result),
          reject,
        });
        if (queue.length === 1) setImmediate(flush);
      });
    },
    async applyOutbox(entries) {
      const digest = createHash('sha256').update(JSON.stringify(entries)).digest('hex');
      await history.write((transaction) => {
        if (sql('SELECT outbox FROM installation').get()?.outbox === digest) return;
        for (const entry of entries) transaction.append(entry);
        sql('UPDATE installation SET outbox = ?').run(digest);
      });
    },
    onEntry(kind, apply) {
      // The kind decides which entry type arrives; both sides of that agreement are in one noun's file.
      appliers.set(kind, apply as (entry: Entry, transaction: HistoryTransaction) => void);
    },
    retain: (retention) => void retentions.push(retention),
    snapshot: () => snapshotOf(file),
    prune,
    close() {
      stopPruning();
      flush();
      try {
        sql('UPDATE installation SET running = 0').run();
        database.close();
      } catch (error) {
        // It stays open until the process ends, and its -wal as after a crash: SQLite would remove that with the last one.
        log.error({ err: error }, 'history could not be closed');
      }
    },
  };
  return history;
}

/** A reader of its own sees what was committed when it began, whatever is written after (WAL). */
function snapshotOf(file: string): Snapshot {
  const reader = new DatabaseSync(file, { readOnly: true });
  reader.exec('BEGIN');
  reader.prepare('SELECT id FROM installation').get();
  return {
    async copyTo(copy) {
      try {
        closeSync(openSync(copy, 'wx', 0o600));
        await backup(reader, copy, { rate: copyPages });
        const made = new DatabaseSync(copy);
        made.exec('UPDATE installation SET running = 0');
        made.close();
      } finally {
        reader.close();
      }
    },
  };
}

function setUp(database: DatabaseSync, file: string, installId: string, accepted: Accepted): void {
  // What is deleted can be a secret that a command was to get.
  database.exec('PRAGMA synchronous = FULL; PRAGMA secure_delete = FAST');
  // Before anything is written: that would make a -wal, and the next start would miss none.
  const isFound = refuseOther(database, file, installId, accepted);
  database.exec(`PRAGMA auto_vacuum = INCREMENTAL; PRAGMA journal_mode = WAL;
    CREATE TABLE IF NOT EXISTS installation (id TEXT NOT NULL, outbox TEXT);
    CREATE TABLE IF NOT EXISTS migrations (noun TEXT PRIMARY KEY, steps INTEGER NOT NULL) WITHOUT ROWID`);
  migrate(database, 'history', installationSteps);
  if (!isFound) database.prepare('INSERT INTO installation (id) VALUES (?)').run(installId);
  // From here on the file itself says that there must be a -wal.
  database.exec(`PRAGMA user_version = ${schemaVersion};
    UPDATE installation SET running = 1; PRAGMA wal_checkpoint`);
}

/** Whether the file belongs to this installation already. Throws StartError for what is not accepted; writes nothing. */
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
      `${file} lacks its last changes, for ${file}-wal is missing or empty: put that back, or both from a backup, or go on without those changes by starting once with --old-history`,
    );
  }
  return row !== undefined;
}

function lost(file: string): StartError {
  const state = statSync(file, { throwIfNoEntry: false }) ? 'empty' : 'missing';
  return new StartError(
    `${file} is ${state}, though a broker has run here: put it back from a backup, or go on without past commands and events by starting once with --new-history`,
  );
}

/** 0 for a file that is not there. */
function sizeOf(file: string): number {
  return statSync(file, { throwIfNoEntry: false })?.size ?? 0;
}

function migrate(database: DatabaseSync, noun: string, steps: readonly string[]): void {
  const row = database.prepare('SELECT steps FROM migrations WHERE noun = ?').get(noun);
  const done = Number(row?.steps ?? 0);
  if (done > steps.length)
    throw new StartError(`history.db has newer ${noun} than this version knows: install the newer one`);
  if (done === steps.length) return;
  database.exec('BEGIN IMMEDIATE');
  for (const step of steps.slice(done)) database.exec(step);
  database.prepare('INSERT OR REPLACE INTO migrations VALUES (?, ?)').run(noun, steps.length);
  database.exec('COMMIT');
}

function turn(): Promise<void> {
  return new Promise((resolve) => setImmediate(resolve));
}
