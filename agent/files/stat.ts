// Describes one path as a listing does, on request with the SHA-256 of the file.
import { createHash } from 'node:crypto';
import { AppError, type Code } from '../../shared/errors.ts';
import { type BigIntStats, readlink } from './confine/fs.ts';
import { openTarget } from './confine/open-regular-file.ts';
import { assertFolder, type Bytes, fault, type Target } from './confine/request-path.ts';
import type { Confinement } from './confine/resolve.ts';
import { describe, etagOf } from './describe.ts';
import { type Operation, unlessAborted } from './operation-handler.ts';
import { readingFailure } from './read.ts';

const bufferBytes = 1024 * 1024;

interface Found {
  stats: BigIntStats;
  link: Bytes | undefined;
  sha256?: string;
}

export const statFile: Operation<'statFile'> = async ({ reading, users }, request, target, signal) => {
  const finding = request.sha256 ? hash(reading, target, signal) : find(reading, target);
  const { stats, link, sha256 = '' } = await unlessAborted(signal, finding);
  return { entry: describe(target.path, stats, await users(), link), etag: etagOf(stats), sha256 };
};

/** Errors in following a symlink after which the symlink itself is described. */
const lost: readonly Code[] = ['file_not_found', 'permission_denied', 'invalid_path', 'not_a_directory'];

async function find(confinement: Confinement, target: Target): Promise<Found> {
  const { path } = target;
  try {
    await using entry = await confinement.entry(path);
    const { stats } = entry.present;
    assertFolder(target, stats);
    return { stats, link: entry.link };
  } catch (error) {
    if (target.folder || !(error instanceof AppError && lost.includes(error.code))) throw error;
    await using entry = await confinement.name(path);
    // The path is no symlink, so the first error stands.
    if (!entry.found?.stats.isSymbolicLink()) throw error;
    return { stats: entry.found.stats, link: await readlink(entry.at) };
  }
}

async function hash(confinement: Confinement, target: Target, signal: AbortSignal): Promise<Found> {
  using source = await openTarget(confinement, target);
  const { file, stats, link } = source;
  const digest = createHash('sha256');
  const buffer = Buffer.allocUnsafeSlow(bufferBytes);
  try {
    for (let at = 0, length = -1; length !== 0; at += length) {
      signal.throwIfAborted();
      length = (await file.handle.read(buffer, 0, bufferBytes, at)).bytesRead;
      digest.update(buffer.subarray(0, length));
    }
    // The whole etag is compared, so that it belongs to exactly the hashed bytes.
    if (etagOf(await file.stat()) === etagOf(stats)) return { stats, link, sha256: digest.digest('hex') };
  } catch (error) {
    throw signal.aborted ? error : readingFailure(error, target.path);
  }
  throw fault('conflict', target.path, 'changed while it was read, try again');
}
