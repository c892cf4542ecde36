// Paths of requests: one character per byte (latin1), so that names need not be UTF-8 and compare bytewise.
import { posix } from 'node:path';
import { AppError, type Code } from '../../../shared/errors.ts';
import { type Bytes, bytes, fromText, toText } from '../../../shared/tar/index.ts';

export { type Bytes, bytes, fromText, toText };

export interface Target {
  /** Absolute and lexically normalised: no dots, no slash at the end. */
  path: Bytes;
  /** The request asked for a directory: it ended in a slash or dots. */
  folder: boolean;
}

/** The path that a request names: relative ones, "~" and the empty one start at home. */
export function targetOf(requested: Buffer, home: Bytes): Target {
  const text = requested.toString('latin1');
  if (text.includes('\0')) throw new AppError('invalid_path', 'a path cannot hold a NUL byte');
  const path = posix.normalize(text.startsWith('/') ? text : `${home}/${text.replace(/^~(?=\/|$)/, '')}`);
  return {
    path: path.length > 1 && path.endsWith('/') ? path.slice(0, -1) : path,
    folder: text === '~' || /(^|\/)\.{0,2}$/.test(text),
  };
}

/** A failure about a path. */
export function fault(
  code: Code,
  path: Bytes,
  reason: string,
  details: Record<string, unknown> = {},
): AppError {
  return new AppError(code, `${toText(path)}: ${reason}`, { path: toText(path), ...details });
}

/** Throws not_a_directory where the path asks for a directory and leads to something else. */
export function assertFolder({ path, folder }: Target, stats: { isDirectory(): boolean }): void {
  if (folder && !stats.isDirectory()) throw fault('not_a_directory', path, 'not a directory');
}

/** Throws invalid_request where a mode has more than its twelve bits. */
export function assertMode(mode: number | undefined): void {
  if (mode !== undefined && mode > 0o7777)
    throw new AppError('invalid_request', 'mode has more than 12 bits');
}

/** The path above one from a directory; empty for the directory itself. */
export const parentOf = (path: Bytes): Bytes => path.slice(0, Math.max(0, path.lastIndexOf('/')));
