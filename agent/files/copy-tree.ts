// Copies a file or tree with its bytes, modes and times. A symlink is copied as a symlink. The copy is durable when
// duplicate() resolves.
import { posix } from 'node:path';
import { type AppError, fromErrno } from '../../shared/errors.ts';
import { Flushes, keepOwner, NewFile, seconds } from './atomic/atomic-write.ts';
import type { Boundary } from './confine/boundary.ts';
import * as fs from './confine/confined-fs.ts';
import {
  assertOnOrdinaryFileSystem,
  isOnOrdinaryFileSystem,
  isProcessMemory,
} from './confine/kernel-file-systems.ts';
import { hasChanged } from './confine/open-regular-file.ts';
import { type Bytes, fault, toText } from './confine/parse-request-path.ts';
import { type Step, walk } from './confine/walk-tree.ts';

const bufferBytes = 1024 * 1024;
/**
 * Maximum number of flushes of one copy at the same time. Each blocks one of the four threads of Node's thread pool, so
 * a single copy leaves one thread free.
 */
const mostFlushing = 3;

/** The source: a name in an open directory, and its stats when access was checked. */
type Source = Pick<Step, 'name' | 'at' | 'stats'>;

interface Duplicating {
  boundary: Boundary;
  /** Paths of the source and the destination, for messages. */
  path: Bytes;
  destination: Bytes;
  signal: AbortSignal;
  /** True for the names of temporary files, which are not copied. */
  leaveOut: (name: Bytes) => boolean;
  /** True for a move, which fails if owners cannot be preserved or a file system is mounted below the source. */
  moves: boolean;
}

/** Copies `source` to `to`. Resolves to the number of copied regular files, and the number of their bytes. */
export async function duplicate(source: Source, to: fs.Confined, options: Duplicating) {
  // After a failure, disposal waits for the flushes in progress, so that their files can be removed.
  await using flushes = new Flushes(mostFlushing);
  const copier = new Copier(options, flushes);
  await copier.one(source, to, options.path);
  if (source.stats.isDirectory()) await copier.below(source, to);
  await flushes.end();
  return { files: copier.files, bytes: copier.bytes };
}

class Copier {
  readonly #options: Duplicating;
  readonly #flushes: Flushes;
  readonly #buffer = Buffer.allocUnsafeSlow(bufferBytes);
  readonly #zeros = Buffer.alloc(bufferBytes);
  files = 0;
  bytes = 0;

  constructor(options: Duplicating, flushes: Flushes) {
    this.#options = options;
    this.#flushes = flushes;
  }

  /** Copies one entry. A directory is created empty and gets its attributes after its content. */
  async one(source: Source, to: fs.Confined, path: Bytes): Promise<void> {
    const { stats } = source;
    try {
      if (stats.isDirectory()) await fs.mkdir(to, 0o700);
      else if (stats.isSymbolicLink()) await this.#symlink(source, to, path);
      else if (stats.isFile()) await this.#file(source, to, path);
      else throw fault('unsupported_file', path, 'is neither a file, a directory nor a symlink');
    } catch (error) {
      throw this.#failure(error, path);
    }
  }

  /** Copies the content of a directory whose empty copy exists already. */
  async below(source: Source, to: fs.Confined): Promise<void> {
    const { boundary, path, signal, moves, leaveOut } = this.#options;
    using from = await fs.pin(source.at);
    // Handles of the created directories, from the top directory to the one that the walk is in.
    const made = [await fs.pin(to)];
    try {
      assertSame(await from.stat(), source.stats, path);
      await assertOnOrdinaryFileSystem(from.at, path);
      const enter = (_: unknown, inside: fs.Confined): Promise<boolean> => isOnOrdinaryFileSystem(inside);
      const options = { path, signal, oneMount: moves, enter, leaveOut };
      for await (const step of walk(from.at, boundary, options)) {
        const below = posix.join(path, step.path);
        if (step.left) await this.#leave(made, step.stats, below);
        else {
          // `made` is never empty here: its first element, the copy of the start directory, stays until the walk ends.
          const at = fs.child((made.at(-1) as fs.Pinned).at, step.name);
          await this.one(step, at, below);
          if (step.stats.isDirectory()) made.push(await fs.pin(at));
        }
      }
      await this.#leave(made, source.stats, path);
    } finally {
      for (const pinned of made) pinned[Symbol.dispose]();
    }
  }

  async #leave(made: fs.Pinned[], stats: fs.BigIntStats, path: Bytes): Promise<void> {
    // A handle opened with O_PATH cannot be flushed, so the directory is opened again.
    using pinned = made.pop();
    if (pinned) await this.#finish(await fs.pin(pinned.at, fs.O_RDONLY | fs.O_DIRECTORY), stats, path);
  }

  /** Returns the error for an entry of the source. If a disk is full, the error names the path at the destination. */
  #failure(error: unknown, path: Bytes): AppError {
    const failure = fromErrno(error, toText(path));
    const { path: source, destination } = this.#options;
    if (failure.code !== 'no_space') return failure;
    return fromErrno(failure.cause, toText(destination + path.slice(source.length)));
  }

  async #symlink({ at, stats }: Source, to: fs.Confined, path: Bytes): Promise<void> {
    await fs.symlink(await fs.readlink(at), to);
    if (this.#keepsOwner) await keepOwner(fs.lchown(to, Number(stats.uid), Number(stats.gid)), path);
    await fs.lutimes(to, seconds(stats.atimeNs), seconds(stats.mtimeNs));
  }

  async #file(source: Source, to: fs.Confined, path: Bytes): Promise<void> {
    using from = await openSameFile(source, path);
    const before = await from.stat();
    const made = await NewFile.create(to);
    try {
      await this.#content(from, made, before);
      this.#assertUnchanged(before, await from.stat(), made.size, path);
      await made.flushing;
    } catch (error) {
      await made[Symbol.asyncDispose]();
      throw error;
    }
    this.bytes += made.size;
    this.files += 1;
    await this.#finish(made.pinned, before, path);
  }

  /** Copies the bytes. In a sparse file, blocks of zeros become holes. */
  async #content({ handle }: fs.Pinned, to: NewFile, { size, blocks }: fs.BigIntStats): Promise<void> {
    const sparse = blocks * 512n < size;
    // A file of /proc has bytes although it reports size 0, so it is read to its end.
    while (size === 0n || to.size < size) {
      this.#options.signal.throwIfAborted();
      const wanted = size > 0n ? Math.min(bufferBytes, Number(size) - to.size) : bufferBytes;
      const { bytesRead } = await handle.read(this.#buffer, 0, wanted, to.size);
      if (bytesRead === 0) break;
      const chunk = this.#buffer.subarray(0, bytesRead);
      if (sparse && chunk.equals(this.#zeros.subarray(0, bytesRead))) to.skip(bytesRead);
      else await to.append(chunk);
    }
    if (sparse) await to.pinned.handle.truncate(to.size);
  }

  /**
   * Throws if the source changed during the copy. A source that only grew is accepted, except for a move, which would
   * lose the added bytes.
   */
  #assertUnchanged(before: fs.BigIntStats, after: fs.BigIntStats, copied: number, path: Bytes): void {
    const differs = after.size !== before.size || after.mtimeNs !== before.mtimeNs;
    // During the copy, a file may become shorter and then longer than before. hasChanged() takes it for a file that
    // only grew, but the copy lacks bytes.
    const lacksBytes = differs && copied < before.size;
    if (this.#options.moves ? differs : lacksBytes || hasChanged(before, after))
      throw fault('conflict', path, 'changed while it was copied; try again');
  }

  /** Sets the attributes of a copy, flushes it while other files are copied, and closes it. */
  async #finish(made: fs.Pinned, stats: fs.BigIntStats, path: Bytes): Promise<void> {
    const { uid, gid, mode, atimeNs, mtimeNs } = stats;
    const { handle } = made;
    const [owner, group] = [Number(uid), Number(gid)];
    // setuid and setgid are cleared if the copy gets another owner than the source. With them, the copy would run with
    // the agent's rights.
    const ours = owner === process.geteuid?.() && group === process.getegid?.();
    try {
      // The mode is set last, because a change of owner clears setuid and setgid.
      if (this.#keepsOwner) await keepOwner(handle.chown(owner, group), path);
      await handle.utimes(seconds(atimeNs), seconds(mtimeNs));
      await handle.chmod(Number(mode) & (this.#keepsOwner || ours ? 0o7777 : 0o1777));
    } catch (error) {
      made[Symbol.dispose]();
      throw this.#failure(error, path);
    }
    // Some file systems cannot flush directories. The bytes of a file must always be flushed.
    const flushed = stats.isDirectory() ? fs.syncChange(made) : handle.sync();
    await this.#flushes.add(flushed.finally(() => made[Symbol.dispose]()));
  }

  /**
   * True if copies get the owner of the source: for a move, and if the agent runs as root. Otherwise the agent's user
   * owns them.
   */
  get #keepsOwner(): boolean {
    return this.#options.moves || process.geteuid?.() === 0;
  }
}

/** Opens the regular file whose access was checked. Throws `conflict` if another file has its name now. */
async function openSameFile({ name, at, stats }: Source, path: Bytes): Promise<fs.Pinned> {
  using pinned = await fs.pin(at);
  assertSame(await pinned.stat(), stats, path);
  if (await isProcessMemory(name, pinned.at, stats))
    throw fault('unsupported_file', path, 'cannot be copied: it gives access to the memory of a process');
  return await fs.pin(pinned.at, fs.readOnly);
}

function assertSame(now: fs.BigIntStats, then: fs.BigIntStats, path: Bytes): void {
  if (fs.identityOf(now) === fs.identityOf(then)) return;
  throw fault('conflict', path, 'was replaced while it was copied; try again');
}
