// Compares versions as apk does. A version such as 1.2.3b_rc1~4f0a-r4 has numbers, a letter, suffixes, the hash of a
// commit, and the revision of the package.
import { compareNumbers, compareTexts } from './version-parts.ts';

/**
 * Kinds of the parts of a version. If the first parts that differ have different kinds, the version whose part has the
 * kind earlier in this list is newer: 1.2.1 is newer than 1.2a. Exception: if one of these two parts is a pre-release
 * suffix, its version is older: 1.2_rc1 is older than 1.2.
 */
const kinds = ['first', 'number', 'letter', 'suffix', 'suffix number', 'hash', 'revision', 'end'] as const;

interface Part {
  kind: (typeof kinds)[number];
  text: string;
}

const preReleases = ['alpha', 'beta', 'pre', 'rc'];
/** Suffixes in ascending order. */
const suffixes = [...preReleases, 'cvs', 'svn', 'git', 'hg', 'p'];

/** Returns a number below 0 if `a` is older than `b` for apk, above 0 if `a` is newer, and 0 if both are equal. */
export function compareApk(a: string, b: string): number {
  const [x, y] = [partsOf(a), partsOf(b)];
  for (let at = 0; ; at += 1) {
    const [one, other] = [x[at] ?? end, y[at] ?? end];
    const order = compareParts(one, other);
    if (order !== 0 || (one === end && other === end)) return order;
  }
}

const end: Part = { kind: 'end', text: '' };

function partsOf(version: string): Part[] {
  const [, first = '', numbers = '', letter = '', names = '', hash = '', revision = ''] =
    /^(\d*)((?:\.\d+)*)([a-z]?)((?:_[a-z]+\d*)*)(?:~([0-9a-f]+))?(?:-r(\d+))?/.exec(version) ?? [];
  const parts: Part[] = [
    { kind: 'first', text: first },
    ...numbers.split('.').map((text): Part => ({ kind: 'number', text })),
    { kind: 'letter', text: letter },
    ...[...names.matchAll(/_([a-z]+)(\d*)/g)].flatMap(([, text = '', number = '']): Part[] => [
      { kind: 'suffix', text },
      { kind: 'suffix number', text: number },
    ]),
    { kind: 'hash', text: hash },
    { kind: 'revision', text: revision },
  ];
  return parts.filter(({ text }) => text !== '');
}

function compareParts(x: Part, y: Part): number {
  if (x.kind !== y.kind) {
    if (isPreRelease(x) !== isPreRelease(y)) return isPreRelease(x) ? -1 : 1;
    return kinds.indexOf(y.kind) - kinds.indexOf(x.kind);
  }
  if (x.kind === 'suffix') return suffixes.indexOf(x.text) - suffixes.indexOf(y.text);
  // A number with a leading zero counts as a fraction, unless it is the first number: 1.05 is older than 1.5.
  const isFraction = x.kind === 'number' && (x.text.startsWith('0') || y.text.startsWith('0'));
  if (isFraction || x.kind === 'letter' || x.kind === 'hash') return compareTexts(x.text, y.text);
  return compareNumbers(x.text, y.text);
}

const isPreRelease = ({ kind, text }: Part): boolean => kind === 'suffix' && preReleases.includes(text);
