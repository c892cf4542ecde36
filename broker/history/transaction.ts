// The transaction of a change of history: what a database must offer to be used for history.
import type { SQLInputValue, SQLOutputValue } from 'node:sqlite';
import type { Journal } from '../../shared/api/route-table.ts';

export type Row = Record<string, SQLOutputValue>;

/** A row for history.db that can wait in the outbox of state.json. Writing the row twice must be harmless. */
export interface OutboxEntry {
  kind: string;
}

/** Reads a few rows, which an index finds. Lists are read with History.read(). */
export interface RowReader {
  /** The first row; undefined if there is none. */
  get(sql: string, ...values: SQLInputValue[]): Promise<Row | undefined>;
  all(sql: string, ...values: SQLInputValue[]): Promise<Row[]>;
}

/**
 * A transaction of history. It reads what it has written. A change awaits only get() and all(); its writes return
 * nothing, run in their order, and are committed together, so that a database on another machine gets them in one
 * message. A write that fails makes the whole change fail. The transaction throws once its change has ended.
 */
export interface HistoryTransaction extends Journal, RowReader {
  run(sql: string, ...values: SQLInputValue[]): void;
  /** Writes a row, over one with the same values in the columns `key`. */
  put(table: string, key: string, row: Readonly<Record<string, SQLInputValue>>): void;
  /** Writes an entry with the function of its kind, before the change ends: reads may not see it at once. */
  append(entry: OutboxEntry): void;
  /** Runs a function after the commit, in the order of the calls. The function must not throw. */
  committed(run: () => void): void;
}
