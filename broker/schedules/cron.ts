// Cron expressions: read strictly, matched as if wall time were UTC, told in words.
import { Cron as Pattern } from 'croner';
import cronstrue from 'cronstrue';

/** An expression that can fire. */
export interface Cron {
  /** The hour field starts with `*`: it goes by the clock, not by the day. */
  hourly: boolean;
  /** The first wall time after one, in whole seconds; undefined when there is none. */
  next(wall: number): number | undefined;
}

/** Why a text is no expression, for whoever wrote it. */
export class CronError extends Error {
  override readonly name = 'CronError';
}

interface Field {
  name: string;
  min: number;
  max: number;
  /** In order, from `min` on. */
  names?: readonly string[];
}

const months = ['JAN', 'FEB', 'MAR', 'APR', 'MAY', 'JUN', 'JUL', 'AUG', 'SEP', 'OCT', 'NOV', 'DEC'];
const days = ['SUN', 'MON', 'TUE', 'WED', 'THU', 'FRI', 'SAT'];
const dayOfMonth: Field = { name: 'day of month', min: 1, max: 31 };
const month: Field = { name: 'month', min: 1, max: 12, names: months };
const dayOfWeek: Field = { name: 'day of week', min: 0, max: 7, names: days };
const fields: readonly Field[] = [
  { name: 'second', min: 0, max: 59 },
  { name: 'minute', min: 0, max: 59 },
  { name: 'hour', min: 0, max: 23 },
  dayOfMonth,
  month,
  dayOfWeek,
];

const nicknames = new Map(
  Object.entries({
    '@yearly': '0 0 1 1 *',
    '@annually': '0 0 1 1 *',
    '@monthly': '0 0 1 * *',
    '@weekly': '0 0 * * 0',
    '@daily': '0 0 * * *',
    '@midnight': '0 0 * * *',
    '@hourly': '0 * * * *',
  }),
);

/** Long enough for every minute and second by number. */
const longest = 512;
const monthLengths = [[31], [28, 29], [31], [30], [31], [30], [31], [31], [30], [31], [30], [31]];

/** Reads an expression of 5 fields, or of 6 with seconds first. Throws CronError. */
export function readCron(text: string): Cron {
  const given = partsOf(text);
  const values = given.map((part, index) => valuesOf(part, fields[index] ?? dayOfWeek));
  const parts = given.map(whole);
  const [, , hour = '', date = '', , weekday = ''] = parts;
  // crontab: a day field that starts with `*` is no restriction, and does not make the other one optional.
  const both = date.startsWith('*') || weekday.startsWith('*');
  if (both) refuseNever(values, date, weekday);
  const pattern = new Pattern(parts.join(' '), { utcOffset: 0, mode: '6-part', domAndDow: both });
  return {
    hourly: hour.startsWith('*'),
    next: (wall) => pattern.nextRun(new Date(wall))?.getTime(),
  };
}

/** An expression in words. */
export function wordsOf(text: string): string {
  return cronstrue.toString(partsOf(text).map(whole).join(' '), { use24HourTimeFormat: true });
}

/** Six fields in capitals. */
function partsOf(text: string): string[] {
  if (text.length > longest) throw new CronError(`must have at most ${longest} characters`);
  const trimmed = text.trim();
  const nickname = nicknames.get(trimmed.toLowerCase());
  if (trimmed.startsWith('@') && !nickname)
    throw new CronError(`is none of ${[...nicknames.keys()].join(', ')}`);
  const parts = (nickname ?? trimmed).toUpperCase().split(/\s+/);
  if (parts.length === 5) return ['0', ...parts];
  if (parts.length === 6) return parts;
  throw new CronError(
    'must have 5 fields: minute, hour, day of month, month, day of week; or 6 with seconds first',
  );
}

/** crontab: a list with `*` in it is no restriction at all. */
function whole(part: string): string {
  return part.split(',').includes('*') ? '*' : part;
}

/** The numbers a field names; none for what only a calendar can tell (`L`, `5L`, `5#2`). Throws CronError. */
function valuesOf(part: string, field: Field): number[] {
  return part.split(',').flatMap((item) => {
    if (field === dayOfMonth && item === 'L') return [];
    const [, which, nth] = /^(\w+?)(?:L|#([1-5]))$/.exec(item) ?? [];
    if (field === dayOfWeek && which !== undefined && (nth ?? item.endsWith('L'))) {
      numberOf(which, field);
      return [];
    }
    return rangeOf(item, field);
  });
}

function rangeOf(item: string, field: Field): number[] {
  const [, from, to, step] = /^(\*|\w+)(?:-(\w+))?(?:\/(\d{1,2}))?$/.exec(item) ?? [];
  if (from === undefined || (from === '*' && to !== undefined)) {
    throw new CronError(
      `${field.name}: ${JSON.stringify(item.slice(0, 20))} is not a value, a range, * or a step of these`,
    );
  }
  if (step !== undefined && from !== '*' && to === undefined) {
    throw new CronError(
      `${field.name}: a step needs * or a range before it, as in ${from}-${field.max}/${step}`,
    );
  }
  const low = from === '*' ? field.min : numberOf(from, field);
  const high = from === '*' ? field.max : to === undefined ? low : numberOf(to, field);
  const by = Number(step ?? 1);
  if (low > high) throw new CronError(`${field.name}: the range ${item} runs backwards: write it as two`);
  if (by < 1 || by > field.max) throw new CronError(`${field.name}: a step is from 1 to ${field.max}`);
  return Array.from({ length: Math.floor((high - low) / by) + 1 }, (_, index) => low + index * by);
}

function numberOf(text: string, { name, min, max, names = [] }: Field): number {
  const named = names.indexOf(text);
  const value = named >= 0 ? named + min : /^\d{1,2}$/.test(text) ? Number(text) : Number.NaN;
  if (value >= min && value <= max) return value;
  throw new CronError(`${name}: ${JSON.stringify(text.slice(0, 20))} is not from ${min} to ${max}`);
}

/** A day that never comes; searching for it would take long. */
function refuseNever(values: readonly number[][], date: string, weekday: string): void {
  const [, , , dates = [], inMonths = []] = values;
  const [dateItems, weekdayItems] = [date.split(','), weekday.split(',')];
  const isDate = (day: number, length: number): boolean =>
    dates.includes(day) || (day === length && dateItems.includes('L'));
  // Every date falls on every day of the week in some year.
  const mayBeDay = (day: number, length: number): boolean =>
    weekdayItems.some((item) => {
      const [, nth] = /#(\d)$/.exec(item) ?? [];
      return nth ? Math.ceil(day / 7) === Number(nth) : !item.endsWith('L') || day > length - 7;
    });
  const comes = inMonths
    .flatMap((one) => monthLengths[one - 1] ?? [])
    .some((length) =>
      Array.from({ length }, (_, index) => index + 1).some(
        (day) => isDate(day, length) && mayBeDay(day, length),
      ),
    );
  if (!comes) throw new CronError('never fires: no month of these has such a day');
}
