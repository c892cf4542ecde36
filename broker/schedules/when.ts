// When a schedule is due: cron's wall times as instants of a zone, by crontab's rule where the clocks are turned.
import { AppError } from '../../shared/errors.ts';
import { type Cron, CronError, readCron } from './cron.ts';
import { dayMs, type Zone, zoneOf } from './zone.ts';

export interface When {
  /** The first time after an instant; undefined when there is none. */
  next(after: number): number | undefined;
  /** The last time up to `until` that comes after `after`. */
  last(after: number, until: number): number | undefined;
}

const second = 1000;

/** What is read takes up to 80 KB: this many are kept, for all schedules. */
const mostKept = 256;
const kept = new Map<string, When>();

/** Reads what somebody wants to declare. Throws validation_failed that names the field. */
export function openWhen(expression: string, timezone: string): When {
  const when = readWhen(expression, timezone);
  if (when.next(0) === undefined) throw refusal('cron', 'never fires');
  return when;
}

/** The times of what was declared; the last ones asked for are at hand. */
export function readWhen(expression: string, timezone: string): When {
  const key = `${timezone} ${expression}`;
  const when = kept.get(key) ?? parse(expression, timezone);
  kept.delete(key);
  kept.set(key, when);
  const [oldest] = kept.keys();
  if (kept.size > mostKept && oldest !== undefined) kept.delete(oldest);
  return when;
}

function parse(expression: string, timezone: string): When {
  const cron = cronOf(expression);
  const zone = zoneOf(timezone);
  if (!zone) throw refusal('timezone', 'is not the name of a time zone, such as Europe/Berlin');
  return whenOf(cron, zone);
}

function cronOf(expression: string): Cron {
  try {
    return readCron(expression);
  } catch (error) {
    if (error instanceof CronError) throw refusal('cron', error.message);
    throw error;
  }
}

function refusal(path: string, message: string): AppError {
  return new AppError('validation_failed', `${path}: ${message}`, { issues: [{ path, message }] });
}

function whenOf(cron: Cron, zone: Zone): When {
  const next = cron.hourly ? byClock(cron, zone) : byDay(cron, zone);
  return {
    next,
    last(after, until) {
      let found = next(after);
      if (found === undefined || found > until) return undefined;
      // Halves what is left, so that it does not matter how many there are.
      for (let end = until; end - found >= second; ) {
        const middle: number = Math.floor((found + end) / 2);
        const later = next(middle);
        if (later !== undefined && later <= until) found = later;
        else end = middle;
      }
      return found;
    },
  };
}

/** Once a wall time: what lies in a gap comes right after it, what comes twice counts the first time. */
function byDay(cron: Cron, zone: Zone) {
  return (after: number): number | undefined => {
    let wall: number | undefined = pastRepeat(after, zone);
    for (;;) {
      wall = cron.next(wall);
      if (wall === undefined) return undefined;
      const reading = zone.reading(wall);
      const instant = reading.gap ? reading.end : reading.at[0];
      if (instant > after) return instant;
    }
  };
}

/** The wall time of an instant; the end of the repeated time for one in its second pass. */
function pastRepeat(instant: number, zone: Zone): number {
  const wall = Math.floor(instant / second) * second + zone.offsetAt(instant);
  const reading = zone.reading(wall);
  if (reading.gap || reading.at[1] === undefined || instant < reading.at[1]) return wall;
  const [first, again] = reading.at;
  return zone.turn(first, again) + zone.offsetAt(first) - second;
}

/** Whenever the clocks show it: never in a gap, both times where they show it twice. */
function byClock(cron: Cron, zone: Zone) {
  return (after: number): number | undefined => {
    const repeated = inRepeat(cron, zone, after);
    let wall: number | undefined = Math.floor(after / second) * second + zone.offsetAt(after);
    for (;;) {
      wall = cron.next(wall);
      if (wall === undefined) return undefined;
      const reading = zone.reading(wall);
      if (reading.gap) {
        wall = reading.end + zone.offsetAt(reading.end) - second;
        continue;
      }
      const instant = reading.at.find((at) => at !== undefined && at > after);
      if (instant !== undefined) return Math.min(instant, repeated ?? instant);
    }
  };
}

/** From the first pass of a repeated time: the first match of its second pass, whose wall times are no later ones. */
function inRepeat(cron: Cron, zone: Zone, after: number): number | undefined {
  const [offset, later] = [zone.offsetAt(after), zone.offsetAt(after + dayMs)];
  if (later >= offset) return undefined;
  const turn = zone.turn(after, after + dayMs);
  if (turn - after > offset - later) return undefined;
  const wall = cron.next(turn + later - second);
  return wall === undefined ? undefined : wall - later;
}
