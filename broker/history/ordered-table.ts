// A history table whose sequence numbers follow the time of the rows,
// so that a time is found without an index.

import type { Route } from '../../shared/api/route.ts';
import type { Page } from '../../shared/api/route-table.ts';
import { type Condition, filtersOf, pageOfRows } from '../paging.ts';
import type { History, HistoryTransaction, Row } from './history.ts';

/**
 * Sequence numbers per millisecond. With more rows, or a clock set back,
 * they run ahead of the time, never behind.
 */
const perMs = 1_000;
/**
 * Most rows of a table: without a limit, machines or callers could fill the disk.
 * The oldest rows are deleted first.
 */
const maxRows = 1_000_000;

type ListInput = { limit: number; offset: number; sort: string; since?: Date | undefined };

interface OrderedTableOptions {
  keepMs: number;
  keepRows?: number | undefined;
  /** Columns by which the last migration step counts the rows, with countRows(). */
  counted: readonly string[];
}

export class OrderedTable {
  readonly #history: History;
  readonly #counted: readonly string[];
  readonly #name: string;
  /** SQL that adds a row; all rows have the same columns in the same order. */
  #insert: string | undefined;
  #last: number;

  private constructor(history: History, name: string, counted: readonly string[], last: number) {
    this.#history = history;
    this.#name = name;
    this.#counted = counted;
    this.#last = last;
  }

  /**
   * Applies the migration `steps`, of which the first is step 3 since version 0.1.0. Deletes rows older than `keepMs`, and the
   * oldest rows beyond `keepRows`.
   */
  static async open(
    history: History,
    name: string,
    steps: readonly string[],
    { keepMs, keepRows = maxRows, counted }: OrderedTableOptions,
  ): Promise<OrderedTable> {
    await history.migrate(name, steps, 3);
    history.retain({ table: name, column: 'created_at', keepMs, keepRows, ordered: 'seq' });
    const newest = await history.get(`SELECT max(seq) AS last FROM ${name}`);
    return new OrderedTable(history, name, counted, Number(newest?.last ?? 0));
  }

  /** The highest sequence number that is committed. */
  get last(): number {
    return this.#last;
  }

  /**
   * Adds a row with time `at`, numbered inside the transaction and above all earlier numbers. False if the table has
   * the row already.
   */
  async add(
    transaction: HistoryTransaction,
    at: number,
    row: Readonly<Record<string, string | number | null>>,
  ): Promise<boolean> {
    this.#insert ??= this.#insertOf(Object.keys(row));
    const least = Math.max(this.#last + 1, at * perMs);
    const added = await transaction.get(this.#insert, least, ...Object.values(row));
    if (!added) return false;
    transaction.committed(() => {
      this.#last = Number(added.seq);
    });
    return true;
  }

  #insertOf(columns: readonly string[]): string {
    const next = `(SELECT CASE WHEN coalesce(max(seq), 0) < ?1 THEN ?1 ELSE max(seq) + 1 END FROM ${this.#name})`;
    return `INSERT INTO ${this.#name} (seq, ${columns.join(', ')}) VALUES (${next}${', ?'.repeat(columns.length)})
      ON CONFLICT DO NOTHING RETURNING seq`;
  }

  /** Returns one page of a list route, sorted by time. */
  page(
    route: Pick<Route, 'filters'>,
    conditions: readonly Condition[],
    input: ListInput,
  ): Promise<Page<Row>> {
    return pageOfRows(
      this.#history,
      { table: this.#name, columns: '*', counted: this.#counted, byMachine: true },
      [...conditions, ...filtersOf(route, input, { since: rowsSince(input.since) })],
      { ...input, sort: input.sort.replace('created_at', 'seq') },
      'seq',
    );
  }
}

/** A sequence number below that of every row with time `at` or later. */
function sequenceBefore(at: Date): number {
  return at.getTime() * perMs - 1;
}

/** Condition for rows with time `at` or later and a sequence number above `after`. */
export function rowsSince(at: Date | undefined, after = at && sequenceBefore(at)): Condition {
  return at && after !== undefined ? ['seq > ? AND created_at >= ?', after, at.getTime()] : undefined;
}
