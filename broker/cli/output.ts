// How the CLI speaks: tables for people, JSON for programs.
import { styleText } from 'node:util';
import { clean, cleanJson, cleanLines } from '../../shared/clean.ts';
import { now } from '../../shared/clock.ts';
import { put } from './told.ts';

export { clean, cleanJson, cleanLines };

export type Format = 'text' | 'json';
export type Cell = string | number | boolean | null | undefined;

/** Prints a result: as JSON whole, else the lines a person wants. */
export function print(format: Format, result: unknown, lines: () => string[]): void {
  if (format === 'json') sayJson(result, 2);
  else say(lines().map(clean).join('\n'));
}

/** One line, or several; of nothing nothing. */
export function say(text: string): void {
  if (text !== '') put('stdout', `${cleanLines(text)}\n`);
}

export function sayJson(value: unknown, indent?: number): void {
  put('stdout', `${cleanJson(value, indent)}\n`);
}

/** For a person who watches; never in the way of what is piped on. */
export function hint(text: string): void {
  put('stderr', `${cleanLines(text)}\n`);
}

/** A list: as JSON an array, else a table with a row for each. */
export async function printTable<T>(
  format: Format,
  items: readonly T[],
  columns: Record<string, (item: T) => Cell>,
): Promise<void> {
  if (format === 'json') return sayJson(items, 2);
  const titles = Object.keys(columns);
  const rows = items.map((item) => Object.values(columns).map((cell) => shown(cell(item))));
  put('stdout', `${await table([titles.map((title) => paint('bold', title.toUpperCase())), ...rows])}\n`);
}

/** A record: as JSON, else a line for each field. */
export async function printFields(
  format: Format,
  result: unknown,
  fields: Record<string, Cell>,
): Promise<void> {
  if (format === 'json') return sayJson(result, 2);
  const rows = Object.entries(fields).filter(([, value]) => value !== undefined && value !== null);
  const drawn = await table(rows.map(([name, value]) => [paint('bold', clean(name)), shown(value)]));
  put('stdout', `${drawn}\n`);
}

/** Cells under each other, without lines around them. */
async function table(rows: string[][]): Promise<string> {
  const { default: Table } = await import('cli-table3');
  const parts = ['top', 'top-mid', 'top-left', 'top-right', 'bottom', 'bottom-mid', 'bottom-left'];
  const more = ['bottom-right', 'left', 'left-mid', 'mid', 'mid-mid', 'right', 'right-mid', 'middle'];
  const drawn = new Table({
    chars: Object.fromEntries([...parts, ...more].map((part) => [part, ''])),
    style: { head: [], border: [], compact: true, 'padding-left': 0, 'padding-right': 2 },
  });
  drawn.push(...rows);
  return drawn
    .toString()
    .split('\n')
    .map((line) => line.trimEnd())
    .join('\n');
}

const tints: Readonly<Record<string, 'green' | 'red' | 'yellow'>> = {
  online: 'green',
  completed: 'green',
  delivered: 'green',
  CONNECTED: 'green',
  ok: 'green',
  offline: 'red',
  failed: 'red',
  fail: 'red',
  timeout: 'red',
  lost: 'red',
  running: 'yellow',
  queued: 'yellow',
  pending: 'yellow',
  warn: 'yellow',
  GRACE_PERIOD: 'yellow',
};

function shown(value: Cell): string {
  if (value === undefined || value === null || value === '') return '-';
  if (typeof value === 'boolean') return value ? 'yes' : 'no';
  const text = clean(String(value));
  const tint = tints[text];
  return tint ? paint(tint, text) : text;
}

/** Colour where a person sees it and has not asked for none (https://no-color.org). */
function paint(style: 'bold' | 'dim' | 'green' | 'red' | 'yellow', text: string): string {
  const { NO_COLOR, FORCE_COLOR } = process.env;
  const wanted = NO_COLOR ? false : FORCE_COLOR ? FORCE_COLOR !== '0' : process.stdout.isTTY;
  return wanted ? styleText(style, text, { validateStream: false }) : text;
}

/** 1536 as 1.5 KiB. */
export function size(bytes: number | undefined): string {
  if (bytes === undefined) return '-';
  const power = Math.max(0, Math.min(4, Math.floor(Math.log2(Math.max(1, bytes)) / 10)));
  const value = bytes / 1024 ** power;
  return `${power > 0 && value < 100 ? value.toFixed(1) : Math.round(value)} ${['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}`;
}

/** 90000 as 1m 30s. */
export function span(ms: number): string {
  if (ms < 1000) return `${Math.round(ms)}ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(1).replace('.0', '')}s`;
  const seconds = Math.floor(ms / 1000);
  const parts = [
    [Math.floor(seconds / 86_400), 'd'],
    [Math.floor(seconds / 3600) % 24, 'h'],
    [Math.floor(seconds / 60) % 60, 'm'],
    [seconds % 60, 's'],
  ].filter(([count]) => count);
  return parts
    .slice(0, 2)
    .map(([count, unit]) => `${count}${unit}`)
    .join(' ');
}

/** How long ago, or in how long. */
export function when(timestamp: string | null | undefined): string {
  if (!timestamp) return '-';
  const ms = Date.parse(timestamp) - now();
  return ms > 0 ? `in ${span(ms)}` : `${span(-ms)} ago`;
}
