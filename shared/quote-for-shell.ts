// Quotes a text for a command line that a person pastes into a shell.

/** Quotes a text as one word of a POSIX shell if it needs quotes. */
export function quoteForShell(text: string): string {
  return /^[\w.:/@%+-]+$/.test(text) ? text : `'${text.replaceAll("'", String.raw`'\''`)}'`;
}
