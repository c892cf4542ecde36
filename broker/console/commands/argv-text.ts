// Converts a program with its arguments to one line of text, and back. Spaces separate words; quotes and backslashes
// work as in a shell, and nothing else is special.

/** Words that need no quotes. Among them are parameters of saved commands such as {{unit}}. */
const plain = /^(?:[\w./:=@%+,-]|\{\{\w+\}\})+$/;

export const quoted = (word: string): string =>
  plain.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;

export const argvText = (argv: readonly string[]): string => argv.map(quoted).join(' ');

const piece = /\s+|'([^']*)'|"((?:[^"\\]|\\.)*)"|\\(.)|([^\s'"\\]+)/gsy;

/** Returns the words of a line. Throws if a quotation mark is not closed. */
export function argvOf(line: string): string[] {
  const words: string[] = [];
  let word: string | undefined;
  let read = 0;
  for (const [whole, single, double, escaped, bare] of line.matchAll(piece)) {
    read += whole.length;
    const text = single ?? double?.replace(/\\(["\\$`])/g, '$1') ?? escaped ?? bare;
    if (text !== undefined) word = (word ?? '') + text;
    else if (word !== undefined) {
      words.push(word);
      word = undefined;
    }
  }
  if (read < line.length) throw new Error('The command has a quotation mark that is not closed');
  return word === undefined ? words : [...words, word];
}
