// Rows that are only ever added, numbered by their time: they stand in its order, and need no index of it.
import type { History } from './history.ts';
import type { Condition } from './paging.ts';

/** Numbers of a millisecond; where there are more of them, or the clock is set back, they run ahead of it, never behind. */
const perMs = 1_000;

export interface Numbers {
  /** For a row of that time: above all that were given before. Inside a transaction. */
  next(at: number): number;
  /** The last one given. */
  readonly last: number;
}

/** Of a table that has them as its `seq`. */
export function openNumbers(history: History, table: string): Numbers {
  let last = Number(history.sql(`SELECT max(seq) AS last FROM ${table}`).get()?.last ?? 0);
  return {
    next(at) {
      last = Math.max(last + 1, at * perMs);
      return last;
    },
    get last() {
      return last;
    },
  };
}

/** Rows of that time and later, by number and `created_at`. */
export function rowsSince(at: Date | undefined): Condition {
  return at && ['seq >= ? AND created_at >= ?', at.getTime() * perMs, at.getTime()];
}

/** SQL that numbers the rows of a table as `seq`, in the order of what they were numbered by before. */
export function renumbered(table: string, before: string): string {
  return `(SELECT n + max(created_at * ${perMs} - n) OVER (ORDER BY n) AS seq, *
    FROM (SELECT row_number() OVER (ORDER BY ${before}) AS n, * FROM ${table}))`;
}
