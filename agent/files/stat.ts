// Describes one path as a listing does, on request with the digest of its bytes.
import { createHash } from 'node:crypto';
import type { BigIntStats } from 'node:fs';
import { readlink } from 'node:fs/promises';
import { posix } from 'node:path';
import type { FileEntry } from '../../proto/types/farhand/agent/v1/FileEntry.ts';
import { AppError, type Code } from '../../shared/errors.ts';
import type { AgentMethods } from '../../shared/rpc.ts';
import { failingAs, unlessAborted } from './abort.ts';
import type { Beneath, Entry } from './beneath/index.ts';
import { type Bytes, bytes, demandFolder, fault, type Target, targetOf } from './beneath/path.ts';
import { describe, etagOf } from './describe.ts';
import type { AskPeople, People } from './people.ts';
import { openSource, readingFailure } from './read.ts';

const bufferBytes = 1024 * 1024;

interface Found {
  stats: BigIntStats;
  link: Bytes | undefined;
}

export function openDescriber(beneath: Beneath, people: AskPeople, home: Bytes): AgentMethods['statFile'] {
  return (request, { signal }) => {
    const target = targetOf(request.path, home);
    const { path } = target;
    return failingAs(path, signal, async () => {
      const hashed = request.sha256 ? await hash(beneath, target, signal) : undefined;
      const { stats, link } = hashed ?? (await unlessAborted(signal, find(beneath, target)));
      const entry = describe({ path, name: posix.basename(path) || '/', link }, stats, await people());
      return { entry, etag: etagOf(stats), sha256: hashed?.sha256 ?? '' };
    });
  };
}

/** The entry of what has a name just used, as a listing has it: a symlink with type and size of its target. */
export async function entryOf(
  beneath: Beneath,
  { directory, name, at }: Pick<Entry, 'directory' | 'name' | 'at'>,
  { path, stats, people }: { path: Bytes; stats: BigIntStats; people: People },
): Promise<FileEntry> {
  const described = { path, name: posix.basename(path) || '/' };
  if (!stats.isSymbolicLink()) return describe(described, stats, people);
  const link = await readlink(bytes(at), 'latin1').catch(() => undefined);
  const target = await beneath.linkTarget({ at: directory, close: () => undefined }, name);
  return describe({ ...described, link }, target ?? stats, people);
}

/** Failures to follow a symlink that leave the symlink itself to be told of. */
const lost: readonly Code[] = ['file_not_found', 'permission_denied', 'invalid_path', 'not_a_directory'];

async function find(beneath: Beneath, target: Target): Promise<Found> {
  const { path } = target;
  const missing = fault('file_not_found', path, 'no such file');
  try {
    return await using(await beneath.entry(path), async ({ found, link }) => {
      if (!found) throw missing;
      demandFolder(target, found.stats);
      return { stats: found.stats, link };
    });
  } catch (error) {
    if (target.folder || !(error instanceof AppError && lost.includes(error.code))) throw error;
    return using(await beneath.name(path), async ({ found, at }) => {
      // Not a symlink: it has failed for another reason, or is gone.
      if (!found?.stats.isSymbolicLink()) throw error;
      return { stats: found.stats, link: await readlink(bytes(at), 'latin1') };
    });
  }
}

async function using<T>(entry: Entry, work: (entry: Entry) => Promise<T>): Promise<T> {
  try {
    return await work(entry);
  } finally {
    entry.close();
  }
}

async function hash(
  beneath: Beneath,
  target: Target,
  signal: AbortSignal,
): Promise<Found & { sha256: string }> {
  const opened = openSource(beneath, target);
  const { handle, stats, link } = await unlessAborted(signal, opened, (late) => late.handle.close());
  try {
    const digest = createHash('sha256');
    const buffer = Buffer.allocUnsafeSlow(bufferBytes);
    for (let at = 0, length = -1; length !== 0; at += length) {
      length = (await unlessAborted(signal, handle.read(buffer, 0, bufferBytes, at))).bytesRead;
      digest.update(buffer.subarray(0, length));
    }
    // All of it, so that the etag is of what was hashed.
    if (etagOf(await handle.stat({ bigint: true })) === etagOf(stats))
      return { stats, link, sha256: digest.digest('hex') };
  } catch (error) {
    throw signal.aborted ? error : readingFailure(error, target.path);
  } finally {
    // Nobody waits: closing waits for a read under way, which may hang.
    handle.close().catch(() => undefined);
  }
  throw fault('conflict', target.path, 'changed while it was read, try again');
}
