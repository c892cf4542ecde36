// Cron expressions: checks them strictly, finds the next match of a wall time (as if in UTC),
// and describes them in words.
import { Cron as Pattern } from 'croner';
import cronstrue from 'cronstrue';
import { AppError } from '../../shared/errors.ts';

export interface Cron {
  /**
   * Whether the hour field starts with `*`. If so, the expression runs whenever clocks show one of its times.
   */
  hourly: boolean;
  /** The first matching wall time after `wall`, in whole seconds; undefined if there is none. */
  next(wall: number): number | undefined;
}

interface Field {
  name: string;
  min: number;
  max: number;
  /** Names of the values, in order from `min` on. */
  names?: readonly string[];
}

const months = ['JAN', 'FEB', 'MAR', 'APR', 'MAY', 'JUN', 'JUL', 'AUG', 'SEP', 'OCT', 'NOV', 'DEC'];
const days = ['SUN', 'MON', 'TUE', 'WED', 'THU', 'FRI', 'SAT'];
const fields: readonly Field[] = [
  { name: 'second', min: 0, max: 59 },
  { name: 'minute', min: 0, max: 59 },
  { name: 'hour', min: 0, max: 23 },
  { name: 'day of month', min: 1, max: 31 },
  { name: 'month', min: 1, max: 12, names: months },
  { name: 'day of week', min: 0, max: 7, names: days },
];

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
/** Longest expression in characters; enough to list every minute and second. */
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

/** Throws validation_failed for an expression that never fires. */
export function assertFires(text: string): void {
  // Only 28 years are searched: in them every date falls on every weekday.
  // A search to the year 9999 takes 80 ms.
  const first = patternOf([...partsOf(text), '2000-2027']).nextRun(new Date(0));
  if (!first) throw refusal('cron', 'never fires: no month of these has such a day');
}

/** Describes an expression in words. */
export function wordsOf(text: string): string {
  return cronstrue.toString(partsOf(text).join(' '), { use24HourTimeFormat: true });
}

/** Makes a pattern of six fields, or of seven with the years last. */
function patternOf(parts: readonly string[]): Pattern {
  const [, , , date, , weekday] = parts;
  // crontab's rule: if a day field starts with `*`, both day fields must match;
  // otherwise one of them is enough.
  const both = [date, weekday].some((part) => part?.startsWith('*'));
  const mode = parts.length === 6 ? '6-part' : '7-part';
  return new Pattern(parts.join(' '), { utcOffset: 0, mode, domAndDow: both });
}

/** Splits an expression into six fields, in capitals. Throws validation_failed. */
function partsOf(text: string): string[] {
  if (text.length > longest) throw refusal('cron', `must have at most ${longest} characters`);
  const trimmed = text.trim();
  const nickname = nicknames.get(trimmed.toLowerCase());
  if (trimmed.startsWith('@') && !nickname)
    throw refusal('cron', `is none of ${[...nicknames.keys()].join(', ')}`);
  const parts = (nickname ?? trimmed).toUpperCase().split(/\s+/);
  if (parts.length === 5) parts.unshift('0');
  if (parts.length !== 6) throw refusal('cron', `must have 5 fields: ${fiveFields}; or 6 with seconds first`);
  for (const [index, field] of fields.entries()) {
    for (const item of parts[index]?.split(',') ?? []) assertItem(item, field);
  }
  // crontab's rule: a list that contains `*` matches every value.
  return parts.map((part) => (part.split(',').includes('*') ? '*' : part));
}

/** Checks one item in the list of a field. Throws validation_failed. */
function assertItem(item: string, field: Field): void {
  const { name, min, max } = field;
  const wrong = (problem: string): AppError => refusal('cron', `${name}: ${problem}`);
  if (name === 'day of month' && item === 'L') return;
  const [, day = item] = name === 'day of week' ? (/^(\w+?)(?:L|#[1-5])$/.exec(item) ?? []) : [];
  const [, from, to, step] = /^(\*|\w+)(?:-(\w+))?(?:\/(\d{1,2}))?$/.exec(day) ?? [];
  if (from === undefined || (from === '*' && to !== undefined))
    throw wrong(`${JSON.stringify(item.slice(0, 20))} is not a value, a range, * or a step of these`);
  const low = from === '*' ? min : numberOf(from, field);
  const high = to === undefined ? low : numberOf(to, field);
  if (low > high) throw wrong(`the range ${item} runs backwards: write it as two`);
  if (step === undefined) return;
  if (from !== '*' && to === undefined)
    throw wrong(`a step needs * or a range before it, as in ${from}-${max}/${step}`);
  if (Number(step) < 1 || Number(step) > max) throw wrong(`a step is from 1 to ${max}`);
}

function numberOf(text: string, { name, min, max, names = [] }: Field): number {
  const named = names.indexOf(text);
  const value = named >= 0 ? named + min : /^\d{1,2}$/.test(text) ? Number(text) : Number.NaN;
  if (value >= min && value <= max) return value;
  throw refusal('cron', `${name}: ${JSON.stringify(text.slice(0, 20))} is not from ${min} to ${max}`);
}
