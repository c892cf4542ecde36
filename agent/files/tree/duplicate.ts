// Copies what has a name, with all below it, to a name in a directory that nobody else can reach: bytes, modes, times,
// symlinks as symlinks. On the disk when it resolves.
import { type BigIntStats, constants } from 'node:fs';
import { type FileHandle, lchown, lutimes, mkdir, open, readlink, symlink } from 'node:fs/promises';
import { posix } from 'node:path';
import { errnoOf, fromErrno } from '../../../shared/errors.ts';
import { type Boundary, identityOf } from '../beneath/boundary.ts';
import { isTorn } from '../beneath/contents.ts';
import { Descent, letGo, pathOf, pin } from '../beneath/descent.ts';
import { holdsFiles, holdsMemory } from '../beneath/kernel.ts';
import { type Bytes, bytes, fault, shown } from '../beneath/path.ts';
import { type Step, walk } from '../beneath/walk.ts';

const { O_CREAT, O_DIRECTORY, O_EXCL, O_NOCTTY, O_NOFOLLOW, O_NONBLOCK, O_RDONLY, O_WRONLY } = constants;
const bufferBytes = 1024 * 1024;
/** Bytes after which the disk is set to work, so that the last fsync of a large file does not take minutes. */
const flushBytes = 64 * 1024 * 1024;
/** Files flushed at once, which is cheaper than one by one; Node's thread pool keeps room for others. */
const mostFlushing = 3;

/** What is to be copied: a name in a pinned directory, and what it was when it was judged. */
export type Source = Pick<Step, 'parent' | 'name' | 'at' | 'stats'>;

export interface Duplicating {
  boundary: Boundary;
  /** Of the source, for messages. */
  path: Bytes;
  signal: AbortSignal;
  /** A move: owners are kept or it fails, and what is mounted below is not taken along. A copy is root's to own, or ours. */
  moves: boolean;
}

export interface Duplicated {
  /** Regular files, and their bytes. */
  files: number;
  bytes: number;
}

export async function duplicate(source: Source, to: Bytes, options: Duplicating): Promise<Duplicated> {
  const copier = new Copier(options);
  try {
    await copier.one(source, to, options.path);
    if (source.stats.isDirectory()) await copier.below(source, to);
    return await copier.end();
  } finally {
    await copier.settle();
  }
}

class Copier {
  readonly #options: Duplicating;
  readonly #buffer = Buffer.allocUnsafeSlow(bufferBytes);
  readonly #zeros = Buffer.alloc(bufferBytes);
  #flushing: Promise<void>[] = [];
  #files = 0;
  #bytes = 0;

  constructor(options: Duplicating) {
    this.#options = options;
  }

  /** A directory is made empty, and gets its attributes only when it is left. */
  async one(source: Source, to: Bytes, path: Bytes): Promise<void> {
    const { stats } = source;
    try {
      if (stats.isDirectory()) await mkdir(bytes(to), 0o700);
      else if (stats.isSymbolicLink()) await this.#symlink(source, to, path);
      else if (stats.isFile()) await this.#file(source, to, path);
      else throw fault('unsupported_file', path, 'neither file, directory nor symlink');
    } catch (error) {
      throw fromErrno(error, shown(path));
    }
  }

  /** All below a directory whose copy has been made. */
  async below(source: Source, to: Bytes): Promise<void> {
    const { boundary, path, signal, moves } = this.#options;
    const [from, top] = await Promise.all([pin(source.at), pin(to)]);
    const descent = new Descent(pathOf(top), path);
    try {
      this.#demandSame(await from.stat({ bigint: true }), source.stats, path);
      if (!(await holdsFiles(pathOf(from))))
        throw fault('unsupported_file', path, 'holds no files of a disk');
      const enter = (_: unknown, inside: Bytes): Promise<boolean> => holdsFiles(inside);
      const options = { path, signal, directories: 'both', oneMount: moves, enter } as const;
      for await (const step of walk(pathOf(from), boundary, options)) {
        const below = posix.join(path, step.path);
        if (step.left) {
          const made = await open(descent.at, O_RDONLY | O_DIRECTORY);
          try {
            // Before its own mode may forbid the way up.
            await descent.leave();
          } catch (error) {
            letGo(made);
            throw error;
          }
          await this.#finish(made, step.stats, below);
          continue;
        }
        const at = `${descent.at}/${step.name}`;
        await this.one(step, at, below);
        if (!step.stats.isDirectory()) continue;
        const handle = await pin(at);
        descent.enter(handle, await handle.stat({ bigint: true }));
      }
      await this.#finish(await open(pathOf(top), O_RDONLY | O_DIRECTORY), source.stats, path);
    } finally {
      descent.close();
      letGo(from);
      letGo(top);
    }
  }

  /** Everything is on the disk when it resolves. */
  async end(): Promise<Duplicated> {
    await Promise.all(this.#flushing.splice(0));
    return { files: this.#files, bytes: this.#bytes };
  }

  /** After a failure: nothing is under way any more. */
  async settle(): Promise<void> {
    await Promise.allSettled(this.#flushing.splice(0));
  }

  async #symlink({ at, stats }: Source, to: Bytes, path: Bytes): Promise<void> {
    await symlink(bytes(await readlink(bytes(at), 'latin1')), bytes(to));
    if (this.#keepsOwner) await this.#own(lchown(bytes(to), Number(stats.uid), Number(stats.gid)), path);
    await lutimes(bytes(to), seconds(stats.atimeNs), seconds(stats.mtimeNs));
  }

  async #file(source: Source, to: Bytes, path: Bytes): Promise<void> {
    const from = await this.#openFile(source, path);
    try {
      const before = await from.stat({ bigint: true });
      const made = await open(bytes(to), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_NOCTTY, 0o600);
      try {
        const copied = await this.#content(from, made, before);
        this.#demandUnchanged(before, await from.stat({ bigint: true }), copied, path);
        this.#bytes += copied;
      } catch (error) {
        letGo(made);
        throw error;
      }
      await this.#finish(made, before, path);
      this.#files += 1;
    } finally {
      letGo(from);
    }
  }

  /** The very file that was judged, known to be a plain one before it is opened. */
  async #openFile({ name, at, stats }: Source, path: Bytes): Promise<FileHandle> {
    const pinned = await pin(at);
    try {
      this.#demandSame(await pinned.stat({ bigint: true }), stats, path);
      if (await holdsMemory(name, pathOf(pinned), stats))
        throw fault('unsupported_file', path, 'the memory of a process');
      return await open(pathOf(pinned), O_RDONLY | O_NONBLOCK | O_NOCTTY);
    } finally {
      letGo(pinned);
    }
  }

  /** A copy has what was there when it began; a move must not lose what was added since. */
  #demandUnchanged(before: BigIntStats, after: BigIntStats, copied: number, path: Bytes): void {
    const differs = after.size !== before.size || after.mtimeNs !== before.mtimeNs;
    // Shrunk and grown again.
    const short = differs && copied < before.size;
    if (this.#options.moves ? differs : short || isTorn(before, after))
      throw fault('conflict', path, 'changed while it was copied, try again');
  }

  #demandSame(now: BigIntStats, then: BigIntStats, path: Bytes): void {
    if (identityOf(now) === identityOf(then)) return;
    throw fault('conflict', path, 'was replaced while it was copied, try again');
  }

  /** Copies the bytes, and leaves out holes; their number. */
  async #content(from: FileHandle, to: FileHandle, { size, blocks }: BigIntStats): Promise<number> {
    const sparse = blocks * 512n < size;
    let at = 0;
    for (let flushed = 0; ; ) {
      this.#options.signal.throwIfAborted();
      // A file of /proc says 0 and has more.
      const wanted = size > 0n ? Math.min(bufferBytes, Number(size) - at) : bufferBytes;
      const { bytesRead } = await from.read(this.#buffer, 0, wanted, at);
      if (bytesRead === 0) break;
      const chunk = this.#buffer.subarray(0, bytesRead);
      if (!sparse || !chunk.equals(this.#zeros.subarray(0, bytesRead))) await writeAt(to, chunk, at);
      at += bytesRead;
      if (size > 0n && at >= size) break;
      if (at - flushed < flushBytes) continue;
      flushed = at;
      await to.datasync();
    }
    if (sparse) await to.truncate(at);
    return at;
  }

  /** Gives what was made its attributes, flushes it while others are copied, and closes it. */
  async #finish(made: FileHandle, stats: BigIntStats, path: Bytes): Promise<void> {
    try {
      const { uid, gid, mode, atimeNs, mtimeNs } = stats;
      // A change of owner clears setuid and setgid, so the mode comes second.
      if (this.#keepsOwner) await this.#own(made.chown(Number(uid), Number(gid)), path);
      await made.utimes(seconds(atimeNs), seconds(mtimeNs));
      await made.chmod(Number(mode) & (this.#keepsOwner || isOurs(stats) ? 0o7777 : 0o1777));
    } catch (error) {
      letGo(made);
      throw fromErrno(error, shown(path));
    }
    const flushed = made.sync().finally(() => letGo(made));
    // Its failure is thrown where it is awaited; until then nobody listens.
    flushed.catch(() => undefined);
    this.#flushing.push(flushed);
    if (this.#flushing.length >= mostFlushing) await Promise.all(this.#flushing.splice(0));
  }

  get #keepsOwner(): boolean {
    return this.#options.moves || process.geteuid?.() === 0;
  }

  async #own(change: Promise<void>, path: Bytes): Promise<void> {
    try {
      await change;
    } catch (error) {
      // EINVAL: an owner that the agent's user namespace does not know.
      if (!['EPERM', 'EINVAL'].includes(errnoOf(error) ?? '')) throw error;
      throw fault('permission_denied', path, 'the agent may not keep its owner and group');
    }
  }
}

/** As Node takes times: exact to less than a microsecond. */
const seconds = (ns: bigint): number => Number(ns) / 1e9;

/** What is copied for somebody else must not lend him our rights: setuid and setgid stay only for the same owner. */
const isOurs = ({ uid, gid }: BigIntStats): boolean =>
  Number(uid) === process.geteuid?.() && Number(gid) === process.getegid?.();

async function writeAt(to: FileHandle, chunk: Buffer, position: number): Promise<void> {
  for (let written = 0; written < chunk.length; ) {
    const left = chunk.length - written;
    written += (await to.write(chunk, written, left, position + written)).bytesWritten;
  }
}
