// Names as bytes: one character per byte (latin1), so that names need not be UTF-8 and compare bytewise.

/** A path or name with one character per byte; never toText or handed to `fs` as it is. */
export type Bytes = string;

/** The form in which `fs` takes it. */
export const bytes = (path: Bytes): Buffer => Buffer.from(path, 'latin1');
/** The form for messages; bytes that are not UTF-8 become U+FFFD. */
export const toText = (path: Bytes): string => bytes(path).toString();
/** From text that is UTF-8, such as a setting. */
export const fromText = (path: string): Bytes => Buffer.from(path).toString('latin1');
