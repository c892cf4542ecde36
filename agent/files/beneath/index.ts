// Confinement: the only way from the path of a request to something on disk. Directories are pinned by an O_PATH
// handle, judged once, and used as /proc/self/fd/N/name; no path is ever checked first and used later.
import { type BigIntStats, constants, type Stats } from 'node:fs';
import { chmod, type FileHandle, mkdir, open, readlink, rmdir, stat } from 'node:fs/promises';
import { posix } from 'node:path';
import { errnoOf, fromErrno } from '../../../shared/errors.ts';
import type { Boundary, Place } from './boundary.ts';
import { type Bytes, bytes, fault, pathOnly, shown } from './path.ts';

const { O_DIRECTORY, O_NOFOLLOW } = constants;
/** As many symlinks in a row as Linux follows. */
const longestTrail = 40;

/** An open directory inside the boundary. */
export interface Directory {
  /** /proc/self/fd/N: stays this directory whatever happens to its names. */
  at: Bytes;
  close(): void;
}

/** One name in an open directory inside the boundary; a symlink there has been followed, unless a name was asked for. */
export interface Entry {
  directory: Bytes;
  name: Bytes;
  /** /proc/self/fd/N/name, for calls that do not follow symlinks: create, rename, link, unlink, lstat. */
  at: Bytes;
  /** What has the name, pinned: open it for reading as `at`. Absent where nothing has it. */
  found?: { at: Bytes; stats: BigIntStats };
  /** Target of the symlink that the request named, as written. */
  link?: Bytes;
  /** Directories made on the way, outermost first: each as the open directory above it. */
  madeIn: Bytes[];
  /** Judges the place again, with what has the name now. */
  recheck(stats: BigIntStats | undefined): Promise<void>;
  /** Removes the directories made on the way, as far as they are still empty. */
  undo(): Promise<void>;
  close(): void;
}

/** One resolution: every handle stays open until its entry is closed. */
interface Trail {
  path: Bytes;
  /** Whether a symlink at the end is followed. */
  follows: boolean;
  hops: number;
  held: FileHandle[];
  made: { above: FileHandle; name: Bytes }[];
  link?: Bytes;
}

const trailTo = (path: Bytes, follows = true): Trail => ({ path, follows, hops: 0, held: [], made: [] });
const pinned = (handle: FileHandle): Bytes => `/proc/self/fd/${handle.fd}`;
/** Nobody waits: the last close of a deleted file may take its time. */
const release = ({ held }: Trail): void => {
  for (const handle of held) handle.close().catch(() => undefined);
};

async function hold(trail: Trail, path: Bytes, flags: number): Promise<FileHandle> {
  const handle = await open(bytes(path), pathOnly | flags);
  trail.held.push(handle);
  return handle;
}

async function undo(trail: Trail): Promise<void> {
  for (const { above, name } of trail.made.reverse()) {
    await rmdir(bytes(`${pinned(above)}/${name}`)).catch(() => undefined);
  }
}

export class Beneath {
  /** What confines it, for those who walk on from an open directory. */
  readonly boundary: Boundary;

  constructor(boundary: Boundary) {
    this.boundary = boundary;
  }

  /** An existing directory, symlinks followed. */
  async directory(path: Bytes): Promise<Directory> {
    const trail = trailTo(path);
    return this.#resolve(trail, async () => {
      const at = pinned(await this.#directory(trail, path));
      await this.#check(trail, { at });
      return { at, close: () => release(trail) };
    });
  }

  /** What a path names, a symlink at its end followed; with `parents` missing directories above it are made. */
  entry(path: Bytes, parents = false): Promise<Entry> {
    return this.#enter(trailTo(path), parents);
  }

  /** What has the name that a path ends in, a symlink there not followed. */
  name(path: Bytes, parents = false): Promise<Entry> {
    return this.#enter(trailTo(path, false), parents);
  }

  #enter(trail: Trail, parents: boolean): Promise<Entry> {
    const { path } = trail;
    return this.#resolve(trail, async () => {
      const directory = await this.#parent(trail, posix.dirname(path), parents);
      return this.#lookUp(trail, pinned(directory), posix.basename(path));
    });
  }

  /** What a symlink in an open directory leads to; undefined where it dangles or leads out. */
  async linkTarget(directory: Directory, name: Bytes): Promise<Stats | undefined> {
    const at = `${directory.at}/${name}`;
    if (this.boundary.unconfined) return stat(bytes(at)).catch(() => undefined);
    const trail = trailTo(name);
    try {
      const entry = await this.#follow(trail, directory.at, name);
      return entry.found && (await stat(bytes(entry.found.at)));
    } catch {
      return undefined;
    } finally {
      release(trail);
    }
  }

  /** Leaves nothing behind on failure, and does not tell what exists outside the roots. */
  async #resolve<T>(trail: Trail, work: () => Promise<T>): Promise<T> {
    try {
      return await work();
    } catch (error) {
      await undo(trail);
      release(trail);
      throw this.boundary.covers(trail.path)
        ? fromErrno(error, shown(trail.path))
        : this.boundary.outside(trail.path);
    }
  }

  async #parent(trail: Trail, path: Bytes, make: boolean): Promise<FileHandle> {
    try {
      return await hold(trail, path, O_DIRECTORY);
    } catch (error) {
      if (!make || errnoOf(error) !== 'ENOENT') await this.#fail(trail, path, error);
    }
    return this.#make(trail, path);
  }

  async #make(trail: Trail, path: Bytes): Promise<FileHandle> {
    const above = await this.#parent(trail, posix.dirname(path), true);
    const name = posix.basename(path);
    const at = `${pinned(above)}/${name}`;
    await this.#check(trail, { at: pinned(above), name });
    try {
      await mkdir(bytes(at), 0o755);
    } catch (error) {
      // Somebody was faster, or a symlink dangles there: opening tells which.
      if (errnoOf(error) === 'EEXIST') return this.#directory(trail, at);
      throw error;
    }
    trail.made.push({ above, name });
    const made = await hold(trail, at, O_DIRECTORY | O_NOFOLLOW);
    // Against the umask; a setgid bit inherited from above stays.
    await chmod(pinned(made), ((await made.stat()).mode & 0o7000) | 0o755);
    return made;
  }

  async #lookUp(trail: Trail, at: Bytes, name: Bytes): Promise<Entry> {
    const surveyed = this.boundary.survey({ at, name });
    // Listened to below; until then the name is opened meanwhile.
    surveyed.catch(() => undefined);
    const found = await hold(trail, `${at}/${name}`, O_NOFOLLOW).catch(async (error: unknown) => {
      if (errnoOf(error) === 'ENOENT') return undefined;
      this.boundary.judge(await surveyed, undefined, trail.path);
      throw error;
    });
    const stats = await found?.stat({ bigint: true });
    if (stats?.isSymbolicLink() && trail.follows) {
      this.boundary.demandFree(await surveyed, stats, trail.path);
      return this.#follow(trail, at, name);
    }
    this.boundary.judge(await surveyed, stats, trail.path);
    return this.#entry(trail, at, name, found && stats && { at: pinned(found), stats });
  }

  /** Goes on where a symlink points to; its path is resolved by the kernel, never lexically. */
  async #follow(trail: Trail, at: Bytes, name: Bytes): Promise<Entry> {
    trail.hops += 1;
    if (trail.hops > longestTrail) throw fault('invalid_path', trail.path, 'too many symlinks');
    const link = await readlink(bytes(`${at}/${name}`), 'latin1').catch(() => undefined);
    // It has just been replaced.
    if (link === undefined) return this.#lookUp(trail, at, name);
    trail.link ??= link;
    const target = link.startsWith('/') ? link : `${at}/${link}`;
    const cut = target.lastIndexOf('/');
    const last = target.slice(cut + 1);
    if (!/^\.{0,2}$/.test(last)) {
      const directory = await this.#directory(trail, target.slice(0, cut) || '/');
      return this.#lookUp(trail, pinned(directory), last);
    }
    // It ends in a slash or dots, so it names a directory without a name of its own.
    const directory = await this.#directory(trail, target);
    await this.#check(trail, { at: pinned(directory) });
    const found = { at: pinned(directory), stats: await directory.stat({ bigint: true }) };
    return this.#entry(trail, found.at, '.', found);
  }

  async #directory(trail: Trail, path: Bytes): Promise<FileHandle> {
    return hold(trail, path, O_DIRECTORY).catch((error: unknown) => this.#fail(trail, path, error));
  }

  /** Why a directory cannot be opened is told only if the way to it ends inside: elsewhere it would tell what exists. */
  async #fail(trail: Trail, path: Bytes, error: unknown): Promise<never> {
    const reached = await this.#reach(trail, path);
    await this.#check(trail, { at: pinned(reached) });
    throw error;
  }

  /** The last directory on the way of a path that is there, symlinks followed as the kernel does. */
  async #reach(trail: Trail, path: Bytes, hops = 0): Promise<FileHandle> {
    // A slash or dot at the end would follow the symlink before it.
    const plain = path.replace(/(\/\.?)+$/, '') || '/';
    const directory = await hold(trail, plain, O_DIRECTORY).catch(() => undefined);
    if (directory) return directory;
    const above = posix.dirname(plain);
    const link = await readlink(bytes(plain), 'latin1').catch(() => undefined);
    if (link === undefined || hops === longestTrail) return this.#reach(trail, above, hops);
    return this.#reach(trail, link.startsWith('/') ? link : `${above}/${link}`, hops + 1);
  }

  async #check(trail: Trail, place: Place, stats?: BigIntStats): Promise<void> {
    this.boundary.judge(await this.boundary.survey(place), stats, trail.path);
  }

  #entry(trail: Trail, directory: Bytes, name: Bytes, found: Entry['found']): Entry {
    return {
      directory,
      name,
      at: `${directory}/${name}`,
      ...(found && { found }),
      ...(trail.link !== undefined && { link: trail.link }),
      madeIn: trail.made.map(({ above }) => pinned(above)),
      recheck: (stats) => this.#check(trail, { at: directory, name }, stats),
      undo: () => undo(trail),
      close: () => release(trail),
    };
  }
}
