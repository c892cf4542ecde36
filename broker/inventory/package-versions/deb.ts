// Compares versions as dpkg does (deb-version(7)).
import { compareNumbers, partsOf } from './version-parts.ts';

/** Returns a number below 0 if `a` is older than `b`, above 0 if it is newer, and 0 if both are equal. */
export function compareDeb(a: string, b: string): number {
  const [x, y] = [partsOf(a), partsOf(b)];
  return (
    compareNumbers(x.epoch, y.epoch) ||
    comparePart(x.version, y.version) ||
    comparePart(x.release ?? '', y.release ?? '')
  );
}

/**
 * Compares part by part, until two parts differ. Parts are text and numbers in turn. Text is compared character by
 * character.
 */
function comparePart(a: string, b: string): number {
  const [x, y] = [segmentsOf(a), segmentsOf(b)];
  for (let at = 0; at < Math.max(x.length, y.length); at += 1) {
    const compare = at % 2 === 0 ? compareSigns : compareNumbers;
    const order = compare(x[at] ?? '', y[at] ?? '');
    if (order !== 0) return order;
  }
  return 0;
}

/**
 * Splits a version into parts, which are text and numbers in turn. If the version starts with a number, the first
 * part is empty.
 */
function segmentsOf(text: string): string[] {
  const segments: string[] = text.match(/\d+|\D+/g) ?? [];
  return /^\d/.test(text) ? ['', ...segments] : segments;
}

function compareSigns(a: string, b: string): number {
  for (let at = 0; at < Math.max(a.length, b.length); at += 1) {
    const order = rankOf(a[at]) - rankOf(b[at]);
    if (order !== 0) return order;
  }
  return 0;
}

/**
 * Returns the order of a character: a tilde sorts before the end of the text, and letters before all other
 * characters.
 */
function rankOf(sign: string | undefined): number {
  if (sign === undefined) return 0;
  if (sign === '~') return -1;
  return /[a-z]/i.test(sign) ? sign.charCodeAt(0) : sign.charCodeAt(0) + 256;
}
