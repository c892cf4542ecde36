// A history table whose sequence numbers follow the time of the rows, so that the rows of a period are found without an
// index of times.

import type { Route } from '../../shared/api/route.ts';
import type { Page } from '../../shared/api/route-table.ts';
import { type Condition, filtersOf, pageOfRows } from '../list-pages-and-filters.ts';
import type { History, HistoryTransaction, Row } from './history-database.ts';
import { type Bounds, type CountedTable, numberedBefore, sequencesPerMs } from './row-counts.ts';

/**
 * Maximum number of rows of a table. Without a limit, machines or callers could fill the disk. The oldest rows are
 * deleted first.
 */
const maxRows = 1_000_000;

type ListInput = Bounds & { limit: number; offset: number; sort: string };

interface OrderedTableOptions {
  keepMs: number;
  keepRows?: number | undefined;
  /** Columns that have an index, the most selective first. A list uses the first index whose column it filters by. */
  findBy: readonly string[];
}

export class OrderedTable {
  readonly #history: History;
  readonly #counted: CountedTable;
  readonly #findBy: readonly string[];
  #last: number;

  private constructor(history: History, counted: CountedTable, findBy: readonly string[], last: number) {
    this.#history = history;
    this.#counted = counted;
    this.#findBy = findBy;
    this.#last = last;
  }

  /**
   * Applies the migration `steps`. The first one has the number 3, because the three steps of version 0.1.0 were merged
   * into it. Deletes rows older than `keepMs`, and the oldest rows beyond `keepRows`.
   */
  static async open(
    history: History,
    counted: CountedTable,
    steps: readonly string[],
    { keepMs, keepRows = maxRows, findBy }: OrderedTableOptions,
  ): Promise<OrderedTable> {
    const name = counted.table;
    await history.migrate(name, steps, 3);
    history.count(counted);
    history.retain({ table: name, column: 'created_at', keepMs, keepRows, ordered: 'seq' });
    const newest = await history.get(`SELECT max(seq) AS last FROM ${name}`);
    return new OrderedTable(history, counted, findBy, Number(newest?.last ?? 0));
  }

  /** The highest sequence number that is committed. */
  get last(): number {
    return this.#last;
  }

  /** Records that a sequence number is committed. */
  advance(seq: number): void {
    this.#last = Math.max(this.#last, seq);
  }

  /**
   * Adds a row, numbered above all earlier rows. Resolves with false if the table has the row already. For a new row,
   * calls `added` before the transaction calls the functions that were passed to its committed().
   */
  async add(
    transaction: HistoryTransaction,
    at: number,
    row: Readonly<Record<string, string | number | null>>,
    added = (): void => {},
  ): Promise<boolean> {
    const least = Math.max(this.#last + 1, at * sequencesPerMs);
    let seq: number | undefined;
    transaction.committed(() => this.advance(seq ?? 0));
    const values = [least, ...Object.values(row)];
    const answer = transaction.ask(this.#insertOf(Object.keys(row)), values, (stored) => {
      if (!stored) return;
      seq = Number(stored.seq);
      added();
    });
    // A change may be committed although the connection was lost before this answer. The row then counts as new.
    answer.catch(() => {
      seq = least;
      added();
    });
    await answer;
    return seq !== undefined;
  }

  #insertOf(columns: readonly string[]): string {
    const { table } = this.#counted;
    const next = `(SELECT CASE WHEN coalesce(max(seq), 0) < ?1 THEN ?1 ELSE max(seq) + 1 END FROM ${table})`;
    return `INSERT INTO ${table} (seq, ${columns.join(', ')}) VALUES (${next}${', ?'.repeat(columns.length)})
      ON CONFLICT DO NOTHING RETURNING seq`;
  }

  /** Returns one page of a list route, sorted by time. */
  page(
    route: Pick<Route, 'filters'>,
    conditions: readonly Condition[],
    input: ListInput,
  ): Promise<Page<Row>> {
    const counted = this.#counted;
    const within = ({ since, until }: Bounds): Condition[] => [
      rowsSince(since),
      until && [`${numberedBefore(counted, until)} AND created_at < ?`, until.getTime()],
    ];
    return pageOfRows(
      this.#history,
      { table: counted.table, columns: '*', counted, within, findBy: this.#findBy, tie: ['seq'] },
      [...conditions, ...filtersOf(route, input)],
      { ...input, sort: input.sort.replace('created_at', 'seq') },
    );
  }
}

/** Returns a number below the sequence numbers of all rows with time `at` or later. */
function sequenceBefore(at: Date): number {
  return at.getTime() * sequencesPerMs - 1;
}

/** Returns the condition for rows with time `at` or later and a sequence number above `after`. */
export function rowsSince(at: Date | undefined, after = at && sequenceBefore(at)): Condition {
  return at && after !== undefined ? ['seq > ? AND created_at >= ?', after, at.getTime()] : undefined;
}
