// Makes text from machines safe to print. Characters that could control a terminal are removed, replaced or escaped.

/**
 * Matches characters that control a terminal (C0, DEL, C1), Unicode line ends, invisible characters, and characters
 * that change the direction of text.
 */
// biome-ignore lint/suspicious/noControlCharactersInRegex: control characters are what is taken out
const control = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g;

/**
 * Matches escape sequences: CSI, OSC and others (ECMA-48, 5.3 to 5.6). Node's stripVTControlCharacters() is not used,
 * because its pattern takes seconds for 64 KiB of hostile text.
 */
const sequence =
  // biome-ignore lint/suspicious/noControlCharactersInRegex: escape sequences begin with one
  /(?:\u001b\[|\u009b)[0-?]*[ -/]*[@-~]|(?:\u001b[\]PX^_]|\u009d)[^\u0007\u001b\n]*(?:\u0007|\u001b\\)?|\u001b[ -/]*[0-~]/g;

/** Replaces control characters by U+FFFD, so that a value cannot control a terminal or begin a new line. */
export function clean(text: string): string {
  return text.replace(control, '\ufffd');
}

/** Sanitizes text of several lines. Removes whole escape sequences; tabs and line feeds stay. */
export function cleanLines(text: string): string {
  return text
    .replace(sequence, '')
    .replace(/\r+$/gm, '')
    .replace(control, (one) => (one === '\t' || one === '\n' ? one : '\ufffd'));
}

/** Returns a value as JSON with control characters escaped, except the line feeds of `indent`. */
export function cleanJson(value: unknown, indent?: number): string {
  return escapeControls(JSON.stringify(value, null, indent));
}

/** Escapes the control characters in a JSON text, except line feeds. */
export function escapeControls(json: string): string {
  return json.replace(control, (one) =>
    one === '\n' ? one : `\\u${one.charCodeAt(0).toString(16).padStart(4, '0')}`,
  );
}
