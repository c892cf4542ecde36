// Due times of schedules, without a broker: expressions, time zones, daylight saving time, and refusals.
import { expect, test } from 'vitest';
import { checkedTimetable } from '../broker/schedules/cron-due-times.ts';
import { wordsOf } from '../broker/schedules/cron-expression.ts';
import { replacedOf, setSettledUntil } from '../broker/schedules/tracked-schedules.ts';
import { now } from '../shared/clock.ts';
import { AppError } from '../shared/errors.ts';
import { leapingClock } from './commands-fixture.ts';
import { seeded } from './seeded-random.ts';

/** Returns the next due times after an instant as text, without seconds and Z if the seconds are 0. */
function next(cron: string, zone: string, from: string, count = 3): string[] {
  const timetable = checkedTimetable(cron, zone);
  const times: string[] = [];
  for (let at: number | undefined = Date.parse(from); times.length < count; ) {
    at = timetable.next(at);
    if (at === undefined) break;
    times.push(new Date(at).toISOString().replace(/(:00)?\.000Z$/, ''));
  }
  return times;
}

function refusalOf(cron: string, zone = 'UTC'): unknown {
  try {
    checkedTimetable(cron, zone);
  } catch (error) {
    return error instanceof AppError ? [error.code, error.details.issues] : error;
  }
  return 'accepted';
}

/** Returns the CPU milliseconds of the fastest of three runs. They do not depend on how busy the machine is. */
function fastest(run: () => unknown): number {
  const times = [1, 2, 3].map(() => {
    const before = process.threadCpuUsage();
    run();
    return process.threadCpuUsage(before).user / 1000;
  });
  return Math.min(...times);
}

/** Short names for texts that are too long for the name of a test. */
const longTexts = new Map<string, string>();
function long(name: string, text: string): string {
  longTexts.set(name, text);
  return name;
}
const textOf = (named: string): string => longTexts.get(named) ?? named;

test.each([
  '',
  ' ',
  '* * * *',
  '* * * * * * *',
  '60 * * * *',
  '* 24 * * *',
  '* * 0 * *',
  '* * 32 * *',
  '* * * 13 * ',
  '* * * 0 *',
  '* * * * 8',
  '5-1 * * * *',
  '* * * * FRI-MON',
  '*/0 * * * *',
  '*/60 * * * *',
  '*/1000 * * * *',
  '5/15 * * * *',
  '*-5 * * * *',
  '1,,2 * * * *',
  '1, * * * *',
  '-1 * * * *',
  '1.5 * * * *',
  '1e1 * * * *',
  '? * * * *',
  '0 0 ? * *',
  '0 0 15W * *',
  '0 0 L-2 * *',
  'L * * * *',
  '0 0 * L *',
  '0 0 * * L',
  '0 0 * * 5#0',
  '0 0 * * 5#6',
  '0 0 * * 8L',
  '0 0 1#2 * *',
  '60,* * * * *',
  'constructor',
  '0 0 * * +MON',
  '0 0 * * SUNDAY',
  '0 0 * FOO *',
  '0 0 31 2 *',
  '0 0 30,31 2 *',
  '0 0 31 2,4,6,9,11 */2',
  // These two are never due. The first needs a last Friday of the month on day 1 or 21, but the last Friday is never
  // before the 22nd. The second needs a fifth Friday on day 1, 9, 17 or 25, but a fifth Friday is never before the
  // 29th.
  '* * */20 * FRIL',
  '0 0 */8 12 FRI#5',
  '@reboot',
  '@every 5m',
  '2026-11-21T10:00:00Z',
  '* * * * *\u0000',
  long('100,000 letters', 'x'.repeat(100_000)),
  long('a list of 50,000', `* * * * ${'1,'.repeat(50_000)}1`),
  long('100,000 blanks', ' '.repeat(100_000)),
  '٣ * * * *',
])('the expression %s is refused within 30 ms', (named) => {
  const cron = textOf(named);
  const issue = { path: 'cron', message: expect.any(String) };
  expect(refusalOf(cron)).toEqual(['validation_failed', [issue]]);
  expect(fastest(() => refusalOf(cron))).toBeLessThan(30);
});

test.each([
  'Nowhere/City',
  '',
  '+02:00',
  'UTC+1',
  'Europe/Berlin\n',
  '../etc',
  long('a name of 100,000 letters', 'x'.repeat(100_000)),
])('the time zone %s is refused within 30 ms', (named) => {
  const zone = textOf(named);
  const issue = { path: 'timezone', message: expect.any(String) };
  expect(refusalOf('* * * * *', zone)).toEqual(['validation_failed', [issue]]);
  expect(fastest(() => refusalOf('* * * * *', zone))).toBeLessThan(30);
});

test('a refusal says which part of the expression is wrong', () => {
  expect(refusalOf('0 24 * * *')).toMatchObject([
    'validation_failed',
    [{ message: 'hour: "24" must be made of values from 0 to 23, as in 0-23, 1,3 or */2' }],
  ]);
  expect(refusalOf('0 0 30 2 *')).toMatchObject([
    'validation_failed',
    [{ message: 'never fires, because none of these months has such a day' }],
  ]);
});

// Expression, time zone, start, and the next due times in UTC. The days of clock changes are those that the law of the
// zone sets.
test.each<[what: string, cron: string, zone: string, from: string, times: string[]]>([
  ['a time that is just now is past', '0 12 * * *', 'UTC', '2026-11-21T12:00:00Z', ['2026-11-22T12:00']],
  ['half a second before it is not', '0 12 * * *', 'UTC', '2026-11-21T11:59:59.500Z', ['2026-11-21T12:00']],
  [
    'with six fields, the first field is the seconds',
    '*/20 * * * * *',
    'UTC',
    '2026-11-21T12:00:30Z',
    ['2026-11-21T12:00:40', '2026-11-21T12:01'],
  ],
  [
    'a step over a range',
    '10-40/15 8 * * *',
    'UTC',
    '2026-11-21T00:00:00Z',
    ['2026-11-21T08:10', '2026-11-21T08:25', '2026-11-21T08:40', '2026-11-22T08:10'],
  ],
  [
    'names of months and days in any case',
    '0 0 * jan-mar Mon',
    'UTC',
    '2026-11-21T00:00:00Z',
    ['2027-01-04T00:00', '2027-01-11T00:00'],
  ],
  ['seven is Sunday too', '0 0 * * 7', 'UTC', '2026-11-21T00:00:00Z', ['2026-11-22T00:00']],
  [
    'a range may end with Sunday',
    '0 0 * * 5-7',
    'UTC',
    '2026-11-21T12:00:00Z',
    ['2026-11-22T00:00', '2026-11-27T00:00'],
  ],
  ['@weekly', '@weekly', 'UTC', '2026-11-21T00:00:00Z', ['2026-11-22T00:00', '2026-11-29T00:00']],
  ['@yearly', '@Yearly', 'UTC', '2026-11-21T00:00:00Z', ['2027-01-01T00:00']],
  [
    'with two day fields, a day must match one of them',
    '0 0 13 * 5',
    'UTC',
    '2026-11-01T00:00:00Z',
    [
      '2026-11-06T00:00',
      '2026-11-13T00:00',
      '2026-11-20T00:00',
      '2026-11-27T00:00',
      '2026-12-04T00:00',
      '2026-12-11T00:00',
      '2026-12-13T00:00',
    ],
  ],
  [
    'with two day fields of which one starts with *, a day must match both',
    '0 0 */2 * 1',
    'UTC',
    '2026-11-21T00:00:00Z',
    ['2026-11-23T00:00', '2026-12-07T00:00', '2026-12-21T00:00'],
  ],
  [
    'the last day of the month',
    '0 0 L * *',
    'UTC',
    '2027-01-31T00:00:00Z',
    ['2027-02-28T00:00', '2027-03-31T00:00', '2027-04-30T00:00'],
  ],
  [
    'the last day of a February that has 29',
    '0 0 L 2 *',
    'UTC',
    '2027-03-01T00:00:00Z',
    ['2028-02-29T00:00'],
  ],
  [
    'the last Friday',
    '0 0 * * FRIL',
    'UTC',
    '2026-11-21T00:00:00Z',
    ['2026-11-27T00:00', '2026-12-25T00:00'],
  ],
  [
    'the second Tuesday',
    '0 0 * * 2#2',
    'UTC',
    '2026-11-21T00:00:00Z',
    ['2026-12-08T00:00', '2027-01-12T00:00'],
  ],
  [
    'the fifth Monday, where there is one',
    '0 0 * * MON#5',
    'UTC',
    '2026-11-21T00:00:00Z',
    ['2026-11-30T00:00', '2027-03-29T00:00'],
  ],
  [
    'the day that only leap years have',
    '0 0 29 2 *',
    'UTC',
    '2026-11-21T00:00:00Z',
    ['2028-02-29T00:00', '2032-02-29T00:00'],
  ],
  ['2100 is no leap year', '0 0 29 2 *', 'UTC', '2096-03-01T00:00:00Z', ['2104-02-29T00:00']],
  ['a zone by its wall time', '0 9 * * *', 'Asia/Kolkata', '2026-11-21T00:00:00Z', ['2026-11-21T03:30']],

  // Clock changes in New York, 2026: 8 March from 2:00 to 3:00 (07:00Z), 1 November from 2:00 to 1:00 (06:00Z).
  [
    'New York, a daily time in the gap: right after it',
    '30 2 * * *',
    'America/New_York',
    '2026-03-07T12:00:00Z',
    ['2026-03-08T07:00', '2026-03-09T06:30'],
  ],
  [
    'New York, several in the gap: once',
    '0,30 2 * * *',
    'America/New_York',
    '2026-03-07T12:00:00Z',
    ['2026-03-08T07:00', '2026-03-09T06:00'],
  ],
  [
    'New York, in the gap and right after it: once',
    '0 2,3 * * *',
    'America/New_York',
    '2026-03-07T12:00:00Z',
    ['2026-03-08T07:00', '2026-03-09T06:00'],
  ],
  [
    'New York, one date in the gap: once',
    '30 2 8 3 *',
    'America/New_York',
    '2026-03-07T12:00:00Z',
    ['2026-03-08T07:00', '2027-03-08T07:30'],
  ],
  [
    'New York, asked at the end of the gap: not again',
    '30 2 * * *',
    'America/New_York',
    '2026-03-08T07:00:00Z',
    ['2026-03-09T06:30'],
  ],
  [
    'New York, hourly over the gap: what the clock shows',
    '30 * * * *',
    'America/New_York',
    '2026-03-08T05:45:00Z',
    ['2026-03-08T06:30', '2026-03-08T07:30'],
  ],
  [
    'New York, every two hours over the gap',
    '0 */2 * * *',
    'America/New_York',
    '2026-03-08T04:00:00Z',
    ['2026-03-08T05:00', '2026-03-08T08:00'],
  ],
  [
    'New York, every second of an hour that is not there: once',
    '* * 2 * * *',
    'America/New_York',
    '2026-03-08T05:00:00Z',
    ['2026-03-08T07:00', '2026-03-09T06:00'],
  ],
  [
    'New York, every second over the gap',
    '* * * * * *',
    'America/New_York',
    '2026-03-08T06:59:58Z',
    ['2026-03-08T06:59:59', '2026-03-08T07:00', '2026-03-08T07:00:01'],
  ],
  [
    'New York, a daily time that comes twice: the first',
    '30 1 * * *',
    'America/New_York',
    '2026-10-31T12:00:00Z',
    ['2026-11-01T05:30', '2026-11-02T06:30'],
  ],
  [
    'New York, several that come twice: the first each',
    '0,30 1 * * *',
    'America/New_York',
    '2026-10-31T12:00:00Z',
    ['2026-11-01T05:00', '2026-11-01T05:30', '2026-11-02T06:00'],
  ],
  [
    'New York, asked in the second pass: the next day',
    '*/10 1 * * *',
    'America/New_York',
    '2026-11-01T06:15:00Z',
    ['2026-11-02T06:00'],
  ],
  [
    'New York, asked in the second pass: right after it',
    '* 1-2 * * *',
    'America/New_York',
    '2026-11-01T06:15:00Z',
    ['2026-11-01T07:00'],
  ],
  [
    'New York, hourly through both passes',
    '30 * * * *',
    'America/New_York',
    '2026-11-01T04:45:00Z',
    ['2026-11-01T05:30', '2026-11-01T06:30', '2026-11-01T07:30'],
  ],
  [
    'New York, every half hour through both passes',
    '*/30 * * * *',
    'America/New_York',
    '2026-11-01T05:00:00Z',
    ['2026-11-01T05:30', '2026-11-01T06:00', '2026-11-01T06:30', '2026-11-01T07:00'],
  ],
  // Clock changes in Berlin, 2026: 29 March from 2:00 to 3:00 (01:00Z), 25 October from 3:00 to 2:00 (01:00Z).
  [
    'Berlin, a daily time in the gap',
    '30 2 * * *',
    'Europe/Berlin',
    '2026-03-28T12:00:00Z',
    ['2026-03-29T01:00', '2026-03-30T00:30'],
  ],
  [
    'Berlin, a daily time that comes twice',
    '30 2 * * *',
    'Europe/Berlin',
    '2026-10-24T12:00:00Z',
    ['2026-10-25T00:30', '2026-10-26T01:30'],
  ],
  [
    'Berlin, noon stays noon',
    '0 12 * * *',
    'Europe/Berlin',
    '2026-10-24T00:00:00Z',
    ['2026-10-24T10:00', '2026-10-25T11:00'],
  ],
  // Clock changes on Lord Howe Island, 2026: 5 April from 2:00 to 1:30 (15:00Z on 4 April), 4 October from 2:00 to 2:30
  // (15:30Z on 3 October).
  [
    'Lord Howe, a daily time in the gap of 30 minutes',
    '15 2 * * *',
    'Australia/Lord_Howe',
    '2026-10-03T00:00:00Z',
    ['2026-10-03T15:30', '2026-10-04T15:15'],
  ],
  [
    'Lord Howe, a daily time after the gap',
    '45 2 * * *',
    'Australia/Lord_Howe',
    '2026-10-03T00:00:00Z',
    ['2026-10-03T15:45', '2026-10-04T15:45'],
  ],
  [
    'Lord Howe, a daily time that comes twice',
    '45 1 * * *',
    'Australia/Lord_Howe',
    '2026-04-04T00:00:00Z',
    ['2026-04-04T14:45', '2026-04-05T15:15'],
  ],
  [
    'Lord Howe, every quarter through both passes',
    '*/15 * * * *',
    'Australia/Lord_Howe',
    '2026-04-04T14:15:00Z',
    ['2026-04-04T14:30', '2026-04-04T14:45', '2026-04-04T15:00', '2026-04-04T15:15', '2026-04-04T15:30'],
  ],
  // Clock changes in Havana, 2026: 8 March from 0:00 to 1:00 (05:00Z), 1 November from 1:00 to 0:00 (05:00Z).
  [
    'Havana, midnight in the gap',
    '0 0 * * *',
    'America/Havana',
    '2026-03-07T12:00:00Z',
    ['2026-03-08T05:00', '2026-03-09T04:00'],
  ],
  [
    'Havana, @daily as well',
    '@daily',
    'America/Havana',
    '2026-03-07T12:00:00Z',
    ['2026-03-08T05:00', '2026-03-09T04:00'],
  ],
  [
    'Havana, midnight that comes twice',
    '0 0 * * *',
    'America/Havana',
    '2026-10-31T12:00:00Z',
    ['2026-11-01T04:00', '2026-11-02T05:00'],
  ],
  // Apia skipped 30 December 2011: at the midnight after the 29th, the 31st began (10:00Z on 30 December).
  [
    'Apia, a daily time of the skipped day: once, when it is over',
    '0 9 * * *',
    'Pacific/Apia',
    '2011-12-29T12:00:00Z',
    ['2011-12-29T19:00', '2011-12-30T10:00', '2011-12-30T19:00'],
  ],
  [
    'Apia, hourly: what the clock shows',
    '0 * * * *',
    'Pacific/Apia',
    '2011-12-30T08:30:00Z',
    ['2011-12-30T09:00', '2011-12-30T10:00', '2011-12-30T11:00'],
  ],
])('%s', (_what, cron, zone, from, times) => {
  expect(next(cron, zone, from, times.length)).toEqual(times);
});

test('the last due time of a schedule with seconds is found as fast over ten years as over one', () => {
  const timetable = checkedTimetable('* * * * * *', 'Europe/Berlin');
  const [after, until] = [Date.parse('2016-01-01T00:00:00Z'), Date.parse('2026-11-21T12:00:00.999Z')];
  expect(timetable.last(after, until)).toBe(Date.parse('2026-11-21T12:00:00Z'));
  expect(fastest(() => timetable.last(after, until))).toBeLessThan(50);
  expect(timetable.last(until - 500, until)).toBeUndefined();
  expect(checkedTimetable('0 0 29 2 *', 'UTC').last(after, until)).toBe(Date.parse('2024-02-29T00:00:00Z'));
  expect(
    checkedTimetable('0 0 29 2 *', 'UTC').last(Date.parse('2024-02-29T00:00:00Z'), until),
  ).toBeUndefined();
});

test.each([
  ['0 0 L,* * 1', '0 0 * * 1'],
  ['0 0 1 * 1#1,*', '0 0 1 * *'],
  ['0 9,* * * *', '0 * * * *'],
])('a list with * in it is *: %s', (list, plain) => {
  const from = '2026-03-07T12:10:00Z';
  expect(next(list, 'America/New_York', from, 30)).toEqual(next(plain, 'America/New_York', from, 30));
  expect(wordsOf(list)).toBe(wordsOf(plain));
});

test('an expression is described in words', () => {
  expect(wordsOf('*/5 1-3 * * MON-FRI')).toBe(
    'Every 5 minutes, between 01:00 and 03:59, Monday through Friday',
  );
  expect(wordsOf('@daily')).toBe('At 00:00');
});

// ---- Comparison with a check of every minute of the wall clock

interface Fields {
  text: string;
  matches(wall: Date): boolean;
  hourly: boolean;
}

function pick<T>(random: () => number, from: readonly T[]): T {
  return from[Math.floor(random() * from.length)] as T;
}

function randomFields(random: () => number): Fields {
  const minute = pick(random, ['0', '30', '15,45', '*/20', '5', '10-50/20', '59']);
  const hour = pick(random, ['*', '*/2', '*/3', '0', '1', '2', '3', '1-3', '0,12', '23', '2,3', '0-23']);
  const [date, weekday] = pick(random, [
    ['*', '*'],
    ['*', '0'],
    ['1-15', '*'],
    ['1,8,29', '0,6'],
    ['*/2', '0-5'],
  ] as const);
  const within = (field: string, min: number, max: number): number[] =>
    field.split(',').flatMap((item) => {
      const [range = '', step = '1'] = item.split('/');
      const [low, high] = range === '*' ? [min, max] : range.split('-').map(Number);
      const numbers = Array.from({ length: max - min + 1 }, (_, index) => min + index);
      return numbers.filter(
        (n) => n >= (low ?? 0) && n <= (high ?? low ?? 0) && (n - (low ?? 0)) % Number(step) === 0,
      );
    });
  const sets = [within(minute, 0, 59), within(hour, 0, 23), within(date, 1, 31), within(weekday, 0, 6)];
  const both = date.startsWith('*') || weekday.startsWith('*');
  return {
    text: `${minute} ${hour} ${date} * ${weekday}`,
    hourly: hour.startsWith('*'),
    matches(wall) {
      const [minutes, hours, dates, weekdays] = sets;
      if (!minutes?.includes(wall.getUTCMinutes()) || !hours?.includes(wall.getUTCHours())) return false;
      const [isDate, isDay] = [dates?.includes(wall.getUTCDate()), weekdays?.includes(wall.getUTCDay())];
      return both ? Boolean(isDate && isDay) : Boolean(isDate || isDay);
    },
  };
}

const minuteMs = 60_000;

/** Returns the wall time of a zone at each minute. */
function wallsOf(zone: string, from: number, to: number): number[] {
  const format = new Intl.DateTimeFormat('sv-SE', {
    timeZone: zone,
    dateStyle: 'short',
    timeStyle: 'medium',
  });
  const walls: number[] = [];
  for (let at = from; at <= to; at += minuteMs)
    walls.push(Date.parse(`${format.format(at).replace(' ', 'T')}Z`));
  return walls;
}

/** Returns the due times found by checking every minute, for comparison. */
function watched({ matches, hourly }: Fields, walls: readonly number[], from: number): number[] {
  const found: number[] = [];
  let printed = (walls[0] ?? 0) - minuteMs;
  for (const [index, wall] of walls.entries()) {
    const skipped: number[] = [];
    for (let missing = printed + minuteMs; missing < wall; missing += minuteMs) skipped.push(missing);
    const now = matches(new Date(wall)) && (hourly || wall > printed);
    if (now || (!hourly && skipped.some((one) => matches(new Date(one)))))
      found.push(from + index * minuteMs);
    printed = Math.max(printed, wall);
    // An hourly expression is due at every matching wall time, also when this wall time is repeated. Skipped wall times
    // are ignored.
    if (hourly) printed = wall;
  }
  return found;
}

test.each([
  ['America/New_York', '2026-03-06', '2026-03-11'],
  ['America/New_York', '2026-10-30', '2026-11-04'],
  ['Europe/Berlin', '2027-03-26', '2027-03-31'],
  ['Europe/Berlin', '2025-10-24', '2025-10-28'],
  ['Australia/Lord_Howe', '2026-04-02', '2026-04-07'],
  ['Australia/Lord_Howe', '2026-10-01', '2026-10-06'],
  ['America/Havana', '2026-03-06', '2026-03-10'],
  ['America/Havana', '2026-10-30', '2026-11-03'],
  ['Pacific/Apia', '2011-12-28', '2012-01-02'],
  ['Africa/Casablanca', '2026-02-12', '2026-02-17'],
  ['Asia/Kathmandu', '1985-12-30', '1986-01-03'],
  ['America/Caracas', '2016-04-29', '2016-05-03'],
  ['Antarctica/Troll', '2026-03-27', '2026-03-31'],
  ['Antarctica/Troll', '2026-10-23', '2026-10-27'],
])('%s from %s to %s: the same times as a walk through every minute', (zone, first, last) => {
  const [from, to] = [Date.parse(`${first}T00:00:00Z`), Date.parse(`${last}T00:00:00Z`)];
  const random = seeded(from / minuteMs);
  // Begins a day earlier: whether a wall time is repeated or skipped depends on the wall times before it.
  const early = from - 1440 * minuteMs;
  const walls = wallsOf(zone, early, to);
  for (let round = 0; round < 60; round += 1) {
    const fields = randomFields(random);
    const timetable = checkedTimetable(fields.text, zone);
    const expected = watched(fields, walls, early).filter((at) => at > from);
    const found: number[] = [];
    for (let at = timetable.next(from); at !== undefined && at <= to; at = timetable.next(at)) found.push(at);
    expect([fields.text, found.map((at) => new Date(at).toISOString())]).toEqual([
      fields.text,
      expected.map((at) => new Date(at).toISOString()),
    ]);
    const some = from + random() * (to - from);
    expect([fields.text, timetable.next(some)]).toEqual([
      fields.text,
      expected.find((at) => at > some) ?? timetable.next(to),
    ]);
    expect([fields.text, timetable.last(from, some)]).toEqual([
      fields.text,
      expected.findLast((at) => at <= some),
    ]);
  }
});

test('due times of a replaced expression are not overlooked if the broker that changed it has a clock ahead of this one', () => {
  const clock = leapingClock({ still: true });
  const changed = now() + 200;
  const [since, until] = [changed - 3_600_000, changed].map((at) => new Date(at).toISOString());
  const replaced = [{ cron: '* * * * *', timezone: 'UTC', since: since ?? '', until: until ?? '' }];
  const settledUntil = now() - 600_000;
  const tracked = { schedule: { since: until ?? '', replaced }, settledUntil };
  setSettledUntil(tracked, settledUntil);
  expect([tracked.settledUntil, replacedOf(tracked)]).toEqual([settledUntil, undefined]);
  clock.set(changed);
  expect(replacedOf(tracked)).toBe(replaced[0]);
});
