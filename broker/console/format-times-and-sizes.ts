// Formats times, durations and sizes as texts for people.
import { clock, dayMs, hourMs, minuteMs, secondMs } from './timers.ts';

const units: readonly (readonly [name: string, ms: number])[] = [
  ['d', dayMs],
  ['h', hourMs],
  ['min', minuteMs],
  ['s', secondMs],
];

/** Returns a duration in its largest unit, such as `3 min`. Durations below a second are in milliseconds. */
export function durationText(ms: number): string {
  const [name, size] = units.find(([, of]) => ms >= of) ?? ['ms', 1];
  const value = ms / size;
  const isExact = value < 10 && (name === 'h' || name === 'd');
  return `${isExact ? Math.round(value * 10) / 10 : Math.round(value)} ${name}`;
}

/** Returns a time relative to now, such as `3 min ago` or `in 2 h`. */
export function relativeText(at: string): string {
  const ms = clock.value - Date.parse(at);
  if (Number.isNaN(ms)) return '';
  if (Math.abs(ms) < 5_000) return 'just now';
  return ms > 0 ? `${durationText(ms)} ago` : `in ${durationText(-ms)}`;
}

const full = new Intl.DateTimeFormat(undefined, { dateStyle: 'medium', timeStyle: 'medium', hour12: false });
const clockTime = new Intl.DateTimeFormat(undefined, {
  hour: '2-digit',
  minute: '2-digit',
  second: '2-digit',
  hour12: false,
});

/** Returns date and time in the browser's time zone. */
export const fullTime = (at: string): string => full.format(new Date(at));
export const timeOfDay = (at: string): string => clockTime.format(new Date(at));

const sizes = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];

/** Returns a number of bytes in its largest unit, such as `1.4 GiB`. */
export function bytesText(bytes: number): string {
  let value = bytes;
  let unit = 0;
  while (value >= 1024 && unit < sizes.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit > 0 && value < 10 ? value.toFixed(1) : Math.round(value)} ${sizes[unit]}`;
}
