// Makes text from a broker safe to print in a log or terminal.
const longest = 200;

export function sanitize(text: string): string {
  return text.slice(0, longest).replace(/[\p{C}\u2028\u2029]/gu, '?');
}
