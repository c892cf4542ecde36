// Timers, and the formatting of times and sizes. Pages call now() instead of Date.now().
import { signal } from '@preact/signals';

export const now = (): number => Date.now();

export const secondMs = 1_000;
export const minuteMs = 60_000;
export const hourMs = 3_600_000;
export const dayMs = 86_400_000;

/** Calls `run` once after `ms` milliseconds. The returned function cancels the timer. */
export function after(ms: number, run: () => void): () => void {
  const timer = setTimeout(run, ms);
  return () => clearTimeout(timer);
}

/** Returns a function that calls `run` after `ms` milliseconds. Calls until then have no further effect. */
export function soon(ms: number, run: () => void): { (): void; cancel(): void } {
  let stop: (() => void) | undefined;
  const cancel = (): void => {
    stop?.();
    stop = undefined;
  };
  const ask = (): void => {
    stop ??= after(ms, () => {
      stop = undefined;
      run();
    });
  };
  return Object.assign(ask, { cancel });
}

/** Calls `run` every `ms` milliseconds. The returned function stops the timer. */
export function every(ms: number, run: () => void): () => void {
  const timer = setInterval(run, ms);
  return () => clearInterval(timer);
}

/** The current time in steps of 5 s. Components that read it are drawn again at each step. */
export const clock = signal(now());
every(5_000, () => {
  if (!document.hidden) clock.value = now();
});
document.addEventListener('visibilitychange', () => {
  clock.value = now();
});

const units: readonly (readonly [name: string, ms: number])[] = [
  ['d', dayMs],
  ['h', hourMs],
  ['min', minuteMs],
  ['s', secondMs],
];

/** Returns a duration in its largest unit, such as `3 min`. Less than a second is in milliseconds. */
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
