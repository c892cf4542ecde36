// Compares versions as rpm does (rpm-version(7)): epoch, version and release, each in segments.
import { compareNumbers, compareTexts, partsOf } from './version-parts.ts';

/** A function that compares two parts of versions, such as the releases. */
type CompareText = (a: string, b: string) => number;

/** Returns a number below 0 if `a` is older than `b` for rpm, above 0 if `a` is newer, and 0 if both are equal. */
export const compareRpm = (a: string, b: string): number => compareWithEpoch(a, b, compareSegments);

/** Compares versions of the form [EPOCH:]VERSION[-RELEASE], as rpm and pacman do. */
export function compareWithEpoch(a: string, b: string, compare: CompareText): number {
  const [x, y] = [partsOf(a), partsOf(b)];
  const order = compareNumbers(x.epoch, y.epoch) || compare(x.version, y.version);
  // Releases are compared only if both versions have one.
  if (order !== 0 || x.release === undefined || y.release === undefined) return order;
  return compare(x.release, y.release);
}

/**
 * Compares as rpmvercmp() does. Special characters only separate segments, except for tilde and caret: 1.0~rc1 is older
 * than 1.0, and 1.0^git1 is newer than 1.0 but older than 1.0.1.
 */
function compareSegments(a: string, b: string): number {
  const segment = /~|\^|\d+|[a-z]+/gi;
  const x: readonly string[] = a.match(segment) ?? [];
  const y: readonly string[] = b.match(segment) ?? [];
  for (let at = 0; at < Math.max(x.length, y.length); at += 1) {
    const order = compareSegment(x[at], y[at]);
    if (order !== 0) return order;
  }
  return 0;
}

function compareSegment(x: string | undefined, y: string | undefined): number {
  if (x === y) return 0;
  if (x === '~' || y === '~') return x === '~' ? -1 : 1;
  // A caret is newer than the end of a version, and older than any other segment.
  if (x === '^') return y === undefined ? 1 : -1;
  if (y === '^') return x === undefined ? -1 : 1;
  if (x === undefined || y === undefined) return x === undefined ? -1 : 1;
  return compareNumbersOrLetters(x, y);
}

/** Compares segments that consist of digits or of letters. A number is newer than letters. */
export function compareNumbersOrLetters(x: string, y: string): number {
  const [isNumber, isOther] = [/^\d/.test(x), /^\d/.test(y)];
  if (isNumber !== isOther) return isNumber ? 1 : -1;
  return isNumber ? compareNumbers(x, y) : compareTexts(x, y);
}
