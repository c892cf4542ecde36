// Checks the length of the README and of the sentences in the docs, and counts words that should be avoided.
//
//   node scripts/check-words.ts                fails if this checkout exceeds a limit
//   node scripts/check-words.ts DIRECTORY      prints the same for another checkout, and never fails
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { join, relative } from 'node:path';

const own = join(import.meta.dirname, '..');
const root = process.argv[2] ?? own;
const readmeCeiling = 900;
const sentenceCeiling = 30;

interface Avoided {
  name: string;
  /** Matches the word, also as a part of an identifier. */
  pattern: RegExp;
  /**
   * How often the word may occur in agent, broker, shared, scripts and test together. Lower this number when the count
   * falls.
   */
  ceiling: number;
}

/** Words that the docs must not contain, and that the code may contain at most `ceiling` times. */
const avoided: Avoided[] = [
  { name: 'told, tell', pattern: /\b(?:told|tell|tells|telling)\b/g, ceiling: 0 },
  { name: 'whoever', pattern: /\bwhoever\b/g, ceiling: 0 },
  // A mention of the Linux user of this name is allowed.
  { name: 'nobody', pattern: /(?<!['"]|user |belongs to )\bnobody\b/g, ceiling: 0 },
  { name: 'wish', pattern: /\b(?:wish|wishes|wished|wishing)\b/g, ceiling: 0 },
  { name: 'shown', pattern: /\bshown\b/g, ceiling: 0 },
  { name: 'letGo', pattern: /\b(?:let|lets) go\b/g, ceiling: 0 },
  { name: 'demandX', pattern: /\bdemand [a-z]+(?=\()/g, ceiling: 0 },
  { name: 'openX', pattern: /\bopen [a-z]+(?: [a-z]+)*(?=\()/g, ceiling: 0 },
];

/**
 * Names that may begin with "open". They open something (`openFile`), mean something that has not ended yet
 * (`openCommand`), or are names of Node (`openAsBlob`).
 */
const allowed = new Set([
  'open as blob',
  'open command',
  'open database',
  'open directory',
  'open file',
  'open file contents',
  'open files limit',
  'open folder',
  'open free pipe',
  'open handles',
  'open history',
  'open input file',
  'open output',
  'open pair',
  'open same file',
  'open session',
  'open state',
  'open sync',
  'open target file',
  'open terminal',
  'open unlinked file',
]);

function filesBelow(folder: string, ending: RegExp): string[] {
  if (!existsSync(join(root, folder))) return [];
  const found = readdirSync(join(root, folder), { recursive: true, withFileTypes: true });
  return found
    .filter((one) => one.isFile() && ending.test(one.name) && !one.parentPath.includes('node_modules'))
    .map((one) => relative(root, join(one.parentPath, one.name)))
    .sort();
}

const read = (path: string): string => readFileSync(join(root, path), 'utf8');

/** Returns a path and its text, with identifiers split into words: `startQuietSystem` becomes `start quiet system`. */
function wordsOf(path: string, text: string): string {
  return `${path}\n${text}`
    .replaceAll(/([a-z0-9])([A-Z])/g, '$1 $2')
    .replaceAll(/[-_/.]/g, (sign) => (sign === '.' ? '. ' : ' '))
    .toLowerCase();
}

const occurrences = ({ pattern }: Avoided, text: string): number =>
  [...text.matchAll(pattern)].filter(([word]) => !allowed.has(word)).length;

/**
 * Yields the paragraphs, list items and table cells of a page with their first line numbers. Leaves out code blocks.
 */
function* paragraphsOf(page: string): Generator<{ line: number; text: string; isCell?: boolean }> {
  let line = 0;
  let paragraph = { line: 1, text: '' };
  let inCode = false;
  for (const row of `${page}\n`.split('\n')) {
    line += 1;
    const fence = row.trimStart().startsWith('```');
    if (fence) inCode = !inCode;
    const cells = row.trimStart().startsWith('|') ? row.split(/(?<!\\)\|/) : [];
    const starts = /^\s*(?:[-*]|\d+\.|#+) /.test(row);
    if (paragraph.text !== '' && (fence || inCode || starts || cells.length > 0 || row.trim() === '')) {
      yield paragraph;
      paragraph = { line, text: '' };
    }
    if (fence || inCode) continue;
    for (const text of cells) yield { line, text, isCell: true };
    if (cells.length > 0 || row.trim() === '') continue;
    if (paragraph.text === '') paragraph = { line, text: '' };
    paragraph.text += ` ${row.trim()}`;
  }
}

/** Returns a text in which each piece of inline code and each address is replaced by one word. */
function plain(text: string): string {
  return text
    .replaceAll(/`+[^`]+`+/g, 'code')
    .replaceAll(/!?\[([^\]]*)\]\([^)]*\)/g, '$1')
    .replaceAll(/https?:\/\/\S+/g, 'address')
    .replaceAll(/[*_#>]/g, '');
}

const wordCount = (text: string): number => [...text.matchAll(/[\p{L}\p{N}][^\s]*/gu)].length;
/** Returns the number of words as `wc -w` counts them, including tables, code and addresses. */
const allWords = (text: string): number => text.split(/\s+/).filter(Boolean).length;

/**
 * Returns the sentences of a page that are longer than the limit. In a table cell, a semicolon also ends a sentence.
 */
function longSentences(path: string): string[] {
  return [...paragraphsOf(read(path))].flatMap(({ line, text, isCell }) =>
    plain(text)
      .split(isCell ? /(?<=[.!?;])["')]*\s+/ : /(?<=[.!?])["')]*\s+/)
      .filter((sentence) => wordCount(sentence) > sentenceCeiling)
      .map((sentence) => `${path}:${line} ${wordCount(sentence)} words: ${sentence.trim().slice(0, 70)}…`),
  );
}

const failures: string[] = [];
const pages = ['README.md', 'CONTRIBUTING.md', 'SECURITY.md', ...filesBelow('docs', /\.md$/)].filter((path) =>
  existsSync(join(root, path)),
);
const sources = ['agent', 'broker', 'shared', 'scripts', 'test']
  .flatMap((folder) => filesBelow(folder, /\.(?:tsx?|sh|py|service|in)$/))
  .filter((path) => path !== 'scripts/check-words.ts');
const prose = pages.map((path): [string, string] => [path, wordsOf('', read(path))]);
const code = sources.map((path): string => wordsOf(path, read(path)));

console.log(`${'word'.padEnd(12)}${'docs'.padStart(7)}${'code'.padStart(7)}${'ceiling'.padStart(9)}`);
for (const word of avoided) {
  const inDocs = prose.map(([path, text]): [string, number] => [path, occurrences(word, text)]);
  const docs = inDocs.reduce((sum, [, count]) => sum + count, 0);
  const inCode = code.reduce((sum, text) => sum + occurrences(word, text), 0);
  console.log(
    `${word.name.padEnd(12)}${String(docs).padStart(7)}${String(inCode).padStart(7)}${String(word.ceiling).padStart(9)}`,
  );
  for (const [path, count] of inDocs)
    if (count > 0) failures.push(`${path} contains "${word.name}" ${count} times; use another word`);
  if (inCode > word.ceiling)
    failures.push(
      `the code contains "${word.name}" ${inCode} times, more than its ceiling of ${word.ceiling}; use another word`,
    );
}
const readme = allWords(read('README.md'));
console.log(`README: ${readme} words of at most ${readmeCeiling}`);
if (readme > readmeCeiling)
  failures.push(`README.md has ${readme} words, more than ${readmeCeiling}; shorten it`);
failures.push(...pages.flatMap(longSentences));
for (const failure of failures) console.log(failure);
if (root === own && failures.length > 0) process.exitCode = 1;
