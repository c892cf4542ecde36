// Makes text of a broker fit for a log and for a terminal.
const longest = 200;

export function sanitize(text: string): string {
  return text.slice(0, longest).replace(/[\p{C}\u2028\u2029]/gu, '?');
}
