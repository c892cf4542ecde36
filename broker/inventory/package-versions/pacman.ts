// Compares versions as pacman does (vercmp(8)). The rule is similar to rpm's, but 1.0beta is older than 1.0,
// and the number of separators between segments counts.
import { compareNumbersOrLetters, compareWithEpoch } from './rpm.ts';

/** Returns a number below 0 if `a` is older than `b` for pacman, above 0 if `a` is newer, and 0 if both are equal. */
export const comparePacman = (a: string, b: string): number => compareWithEpoch(a, b, compareSegments);

/**
 * Matches the pieces of a version. A piece is a segment of digits or of letters, with the separators before it.
 * Separators at the end are a piece too.
 */
const pieces = /([^0-9a-z]*)(\d+|[a-z]+)|([^0-9a-z]+)$/gi;

function compareSegments(a: string, b: string): number {
  const [x, y] = [[...a.matchAll(pieces)], [...b.matchAll(pieces)]];
  for (let at = 0; ; at += 1) {
    const [one, two] = [x[at], y[at]];
    const [, signs = '', segment] = one ?? [];
    const [, others = '', other] = two ?? [];
    if (segment === undefined || other === undefined) return compareRests(one?.[0] ?? '', two?.[0] ?? '');
    if (signs.length !== others.length) return signs.length - others.length;
    const order = compareNumbersOrLetters(segment, other);
    if (order !== 0) return order;
  }
}

/**
 * Compares the remainders of two versions after their equal segments. At most one remainder has a segment. A remainder
 * that begins with letters makes its version older: 1.0beta is older than 1.0.
 */
function compareRests(a: string, b: string): number {
  // If both versions have a remainder, separators at the start of the remainders are ignored.
  const [x, y] = a && b ? [withoutSigns(a), withoutSigns(b)] : [a, b];
  if (x === y) return 0;
  return (x === '' && !/^[a-z]/i.test(y)) || /^[a-z]/i.test(x) ? -1 : 1;
}

const withoutSigns = (text: string): string => text.replace(/^[^0-9a-z]+/i, '');
