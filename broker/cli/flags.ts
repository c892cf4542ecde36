// Values of flags: what is not good is a wrong usage that names the flag.
import { durationForm, parseDuration } from '../../shared/duration.ts';
import { UsageError } from '../../shared/errors.ts';

/** For Commander: each of these reads a value, or says what is wrong with it. */
export const milliseconds =
  (flag: string) =>
  (text: string): number => {
    if (durationForm.test(text)) return parseDuration(text);
    throw new UsageError(`${flag} ${text}: must be a duration such as 300ms, 5m or 24h`);
  };

export const count =
  (flag: string, least = 1) =>
  (text: string): number => {
    if (/^\d{1,9}$/.test(text) && Number(text) >= least) return Number(text);
    throw new UsageError(`${flag} ${text}: must be a whole number from ${least}`);
  };

export const words = (text: string): string[] =>
  text
    .split(',')
    .map((word) => word.trim())
    .filter((word) => word !== '');

/** A flag that may be told several times, or with commas. */
export const collect = (text: string, before: string[] = []): string[] => [...before, ...words(text)];

/** NAME=VALUE, several times. */
export const variables = (text: string, before: Record<string, string> = {}): Record<string, string> => {
  const at = text.indexOf('=');
  if (at < 1) throw new UsageError(`--env ${text}: must be NAME=VALUE`);
  return { ...before, [text.slice(0, at)]: text.slice(at + 1) };
};

/** Permissions, as 0644. */
export const permissions = (text: string): string => {
  if (/^[0-7]{3,4}$/.test(text)) return text;
  throw new UsageError(`--mode ${text}: must be 3 or 4 octal digits`);
};

/** An instant, or how long ago: 2h. */
export const since =
  (flag: string, now: () => number) =>
  (text: string): string => {
    const ms = durationForm.test(text) ? now() - parseDuration(text) : Date.parse(text);
    if (Number.isFinite(ms)) return new Date(ms).toISOString();
    throw new UsageError(`${flag} ${text}: must be a time such as 2h (ago) or 2026-11-21T10:00:00Z`);
  };

/** Only what was told. */
export function given<T extends object>(values: T): { [K in keyof T]?: Exclude<T[K], undefined> } {
  // Those that are undefined are gone.
  return Object.fromEntries(Object.entries(values).filter(([, value]) => value !== undefined)) as {
    [K in keyof T]?: Exclude<T[K], undefined>;
  };
}
