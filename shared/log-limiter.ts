// Limits how many log lines of each kind are written per minute, and reports how many were dropped.
import { after } from './clock.ts';

const periodMs = 60_000;

interface Period<T> {
  first: T;
  taken: number;
  more: number;
  cancel(): void;
}

export class LogLimiter<T> {
  readonly #most: number;
  readonly #mostKinds: number;
  readonly #report: (first: T, more: number) => void;
  readonly #periods = new Map<string, Period<T>>();

  /**
   * Allows `most` lines of each kind per period of a minute. After a period with dropped lines, calls `report`
   * with the `value` of the first line in the period, and the number of dropped lines.
   */
  constructor(most: number, report: (first: T, more: number) => void, mostKinds = 1_000) {
    this.#most = most;
    this.#report = report;
    this.#mostKinds = mostKinds;
  }

  /** Counts one line of a kind. Returns true if the line may be logged. `value` describes the line for `report`. */
  take(kind: string, value: T): boolean {
    // If `mostKinds` kinds already have a period, all further kinds share one more period. Otherwise an attacker could
    // fill the memory with new kinds.
    const key = this.#periods.has(kind) || this.#periods.size < this.#mostKinds ? kind : '';
    const period = this.#periods.get(key) ?? this.#begin(key, value);
    if (period.taken < this.#most) period.taken += 1;
    else period.more += 1;
    return period.more === 0;
  }

  /** Ends the current period of every kind, and reports the lines that were dropped in it. */
  close(): void {
    for (const key of [...this.#periods.keys()]) this.#end(key);
  }

  #begin(key: string, first: T): Period<T> {
    const period = { first, taken: 0, more: 0, cancel: after(periodMs, () => this.#end(key)) };
    this.#periods.set(key, period);
    return period;
  }

  #end(key: string): void {
    const period = this.#periods.get(key);
    this.#periods.delete(key);
    period?.cancel();
    if (period && period.more > 0) this.#report(period.first, period.more);
  }
}
