// Writes of history.db. All that are requested in one turn of the event loop share a transaction, and so one
// sync of the disk.
import type { DatabaseSync, StatementSync } from 'node:sqlite';
import type { Logger } from '../../shared/logger.ts';
import type { HistoryTransaction, OutboxEntry } from './transaction.ts';

/** The prepared statements of a connection. */
export class Statements {
  readonly #database: DatabaseSync;
  readonly #most: number;
  readonly #prepared = new Map<string, StatementSync>();

  /** Lists have a statement for each combination of filters; beyond `most`, the oldest is dropped. */
  constructor(database: DatabaseSync, most: number) {
    this.#database = database;
    this.#most = most;
  }

  of(sql: string): StatementSync {
    const prepared = this.#prepared.get(sql);
    if (prepared) return prepared;
    const statement = this.#database.prepare(sql);
    const [oldest] = this.#prepared.keys();
    if (oldest !== undefined && this.#prepared.size >= this.#most) this.#prepared.delete(oldest);
    this.#prepared.set(sql, statement);
    return statement;
  }
}

/** Writes an entry of the outbox. A promise that it returns settles once the entry is written. */
export type Applier = (entry: OutboxEntry, transaction: HistoryTransaction) => Promise<void> | void;

interface Done {
  hooks: (() => void)[];
  resolve(): void;
}

interface Pending {
  /** Makes the change. The returned function resolves the caller's promise with the result. */
  run(transaction: HistoryTransaction): Promise<() => void>;
  reject(error: unknown): void;
}

/**
 * Commits the changes of a turn as a group. They run one after another, in their order. SQLite answers at
 * once, so a group runs to its end before the event loop turns; a change that arrives meanwhile is in the group
 * of the next turn.
 */
export class WriteQueue {
  readonly #database: DatabaseSync;
  readonly #statements: Statements;
  readonly #appliers: ReadonlyMap<string, Applier>;
  readonly #log: Logger;
  #queue: Pending[] = [];
  /** The group that is running; it never rejects. */
  #running: Promise<void> | undefined;
  #isClosed = false;

  constructor(
    database: DatabaseSync,
    statements: Statements,
    appliers: ReadonlyMap<string, Applier>,
    log: Logger,
  ) {
    this.#database = database;
    this.#statements = statements;
    this.#appliers = appliers;
    this.#log = log;
  }

  write<T>(change: (transaction: HistoryTransaction) => Promise<T> | T): Promise<T> {
    const { promise, resolve, reject } = Promise.withResolvers<T>();
    const run = async (transaction: HistoryTransaction): Promise<() => void> => {
      const result = await change(transaction);
      return () => resolve(result);
    };
    if (this.#isClosed) reject(new Error('history.db is closed'));
    else if (this.#queue.push({ run, reject }) === 1) setImmediate(() => void this.#flush());
    return promise;
  }

  /** Resolves when no group is running: outside its changes, rows that are not committed must not be seen. */
  async idle(): Promise<void> {
    while (this.#running) await this.#running;
  }

  /** Commits what is queued. From now on, writes reject. */
  async close(): Promise<void> {
    this.#isClosed = true;
    await this.#flush();
    await this.idle();
  }

  async #flush(): Promise<void> {
    await this.idle();
    const group = this.#queue;
    this.#queue = [];
    if (group.length === 0) return;
    this.#running = Promise.resolve().then(() => this.#commit(group));
    await this.#running;
  }

  async #commit(group: readonly Pending[]): Promise<void> {
    const done: Done[] = [];
    try {
      this.#run('BEGIN IMMEDIATE');
      for (const member of group) done.push(await this.#attempt(member));
      this.#run('COMMIT');
      this.#running = undefined;
      for (const hook of done.flatMap(({ hooks }) => hooks)) hook();
      for (const { resolve } of done) resolve();
    } catch (error) {
      this.#running = undefined;
      this.#log.error({ err: error }, 'history.db could not be written, so the changes are undone');
      if (this.#database.isTransaction) this.#run('ROLLBACK');
      for (const member of group) member.reject(error);
    }
  }

  /** Runs one change of a group. A change that fails undoes only its own rows and hooks. */
  async #attempt(member: Pending): Promise<Done> {
    const { transaction, hooks, settle, end } = this.#begin();
    this.#run('SAVEPOINT member');
    try {
      return { hooks, resolve: await withinTurn(member.run(transaction).then(settle)) };
    } catch (error) {
      this.#run('ROLLBACK TO member');
      member.reject(error);
      return { hooks: [], resolve: () => {} };
    } finally {
      end();
      this.#run('RELEASE member');
    }
  }

  #begin() {
    const hooks: (() => void)[] = [];
    /** The appended entries that are being written. */
    let appended: Promise<void>[] = [];
    let failure: { error: unknown } | undefined;
    let hasEnded = false;
    const fail = (error: unknown): void => {
      failure ??= { error };
    };
    const execute = <T>(sql: string, how: (statement: StatementSync) => T): T => {
      if (hasEnded) throw new Error('this transaction of history.db has ended');
      try {
        return how(this.#statements.of(sql));
      } catch (error) {
        fail(error);
        throw error;
      }
    };
    const transaction: HistoryTransaction = {
      get: async (sql, ...values) => execute(sql, (statement) => statement.get(...values)),
      all: async (sql, ...values) => execute(sql, (statement) => statement.all(...values)),
      run: (sql, ...values) => void execute(sql, (statement) => statement.run(...values)),
      put: (table, key, row) => transaction.run(upsert(table, key, Object.keys(row)), ...Object.values(row)),
      append: (entry) => {
        const apply = this.#appliers.get(entry.kind);
        if (!apply) throw new Error(`no function writes history entries of kind ${entry.kind}`);
        const written = apply(entry, transaction);
        if (written) appended.push(written.catch(fail));
      },
      committed: (run) => void hooks.push(run),
    };
    /** Waits for the appended entries. Throws the first failure of a statement, even if it was caught. */
    const settle = async <T>(result: T): Promise<T> => {
      for (let written = appended; written.length > 0; written = appended) {
        appended = [];
        await Promise.all(written);
      }
      if (failure) throw failure.error;
      return result;
    };
    const end = (): void => {
      hasEnded = true;
    };
    return { transaction, hooks, settle, end };
  }

  #run(sql: string): void {
    this.#statements.of(sql).run();
  }
}

/** SQL that writes a row, over one with the same values in the columns `key`. */
function upsert(table: string, key: string, columns: readonly string[]): string {
  const places = columns.map(() => '?').join(', ');
  const changes = columns.map((name) => `${name} = excluded.${name}`).join(', ');
  return `INSERT INTO ${table} (${columns.join(', ')}) VALUES (${places}) ON CONFLICT (${key}) DO UPDATE SET ${changes}`;
}

/**
 * Rejects unless `work` settles before the event loop turns. A change that waits for anything but its
 * transaction would make every other write wait too, or for ever if it waits for one of these.
 */
function withinTurn<T>(work: Promise<T>): Promise<T> {
  const late = Promise.withResolvers<never>();
  const turn = setImmediate(() =>
    late.reject(new Error('a change of history.db waited for something else than its transaction')),
  );
  return Promise.race([work, late.promise]).finally(() => clearImmediate(turn));
}
