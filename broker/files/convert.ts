// Converts file entries and paths between the protocol of the agents and REST.
import { isUtf8 } from 'node:buffer';
import type { FileEntry__Output } from '../../proto/types/farhand/agent/v1/FileEntry.ts';
import type { Api, Reply } from '../../shared/api/index.ts';
import { iso, latestInstant } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';

export type Entry = Reply<Api['files']['change']>;

/** No system call takes longer ones. */
const longestPath = 16 * 1024;
const specials = new Set(['fifo', 'socket', 'block', 'char']);

export function entryOf(entry: FileEntry__Output): Entry {
  const directory = entry.type === 'FILE_TYPE_DIRECTORY';
  const foreign = !isUtf8(entry.name) || !isUtf8(entry.path) || !isUtf8(entry.link_target ?? Buffer.alloc(0));
  const text = (bytes: Buffer): string => bytes.toString(foreign ? 'base64' : 'utf8');
  return {
    name: text(entry.name),
    path: text(entry.path),
    type: directory ? 'directory' : 'file',
    ...(!directory && { size: entry.size }),
    mode: (entry.mode & 0o777).toString(8).padStart(4, '0'),
    ...(entry.mode & 0o4000 && { setuid: true }),
    ...(entry.mode & 0o2000 && { setgid: true }),
    ...(entry.mode & 0o1000 && { sticky: true }),
    owner: entry.owner,
    group: entry.group,
    modified_at: assertTime(entry.modified_at_ms),
    ...(entry.link_target && { link_target: text(entry.link_target) }),
    ...(isSpecial(entry.special) && { special: entry.special }),
    ...(foreign && { name_encoding: 'base64' as const }),
  };
}

/** Of an answer that must hold one. */
export function assertEntry(entry: FileEntry__Output | null | undefined): FileEntry__Output {
  if (entry) return entry;
  throw new AppError('machine_error', 'the machine answered without the file’s entry');
}

/** What a machine says goes into our headers and dates only if it can (RFC 9110 section 8.8.3). */
export function assertEtag(etag: string): string {
  if (/^"[\x21\x23-\x7e]{0,200}"$/.test(etag)) return etag;
  throw new AppError('machine_error', 'the machine answered with an invalid ETag');
}

function assertTime(ms: number): string {
  if (Math.abs(ms) <= latestInstant) return iso(ms);
  throw new AppError('machine_error', 'the machine answered with an invalid time');
}

function isSpecial(text: string): text is NonNullable<Entry['special']> {
  return specials.has(text);
}

/** A path as text, or as base64 where it is not UTF-8. */
export function pathOf(path: Buffer): { path: string; path_encoding?: 'base64' } {
  return isUtf8(path)
    ? { path: path.toString('utf8') }
    : { path: path.toString('base64'), path_encoding: 'base64' };
}

/** A path of a request as it crosses the wire. Throws invalid_path for one that nothing can have. */
export function bytesOf(path: string, encoding: 'base64' | undefined): Buffer {
  const bytes = Buffer.from(path, encoding ?? 'utf8');
  // Node skips what is not base64; the rest of it would be another path.
  if (encoding && bytes.toString('base64') !== path) {
    throw new AppError('invalid_path', 'the path is not base64; in a query, + is written %2B');
  }
  if (bytes.length <= longestPath) return bytes;
  throw new AppError('invalid_path', `a path cannot be longer than ${longestPath} bytes`);
}

/** The low 12 bits that octal digits stand for. */
export function modeOf(digits: string | undefined): number | undefined {
  return digits === undefined ? undefined : Number.parseInt(digits, 8);
}
