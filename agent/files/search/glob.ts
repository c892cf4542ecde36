// Globs over names and paths, matched in time that grows with pattern times name, whatever both are: the regular
// expressions that libraries make of globs take years for some patterns, and a request may hold any.
import { AppError } from '../../../shared/errors.ts';

const longestGlob = 1_000;
/** Of all that its braces stand for, and pairs of them. */
const longestExpanded = 4_000;
const mostBraces = 32;

type Test = (character: string) => boolean;
/** A character's test, or any number of characters. */
type Piece = Test | '*';
/** One step of a path, or any number of steps. */
type Segment = Piece[] | '**';

/**
 * Whether a path matches, which has slashes between its names and none at its ends. A glob without a slash is about
 * the last name alone. `*` and `?` stand for what is in a name, `**` for any number of names; `[a-z]`, `[!a-z]`,
 * `{this,that}` and `\` as everywhere.
 */
export type Glob = (path: string) => boolean;

export function compileGlob(glob: string, ignoreCase: boolean): Glob {
  if (glob.length > longestGlob) throw invalid(`longer than ${longestGlob} characters`);
  const fold = (text: string): string => (ignoreCase ? text.toLowerCase() : text);
  const patterns = expand(fold(glob)).map((pattern) => segmentsOf(pattern));
  return (path) => {
    const names = fold(path)
      .split('/')
      .map((name) => Array.from(name));
    return patterns.some((pattern) =>
      matches(pattern.length === 1 ? names.slice(-1) : names, pattern, isAny, isSegment),
    );
  };
}

const invalid = (reason: string): AppError =>
  new AppError('invalid_request', `the glob of name is ${reason}`);
const isAny = (segment: Segment): boolean => segment === '**';
const isSegment = (name: string[], segment: Segment): boolean =>
  segment !== '**' && matches(name, segment, isStar, isCharacter);
const isStar = (piece: Piece): boolean => piece === '*';
const isCharacter = (character: string, piece: Piece): boolean => piece !== '*' && piece(character);

/**
 * Only the last wildcard is ever tried anew: what an earlier one could take more, that one can take as well. So it
 * costs at most the product of both lengths.
 */
function matches<T, P>(
  items: T[],
  pattern: P[],
  isWildcard: (part: P) => boolean,
  fits: (item: T, part: P) => boolean,
): boolean {
  let [item, part] = [0, 0];
  let retry: { item: number; part: number } | undefined;
  while (item < items.length) {
    const wanted = pattern[part];
    if (wanted !== undefined && isWildcard(wanted)) {
      part += 1;
      retry = { item, part };
    } else if (wanted !== undefined && fits(items[item] as T, wanted)) {
      item += 1;
      part += 1;
    } else if (retry) {
      retry.item += 1;
      ({ item, part } = retry);
    } else return false;
  }
  return pattern.slice(part).every(isWildcard);
}

function segmentsOf(pattern: string): Segment[] {
  const segments = pattern.replace(/^\//, '').split('/');
  const parts = segments.map((text): Segment => (text === '**' ? '**' : piecesOf(text)));
  // Without a slash "**" says no more than "*".
  return parts.length === 1 && parts[0] === '**' ? [['*']] : parts;
}

function piecesOf(text: string): Piece[] {
  const characters = Array.from(text);
  const pieces: Piece[] = [];
  for (let at = 0; at < characters.length; at += 1) {
    const character = characters[at] ?? '';
    if (character === '*') pieces.push('*');
    else if (character === '?') pieces.push(() => true);
    else if (character === '[') {
      const end = classEnd(characters, at);
      pieces.push(end === -1 ? is('[') : classOf(characters.slice(at + 1, end)));
      if (end !== -1) at = end;
    } else if (character === '\\' && at + 1 < characters.length) {
      at += 1;
      pieces.push(is(characters[at] ?? ''));
    } else pieces.push(is(character));
  }
  return pieces;
}

const is =
  (wanted: string): Test =>
  (character) =>
    character === wanted;

/** A bracket right at the start of a class belongs to it. */
function classEnd(characters: string[], start: number): number {
  const first = start + (/^[!^]$/.test(characters[start + 1] ?? '') ? 2 : 1);
  return characters.indexOf(']', first + 1);
}

function classOf(characters: string[]): Test {
  const negated = characters[0] === '!' || characters[0] === '^';
  const ranges: [from: string, to: string][] = [];
  for (let at = negated ? 1 : 0; at < characters.length; at += 1) {
    const from = characters[at] ?? '';
    const ranged = characters[at + 1] === '-' && at + 2 < characters.length;
    ranges.push([from, ranged ? (characters[at + 2] ?? '') : from]);
    if (ranged) at += 2;
  }
  const within = (character: string): boolean =>
    ranges.some(([from, to]) => character >= from && character <= to);
  return (character) => within(character) !== negated;
}

/** The patterns that `{this,that}` stands for. */
function expand(glob: string): string[] {
  if (glob.split('{').length > mostBraces) throw invalid('too complex: too many braces');
  const done: string[] = [];
  const open = [glob];
  let length = 0;
  for (let next = open.pop(); next !== undefined; next = open.pop()) {
    const braces = firstBraces(next);
    if (braces) open.push(...braces.alternatives.map((one) => braces.before + one + braces.after));
    else done.push(next);
    length += next.length;
    if (length > longestExpanded) throw invalid('too complex: its braces stand for too much');
  }
  return done;
}

interface Braces {
  before: string;
  alternatives: string[];
  after: string;
}

/** The first pair of braces with a comma in it; others stand for themselves. */
function firstBraces(glob: string): Braces | undefined {
  for (let start = indexOutside(glob, '{', 0); start !== -1; start = indexOutside(glob, '{', start + 1)) {
    const end = closing(glob, start);
    const alternatives = end === -1 ? [] : alternativesOf(glob.slice(start + 1, end));
    if (alternatives.length > 1)
      return { before: glob.slice(0, start), alternatives, after: glob.slice(end + 1) };
  }
  return undefined;
}

function closing(glob: string, start: number): number {
  let depth = 0;
  for (let at = start; at < glob.length; at += 1) {
    if (glob[at] === '\\') at += 1;
    else if (glob[at] === '{') depth += 1;
    else if (glob[at] === '}') depth -= 1;
    if (depth === 0) return at;
  }
  return -1;
}

/** Where a character stands unescaped. */
function indexOutside(text: string, wanted: string, from: number): number {
  for (let at = from; at < text.length; at += 1) {
    if (text[at] === '\\') at += 1;
    else if (text[at] === wanted) return at;
  }
  return -1;
}

/** Splits at commas that stand unescaped, and in no inner pair of braces. */
function alternativesOf(text: string): string[] {
  const parts: string[] = [];
  let depth = 0;
  let start = 0;
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === '\\') at += 1;
    else if (text[at] === '{') depth += 1;
    else if (text[at] === '}') depth -= 1;
    else if (text[at] === ',' && depth === 0) {
      parts.push(text.slice(start, at));
      start = at + 1;
    }
  }
  return [...parts, text.slice(start)];
}
