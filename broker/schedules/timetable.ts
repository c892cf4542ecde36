// The instants at which a cron expression is due in a time zone, by crontab's rule where clocks are turned.
import { assertFires, type Cron, readCron, refusal } from './cron.ts';
import { dayMs, findTimeZone, type TimeZone } from './time-zone.ts';

const second = 1000;

/** The timetable of what somebody declares. Throws validation_failed that names the field, also if it never fires. */
export function checkedTimetable(expression: string, timezone: string): Timetable {
  const timetable = new Timetable(expression, timezone);
  assertFires(expression);
  return timetable;
}

export class Timetable {
  readonly #cron: Cron;
  readonly #zone: TimeZone;

  /** Throws validation_failed that names the field. */
  constructor(expression: string, timezone: string) {
    this.#cron = readCron(expression);
    const zone = findTimeZone(timezone);
    if (!zone) throw refusal('timezone', 'is not the name of a time zone, such as Europe/Berlin');
    this.#zone = zone;
  }

  /** The first time after an instant; undefined when there is none. */
  next(after: number): number | undefined {
    return this.#cron.hourly ? this.#nextByClock(after) : this.#nextByDay(after);
  }

  /** The first `count` (at least one) times after an instant, up to `until`. */
  times(after: number, count: number, until = Number.POSITIVE_INFINITY): number[] {
    const times: number[] = [];
    for (let at = this.next(after); at !== undefined && at <= until; at = this.next(at)) {
      times.push(at);
      if (times.length === count) break;
    }
    return times;
  }

  /** The last time up to `until` that comes after `after`. */
  last(after: number, until: number): number | undefined {
    let [found] = this.times(after, 1, until);
    if (found === undefined) return undefined;
    // Halves what is left, so that it does not matter how many there are.
    for (let end = until; end - found >= second; ) {
      const middle: number = Math.floor((found + end) / 2);
      const [later] = this.times(middle, 1, until);
      if (later === undefined) end = middle;
      else found = later;
    }
    return found;
  }

  /** Once a wall time: what lies in a gap comes right after it, what comes twice counts the first time. */
  #nextByDay(after: number): number | undefined {
    let wall: number | undefined = this.#pastRepeat(after);
    for (;;) {
      wall = this.#cron.next(wall);
      if (wall === undefined) return undefined;
      const reading = this.#zone.reading(wall);
      const instant = reading.gap ? reading.end : reading.at[0];
      if (instant > after) return instant;
    }
  }

  /** The wall time of an instant; the end of the repeated time for one in its second pass. */
  #pastRepeat(instant: number): number {
    const wall = this.#zone.wallAt(instant);
    const reading = this.#zone.reading(wall);
    if (reading.gap || reading.at[1] === undefined || instant < reading.at[1]) return wall;
    const [first, again] = reading.at;
    return this.#zone.turn(first, again) + this.#zone.offsetAt(first) - second;
  }

  /** Whenever the clocks show it: never in a gap, both times where they show it twice. */
  #nextByClock(after: number): number | undefined {
    const repeated = this.#inRepeat(after);
    let wall: number | undefined = this.#zone.wallAt(after);
    for (;;) {
      wall = this.#cron.next(wall);
      if (wall === undefined) return undefined;
      const reading = this.#zone.reading(wall);
      if (reading.gap) {
        wall = this.#zone.wallAt(reading.end) - second;
        continue;
      }
      const instant = reading.at.find((at) => at !== undefined && at > after);
      if (instant !== undefined) return Math.min(instant, repeated ?? instant);
    }
  }

  /** From the first pass of a repeated time: the first match of its second pass, whose wall times are no later ones. */
  #inRepeat(after: number): number | undefined {
    const [offset, later] = [this.#zone.offsetAt(after), this.#zone.offsetAt(after + dayMs)];
    if (later >= offset) return undefined;
    const turn = this.#zone.turn(after, after + dayMs);
    if (turn - after > offset - later) return undefined;
    const wall = this.#cron.next(turn + later - second);
    return wall === undefined ? undefined : wall - later;
  }
}
