// Time zones: between instants and what the clocks on the wall show there, also where these are turned.

/** Wall time is in milliseconds as if the zone were UTC. */
export interface Zone {
  /** What has to be added to an instant to get the wall time. */
  offsetAt(instant: number): number;
  /** Whole seconds at which the clocks show a wall time: one, or two where they were turned back. */
  reading(wall: number): { at: [first: number, second?: number]; gap: false } | { end: number; gap: true };
  /** The first second with another offset than `from`; there must be one up to `to`. */
  turn(from: number, to: number): number;
}

const second = 1000;
/** Longer than any clock was ever turned. */
export const dayMs = 24 * 3_600_000;

const name = /^[A-Za-z][A-Za-z0-9_+\-/]{0,63}$/;
const known = new Map<string, Zone>();

/** The zone with an IANA name; undefined when there is none. */
export function zoneOf(text: string): Zone | undefined {
  const id = text.toLowerCase();
  const found = known.get(id);
  if (found || !name.test(text)) return found;
  let format: Intl.DateTimeFormat;
  try {
    const fields = { year: 'numeric', month: 'numeric', day: 'numeric' } as const;
    const time = { hour: 'numeric', minute: 'numeric', second: 'numeric', hourCycle: 'h23' } as const;
    format = new Intl.DateTimeFormat('en-US', { timeZone: text, ...fields, ...time });
  } catch {
    return undefined;
  }
  const zone = zoneOver(format);
  known.set(id, zone);
  return zone;
}

function zoneOver(format: Intl.DateTimeFormat): Zone {
  const utc = format.resolvedOptions().timeZone === 'UTC';

  function offsetAt(instant: number): number {
    if (utc) return 0;
    const whole = Math.floor(instant / second) * second;
    const [month = 1, day, year = 0, ...time] = format.format(whole).split(/\D+/).map(Number);
    return Date.UTC(year, month - 1, day, ...time) - whole;
  }

  function turn(from: number, to: number): number {
    const offset = offsetAt(from);
    let [same, other] = [Math.floor(from / second), Math.ceil(to / second)];
    while (other - same > 1) {
      const middle = Math.floor((same + other) / 2);
      if (offsetAt(middle * second) === offset) same = middle;
      else other = middle;
    }
    return other * second;
  }

  return {
    offsetAt,
    turn,
    reading(wall) {
      const [before, after] = [offsetAt(wall - dayMs), offsetAt(wall + dayMs)];
      const early = wall - before;
      const late = wall - after;
      if (before === after) return { at: [early], gap: false };
      const [isEarly, isLate] = [offsetAt(early) === before, offsetAt(late) === after];
      if (isEarly && isLate) return { at: [early, late], gap: false };
      if (isEarly || isLate) return { at: [isEarly ? early : late], gap: false };
      return { end: turn(late, early), gap: true };
    },
  };
}
