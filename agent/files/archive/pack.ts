// Reads a directory as a tar while it is walked: what was in it when its turn came, or an error that names the file
// which changed. Nothing but the chunk at hand is in memory.
import { createHash } from 'node:crypto';
import { type BigIntStats, constants } from 'node:fs';
import { type FileHandle, open, readlink, stat } from 'node:fs/promises';
import { posix } from 'node:path';
import { pipeline } from 'node:stream/promises';
import { createGzip } from 'node:zlib';
import { AppError, errnoOf, fromErrno } from '../../../shared/errors.ts';
import type { AgentMethods } from '../../../shared/rpc.ts';
import { unlessAborted } from '../abort.ts';
import type { Beneath, Directory } from '../beneath.ts';
import { identify, identityOf } from '../boundary.ts';
import { letGo } from '../descent.ts';
import { describe } from '../describe.ts';
import { holdsFiles } from '../kernel.ts';
import { type Bytes, bytes, fault, shown, targetOf } from '../path.ts';
import type { AskPeople, People } from '../people.ts';
import { type Step, walk } from '../walk.ts';
import { encodeHeader, endOfArchive, paddingOf, type TarHeader } from './header.ts';

const { O_RDONLY, O_NONBLOCK, O_NOCTTY, O_NOFOLLOW } = constants;
const chunkBytes = 256 * 1024;

/** One archive on its way out. */
interface Job {
  beneath: Beneath;
  directory: Directory;
  path: Bytes;
  people: People;
  signal: AbortSignal;
  files: number;
  bytes: number;
}

export function openPacker(beneath: Beneath, people: AskPeople, home: Bytes): AgentMethods['readArchive'] {
  return async function* readArchive(request, { signal }) {
    const { path } = targetOf(request.path, home);
    let directory: Directory | undefined;
    try {
      directory = await unlessAborted(signal, beneath.directory(path), (late) => late.close());
      if (!(await holdsFiles(directory.at)))
        throw fault('unsupported_file', path, 'holds no files of a disk');
      const job: Job = { beneath, directory, path, people: await people(), signal, files: 0, bytes: 0 };
      const stats = await stat(bytes(directory.at), { bigint: true });
      yield { head: { entry: describe({ path, name: posix.basename(path) }, stats, job.people) } };
      const hash = createHash('sha256');
      const plain = chunksOf(partsOf(job, stats));
      for await (const chunk of request.gzip ? zipped(plain) : plain) {
        signal.throwIfAborted();
        hash.update(chunk);
        yield { chunk };
      }
      yield { tail: { files: job.files, bytes: job.bytes, sha256: hash.digest('hex') } };
    } catch (error) {
      throw signal.aborted ? signal.reason : fromErrno(error, shown(path));
    } finally {
      directory?.close();
    }
  };
}

/** The bytes of the archive in order, in pieces of any size that stand only until the next is asked for. */
async function* partsOf(job: Job, self: BigIntStats): AsyncGenerator<Buffer> {
  const { beneath, directory, path, signal } = job;
  yield encodeHeader(headerOf('directory', './', self, job.people));
  const buffer = Buffer.allocUnsafeSlow(chunkBytes);
  const steps = walk(directory.at, beneath.boundary, {
    path,
    signal,
    sorted: true,
    skip: leaveOutForbidden,
    enter: (_, inside) => holdsFiles(inside),
  });
  for await (const step of steps) {
    if (step.stats.isDirectory())
      yield encodeHeader(headerOf('directory', `${step.path}/`, step.stats, job.people));
    else if (step.stats.isSymbolicLink()) yield* symlinkOf(step, job);
    else if (step.stats.isFile()) yield* fileOf(step, job, buffer);
  }
  yield endOfArchive;
}

/** What the agent keeps to itself is not in the archive; what it may not read fails it. */
function leaveOutForbidden(path: Bytes, error: unknown): void {
  if (!(error instanceof AppError)) throw fromErrno(error, shown(path));
}

async function* symlinkOf({ at, path, stats }: Step, { people }: Job): AsyncGenerator<Buffer> {
  const target = await readlink(bytes(at), 'latin1').catch(unlessGone);
  if (target !== undefined) yield encodeHeader({ ...headerOf('symlink', path, stats, people), target });
}

async function* fileOf(step: Step, job: Job, buffer: Buffer): AsyncGenerator<Buffer> {
  const absolute = posix.join(job.path, step.path);
  const handle = await openFile(step.at, absolute);
  if (!handle) return;
  try {
    const stats = await handle.stat({ bigint: true });
    if (!stats.isFile() || (await isForbidden(step, stats, job))) return;
    const size = Number(stats.size);
    yield encodeHeader({ ...headerOf('file', step.path, stats, job.people), size });
    for (let left = size; left > 0; ) {
      const { bytesRead } = await handle.read(buffer, 0, Math.min(left, buffer.length), size - left);
      if (bytesRead === 0) throw changed(absolute);
      left -= bytesRead;
      yield buffer.subarray(0, bytesRead);
    }
    const now = await handle.stat({ bigint: true });
    if (now.size !== stats.size || now.mtimeNs !== stats.mtimeNs) throw changed(absolute);
    yield Buffer.alloc(paddingOf(size));
    job.files += 1;
    job.bytes += size;
  } catch (error) {
    throw fromErrno(error, shown(absolute));
  } finally {
    letGo(handle);
  }
}

/** Undefined where it is gone, or a symlink by now. */
async function openFile(at: Bytes, path: Bytes): Promise<FileHandle | undefined> {
  try {
    return await open(bytes(at), O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_NOCTTY);
  } catch (error) {
    if (['ENOENT', 'ELOOP', 'ENXIO', 'ENODEV'].includes(errnoOf(error) ?? '')) return undefined;
    throw fromErrno(error, shown(path));
  }
}

/** The walk has judged what had the name a moment ago; another file that has it now is judged again. */
async function isForbidden(
  { parent, name, stats }: Step,
  now: BigIntStats,
  { beneath }: Job,
): Promise<boolean> {
  if (identityOf(stats) === identityOf(now)) return false;
  return (await beneath.boundary.kept())(await identify(parent), name, now);
}

const changed = (path: Bytes): AppError => fault('conflict', path, 'changed while it was read, try again');

function headerOf(kind: TarHeader['kind'], name: Bytes, stats: BigIntStats, people: People): TarHeader {
  const [uid, gid] = [Number(stats.uid), Number(stats.gid)];
  const [owner, group] = [people.owner(uid), people.group(gid)];
  return {
    kind,
    name,
    mode: Number(stats.mode) & 0o7777,
    uid,
    gid,
    // A number where there is no name would be taken for one.
    owner: owner === String(uid) ? '' : owner,
    group: group === String(gid) ? '' : group,
    size: 0,
    mtimeNs: stats.mtimeNs,
  };
}

/** Gone, or another thing by now: EINVAL is a symlink that no longer is one. */
function unlessGone(error: unknown): undefined {
  if (errnoOf(error) !== 'ENOENT' && errnoOf(error) !== 'EINVAL') throw error;
}

/** The same bytes in chunks of one size. */
async function* chunksOf(parts: AsyncIterable<Buffer>): AsyncGenerator<Buffer> {
  let chunk = Buffer.allocUnsafeSlow(chunkBytes);
  let filled = 0;
  for await (const part of parts) {
    for (let at = 0; at < part.length; ) {
      const copied = part.copy(chunk, filled, at);
      at += copied;
      filled += copied;
      if (filled < chunkBytes) continue;
      yield chunk;
      // The reader may hold the last one still.
      chunk = Buffer.allocUnsafeSlow(chunkBytes);
      filled = 0;
    }
  }
  if (filled > 0) yield chunk.subarray(0, filled);
}

async function* zipped(chunks: AsyncIterable<Buffer>): AsyncGenerator<Buffer> {
  const gzip = createGzip({ chunkSize: chunkBytes });
  const fed = pipeline(chunks, gzip);
  // Its failure comes out of the stream as well.
  fed.catch(() => undefined);
  for await (const chunk of gzip) yield chunk as Buffer;
  await fed;
}
