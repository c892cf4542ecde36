// Interfaces of the history database and of its transactions.
import type { SQLInputValue, SQLOutputValue } from 'node:sqlite';
import type { Journal } from '../../shared/api/route-table.ts';

export type Row = Record<string, SQLOutputValue>;
export type Value = SQLInputValue;

export interface Query {
  sql: string;
  values: readonly Value[];
}

/**
 * A row that will be written to the history. Until then, it can be stored in the outbox of state.json. Writing the row
 * a second time must change nothing.
 */
export interface OutboxEntry {
  kind: string;
}

/** Reads a few rows by an index. Use History.read() for lists. */
export interface RowReader {
  /** Returns the first row; undefined if there is none. */
  get(sql: string, ...values: Value[]): Promise<Row | undefined>;
  all(sql: string, ...values: Value[]): Promise<Row[]>;
}

/**
 * A transaction of the history. Its reads see its own writes. The function that uses the transaction is called a
 * change. A change may await only get(), all() and ask() of its transaction. If it awaits another call of
 * History.write(), the change and that call wait for each other forever. After the change has ended, the transaction
 * accepts no more statements.
 */
export interface HistoryTransaction extends Journal, RowReader {
  /**
   * Declares that the change is about this machine. The change fails if another broker owns the machine at the time of
   * the commit.
   */
  about(machineId: string): void;
  /** Runs a statement after those of earlier calls. If the statement fails, the whole change fails. */
  run(sql: string, ...values: Value[]): void;
  /**
   * Runs a statement, then calls `use` with the first row of the result. `use` runs before the functions that were
   * passed to committed(). The change need not await the returned promise: if the statement fails, the change fails in
   * any case.
   */
  ask(sql: string, values: readonly Value[], use: (row: Row | undefined) => void): Promise<void>;
  /** Inserts a row, or updates the row that has the same values in the columns `key`. */
  put(table: string, key: string, row: Readonly<Record<string, Value>>): void;
  /**
   * Writes an entry by the function that History.onEntry() registered for the entry's kind. That function may still be
   * writing when append() returns, so reads within the change may miss the entry. The commit waits for it.
   */
  append(entry: OutboxEntry): void;
  /** Runs a function after the commit, in the order of the calls. The function must not throw. */
  committed(run: () => void): void;
}

/** The state of the connection to the database. */
export interface Connection {
  /** False while the database does not answer. A write that is requested in that time rejects at once. */
  readonly isReady: boolean;
  /** Calls `listener` each time the database stops answering. */
  onUnavailable(listener: () => void): void;
  /**
   * Number of times that the database has stopped answering. Each time, a standby that lacks the last commits may have
   * been promoted, so that another server answers from then on.
   */
  readonly disconnects: number;
  /** Calls `listener` if the database has lost commits of this broker. The broker must then end. */
  onCommitsLost(listener: (error: Error) => void): void;
  /**
   * Called when the broker stops. If the connection is lost during a commit, the commit waits until the database
   * answers again. After this call, it fails instead.
   */
  stopWaiting(): void;
}

/** The connection to a file, which always answers and loses no commit. */
export const fileConnection: Connection = {
  ...{ isReady: true, disconnects: 0 },
  onUnavailable() {},
  onCommitsLost() {},
  stopWaiting() {},
};

/**
 * The connection that writes. It runs statements in the order of the calls. After a failed statement, all further
 * statements may fail until rollback().
 */
export interface Writer extends Connection {
  begin(): Promise<void>;
  execute(sql: string, values: readonly Value[]): Promise<Row[]>;
  /**
   * Resolves once all changes are on disk. Throws if no change is on disk. After stopWaiting(), it also throws if the
   * database's answer to COMMIT was lost. The changes may then be on disk.
   */
  commit(): Promise<void>;
  /** Undoes all changes since begin(). Does nothing after a commit. */
  rollback(): Promise<void>;
}

/**
 * A database for the history. SQL texts are written for SQLite. A driver translates them if its database
 * needs that.
 */
export interface Database extends RowReader {
  /** Name of the database in messages. */
  readonly name: string;
  readonly writer: Writer;
  /**
   * True for a database server, false for a file. A commit on a server takes longer than a turn of the event loop. So
   * get(), all() and read() of History wait for the writes that were requested before them.
   */
  readonly isRemote: boolean;
  /**
   * Applies the migration steps that are not yet applied to this database. `noun` names the tables of the steps, for
   * example `webhooks`. steps[0] has the number `first`. Throws StartError if a newer broker wrote these tables.
   */
  migrate(noun: string, steps: readonly string[], first: number): Promise<void>;
  /**
   * Reads what is committed. With PostgreSQL, these reads have a connection of their own. They wait only for each
   * other, not for writes or other reads of this broker.
   */
  readonly committed: RowReader;
  /** Runs all queries on one state of the database, which includes every write that has resolved before the call. */
  read(queries: readonly Query[]): Promise<Row[][]>;
  /** Freezes a view of the database, as History.snapshot() describes. */
  snapshot(): (copy: string) => Promise<void>;
  /** Returns the space of deleted rows to the system, in a small step. */
  shrink(): Promise<void>;
  close(): Promise<void>;
}
