// Prints results: as tables for users, as JSON for programs.
import { styleText } from 'node:util';
import { now } from '../../shared/clock.ts';
import { clean, cleanJson, cleanLines } from '../../shared/sanitize-text.ts';
import { writeNow } from './stdout-stderr-and-exit.ts';

export { clean, cleanJson, cleanLines };

export type Format = 'text' | 'json';
export type Cell = string | number | boolean | null | undefined;

/**
 * Prints a result as JSON or as text. If `text` returns an array of lines, they are sanitized here. If it returns one
 * string, that string must be sanitized already, as those of table() and record() are.
 */
export async function print(
  format: Format,
  result: unknown,
  text: () => string[] | Promise<string>,
): Promise<void> {
  if (format === 'json') return printJson(result, 2);
  const drawn = await text();
  const whole = typeof drawn === 'string' ? drawn : drawn.map(clean).join('\n');
  if (whole !== '') writeNow('stdout', `${whole}\n`);
}

export function printJson(value: unknown, indent?: number): void {
  writeNow('stdout', `${cleanJson(value, indent)}\n`);
}

/** Prints a text to standard error, so that it is never mixed with piped output. */
export function hint(text: string): void {
  writeNow('stderr', `${cleanLines(text)}\n`);
}

/** Returns a table with one row per item. */
export function table<T>(items: readonly T[], columns: Record<string, (item: T) => Cell>): Promise<string> {
  const titles = Object.keys(columns).map((title) => paint('bold', title.toUpperCase()));
  return align([titles, ...items.map((item) => Object.values(columns).map((cell) => cellText(cell(item))))]);
}

/** Returns a text with one line for each field that has a value. */
export function record(fields: Record<string, Cell>): Promise<string> {
  const rows = Object.entries(fields).filter(([, value]) => value !== undefined && value !== null);
  return align(rows.map(([name, value]) => [paint('bold', clean(name)), cellText(value)]));
}

/** Returns rows as aligned columns without borders. */
async function align(rows: string[][]): Promise<string> {
  const { default: Table } = await import('cli-table3');
  const sides = ['top', 'bottom', 'left', 'right', 'mid'];
  const chars = ['middle', ...sides, ...sides.flatMap((side) => sides.map((other) => `${side}-${other}`))];
  const drawn = new Table({
    chars: Object.fromEntries(chars.map((part) => [part, ''])),
    style: { head: [], border: [], compact: true, 'padding-left': 0, 'padding-right': 2 },
  });
  drawn.push(...rows);
  return drawn.toString().replace(/ +$/gm, '');
}

/** Returns a number of machines as text. */
export const counted = (machines: number): string => `${machines} ${machines === 1 ? 'machine' : 'machines'}`;

const tints = {
  green: /^(online|completed|delivered|CONNECTED|ok)$/,
  red: /^(offline|failed|fail|timeout|lost)$/,
  yellow: /^(running|queued|pending|warn|GRACE_PERIOD)$/,
};

function cellText(value: Cell): string {
  if (value === undefined || value === null || value === '') return '-';
  if (typeof value === 'boolean') return value ? 'yes' : 'no';
  const text = clean(String(value));
  const tint = (['green', 'red', 'yellow'] as const).find((one) => tints[one].test(text));
  return tint ? paint(tint, text) : text;
}

/**
 * Colours a text if standard output is a terminal or FORCE_COLOR is set. NO_COLOR turns colours off
 * (https://no-color.org).
 */
function paint(style: 'bold' | keyof typeof tints, text: string): string {
  return process.env.NO_COLOR ? text : styleText(style, text, { stream: process.stdout });
}

/** Returns a number of bytes as text: 1536 is 1.5 KiB. */
export function size(bytes: number): string {
  const power = Math.max(0, Math.min(4, Math.floor(Math.log2(Math.max(1, bytes)) / 10)));
  const value = bytes / 1024 ** power;
  return `${power > 0 && value < 100 ? value.toFixed(1) : Math.round(value)} ${['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}`;
}

const units = { d: 86_400, h: 3600, m: 60, s: 1 };

/** Returns a duration in milliseconds as text: 90000 is 1m 30s. */
export function span(ms: number): string {
  if (ms < 1000) return `${Math.round(ms)}ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(1).replace('.0', '')}s`;
  let rest = Math.floor(ms / 1000);
  const parts = Object.entries(units).map(([unit, seconds]) => {
    const count = Math.floor(rest / seconds);
    rest %= seconds;
    return count > 0 ? `${count}${unit}` : '';
  });
  return parts.filter(Boolean).slice(0, 2).join(' ');
}

/** Returns the time since or until a timestamp as text, such as "5m ago". */
export function when(timestamp: string | null | undefined): string {
  if (!timestamp) return '-';
  const ms = Date.parse(timestamp) - now();
  return ms > 0 ? `in ${span(ms)}` : `${span(-ms)} ago`;
}

/** Returns the non-empty fields of an object as short text, except those in `without`. */
export function summary(value: object, ...without: string[]): string {
  const rest = Object.entries(value).filter(
    ([name, one]) => !without.includes(name) && one !== null && one !== '',
  );
  return rest
    .map(([name, one]) => `${name}=${shorten(typeof one === 'string' ? one : JSON.stringify(one))}`)
    .join(' ');
}

export const shorten = (text: string): string => (text.length > 60 ? `${text.slice(0, 59)}…` : text);
