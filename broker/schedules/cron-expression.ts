// Checks cron expressions strictly, finds their next match, and describes them in words. All times are wall times: what
// clocks in the time zone show. The wall time 09:00 is given as 09:00 UTC, in milliseconds since 1970.
import { Cron as Pattern } from 'croner';
import cronstrue from 'cronstrue';
import { AppError } from '../../shared/errors.ts';

export interface Cron {
  /**
   * True if the hour field starts with `*`. When clocks are set back, they show an hour twice. If `hourly` is true, the
   * expression is then due both times. Otherwise it is due only the first time.
   */
  hourly: boolean;
  /** Returns the first matching wall time after `wall`, in whole seconds; undefined if there is none. */
  next(wall: number): number | undefined;
}

const fields = [
  { name: 'second', min: 0, max: 59 },
  { name: 'minute', min: 0, max: 59 },
  { name: 'hour', min: 0, max: 23 },
  { name: 'day of month', min: 1, max: 31 },
  { name: 'month', min: 1, max: 12 },
  { name: 'day of week', min: 0, max: 7 },
];
/** Syntax that croner accepts, but that other programs read differently: `?`, `+`, `W` and `#L`. */
const extension = /[?+]|[\dL]W|#L/;

const nicknames: ReadonlyMap<string, string> = new Map([
  ['@yearly', '0 0 1 1 *'],
  ['@annually', '0 0 1 1 *'],
  ['@monthly', '0 0 1 * *'],
  ['@weekly', '0 0 * * 0'],
  ['@daily', '0 0 * * *'],
  ['@midnight', '0 0 * * *'],
  ['@hourly', '0 * * * *'],
]);

const fiveFields = 'minute, hour, day of month, month, day of week';
/** Maximum number of characters of an expression. That is enough to list every minute and second. */
const longest = 512;

/** Makes a validation_failed error about one field of a request. */
export function refusal(path: string, message: string): AppError {
  return new AppError('validation_failed', `${path}: ${message}`, { issues: [{ path, message }] });
}

/** Parses an expression of 5 fields, or of 6 with seconds first. Throws validation_failed. */
export function readCron(text: string): Cron {
  const parts = partsOf(text);
  const pattern = patternOf(parts);
  return {
    hourly: parts[2]?.startsWith('*') ?? false,
    next: (wall) => pattern.nextRun(new Date(wall))?.getTime(),
  };
}

/** Throws validation_failed for a malformed expression, and for one that never fires. */
export function assertCron(text: string): void {
  const parts = split(text);
  for (const [at, { name, min, max }] of fields.entries()) {
    const part = parts[at] ?? '';
    const steps = [...part.matchAll(/\/(\d+)/g)].map(([, step]) => Number(step));
    if (!extension.test(part) && steps.every((step) => step <= max) && isField(at, part)) continue;
    const given = JSON.stringify(part.slice(0, 20));
    const example = `${min}-${max}, 1,3 or */2`;
    throw refusal('cron', `${name}: ${given} must be made of values from ${min} to ${max}, as in ${example}`);
  }
  // Every date falls on every weekday within 28 years, so only 28 years are searched. A search up to the year 9999
  // takes 80 ms.
  const first = patternOf([...partsOf(text), '2000-2027']).nextRun(new Date(0));
  if (!first) throw refusal('cron', 'never fires, because none of these months has such a day');
}

/** True if croner accepts this text for the field at this index. */
function isField(at: number, part: string): boolean {
  try {
    patternOf(fields.map((_, index) => (index === at ? part : '*')));
    return true;
  } catch {
    return false;
  }
}

/** Describes an expression in English words. */
export function wordsOf(text: string): string {
  return cronstrue.toString(partsOf(text).join(' '), { use24HourTimeFormat: true });
}

/** Makes a pattern of six fields, or of seven with the years last. */
function patternOf(parts: readonly string[]): Pattern {
  const [, , , date, , weekday] = parts;
  // The rule of crontab: if a day field starts with `*`, both day fields must match; otherwise one match is enough.
  const both = [date, weekday].some((part) => part?.startsWith('*'));
  const mode = parts.length === 6 ? '6-part' : '7-part';
  return new Pattern(parts.join(' '), { utcOffset: 0, mode, domAndDow: both });
}

/** Returns the six fields of an expression. By a rule of crontab, a list that contains `*` matches every value. */
const partsOf = (text: string): string[] =>
  split(text).map((part) => (part.split(',').includes('*') ? '*' : part));

/** Splits an expression into six fields, in capitals. Throws validation_failed if it is malformed or too long. */
function split(text: string): string[] {
  if (text.length > longest) throw refusal('cron', `must have at most ${longest} characters`);
  const trimmed = text.trim();
  const nickname = nicknames.get(trimmed.toLowerCase());
  if (trimmed.startsWith('@') && !nickname)
    throw refusal('cron', `must be one of ${[...nicknames.keys()].join(', ')}`);
  const parts = (nickname ?? trimmed).toUpperCase().split(/\s+/);
  if (parts.length === 5) parts.unshift('0');
  if (parts.length !== 6) throw refusal('cron', `must have 5 fields: ${fiveFields}; or 6 with seconds first`);
  return parts;
}
