// Streams a directory as a tar archive. Fails if a file changes while it is read, unless the file only grows.
import { createHash } from 'node:crypto';
import { posix } from 'node:path';
import { pipeline } from 'node:stream/promises';
import { createGzip } from 'node:zlib';
import { AppError, fromErrno, ignoring } from '../../../shared/errors.ts';
import { encodeHeader, endOfArchive, paddingOf, type TarHeader } from '../../../shared/tar/index.ts';
import { type BigIntStats, type Confined, readlink, stat } from '../confine/confined-fs.ts';
import { assertOnOrdinaryFileSystem, isOnOrdinaryFileSystem } from '../confine/kernel-file-systems.ts';
import { hasChanged, openFileContents } from '../confine/open-regular-file.ts';
import { type Bytes, fault, toText } from '../confine/parse-request-path.ts';
import { type Step, walk } from '../confine/walk-tree.ts';
import { describe } from '../file-description.ts';
import type { Disk, Operation } from '../handler-adapters.ts';
import type { Users } from '../users-groups.ts';

const chunkBytes = 256 * 1024;

interface Job {
  disk: Disk;
  directory: Confined;
  path: Bytes;
  users: Users;
  signal: AbortSignal;
  files: number;
  bytes: number;
}

export const readArchive: Operation<'readArchive'> = async function* (disk, { gzip }, { path }, signal) {
  using opened = await disk.reading.directory(path);
  const directory = opened.at;
  await assertOnOrdinaryFileSystem(directory, path);
  const job: Job = { disk, directory, path, users: await disk.users(), signal, files: 0, bytes: 0 };
  const stats = await stat(directory);
  yield { head: { entry: describe(path, stats, job.users) } };
  const hash = createHash('sha256');
  const plain = chunksOf(partsOf(job, stats));
  for await (const chunk of gzip ? zipped(plain) : plain) {
    hash.update(chunk);
    yield { chunk };
  }
  yield { tail: { files: job.files, bytes: job.bytes, sha256: hash.digest('hex') } };
};

/** Yields the bytes of the archive in pieces of any size. Each piece is valid only until the next is requested. */
async function* partsOf(job: Job, self: BigIntStats): AsyncGenerator<Buffer> {
  const { disk, directory, path, signal } = job;
  yield encodeHeader(headerOf('directory', './', self, job.users));
  const buffer = Buffer.allocUnsafeSlow(chunkBytes);
  const steps = walk(directory, disk.reading.boundary, {
    path,
    signal,
    skip: leaveOutForbidden,
    // The temporary files of writes in progress are not part of the directory.
    leaveOut: disk.journal.isTemporary,
    enter: (_, inside) => isOnOrdinaryFileSystem(inside),
  });
  for await (const step of steps) {
    if (step.left) continue;
    if (step.stats.isDirectory())
      yield encodeHeader(headerOf('directory', `${step.path}/`, step.stats, job.users));
    else if (step.stats.isSymbolicLink()) yield* symlinkOf(step, job);
    else if (step.stats.isFile()) yield* fileOf(step, job, buffer);
  }
  yield endOfArchive;
}

/** Ignores an AppError: the path is protected, and the walk leaves it out. Throws every other error, such as EACCES. */
function leaveOutForbidden(path: Bytes, error: unknown): void {
  if (!(error instanceof AppError)) throw fromErrno(error, toText(path));
}

async function* symlinkOf({ at, path, stats }: Step, { users }: Job): AsyncGenerator<Buffer> {
  // A symlink that was removed (ENOENT) or replaced by another file (EINVAL) is left out.
  const target = await readlink(at).catch(ignoring('ENOENT', 'EINVAL'));
  if (target !== undefined) yield encodeHeader({ ...headerOf('symlink', path, stats, users), target });
}

async function* fileOf(step: Step, job: Job, buffer: Buffer): AsyncGenerator<Buffer> {
  const path = posix.join(job.path, step.path);
  try {
    const contents = await openFileContents(step, job.disk.reading.boundary);
    if (!contents) return;
    const { stats } = contents;
    using file = contents.file;
    const changed = () => fault('conflict', path, 'changed while it was read; try again');
    const size = Number(stats.size);
    yield encodeHeader({ ...headerOf('file', step.path, stats, job.users), size });
    for (let left = size; left > 0; ) {
      const { bytesRead } = await file.handle.read(buffer, 0, Math.min(left, buffer.length), size - left);
      if (bytesRead === 0) throw changed();
      left -= bytesRead;
      yield buffer.subarray(0, bytesRead);
    }
    // A file that only grew, such as a log, is archived with the size it had when it was opened.
    if (hasChanged(stats, await file.stat())) throw changed();
    yield Buffer.alloc(paddingOf(size));
    job.files += 1;
    job.bytes += size;
  } catch (error) {
    throw fromErrno(error, toText(path));
  }
}

function headerOf(kind: TarHeader['kind'], name: Bytes, stats: BigIntStats, names: Users): TarHeader {
  const [uid, gid] = [Number(stats.uid), Number(stats.gid)];
  const [owner, group] = [names.users.nameOf(uid), names.groups.nameOf(gid)];
  return {
    kind,
    name,
    mode: Number(stats.mode) & 0o7777,
    uid,
    gid,
    // An id without a name gets an empty name, because tar programs would take a number in this field for a name.
    owner: owner === String(uid) ? '' : owner,
    group: group === String(gid) ? '' : group,
    size: 0,
    mtimeNs: stats.mtimeNs,
  };
}

async function* chunksOf(parts: AsyncIterable<Buffer>): AsyncGenerator<Buffer, void, void> {
  let chunk = Buffer.allocUnsafeSlow(chunkBytes);
  let filled = 0;
  for await (const part of parts) {
    for (let at = 0; at < part.length; ) {
      const copied = part.copy(chunk, filled, at);
      at += copied;
      filled += copied;
      if (filled < chunkBytes) continue;
      yield chunk;
      // A new buffer is needed, because the caller may still use the chunk that was just yielded.
      chunk = Buffer.allocUnsafeSlow(chunkBytes);
      filled = 0;
    }
  }
  if (filled > 0) yield chunk.subarray(0, filled);
}

async function* zipped(chunks: AsyncGenerator<Buffer, void, void>): AsyncGenerator<Buffer, void, void> {
  const gzip = createGzip({ chunkSize: chunkBytes });
  const fed = pipeline(chunks, gzip);
  // No handling is needed: if packing fails, reading `gzip` throws the same error.
  fed.catch(() => undefined);
  try {
    for await (const chunk of gzip) yield chunk as Buffer;
  } finally {
    // Ends the walk and waits until its directories are closed.
    await chunks.return();
  }
}
