// Computes a fingerprint of a path on a machine. If two fingerprints of a path differ, the path has changed between
// them. With fingerprints, the broker finds changes that happened while it did not watch the path.
import { createHash } from 'node:crypto';
import type { FileEntry__Output } from '../../proto/types/farhand/agent/v1/FileEntry.ts';
import type { AgentStub, CallOptions } from '../../shared/agent-rpcs.ts';
import { AppError } from '../../shared/errors.ts';
import type { Schedule } from '../state/index.ts';

export type WatchedPath = Pick<NonNullable<Schedule['on_change']>, 'path' | 'recursive'>;

/**
 * Maximum number of entries of a directory that are compared. All larger directories have the same fingerprint, so a
 * comparison finds no changes in them.
 */
const mostEntries = 10_000;
const deadline_ms = 120_000;

/** True for the errors of a path that does not exist. */
export const isMissing = (error: unknown): boolean =>
  error instanceof AppError && (error.code === 'file_not_found' || error.code === 'not_a_directory');

/**
 * Returns the fingerprint of a path, or `missing` if the path does not exist. Throws all other errors of reading the
 * path.
 */
export async function fingerprintOf(
  stub: AgentStub,
  watched: WatchedPath,
  options: CallOptions,
): Promise<string> {
  try {
    const path = Buffer.from(watched.path);
    const single = { ...options, deadline_ms, lane: 'single' } as const;
    const { entry, etag } = await stub.statFile({ path, sha256: false }, single);
    if (entry?.type !== 'FILE_TYPE_DIRECTORY') return digestOf([etag]);
    const lines: string[] = [];
    for await (const some of entriesIn(stub, path, watched.recursive, options)) {
      lines.push(...some.map(lineOf));
      if (lines.length > mostEntries) return 'large';
    }
    return digestOf(lines.sort());
  } catch (error) {
    if (isMissing(error)) return 'missing';
    throw error;
  }
}

/** Yields at most mostEntries + 1 entries of a directory. With `recursive`, includes the entries of subdirectories. */
async function* entriesIn(
  stub: AgentStub,
  path: Buffer,
  recursive: boolean,
  options: CallOptions,
): AsyncGenerator<FileEntry__Output[]> {
  const limit = mostEntries + 1;
  if (recursive) {
    const everything = { path, name: '*', content: '', ignore_case: false, hidden: true, limit };
    for await (const { matches } of stub.searchFiles(everything, { ...options, lane: 'bulk' }))
      yield (matches?.matches ?? []).flatMap(({ entry }) => entry ?? []);
  } else {
    const request = { path, hidden: true, offset: 0, limit };
    for await (const { batch } of stub.listFiles(request, { ...options, lane: 'short' }))
      yield batch?.entries ?? [];
  }
}

/**
 * Returns a digest of the fields of an entry. A digest has a fixed length, but the names that a machine sends can be
 * long.
 */
function lineOf({ path, type, size, mode, owner, group, modified_at_ms }: FileEntry__Output): string {
  const isDirectory = type === 'FILE_TYPE_DIRECTORY';
  // The size and time of a directory are left out. They change when an entry in it is added or removed, even if that
  // entry is not watched.
  const content = isDirectory ? [] : [size, modified_at_ms];
  return digestOf([path.toString('hex'), type, mode, owner, group, ...content]);
}

const digestOf = (lines: readonly (string | number)[]): string =>
  createHash('sha256').update(lines.join('\n')).digest('base64url');
