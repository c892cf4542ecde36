// A history table whose sequence numbers follow the time of the rows,
// so that a time is found without an index.

import type { Route } from '../../shared/api/route.ts';
import type { Page } from '../../shared/api/route-table.ts';
import { type Condition, filtersOf, pageOfRows } from '../paging.ts';
import type { History, Row } from './history.ts';

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
  #last: number;

  /**
   * Applies the migration `steps`, of which the first is step 3 since version 0.1.0. Deletes rows older than `keepMs`, and the
   * oldest rows beyond `keepRows`.
   */
  constructor(
    history: History,
    name: string,
    steps: readonly string[],
    { keepMs, keepRows = maxRows, counted }: OrderedTableOptions,
  ) {
    this.#history = history;
    this.#name = name;
    this.#counted = counted;
    history.migrate(name, steps, 3);
    history.retain({ table: name, column: 'created_at', keepMs, keepRows, ordered: true });
    this.#last = Number(history.sql(`SELECT max(seq) AS last FROM ${name}`).get()?.last ?? 0);
  }

  /** The highest sequence number so far. */
  get last(): number {
    return this.#last;
  }

  /**
   * The sequence number for a new row with time `at`, above all earlier numbers.
   * Call next() inside a transaction.
   */
  next(at: number): number {
    this.#last = Math.max(this.#last + 1, at * perMs);
    return this.#last;
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
