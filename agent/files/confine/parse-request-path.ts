// Parses the paths of requests. Paths have one character per byte (latin1), so that names need not be UTF-8.
import { posix } from 'node:path';
import { AppError, type Code } from '../../../shared/errors.ts';
import { type Bytes, bytes, fromText, toText } from '../../../shared/tar/index.ts';

export { type Bytes, bytes, fromText, toText };

export interface Target {
  /** Absolute path. It has no parts "." or "..", and no slash at its end unless it is "/". */
  path: Bytes;
  /**
   * True if the path must be a directory. This is so if the path in the request is empty or "~", if it ends in "/", or
   * if its last part is "." or "..".
   */
  folder: boolean;
}

/** Returns the path that a request names. Relative paths, "~" and the empty path start at `home`. */
export function targetOf(requested: Buffer, home: Bytes): Target {
  const text = requested.toString('latin1');
  if (text.includes('\0')) throw new AppError('invalid_path', 'a path must not contain a NUL byte');
  const path = posix.normalize(text.startsWith('/') ? text : `${home}/${text.replace(/^~(?=\/|$)/, '')}`);
  return {
    path: path.length > 1 && path.endsWith('/') ? path.slice(0, -1) : path,
    folder: text === '~' || /(^|\/)\.{0,2}$/.test(text),
  };
}

export function fault(
  code: Code,
  path: Bytes,
  reason: string,
  details: Record<string, unknown> = {},
): AppError {
  return new AppError(code, `${toText(path)}: ${reason}`, { path: toText(path), ...details });
}

/** Throws not_a_directory if the path must be a directory and the file is not one. */
export function assertFolder({ path, folder }: Target, stats: { isDirectory(): boolean }): void {
  if (folder && !stats.isDirectory()) throw fault('not_a_directory', path, 'is not a directory');
}

/** Throws is_a_directory if the path must be a directory. */
export function assertFile({ path, folder }: Target): void {
  if (!folder) return;
  const reason =
    'the requested path must be the path of a file, but it is empty or "~", or ends in "/", "." or ".."';
  throw fault('is_a_directory', path, reason);
}

/** Throws invalid_request if a mode has more than twelve bits. */
export function assertMode(mode: number | undefined): void {
  if (mode !== undefined && mode > 0o7777)
    throw new AppError('invalid_request', 'mode: must be at most 7777 (octal)');
}

/** The parent of a relative path; empty for a path of one name. */
export const parentOf = (path: Bytes): Bytes => path.slice(0, Math.max(0, path.lastIndexOf('/')));
