// Sanitizes text of a machine before a terminal shows it.

/** What a terminal obeys (C0, DEL, C1), line ends of Unicode, invisible characters, and what turns the order around. */
// biome-ignore lint/suspicious/noControlCharactersInRegex: control characters are what is taken out
const control = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069]/g;

/** CSI, OSC and its like, other escapes (ECMA-48, 5.3 to 5.6); Node's own pattern takes seconds for a hostile 64 KiB. */
const sequence =
  // biome-ignore lint/suspicious/noControlCharactersInRegex: escape sequences begin with one
  /(?:\u001b\[|\u009b)[0-?]*[ -/]*[@-~]|(?:\u001b[\]PX^_]|\u009d)[^\u0007\u001b\n]*(?:\u0007|\u001b\\)?|\u001b[ -/]*[0-~]/g;

/** One value: it can neither steer a terminal nor begin a line. */
export function clean(text: string): string {
  return text.replace(control, '\ufffd');
}

/** Several lines: escape sequences go as a whole, tabs and line ends stay. */
export function cleanLines(text: string): string {
  return text
    .replace(sequence, '')
    .replace(/\r+$/gm, '')
    .replace(control, (one) => (one === '\t' || one === '\n' ? one : '\ufffd'));
}

/** JSON that means the same and holds none of these characters; line ends are those of `indent`. */
export function cleanJson(value: unknown, indent?: number): string {
  return JSON.stringify(value, null, indent).replace(control, (one) =>
    one === '\n' ? one : `\\u${one.charCodeAt(0).toString(16).padStart(4, '0')}`,
  );
}
