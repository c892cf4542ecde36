// Compares versions as apk does: numbers, a letter, suffixes and the revision of the package, as in 1.2.3b_rc1-r4.
import { compareNumbers } from './deb.ts';

/**
 * Suffixes in ascending order. A version with a suffix of a pre-release is older than one without a suffix.
 */
const suffixes = ['alpha', 'beta', 'pre', 'rc', '', 'cvs', 'svn', 'git', 'hg', 'p'];

interface Version {
  numbers: string[];
  letter: string;
  suffixes: { rank: number; number: string }[];
  /** Is empty if the version has no revision. A version without a revision is older than one with revision 0. */
  revision: string;
}

/** Compares two versions by the rule of apk. The result has the meaning of compareDeb()'s result. */
export function compareApk(a: string, b: string): number {
  const [x, y] = [parse(a), parse(b)];
  return (
    compareLists(x.numbers, y.numbers, compareNumber) ||
    compareText(x.letter, y.letter) ||
    compareLists(x.suffixes, y.suffixes, compareSuffix) ||
    Number(x.revision !== '') - Number(y.revision !== '') ||
    compareNumbers(x.revision, y.revision)
  );
}

function parse(version: string): Version {
  const [, numbers = '', letter = '', rest = '', revision = ''] =
    /^([\d.]*)([a-z]?)((?:_[a-z]+\d*)*)(?:~[0-9a-f]+)?(?:-r(\d+))?/.exec(version) ?? [];
  const found = [...rest.matchAll(/_([a-z]+)(\d*)/g)];
  return {
    numbers: numbers.split('.'),
    letter,
    suffixes: found.map(([, name = '', number = '']) => ({ rank: suffixes.indexOf(name), number })),
    revision,
  };
}

function compareLists<T>(
  a: readonly T[],
  b: readonly T[],
  compare: (x: T | undefined, y: T | undefined, at: number) => number,
): number {
  for (let at = 0; at < Math.max(a.length, b.length); at += 1) {
    const order = compare(a[at], b[at], at);
    if (order !== 0) return order;
  }
  return 0;
}

/**
 * Compares two numbers of a version. A number with a leading zero counts as a fraction, unless it is the
 * first number: 1.05 is older than 1.5.
 */
function compareNumber(x: string | undefined, y: string | undefined, at: number): number {
  if (x === undefined || y === undefined) return Number(x !== undefined) - Number(y !== undefined);
  return at > 0 && (x.startsWith('0') || y.startsWith('0')) ? compareText(x, y) : compareNumbers(x, y);
}

const none = { rank: suffixes.indexOf(''), number: '' };

function compareSuffix(x = none, y = none): number {
  return x.rank - y.rank || compareNumbers(x.number, y.number);
}

const compareText = (x: string, y: string): number => (x < y ? -1 : Number(x > y));
