// File names as strings with one character per byte (latin1), because names need not be UTF-8. Such strings sort by
// their bytes.

/** A path or name with one character per byte. For node:fs use bytes(), for messages toText(). */
export type Bytes = string;

/** Converts a name to the form that node:fs needs. */
export const bytes = (path: Bytes): Buffer => Buffer.from(path, 'latin1');
/** Converts a name to text for messages. Bytes that are not UTF-8 become U+FFFD. */
export const toText = (path: Bytes): string => bytes(path).toString();
/** Converts UTF-8 text, such as a setting, to a name. */
export const fromText = (path: string): Bytes => Buffer.from(path).toString('latin1');
