// Stores the history in the file history.db (SQLite), for a broker that is started without --database-url.
import { closeSync, openSync } from 'node:fs';
import { backup, DatabaseSync } from 'node:sqlite';
import { StartError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import {
  type Database,
  fileConnection,
  type Query,
  type Row,
  type Value,
  type Writer,
} from './database-interface.ts';
import { HistoryReader } from './sqlite-read-client.ts';
import { prepareOnce } from './sqlite-statement-cache.ts';

/** Number of database pages that a backup copies at a time. Other work can use the disk in between. */
const copyPages = 256;

/**
 * The database in the file history.db. SQLite works synchronously, so a group of writes is complete within one turn of
 * the event loop.
 */
export class SqliteDatabase implements Database {
  readonly name = 'history.db';
  readonly isRemote = false;
  /** Reads of committed rows use the same connection, because they take only microseconds. */
  readonly committed = this;
  readonly #database: DatabaseSync;
  readonly #file: string;
  readonly #log: Logger;
  readonly #prepare: ReturnType<typeof prepareOnce>;
  readonly #reader: HistoryReader;
  /**
   * Settles when the transaction in progress ends. Reads outside of the transaction wait for its end, because they
   * must not see its rows.
   */
  #running: PromiseWithResolvers<void> | undefined;

  constructor(database: DatabaseSync, file: string, log: Logger) {
    this.#database = database;
    this.#file = file;
    this.#log = log;
    this.#prepare = prepareOnce(database);
    this.#reader = new HistoryReader(file);
  }

  readonly writer: Writer = {
    ...fileConnection,
    begin: async () => {
      this.#prepare('BEGIN IMMEDIATE').run();
      this.#running = Promise.withResolvers();
    },
    execute: async (sql, values) => {
      // After an error such as a full disk, SQLite may have undone the whole transaction. A further statement would then
      // be committed on its own.
      if (!this.#database.isTransaction) throw new Error('history.db has undone the transaction');
      return this.#prepare(sql).all(...values);
    },
    commit: async () => {
      this.#prepare('COMMIT').run();
      this.#end();
    },
    rollback: async () => {
      if (this.#database.isTransaction) this.#prepare('ROLLBACK').run();
      this.#end();
    },
  };

  async get(sql: string, ...values: Value[]): Promise<Row | undefined> {
    await this.#idle();
    return this.#prepare(sql).get(...values);
  }

  async all(sql: string, ...values: Value[]): Promise<Row[]> {
    await this.#idle();
    return this.#prepare(sql).all(...values);
  }

  async migrate(noun: string, steps: readonly string[], first: number): Promise<void> {
    await this.#idle();
    migrate(this.#database, noun, steps, first);
  }

  read(queries: readonly Query[]): Promise<Row[][]> {
    return this.#reader.read(queries);
  }

  snapshot(): (copy: string) => Promise<void> {
    // In WAL mode, a read transaction sees the database as it is now, even while other connections write.
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

  async shrink(): Promise<void> {
    await this.all('PRAGMA incremental_vacuum(256)');
  }

  async close(): Promise<void> {
    // The reader is closed first. SQLite removes the -wal file only if the connection that is closed last can write.
    await this.#reader.close();
    try {
      this.#prepare('UPDATE installation SET running = 0').run();
      this.#database.close();
    } catch (error) {
      // The database stays open until the process ends, and the -wal file remains as after a crash.
      this.#log.error({ err: error }, 'history.db could not be closed; the next start recovers it');
    }
  }

  #end(): void {
    this.#running?.resolve();
    this.#running = undefined;
  }

  async #idle(): Promise<void> {
    while (this.#running) await this.#running.promise;
  }
}

/**
 * Applies the migration steps that are not yet applied to this database. steps[0] has the number `first`. The table
 * `migrations` records the number of the last applied step under the name `noun`.
 */
export function migrate(database: DatabaseSync, noun: string, steps: readonly string[], first = 1): void {
  const row = database.prepare('SELECT steps FROM migrations WHERE noun = ?').get(noun);
  const done = Number(row?.steps ?? 0);
  const last = first + steps.length - 1;
  if (done > last)
    throw new StartError(`history.db has ${noun} of a newer farhand-broker: install the newer version again`);
  if (done === last) return;
  // - temp_store: a new index may sort more rows than fit into memory.
  // - synchronous: a step needs no sync of its own, because the next commit syncs it. After a power failure, the next
  //   start applies the step again.
  database.exec('PRAGMA temp_store = FILE; PRAGMA synchronous = NORMAL; BEGIN IMMEDIATE');
  for (const step of steps.slice(Math.max(0, done - first + 1))) database.exec(step);
  database.prepare('INSERT OR REPLACE INTO migrations VALUES (?, ?)').run(noun, last);
  database.exec('COMMIT; PRAGMA synchronous = FULL; PRAGMA temp_store = MEMORY');
}
