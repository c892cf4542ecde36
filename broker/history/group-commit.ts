// Groups the writes of the history. Writes requested in one turn of the event loop, or during a commit, share one sync
// of the disk.
import { AppError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Database, HistoryTransaction, OutboxEntry, Row, Value, Writer } from './database-interface.ts';

/** Returns the error with which requests are refused while the database does not answer. */
export function databaseUnavailable(cause?: unknown): AppError {
  const message = 'the broker’s database does not answer; try again later';
  return new AppError('unavailable', message, {}, cause === undefined ? {} : { cause });
}

/** Returns the error for a change about a machine that this broker does not own. */
export function ownedElsewhere(): AppError {
  return new AppError('unavailable', 'another broker is responsible for this machine now; try again');
}

/**
 * Returns an SQL statement that makes a change fail if another broker owns the machine. Returns undefined if this
 * broker already knows that it does not own the machine.
 */
export type Fence = (machineId: string) => { sql: string; values: readonly Value[] } | undefined;

/** Writes an entry of the outbox. If it returns a promise, that promise settles when the entry is written. */
export type Applier = (entry: OutboxEntry, transaction: HistoryTransaction) => Promise<void> | void;

interface Pending {
  /** Makes the change. The returned function resolves the caller's promise with the result. */
  run(transaction: HistoryTransaction): Promise<() => void>;
  reject(error: unknown): void;
}

/**
 * Maximum number of changes in a group. A full group takes some 10 ms, and then the broker serves other requests.
 * Without a maximum, thousands of changes after a network failure would delay these requests.
 */
const mostOfGroup = 100;

/**
 * Groups the changes that are requested in one turn of the event loop, and commits each group in one transaction. The
 * changes run one after another, in the order of the calls.
 */
export class GroupCommit {
  /** Makes the statement that checks the owner of a machine; undefined with a single broker. */
  fence: Fence | undefined;
  readonly name: string;
  readonly writer: Writer;
  readonly appliers: ReadonlyMap<string, Applier>;
  readonly log: Logger;
  #queue: Pending[] = [];
  /** Functions that reject waiting reads. A read waits for the writes that were requested before it. */
  readonly #waiting = new Set<(error: unknown) => void>();
  /** The group that is being written. Never rejects. */
  #running: Promise<void> | undefined;
  #isClosed = false;
  /** Settles when the write that was requested last has ended. */
  #latest: Promise<unknown> = Promise.resolve();

  constructor({ name, writer }: Database, appliers: ReadonlyMap<string, Applier>, log: Logger) {
    this.name = name;
    this.writer = writer;
    this.appliers = appliers;
    this.log = log;
    this.writer.onUnavailable(() => this.#rejectWaiting());
  }

  write<T>(change: (transaction: HistoryTransaction) => Promise<T> | T): Promise<T> {
    const { promise, resolve, reject } = Promise.withResolvers<T>();
    const run = async (transaction: HistoryTransaction): Promise<() => void> => {
      const result = await change(transaction);
      return () => resolve(result);
    };
    if (this.#isClosed) reject(new Error(`${this.name} is closed`));
    else if (!this.writer.isReady) reject(databaseUnavailable());
    else {
      if (this.#queue.push({ run, reject }) === 1) setImmediate(() => void this.#flush());
      this.#latest = promise.catch(() => {});
    }
    return promise;
  }

  /**
   * Resolves when all writes that were requested before this call have ended. Rejects while the database does not
   * answer.
   */
  async settled(): Promise<void> {
    if (!this.writer.isReady) throw databaseUnavailable();
    const { promise, resolve, reject } = Promise.withResolvers<void>();
    this.#waiting.add(reject);
    void this.#latest.then(() => {
      this.#waiting.delete(reject);
      resolve();
    });
    await promise;
  }

  /** Commits the queued changes. From then on, writes reject. */
  async close(): Promise<void> {
    this.#isClosed = true;
    while (this.#queue.length > 0) await this.#flush();
    while (this.#running) await this.#running;
  }

  /**
   * Rejects the changes and reads that wait for the running group, because that group may wait until the database
   * answers again.
   */
  #rejectWaiting(): void {
    const rejects = [...this.#queue.map((member) => member.reject), ...this.#waiting];
    this.#queue = [];
    this.#waiting.clear();
    for (const reject of rejects) reject(databaseUnavailable());
  }

  async #flush(): Promise<void> {
    while (this.#running) await this.#running;
    const group = this.#queue.splice(0, mostOfGroup);
    // setImmediate lets the broker serve other requests between two groups.
    if (this.#queue.length > 0) setImmediate(() => void this.#flush());
    if (group.length === 0) return;
    this.#running = this.#commit(group).finally(() => {
      this.#running = undefined;
    });
    await this.#running;
  }

  async #commit(group: readonly Pending[]): Promise<void> {
    const done: Change[] = [];
    try {
      await this.writer.begin();
      for (const member of group) {
        const change = await this.#attempt(member, group.length === 1);
        if (change) done.push(change);
      }
      // If all changes have failed, there is nothing to commit.
      if (done.length === 0) return await this.#undo();
      await this.writer.commit();
      for (const { runHooks } of done) await runHooks();
      for (const { resolve } of done) resolve();
    } catch (error) {
      // The error of a change is not logged, because the change's caller gets it.
      const failure = done[0]?.failure;
      if (!failure)
        this.log.error({ err: error }, `${this.name} could not be written, so the changes are undone`);
      await this.#undo();
      for (const member of group) member.reject(failure ? failure.error : error);
    }
  }

  async #undo(): Promise<void> {
    await this.writer.rollback().catch(() => {});
  }

  /**
   * Runs one change of a group. If it fails, only its own rows are undone, and none of its hooks run. A change that is
   * alone in its group needs no savepoint. It also does not wait for the answers to its last statements. If one of them
   * fails, COMMIT fails too, and `failure` of the change has the reason.
   */
  async #attempt(member: Pending, isAlone: boolean): Promise<Change | undefined> {
    const change = new Change(this);
    try {
      if (!isAlone) change.execute('SAVEPOINT member', []).catch(() => {});
      await change.settle(member);
      if (!isAlone) await change.execute('RELEASE SAVEPOINT member', []);
      return change;
    } catch (error) {
      member.reject(change.failure ? change.failure.error : error);
      if (!isAlone) await this.writer.execute('ROLLBACK TO SAVEPOINT member', []);
      return undefined;
    } finally {
      change.end();
    }
  }
}

/** One change of a group while it runs, and its hooks: the functions to call after the commit. */
class Change {
  /** Resolves the caller's promise. */
  resolve: () => void = () => {};
  /** The error of the first statement that failed, even if the code of the change caught it. */
  failure: { error: unknown } | undefined;
  readonly #group: GroupCommit;
  readonly #hooks: (() => void)[] = [];
  /** The promises of ask(). The code of the change need not await them, so runHooks() awaits them before the hooks. */
  readonly #answers: Promise<void>[] = [];
  /** The appended entries that are being written. */
  #appended: Promise<void>[] = [];
  #hasEnded = false;
  /** The machines that the change is about. */
  readonly #machines = new Set<string>();

  constructor(group: GroupCommit) {
    this.#group = group;
  }

  /** Runs the change, and waits until its entries are written. */
  async settle(member: Pending): Promise<void> {
    const resolve = await member.run(this.#transaction());
    for (let written = this.#appended; written.length > 0; written = this.#appended) {
      this.#appended = [];
      await Promise.all(written);
    }
    if (this.failure) throw this.failure.error;
    this.resolve = resolve;
  }

  readonly execute = async (sql: string, values: readonly Value[]): Promise<Row[]> => {
    try {
      return await this.#group.writer.execute(sql, values);
    } catch (error) {
      this.failure ??= { error };
      throw error;
    }
  };

  readonly runHooks = async (): Promise<void> => {
    await Promise.all(this.#answers);
    for (const hook of this.#hooks) {
      try {
        hook();
      } catch (err) {
        // The change is on disk, so it must not count as failed.
        this.#group.log.error({ err }, 'a function that is called after a commit has failed');
      }
    }
  };

  end(): void {
    this.#hasEnded = true;
  }

  #transaction(): HistoryTransaction {
    const execute = (sql: string, values: readonly Value[]): Promise<Row[]> => {
      if (this.#hasEnded) throw new Error(`this transaction of ${this.#group.name} has ended`);
      return this.execute(sql, values);
    };
    const transaction: HistoryTransaction = {
      about: (machineId) => {
        const { fence } = this.#group;
        if (!fence || this.#machines.has(machineId)) return;
        this.#machines.add(machineId);
        const check = fence(machineId);
        if (!check) throw ownedElsewhere();
        transaction.run(check.sql, ...check.values);
      },
      get: async (sql, ...values) => (await execute(sql, values))[0],
      all: async (sql, ...values) => execute(sql, values),
      // The error is ignored here: the transaction throws it at the end of the change.
      run: (sql, ...values) => void execute(sql, values).catch(() => {}),
      ask: (sql, values, use) => {
        const used = execute(sql, values).then(([row]) => use(row));
        this.#answers.push(used.catch(() => {}));
        return used;
      },
      put: (table, key, row) => transaction.run(upsert(table, key, Object.keys(row)), ...Object.values(row)),
      append: (entry) => {
        const apply = this.#group.appliers.get(entry.kind);
        if (!apply) throw new Error(`no function writes history entries of kind ${entry.kind}`);
        const written = apply(entry, transaction);
        if (!written) return;
        const failed = (error: unknown): void => {
          this.failure ??= { error };
        };
        this.#appended.push(written.catch(failed));
      },
      committed: (run) => void this.#hooks.push(run),
    };
    return transaction;
  }
}

/** Returns SQL that inserts a row, or updates the row that has the same values in the columns `key`. */
function upsert(table: string, key: string, columns: readonly string[]): string {
  const names = columns.map((name) => `"${name}"`);
  const places = columns.map(() => '?').join(', ');
  const changes = names.map((name) => `${name} = excluded.${name}`).join(', ');
  return `INSERT INTO ${table} (${names.join(', ')}) VALUES (${places}) ON CONFLICT (${key}) DO UPDATE SET ${changes}`;
}
