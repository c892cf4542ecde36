// Rows that are only ever added, numbered as they come and by their time: what is since then is found without an index.
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

/** Below those of all rows of that time and later. */
export function numberBefore(at: Date): number {
  return at.getTime() * perMs - 1;
}

/** Rows of that time and later, after that number. */
export function rowsSince(at: Date | undefined, after = at && numberBefore(at)): Condition {
  return at && after !== undefined ? ['seq > ? AND created_at >= ?', after, at.getTime()] : undefined;
}

/** SQL for a step, which never changes: the rows of a table with such a `number`, in the order they had before. */
export function renumbered(table: string, order: string): string {
  return `(SELECT n + max(created_at * 1000 - n) OVER (ORDER BY n) AS number, *
    FROM (SELECT row_number() OVER (ORDER BY ${order}) AS n, * FROM ${table}))`;
}
