// Globs over names and paths, matched in time that grows with pattern times name, whatever both are: the regular
// expressions that libraries make of globs take years for some patterns, and a request may hold any.
import { AppError } from '../../../shared/errors.ts';

const longestGlob = 1_000;
/** Of all that its braces stand for, and pairs of them. */
const longestExpanded = 4_000;
const mostBraces = 32;

/** A character test, or any number of characters. */
type Piece = ((character: string) => boolean) | '*';
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
  const patterns = expand(tokensOf(fold(glob))).map(segmentsOf);
  return (path) => {
    const names = fold(path)
      .split('/')
      .map((name) => Array.from(name));
    return patterns.some((pattern) =>
      matches(pattern.length === 1 ? names.slice(-1) : names, pattern, '**', fitsSegment),
    );
  };
}

const invalid = (reason: string): AppError =>
  new AppError('invalid_request', `the glob of name is ${reason}`);
const fitsSegment = (name: string[], segment: Segment): boolean =>
  segment !== '**' && matches(name, segment, '*', fitsPiece);
const fitsPiece = (character: string, piece: Piece): boolean => piece !== '*' && piece(character);

/**
 * Only the last wildcard is ever tried anew: what an earlier one could take more, that one can take as well. So it
 * costs at most the product of both lengths.
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

/** Characters, each with the backslash before it: an escaped one equals no character that means something. */
const tokensOf = (glob: string): string[] => glob.match(/\\.|./gsu) ?? [];

function segmentsOf(tokens: string[]): Segment[] {
  const segments = splitAt(tokens[0] === '/' ? tokens.slice(1) : tokens, '/');
  const parts = segments.map((part): Segment => (part.join('') === '**' ? '**' : piecesOf(part)));
  // Without a slash "**" says no more than "*".
  return parts.length === 1 && parts[0] === '**' ? [['*']] : parts;
}

const splitAt = (tokens: string[], separator: string): string[][] => {
  const parts: string[][] = [[]];
  for (const token of tokens) {
    if (token === separator) parts.push([]);
    else parts.at(-1)?.push(token);
  }
  return parts;
};

const plain = (token: string): string => (token.length > 1 && token[0] === '\\' ? token.slice(1) : token);

function piecesOf(tokens: string[]): Piece[] {
  const pieces: Piece[] = [];
  for (let at = 0; at < tokens.length; at += 1) {
    const token = tokens[at] ?? '';
    // A bracket right at the start of a class belongs to it.
    const start = at + (/^[!^]$/.test(tokens[at + 1] ?? '') ? 2 : 1);
    const end = token === '[' ? tokens.indexOf(']', start + 1) : -1;
    if (token === '*') pieces.push('*');
    else if (token === '?') pieces.push(() => true);
    else if (end === -1) pieces.push((character) => character === plain(token));
    else {
      pieces.push(classOf(tokens.slice(start, end), start > at + 1));
      at = end;
    }
  }
  return pieces;
}

function classOf(tokens: string[], negated: boolean): Piece {
  const ranges: [from: string, to: string][] = [];
  for (let at = 0; at < tokens.length; at += 1) {
    const from = plain(tokens[at] ?? '');
    const to = tokens[at + 1] === '-' ? tokens[at + 2] : undefined;
    ranges.push([from, plain(to ?? from)]);
    if (to !== undefined) at += 2;
  }
  return (character) => ranges.some(([from, to]) => character >= from && character <= to) !== negated;
}

/** The patterns that `{this,that}` stands for. */
function expand(glob: string[]): string[][] {
  if (glob.filter((token) => token === '{').length >= mostBraces)
    throw invalid('too complex: too many braces');
  const done: string[][] = [];
  const open = [glob];
  let length = 0;
  for (let next = open.pop(); next !== undefined; next = open.pop()) {
    const alternatives = alternativesOf(next);
    if (alternatives) open.push(...alternatives);
    else done.push(next);
    length += next.length;
    if (length > longestExpanded) throw invalid('too complex: its braces stand for too much');
  }
  return done;
}

/** The glob with each choice of its first pair of braces that has a comma; other braces stand for themselves. */
function alternativesOf(glob: string[]): string[][] | undefined {
  for (let start = glob.indexOf('{'); start !== -1; start = glob.indexOf('{', start + 1)) {
    const cuts = [start];
    let depth = 0;
    let at = start;
    for (; at < glob.length; at += 1) {
      if (glob[at] === '{') depth += 1;
      else if (glob[at] === '}') depth -= 1;
      else if (glob[at] === ',' && depth === 1) cuts.push(at);
      if (depth === 0) break;
    }
    if (depth > 0 || cuts.length === 1) continue;
    const ends = [...cuts.slice(1), at];
    return cuts.map((cut, index) => [
      ...glob.slice(0, start),
      ...glob.slice(cut + 1, ends[index]),
      ...glob.slice(at + 1),
    ]);
  }
  return undefined;
}
