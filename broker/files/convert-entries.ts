// Converts file entries and paths between the agent protocol and REST.
import { isUtf8 } from 'node:buffer';
import type { FileEntry__Output } from '../../proto/types/farhand/agent/v1/FileEntry.ts';
import type { Api, Reply } from '../../shared/api/route-table.ts';
import { iso, latestInstant } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';

export type Entry = Reply<Api['files']['change']>;

/** Longest path in bytes; no system call accepts longer paths. */
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

/** The entry in a machine's answer. Throws machine_error if the entry is missing. */
export function assertEntry(entry: FileEntry__Output | null | undefined): FileEntry__Output {
  if (entry) return entry;
  throw new AppError('machine_error', 'the machine answered without the file’s entry');
}

/** Checks a machine's ETag before it is sent in a header (RFC 9110 section 8.8.3). Throws machine_error. */
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

/** A path as text, or as base64 if the path is not UTF-8. */
export function pathOf(path: Buffer): { path: string; path_encoding?: 'base64' } {
  return isUtf8(path)
    ? { path: path.toString('utf8') }
    : { path: path.toString('base64'), path_encoding: 'base64' };
}

/**
 * The bytes of a path in a request, as sent to the agent. Throws invalid_path for bad base64 or a too long
 * path.
 */
export function bytesOf(path: string, encoding: 'base64' | undefined): Buffer {
  const bytes = Buffer.from(path, encoding ?? 'utf8');
  // Node ignores characters that are not base64, so a mistyped path would become another path.
  if (encoding && bytes.toString('base64') !== path) {
    throw new AppError('invalid_path', 'the path is not base64; in a query, + is written %2B');
  }
  if (bytes.length <= longestPath) return bytes;
  throw new AppError('invalid_path', `a path cannot be longer than ${longestPath} bytes`);
}

/** Parses the octal digits of a file mode. */
export function modeOf(digits: string | undefined): number | undefined {
  return digits === undefined ? undefined : Number.parseInt(digits, 8);
}
