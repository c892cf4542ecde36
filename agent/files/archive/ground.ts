// The directory that an archive is unpacked into: directories in it by their names from there, each opened without
// following symlinks in the pinned one above it, made where missing, and finished at the end.
import { type BigIntStats, constants, readFileSync } from 'node:fs';
import { type FileHandle, mkdir, open } from 'node:fs/promises';
import { AppError, errnoOf } from '../../../shared/errors.ts';
import { entryFault } from '../../../shared/tar/index.ts';
import { type Boundary, identityOf, type Kept } from '../beneath/boundary.ts';
import { letGo, pathOf } from '../beneath/descent.ts';
import { type Bytes, bytes, pathOnly } from '../beneath/path.ts';

const { O_DIRECTORY, O_NOFOLLOW, O_RDONLY } = constants;
/** Directories held open at once. */
const mostHeld = 256;
/** Directories that can be remembered for the end. */
const mostDirectories = 200_000;
/** Those finished at once. */
const finishedAtOnce = 16;
/** Directories after which it is asked again where the forbidden places lie. */
const longestTrust = 512;

/** What a directory gets at the end; nothing where the archive does not describe it, or did not make it. */
export interface Attributes {
  mode: number;
  mtimeNs: bigint;
}

/** An open directory on the ground. */
export interface Plot {
  handle: FileHandle;
  /** /proc/self/fd/N. */
  at: Bytes;
  /** From the ground; empty for the ground itself. */
  path: Bytes;
  stats: BigIntStats;
  /** Renaming works within one. */
  mount: string;
  /** Work under way in it: it is not closed meanwhile. */
  users: number;
}

interface Remembered {
  self: string;
  made: boolean;
  attributes?: Attributes;
}

export class Ground {
  readonly #boundary: Boundary;
  readonly #path: Bytes;
  readonly #plots = new Map<Bytes, Plot>();
  readonly #remembered = new Map<Bytes, Remembered>();
  #kept: Kept = () => true;
  #opened = 0;

  private constructor(boundary: Boundary, path: Bytes) {
    this.#boundary = boundary;
    this.#path = path;
  }

  /** Owns the pinned directory from here on; `path` is for messages. */
  static async open(root: FileHandle, boundary: Boundary, path: Bytes, made: boolean): Promise<Ground> {
    const ground = new Ground(boundary, path);
    try {
      await ground.#keep('', root, made);
      return ground;
    } catch (error) {
      letGo(root);
      throw error;
    }
  }

  /** The directory of a path from the ground, made with all above it where missing. */
  async directory(path: Bytes, make = true): Promise<Plot> {
    const known = this.#plots.get(path);
    if (known) {
      // The map's order is that of the last use.
      this.#plots.delete(path);
      this.#plots.set(path, known);
      return known;
    }
    if (path === '') throw new Error('the ground is closed');
    const cut = path.lastIndexOf('/');
    const above = await this.directory(path.slice(0, Math.max(cut, 0)), make);
    above.users += 1;
    try {
      return await this.#enter(above, path, path.slice(cut + 1), make);
    } finally {
      above.users -= 1;
    }
  }

  /** Refuses a name that the agent keeps to itself, with what has it now, if anything. */
  demandFree(plot: Plot, name: Bytes, present: BigIntStats | undefined, path: Bytes): void {
    if (!this.#kept(identityOf(plot.stats), name, present ?? plot.stats)) return;
    throw entryFault('permission_denied', path, 'the agent keeps this place to itself');
  }

  /** What the archive says about a directory; one that was here before stays as it is. */
  describe(path: Bytes, attributes: Attributes): void {
    const remembered = this.#remembered.get(path);
    if (remembered?.made) remembered.attributes = attributes;
  }

  /** Gives every directory its mode and time, the innermost first, and makes what is in it durable. */
  async finish(): Promise<void> {
    const levels = new Map<number, Bytes[]>();
    for (const path of this.#remembered.keys()) {
      const depth = path === '' ? 0 : path.split('/').length;
      const level = levels.get(depth) ?? [];
      level.push(path);
      levels.set(depth, level);
    }
    for (const depth of [...levels.keys()].sort((a, b) => b - a)) {
      const paths = levels.get(depth) ?? [];
      for (let at = 0; at < paths.length; at += finishedAtOnce) {
        await this.#finishAll(paths.slice(at, at + finishedAtOnce));
      }
    }
  }

  close(): void {
    for (const { handle } of this.#plots.values()) letGo(handle);
    this.#plots.clear();
  }

  async #enter(above: Plot, path: Bytes, name: Bytes, make: boolean): Promise<Plot> {
    const at = `${above.at}/${name}`;
    try {
      return await this.#keep(path, await openDirectory(at), false);
    } catch (error) {
      if (!make || errnoOf(error) !== 'ENOENT') throw namedAs(path, error);
    }
    this.demandFree(above, name, undefined, path);
    try {
      await mkdir(bytes(at), 0o700);
    } catch (error) {
      // Somebody was faster, or a symlink dangles there: opening tells which.
      if (errnoOf(error) !== 'EEXIST') throw error;
      return this.#keep(
        path,
        await openDirectory(at).catch((reason: unknown) => Promise.reject(namedAs(path, reason))),
        false,
      );
    }
    return this.#keep(path, await openDirectory(at), true);
  }

  /** Judges an open directory before anything is done in it. */
  async #keep(path: Bytes, handle: FileHandle, made: boolean): Promise<Plot> {
    const at = pathOf(handle);
    try {
      if (this.#opened % longestTrust === 0) this.#kept = await this.#boundary.kept();
      this.#opened += 1;
      const stats = await handle.stat({ bigint: true });
      this.#boundary.judge(await this.#boundary.survey({ at }), stats, this.#shownPath(path));
      const plot: Plot = { handle, at, path, stats, mount: mountOf(handle), users: 0 };
      this.#remember(path, identityOf(stats), made);
      this.#plots.set(path, plot);
      this.#makeRoom();
      return plot;
    } catch (error) {
      letGo(handle);
      throw error;
    }
  }

  #remember(path: Bytes, self: string, made: boolean): void {
    const remembered = this.#remembered.get(path);
    if (remembered && remembered.self !== self)
      throw entryFault('conflict', path, 'the directory was replaced meanwhile, try again');
    if (remembered) return;
    if (this.#remembered.size >= mostDirectories)
      throw new AppError('payload_too_large', `an archive may have ${mostDirectories} directories`);
    this.#remembered.set(path, { self, made });
  }

  #makeRoom(): void {
    if (this.#plots.size <= mostHeld) return;
    const [last] = [...this.#plots.keys()].slice(-1);
    for (const [path, { users, handle }] of this.#plots) {
      if (users > 0 || path === '' || path === last) continue;
      letGo(handle);
      this.#plots.delete(path);
      return;
    }
  }

  async #finishAll(paths: Bytes[]): Promise<void> {
    // One after another, so that none is closed to make room for another before it is in use.
    const plots: Plot[] = [];
    try {
      for (const path of paths) {
        const plot = await this.directory(path, false);
        plot.users += 1;
        plots.push(plot);
      }
      await Promise.all(plots.map((plot) => seal(plot, this.#remembered.get(plot.path))));
    } finally {
      for (const plot of plots) plot.users -= 1;
    }
  }

  #shownPath(path: Bytes): Bytes {
    return path === '' ? this.#path : `${this.#path}/${path}`;
  }
}

/** Device numbers do not tell bind mounts apart, which cannot be renamed across. */
function mountOf({ fd }: FileHandle): string {
  // The kernel answers from memory, so this waits for no disk.
  const info = readFileSync(`/proc/self/fdinfo/${fd}`, 'latin1');
  return /^mnt_id:\s*(\d+)/m.exec(info)?.[1] ?? '';
}

const openDirectory = (at: Bytes): Promise<FileHandle> =>
  open(bytes(at), pathOnly | O_DIRECTORY | O_NOFOLLOW);

function namedAs(path: Bytes, error: unknown): unknown {
  if (errnoOf(error) !== 'ENOTDIR' && errnoOf(error) !== 'ELOOP') return error;
  return entryFault('not_a_directory', path, 'is a file or a symlink, and the archive has entries below it');
}

/** Those that the archive made but does not describe are as any new directory. */
async function seal({ at }: Plot, remembered: Remembered | undefined): Promise<void> {
  const wanted = remembered?.made ? (remembered.attributes ?? { mode: 0o755 }) : undefined;
  const handle = await open(bytes(at), O_RDONLY | O_DIRECTORY).catch((error: unknown) => {
    // It can be written in, but not opened for that.
    if (errnoOf(error) !== 'EACCES') throw error;
  });
  if (!handle) return;
  try {
    if (wanted && 'mtimeNs' in wanted) await setTimes(handle, wanted.mtimeNs);
    // A setgid bit inherited from above stays.
    if (wanted) await handle.chmod(((await handle.stat()).mode & 0o2000) | wanted.mode);
    await handle.sync().catch((error: unknown) => {
      if (!['EINVAL', 'EOPNOTSUPP'].includes(errnoOf(error) ?? '')) throw error;
    });
  } finally {
    letGo(handle);
  }
}

/** Both times, as tar does: an archive tells no other. */
export async function setTimes(handle: FileHandle, mtimeNs: bigint): Promise<void> {
  const seconds = Number(mtimeNs) / 1e9;
  await handle.utimes(seconds, seconds);
}
