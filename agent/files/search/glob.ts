// Matches names and paths against globs in bounded time. Glob libraries use regular expressions, which take years for
// some patterns.
import { AppError } from '../../../shared/errors.ts';

const longestGlob = 1_000;
/** Maximum total length of all patterns that brace expansion makes, including intermediate ones. */
const longestExpanded = 4_000;

/** A test for one character, or `*` for any number of characters. */
type Piece = ((character: string) => boolean) | '*';
/** The pattern of one name of a path, or `**` for any number of names. */
type Segment = Piece[] | '**';

/** Returns true if the path matches the glob. The path must have no slash at its start or end. */
export type Glob = (path: string) => boolean;

/**
 * Compiles a glob with `*`, `?`, `**`, `[a-z]`, `[!a-z]`, `{this,that}` and `\`. Throws invalid_request if the glob is
 * too long or too complex.
 */
export function compileGlob(glob: string, ignoreCase: boolean): Glob {
  if (glob.length > longestGlob) throw invalid(`longer than ${longestGlob} characters`);
  const fold = (text: string): string => (ignoreCase ? text.toLowerCase() : text);
  const patterns = expand(fold(glob).replace(/\\(.)/gsu, (_, escaped: string) => literal(escaped))).map(
    segmentsOf,
  );
  return (path) => {
    const names = fold(path)
      .split('/')
      .map((name) => Array.from(name));
    // A glob of a single name is compared with the last name of the path.
    return patterns.some((pattern) =>
      matches(pattern.length === 1 ? names.slice(-1) : names, pattern, '**', fitsSegment),
    );
  };
}

const invalid = (reason: string): AppError => new AppError('invalid_request', `name: the glob is ${reason}`);
const fitsSegment = (name: string[], segment: Segment): boolean =>
  segment !== '**' && matches(name, segment, '*', fitsPiece);
const fitsPiece = (character: string, piece: Piece): boolean => piece !== '*' && piece(character);

/**
 * True if the pattern matches all items. After a mismatch, only the last wildcard is tried with more items, and no
 * earlier wildcard: the last one can match whatever an earlier one could. So the number of steps is at most the number
 * of items times the number of parts in the pattern.
 */
function matches<T, P>(items: T[], pattern: P[], wildcard: P, fits: (item: T, part: P) => boolean): boolean {
  let [item, part] = [0, 0];
  let retry: { item: number; part: number } | undefined;
  while (item < items.length) {
    const wanted = pattern[part];
    if (wanted === wildcard) {
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
  return pattern.slice(part).every((rest) => rest === wildcard);
}

/**
 * Replaces an escaped character by a lone surrogate, so that it loses its special meaning. Valid text never contains
 * lone surrogates.
 */
const literal = (character: string): string =>
  /^[!-~]$/.test(character) ? String.fromCharCode(0xd800 + character.charCodeAt(0)) : character;
const plain = (character: string): string =>
  /^[\ud800-\ud87f]$/u.test(character) ? String.fromCharCode(character.charCodeAt(0) - 0xd800) : character;

function segmentsOf(pattern: string): Segment[] {
  const names = pattern.replace(/^\//, '').split('/');
  // The glob "**" alone means the same as "*", because it is compared with a single name.
  if (names.length === 1 && names[0] === '**') return [['*']];
  return names.map((name) => (name === '**' ? name : piecesOf(Array.from(name))));
}

function piecesOf(characters: string[]): Piece[] {
  const pieces: Piece[] = [];
  for (let at = 0; at < characters.length; at += 1) {
    const character = characters[at] ?? '';
    // A "]" directly at the start of a class, such as []a], is a member of the class.
    const start = at + (/^[!^]$/.test(characters[at + 1] ?? '') ? 2 : 1);
    const end = character === '[' ? characters.indexOf(']', start + 1) : -1;
    if (character === '*') pieces.push('*');
    else if (character === '?') pieces.push(() => true);
    else if (end === -1) pieces.push((one) => one === plain(character));
    else {
      pieces.push(classOf(characters.slice(start, end), start > at + 1));
      at = end;
    }
  }
  return pieces;
}

function classOf(characters: string[], negated: boolean): Piece {
  const ranges: [from: string, to: string][] = [];
  for (let at = 0; at < characters.length; at += 1) {
    const from = plain(characters[at] ?? '');
    const to = characters[at + 1] === '-' ? characters[at + 2] : undefined;
    ranges.push([from, plain(to ?? from)]);
    if (to !== undefined) at += 2;
  }
  return (character) => ranges.some(([from, to]) => character >= from && character <= to) !== negated;
}

/** Expands `{this,that}` into patterns, the innermost braces first. Braces without a comma are literal. */
function expand(glob: string): string[] {
  const done: string[] = [];
  const open = [glob];
  let length = 0;
  for (let next = open.pop(); next !== undefined; next = open.pop()) {
    const [braces, inside = ''] = /\{([^{}]*)\}/.exec(next) ?? [];
    const choices = inside.includes(',') ? inside.split(',') : [literal('{') + inside + literal('}')];
    if (braces === undefined) done.push(next);
    else for (const choice of choices) open.push(next.replace(braces, () => choice));
    length += next.length;
    if (length > longestExpanded) throw invalid(`too complex: expands to over ${longestExpanded} characters`);
  }
  return done;
}
