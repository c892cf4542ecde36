// Computes the due times of a cron expression in a time zone. Handles daylight saving time as cron(8) describes.
import { assertCron, type Cron, readCron, refusal } from './cron-expression.ts';
import { dayMs, findTimeZone, type TimeZone } from './time-zone.ts';

const second = 1000;

/**
 * Creates the timetable for a request. Throws validation_failed with the name of the wrong field, also for an
 * expression that is never due.
 */
export function checkedTimetable(expression: string, timezone: string): Timetable {
  assertCron(expression);
  return new Timetable(expression, timezone);
}

export class Timetable {
  readonly #cron: Cron;
  readonly #zone: TimeZone;

  /** Throws validation_failed with the name of the wrong field. */
  constructor(expression: string, timezone: string) {
    this.#cron = readCron(expression);
    const zone = findTimeZone(timezone);
    if (!zone) throw refusal('timezone', 'must be the name of a time zone, such as Europe/Berlin');
    this.#zone = zone;
  }

  /** The first due time after an instant; undefined if there is none. */
  next(after: number): number | undefined {
    return this.#cron.hourly ? this.#nextByClock(after) : this.#nextByDay(after);
  }

  /** The first `count` (at least one) due times after an instant, up to `until`. */
  times(after: number, count: number, until = Number.POSITIVE_INFINITY): number[] {
    const times: number[] = [];
    for (let at = this.next(after); at !== undefined && at <= until; at = this.next(at)) {
      times.push(at);
      if (times.length === count) break;
    }
    return times;
  }

  /** The last due time after `after` and up to `until`; undefined if there is none. */
  last(after: number, until: number): number | undefined {
    let [found] = this.times(after, 1, until);
    if (found === undefined) return undefined;
    // The search is a bisection, so its cost does not grow with the number of due times.
    for (let end = until; end - found >= second; ) {
      const middle: number = Math.floor((found + end) / 2);
      const [later] = this.times(middle, 1, until);
      if (later === undefined) end = middle;
      else found = later;
    }
    return found;
  }

  /** Returns the next due time of an expression whose hour field does not start with `*`. */
  #nextByDay(after: number): number | undefined {
    let wall: number | undefined = this.#pastRepeat(after);
    for (;;) {
      wall = this.#cron.next(wall);
      if (wall === undefined) return undefined;
      const instants = this.#zone.instantsOf(wall);
      // A wall time that the clocks skip is due right after the change. A wall time that occurs twice is due only the
      // first time.
      const instant = instants.gap ? instants.end : instants.at[0];
      if (instant > after) return instant;
    }
  }

  /**
   * Returns the wall time after which #nextByDay() searches for a due time. Usually this is the wall time of `instant`.
   * But if `instant` is in an hour that the clocks show for the second time, returns the last second of this hour.
   */
  #pastRepeat(instant: number): number {
    const wall = this.#zone.wallAt(instant);
    const instants = this.#zone.instantsOf(wall);
    if (instants.gap || instants.at[1] === undefined || instant < instants.at[1]) return wall;
    // `instant` is in a repeated hour. Its due times were due when the clocks first showed this hour.
    const [first, again] = instants.at;
    return this.#zone.transition(first, again) + this.#zone.offsetAt(first) - second;
  }

  /** Returns the next due time of an expression whose hour field starts with `*`. */
  #nextByClock(after: number): number | undefined {
    const repeated = this.#inRepeat(after);
    let wall: number | undefined = this.#zone.wallAt(after);
    for (;;) {
      wall = this.#cron.next(wall);
      if (wall === undefined) return undefined;
      const instants = this.#zone.instantsOf(wall);
      // A wall time that the clocks skip is never due.
      if (instants.gap) {
        wall = this.#zone.wallAt(instants.end) - second;
        continue;
      }
      // A wall time that occurs twice is due both times.
      const instant = instants.at.find((at) => at !== undefined && at > after);
      if (instant !== undefined) return Math.min(instant, repeated ?? instant);
    }
  }

  /**
   * If `after` is in an hour that clocks will show again, returns the first due time after they are set back. Otherwise
   * returns undefined. The search of #nextByClock() covers only later wall times. So it misses those due times
   * in the repeated hour that have no later wall time than `after`.
   */
  #inRepeat(after: number): number | undefined {
    const [offset, later] = [this.#zone.offsetAt(after), this.#zone.offsetAt(after + dayMs)];
    if (later >= offset) return undefined;
    const transition = this.#zone.transition(after, after + dayMs);
    if (transition - after > offset - later) return undefined;
    const wall = this.#cron.next(transition + later - second);
    return wall === undefined ? undefined : wall - later;
  }
}
