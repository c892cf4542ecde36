// Converts between instants and the wall time of a time zone, including changes to and from daylight saving time.

/**
 * The instants at which clocks show a wall time. Usually there is one instant. There are two if the clocks are set back
 * and show the wall time again. If the clocks skip the wall time, there is only `end`, the end of the gap.
 */
export type Instants = { at: [first: number, second?: number]; gap: false } | { end: number; gap: true };

const second = 1000;
/** One day in milliseconds. A time zone changes its offset by at most one day, when it moves across the date line. */
export const dayMs = 24 * 3_600_000;

const zoneName = /^[A-Za-z][A-Za-z0-9_+\-/]{0,63}$/;
/** Time zones by lower-case name; cached because creating one takes some milliseconds. */
const zones = new Map<string, TimeZone>();

/** The time zone with an IANA name; undefined if there is none. */
export function findTimeZone(text: string): TimeZone | undefined {
  const id = text.toLowerCase();
  const found = zones.get(id);
  if (found || !zoneName.test(text)) return found;
  try {
    const zone = new TimeZone(text);
    zones.set(id, zone);
    return zone;
  } catch {
    return undefined;
  }
}

/**
 * A time zone. A wall time is the time that clocks in the zone show, in milliseconds since 1970 as if the zone were
 * UTC.
 */
export class TimeZone {
  readonly #format: Intl.DateTimeFormat;
  readonly #isUtc: boolean;

  /** Throws RangeError for an unknown name. */
  constructor(name: string) {
    const fields = { year: 'numeric', month: 'numeric', day: 'numeric' } as const;
    const time = { hour: 'numeric', minute: 'numeric', second: 'numeric', hourCycle: 'h23' } as const;
    this.#format = new Intl.DateTimeFormat('en-US', { timeZone: name, ...fields, ...time });
    this.#isUtc = this.#format.resolvedOptions().timeZone === 'UTC';
  }

  /** Milliseconds to add to an instant to get the wall time. */
  offsetAt(instant: number): number {
    if (this.#isUtc) return 0;
    const whole = Math.floor(instant / second) * second;
    const [month = 1, day, year = 0, ...time] = this.#format.format(whole).split(/\D+/).map(Number);
    return Date.UTC(year, month - 1, day, ...time) - whole;
  }

  /** The wall time of an instant, in whole seconds. */
  wallAt(instant: number): number {
    return Math.floor(instant / second) * second + this.offsetAt(instant);
  }

  /** Returns the instants at which clocks in the zone show this wall time, which must be in whole seconds. */
  instantsOf(wall: number): Instants {
    const [before, after] = [this.offsetAt(wall - dayMs), this.offsetAt(wall + dayMs)];
    const [early, late] = [wall - before, wall - after];
    if (before === after) return { at: [early], gap: false };
    const [isEarly, isLate] = [this.offsetAt(early) === before, this.offsetAt(late) === after];
    if (isEarly && isLate) return { at: [early, late], gap: false };
    if (isEarly || isLate) return { at: [isEarly ? early : late], gap: false };
    return { end: this.transition(late, early), gap: true };
  }

  /** Returns the first second after `from` with another offset. The offset must change between `from` and `to`. */
  transition(from: number, to: number): number {
    const offset = this.offsetAt(from);
    let [same, other] = [Math.floor(from / second), Math.ceil(to / second)];
    while (other - same > 1) {
      const middle = Math.floor((same + other) / 2);
      if (this.offsetAt(middle * second) === offset) same = middle;
      else other = middle;
    }
    return other * second;
  }
}
