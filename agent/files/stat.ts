// Describes one path, as a listing does. Adds the SHA-256 of the file if the request asks for it.
import type { StatFileResponse } from '../../proto/types/farhand/agent/v1/StatFileResponse.ts';
import { AppError, type Code } from '../../shared/errors.ts';
import { unlessAborted } from '../../shared/stop-waiting-on-abort.ts';
import { readlink } from './confine/confined-fs.ts';
import { assertFolder, type Target } from './confine/parse-request-path.ts';
import type { Confinement } from './confine/resolve-inside-roots.ts';
import { describe, etagOf } from './file-description.ts';
import type { Disk, Operation } from './handler-adapters.ts';
import { readFile } from './read.ts';

export const statFile: Operation<'statFile'> = (disk, request, target, signal) =>
  unlessAborted(signal, request.sha256 ? withDigest(disk, target, signal) : withoutDigest(disk, target));

async function withoutDigest({ reading, users }: Disk, target: Target): Promise<StatFileResponse> {
  const { stats, link } = await find(reading, target);
  return { entry: describe(target.path, stats, await users(), link), etag: etagOf(stats), sha256: '' };
}

/** Describes the file and adds its SHA-256. For the SHA-256, the whole file is read, as for a download. */
async function withDigest(disk: Disk, target: Target, signal: AbortSignal): Promise<StatFileResponse> {
  const response: StatFileResponse = {};
  const whole = { path: Buffer.alloc(0), offset: 0, max_bytes: 0, digest: true };
  for await (const { head, tail } of readFile(disk, whole, target, signal)) {
    signal.throwIfAborted();
    if (head) Object.assign(response, { entry: head.entry, etag: head.etag });
    if (tail) Object.assign(response, tail);
  }
  return response;
}

/** If one of these errors occurs while a symlink is followed, the symlink itself is described. */
const lost: readonly Code[] = ['file_not_found', 'permission_denied', 'invalid_path', 'not_a_directory'];

/** Follows a symlink to its target if possible. Returns the stats of the file found, and the text in the symlink. */
async function find(confinement: Confinement, target: Target) {
  const { path } = target;
  try {
    await using entry = await confinement.entry(path);
    const { stats } = entry.present;
    assertFolder(target, stats);
    return { stats, link: entry.link };
  } catch (error) {
    if (target.folder || !(error instanceof AppError && lost.includes(error.code))) throw error;
    await using entry = await confinement.name(path);
    // The path leads to no accessible file. If it is a symlink, the symlink itself is described.
    if (!entry.found?.stats.isSymbolicLink()) throw error;
    return { stats: entry.found.stats, link: await readlink(entry.at) };
  }
}
