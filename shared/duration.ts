// Parses and formats durations such as 300ms, 5m and 24h.

const units: Readonly<Record<string, number>> = { ms: 1, s: 1_000, m: 60_000, h: 3_600_000, d: 86_400_000 };
export const durationForm = /^\d{1,9}(ms|s|m|h|d)$/;

/** Returns the milliseconds of a text that matches `durationForm`. */
export function parseDuration(text: string): number {
  return Number.parseInt(text, 10) * (units[text.replace(/^\d+/, '')] ?? Number.NaN);
}

/** Formats milliseconds as a whole number of the largest possible unit, such as `90s` or `7d`. */
export function formatDuration(ms: number): string {
  const [unit = 'ms', length = 1] =
    Object.entries(units).findLast(([, one]) => ms > 0 && ms % one === 0) ?? [];
  return `${ms / length}${unit}`;
}
