// A history table that is only appended to: its `seq` follows the time of the rows, so that a time is found without an index.
import type { Page } from '../shared/api/index.ts';
import type { Route } from '../shared/api/route.ts';
import type { History, Row } from './history.ts';
import { type Condition, filtersOf, pageOfRows } from './paging.ts';

/** Sequence numbers per millisecond; with more rows, or a clock set back, they run ahead of the time, never behind it. */
const perMs = 1_000;
/** Without a limit, machines or callers could fill the disk; the oldest rows go first, whatever their age. */
const maxRows = 1_000_000;

type ListInput = { limit: number; offset: number; sort: string; since?: Date | undefined };

export class OrderedTable {
  readonly #history: History;
  readonly #name: string;
  #last: number;

  /** Applies the migration `steps`; rows older than `keepMs` are deleted. */
  constructor(
    history: History,
    name: string,
    steps: readonly string[],
    { keepMs, keepRows = maxRows }: { keepMs: number; keepRows?: number | undefined },
  ) {
    this.#history = history;
    this.#name = name;
    history.migrate(name, steps);
    history.retain({ table: name, column: 'created_at', keepMs, keepRows, ordered: true });
    this.#last = Number(history.sql(`SELECT max(seq) AS last FROM ${name}`).get()?.last ?? 0);
  }

  /** The newest sequence number. */
  get last(): number {
    return this.#last;
  }

  /** The sequence number of a new row of that time, above all earlier ones. Call it inside a transaction. */
  next(at: number): number {
    this.#last = Math.max(this.#last + 1, at * perMs);
    return this.#last;
  }

  /** A page of a list route, sorted by time. */
  page(route: Pick<Route, 'filters'>, conditions: readonly Condition[], input: ListInput): Page<Row> {
    return pageOfRows(
      this.#history,
      { table: this.#name, columns: '*' },
      [...conditions, ...filtersOf(route, input, { since: rowsSince(input.since) })],
      { ...input, sort: input.sort.replace('created_at', 'seq') },
      'seq',
    );
  }
}

/** A sequence number below those of all rows of that time and later. */
function sequenceBefore(at: Date): number {
  return at.getTime() * perMs - 1;
}

/** Rows of that time and later, after that sequence number. */
export function rowsSince(at: Date | undefined, after = at && sequenceBefore(at)): Condition {
  return at && after !== undefined ? ['seq > ? AND created_at >= ?', after, at.getTime()] : undefined;
}
