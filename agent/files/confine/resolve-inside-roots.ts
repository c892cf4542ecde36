// Resolves the path in a request to an open file inside the roots, or to a free name in an open directory there. No
// other code may resolve such paths.
import { posix } from 'node:path';
import { errnoOf, fromErrno } from '../../../shared/errors.ts';
import type { Boundary, Location } from './boundary.ts';
import * as fs from './confined-fs.ts';
import { type Bytes, fault, toText } from './parse-request-path.ts';

/** Maximum number of symlinks that one path may lead through, as in Linux. */
const longestTrail = 40;

/** An open directory inside the boundary. Renames do not affect it. */
export interface Directory extends Disposable {
  at: fs.Confined;
}

interface Found {
  at: fs.Confined;
  stats: fs.BigIntStats;
}

/** The state of resolving one path. Its handles are closed by release(). */
class Trail {
  readonly path: Bytes;
  /** True if a symlink at the end of the path is followed. */
  readonly follows: boolean;
  hops = 0;
  link: Bytes | undefined;
  readonly made: { above: fs.Confined; name: Bytes }[] = [];
  readonly #held: fs.Pinned[] = [];

  constructor(path: Bytes, follows = true) {
    this.path = path;
    this.follows = follows;
  }

  /**
   * Opens a path with O_PATH before the path is checked. The caller then checks the file or directory that was opened.
   */
  async hold(path: Bytes, flags: number): Promise<fs.Pinned> {
    const pinned = await fs.pin(path as fs.Confined, fs.pathOnly | flags);
    this.#held.push(pinned);
    return pinned;
  }

  /** Removes the directories that were created for this path, unless they contain something by now. */
  async undo(): Promise<void> {
    for (const { above, name } of this.made.splice(0).reverse())
      await fs.rmdir(fs.child(above, name)).catch(() => undefined);
  }

  release(): void {
    for (const pinned of this.#held) pinned[Symbol.dispose]();
  }
}

/** The newest work of PathEntry.inTurn() for each name. */
const turns = new Map<string, Promise<unknown>>();

/**
 * A resolved path: one name in an open directory inside the boundary. Confinement.entry() has followed a symlink at the
 * end of the path; Confinement.name() has not.
 */
export class PathEntry implements AsyncDisposable {
  /** Path for calls that do not follow symlinks: create, rename, link, unlink, lstat. */
  readonly at: fs.Confined;
  readonly directory: fs.Confined;
  readonly name: Bytes;
  /** The file of that name, opened with O_PATH; undefined if the name is free. To read the file, open `found.at`. */
  readonly found: Found | undefined;
  readonly path: Bytes;
  /** Target of the symlink that the request named, as stored in the symlink. */
  readonly link: Bytes | undefined;
  readonly #trail: Trail;
  readonly #boundary: Boundary;

  constructor(trail: Trail, boundary: Boundary, directory: fs.Confined, name: Bytes, found?: Found) {
    this.at = fs.child(directory, name);
    this.directory = directory;
    this.name = name;
    this.found = found;
    this.path = trail.path;
    this.link = trail.link;
    this.#trail = trail;
    this.#boundary = boundary;
  }

  /** The file that the entry names. Throws file_not_found if there is none. */
  get present(): Found {
    if (!this.found) throw fault('file_not_found', this.path, 'does not exist');
    return this.found;
  }

  /** Checks access again. `stats` describes the file that has the name now. It may differ from `found`. */
  async recheck(stats: fs.BigIntStats | undefined): Promise<void> {
    const location = { at: this.directory, name: this.name };
    this.#boundary.judge(await this.#boundary.survey(location), stats, this.path);
  }

  /**
   * Runs `work` after all earlier work on the same name has ended. Work that replaces, removes or changes the file of a
   * name runs here, so that none of it undoes another.
   */
  async inTurn<T>(work: () => Promise<T>): Promise<T> {
    const key = `${await fs.identify(this.directory)}/${this.name}`;
    const done = (turns.get(key) ?? Promise.resolve()).then(work, work);
    turns.set(key, done);
    try {
      return await done;
    } finally {
      if (turns.get(key) === done) turns.delete(key);
    }
  }

  /**
   * Makes the name durable, and also the directories that were created for it. If keep() is not called, disposal
   * removes these directories.
   */
  async keep(): Promise<void> {
    const { made } = this.#trail;
    for (const at of [this.directory, ...made.map(({ above }) => above)]) await fs.syncDirectory(at);
    made.splice(0);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.#trail.undo();
    this.#trail.release();
  }
}

/**
 * Resolves paths inside the boundary. Directories are opened before they are checked, so that none is replaced between
 * check and use.
 */
export class Confinement {
  /** The boundary, for operations that walk below an open directory. */
  readonly boundary: Boundary;

  constructor(boundary: Boundary) {
    this.boundary = boundary;
  }

  directory(path: Bytes): Promise<Directory> {
    const trail = new Trail(path);
    return this.#resolve(trail, async () => {
      const { at } = await this.#directory(trail, path);
      await this.#check(trail, { at });
      return { at, [Symbol.dispose]: () => trail.release() };
    });
  }

  /** Resolves a path and follows a symlink at its end. `parents`: create missing directories above it. */
  entry(path: Bytes, parents = false): Promise<PathEntry> {
    return this.#enter(new Trail(path), parents);
  }

  /** Resolves a path without following a symlink at its end. */
  name(path: Bytes, parents = false): Promise<PathEntry> {
    return this.#enter(new Trail(path, false), parents);
  }

  #enter(trail: Trail, parents: boolean): Promise<PathEntry> {
    const { path } = trail;
    return this.#resolve(trail, async () => {
      const { at } = await this.#directory(trail, posix.dirname(path), parents);
      return this.#lookUp(trail, at, posix.basename(path));
    });
  }

  /** Stats of a symlink's target; undefined if the target is missing or outside the roots. */
  async linkTarget(directory: fs.Confined, name: Bytes): Promise<fs.BigIntStats | undefined> {
    if (this.boundary.unconfined) return fs.stat(fs.child(directory, name)).catch(() => undefined);
    const trail = new Trail(name);
    try {
      return (await this.#follow(trail, directory, name)).found?.stats;
    } catch {
      return undefined;
    } finally {
      trail.release();
    }
  }

  /** Runs `work`. If `work` fails, removes the directories that it created and closes those that it opened. */
  async #resolve<T>(trail: Trail, work: () => Promise<T>): Promise<T> {
    try {
      return await work();
    } catch (error) {
      await trail.undo();
      trail.release();
      // The original error of a path outside the roots would reveal whether the path exists.
      throw this.boundary.covers(trail.path)
        ? fromErrno(error, toText(trail.path))
        : this.boundary.outside(trail.path);
    }
  }

  /** Opens a directory. `make`: if it is missing, create it and the missing directories above it. */
  async #directory(trail: Trail, path: Bytes, make = false): Promise<fs.Pinned> {
    try {
      return await trail.hold(path, fs.O_DIRECTORY);
    } catch (error) {
      if (!make || errnoOf(error) !== 'ENOENT') await this.#fail(trail, path, error);
    }
    return this.#make(trail, path);
  }

  async #make(trail: Trail, path: Bytes): Promise<fs.Pinned> {
    const above = (await this.#directory(trail, posix.dirname(path), true)).at;
    const name = posix.basename(path);
    const at = fs.child(above, name);
    await this.#check(trail, { at: above, name });
    try {
      await fs.mkdir(at, 0o755);
    } catch (error) {
      // Another process has created the directory, or a dangling symlink has the name. Opening the name decides which.
      if (errnoOf(error) === 'EEXIST') return this.#directory(trail, at);
      throw error;
    }
    trail.made.push({ above, name });
    const made = await trail.hold(at, fs.O_DIRECTORY | fs.O_NOFOLLOW);
    await fs.chmodDirectory(made, 0o755);
    return made;
  }

  async #lookUp(trail: Trail, directory: fs.Confined, name: Bytes): Promise<PathEntry> {
    const surveyed = this.boundary.survey({ at: directory, name });
    // Prevents an unhandled rejection, which would end the process. The error is thrown below, where `surveyed` is
    // awaited.
    surveyed.catch(() => undefined);
    const found = await trail.hold(fs.child(directory, name), fs.O_NOFOLLOW).catch(async (error: unknown) => {
      if (errnoOf(error) === 'ENOENT') return undefined;
      this.boundary.judge(await surveyed, undefined, trail.path);
      throw error;
    });
    const stats = await found?.stat();
    if (stats?.isSymbolicLink() && trail.follows) {
      this.boundary.assertFree(await surveyed, stats, trail.path);
      return this.#follow(trail, directory, name);
    }
    this.boundary.judge(await surveyed, stats, trail.path);
    return new PathEntry(trail, this.boundary, directory, name, found && stats && { at: found.at, stats });
  }

  /**
   * Follows a symlink. The kernel resolves the directories in its target, because this method must not remove "a/.."
   * from the text: `a` may be a symlink.
   */
  async #follow(trail: Trail, at: fs.Confined, name: Bytes): Promise<PathEntry> {
    trail.hops += 1;
    if (trail.hops > longestTrail)
      throw fault(
        'invalid_path',
        trail.path,
        'leads through too many symlinks; check whether they form a loop',
      );
    const link = await fs.readlink(fs.child(at, name)).catch(() => undefined);
    // The symlink was replaced after it was opened, so the name is looked up again.
    if (link === undefined) return this.#lookUp(trail, at, name);
    trail.link ??= link;
    const target = link.startsWith('/') ? link : `${at}/${link}`;
    const cut = target.lastIndexOf('/');
    const last = target.slice(cut + 1);
    if (!/^\.{0,2}$/.test(last)) {
      const directory = await this.#directory(trail, target.slice(0, cut) || '/');
      return this.#lookUp(trail, directory.at, last);
    }
    // The target ends in "/", "." or "..": it is a directory and has no last name.
    const directory = await this.#directory(trail, target);
    await this.#check(trail, { at: directory.at });
    const found = { at: directory.at, stats: await directory.stat() };
    return new PathEntry(trail, this.boundary, directory.at, '.', found);
  }

  /**
   * Throws `error` if the deepest existing directory of the path is inside the roots. Otherwise throws
   * permission_denied, because `error` would reveal which paths exist outside the roots.
   */
  async #fail(trail: Trail, path: Bytes, error: unknown): Promise<never> {
    await this.#check(trail, { at: (await this.#reach(trail, path)).at });
    throw error;
  }

  /** Opens the deepest existing directory of a path. Symlinks are followed as the kernel follows them. */
  async #reach(trail: Trail, path: Bytes, hops = 0): Promise<fs.Pinned> {
    // Each "/" and "/." at the end is removed. With them, readlink() would follow a symlink instead of reading it.
    const plain = path.replace(/(\/\.?)+$/, '') || '/';
    const directory = await trail.hold(plain, fs.O_DIRECTORY).catch(() => undefined);
    if (directory) return directory;
    const above = posix.dirname(plain);
    const link = await fs.readlink(plain as fs.Confined).catch(() => undefined);
    if (link === undefined || hops === longestTrail) return this.#reach(trail, above, hops);
    return this.#reach(trail, link.startsWith('/') ? link : `${above}/${link}`, hops + 1);
  }

  async #check(trail: Trail, location: Location): Promise<void> {
    this.boundary.judge(await this.boundary.survey(location), undefined, trail.path);
  }
}
