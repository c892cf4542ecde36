// The directories of one watch, watched by inotify through open handles. inotify follows the inode, so a
// replaced directory cannot redirect the watch. (chokidar watches by path and assumes that names are UTF-8.)

import { AppError, errnoOf, ignoring, isErrno } from '../../../shared/errors.ts';
import { Quota } from '../../../shared/quota.ts';
import type { IsProtected } from '../confine/boundary.ts';
import * as fs from '../confine/fs.ts';
import { holdsFiles } from '../confine/kernel-file-systems.ts';
import type { Bytes } from '../confine/request-path.ts';

export type Kind = 'file' | 'directory';

/**
 * Share of the quota that a directory takes, in names, for the kernel's watch and its handle in the agent.
 */
const folderNames = 15;

/**
 * Quota of names that all watches together hold in memory. A directory counts once for each of its watches.
 */
export const watchQuota = (names = 300_000): Quota =>
  new Quota(names, 'names are watched on this machine, watch a directory further down or end other watches');

/** A watched directory. */
export interface Folder {
  self: string;
  stats: fs.BigIntStats;
  watcher: fs.FSWatcher;
  /** Entries last found in the directory. */
  names: Map<Bytes, Kind>;
}

/** Reports a change of `name`. `folder`: path relative to the start. The name "." is the directory itself. */
type Mark = (folder: Bytes, name: Bytes) => void;

export class Watched implements Disposable {
  readonly #start: fs.Confined;
  readonly #only: Bytes | undefined;
  readonly #mark: Mark;
  readonly #quota: Quota;
  readonly #folders = new Map<Bytes, Folder>();

  /** `start`: an open directory, which the caller closes. `only`: watch this name alone. */
  constructor(start: fs.Confined, only: Bytes | undefined, quota: Quota, mark: Mark) {
    this.#start = start;
    this.#quota = quota;
    this.#only = only;
    this.#mark = mark;
  }

  get(path: Bytes): Folder | undefined {
    return this.#folders.get(path);
  }

  /**
   * Watches a directory, then reads its entries, so that no change is missed in between.
   * Undefined if the directory is gone, unreadable, protected, or on a file system of the kernel.
   */
  async add(path: Bytes, isProtected: IsProtected): Promise<Folder | undefined> {
    using pinned = await this.#open(path);
    if (!pinned) return undefined;
    try {
      const { at } = pinned;
      const stats = await pinned.stat();
      if (path !== '' && (isProtected('', '', stats) || !(await holdsFiles(at)))) return undefined;
      this.drop(path);
      const watcher = this.#watch(path, at);
      const folder: Folder = { self: fs.identityOf(stats), stats, watcher, names: new Map() };
      this.#folders.set(path, folder);
      for await (const batch of fs.namesIn(at)) {
        for (const { name, directory } of batch)
          if (this.#only === undefined || name === this.#only)
            this.know(folder, name, directory ? 'directory' : 'file');
      }
      return folder;
    } catch (error) {
      this.drop(path);
      if (path !== '' && isErrno(error, 'EACCES', 'ENOENT')) return undefined;
      throw error;
    }
  }

  /**
   * Opens a watched directory; the caller closes it. Undefined if its path leads to another directory by now.
   */
  async pin(path: Bytes): Promise<fs.Pinned | undefined> {
    const pinned = await this.#open(path);
    const stats = await pinned?.stat();
    if (stats && fs.identityOf(stats) === this.#folders.get(path)?.self) return pinned;
    pinned?.[Symbol.dispose]();
    return undefined;
  }

  know(folder: Folder, name: Bytes, kind: Kind): void {
    if (!folder.names.has(name)) this.#take(1);
    folder.names.set(name, kind);
  }

  forget(folder: Folder, name: Bytes): void {
    if (folder.names.delete(name)) this.#quota.add(-1);
  }

  drop(path: Bytes): void {
    const folder = this.#folders.get(path);
    if (!folder) return;
    folder.watcher.close();
    this.#quota.add(-folderNames - folder.names.size);
    this.#folders.delete(path);
  }

  [Symbol.dispose](): void {
    for (const path of [...this.#folders.keys()]) this.drop(path);
  }

  /**
   * Opens a path step by step from the start, never through a symlink. Undefined if it is gone or not
   * accessible.
   */
  async #open(path: Bytes): Promise<fs.Pinned | undefined> {
    try {
      let pinned = await fs.pin(this.#start, fs.pathOnly | fs.O_DIRECTORY);
      for (const name of path === '' ? [] : path.split('/')) {
        using above = pinned;
        pinned = await fs.pin(fs.child(above.at, name), fs.pathOnly | fs.O_DIRECTORY | fs.O_NOFOLLOW);
      }
      return pinned;
    } catch (error) {
      return ignoring('ENOENT', 'ENOTDIR', 'ELOOP', 'EACCES')(error);
    }
  }

  /** Takes from the quota. On failure the whole watch is released, so that other watches can go on. */
  #take(names: number): void {
    try {
      this.#quota.add(names);
    } catch (error) {
      this[Symbol.dispose]();
      throw error;
    }
  }

  #watch(path: Bytes, at: fs.Confined): fs.FSWatcher {
    this.#take(folderNames);
    try {
      const watcher = fs.watch(at);
      watcher.on('change', (_, name) => this.#mark(path, String(name)));
      watcher.on('error', () => this.#mark(path, '.'));
      return watcher;
    } catch (error) {
      this.#quota.add(-folderNames);
      throw exhausted(error);
    }
  }
}

function exhausted(error: unknown): unknown {
  const limits = { ENOSPC: 'fs.inotify.max_user_watches', EMFILE: 'fs.inotify.max_user_instances' };
  const limit = Object.entries(limits).find(([errno]) => errno === errnoOf(error))?.[1];
  if (limit === undefined) return error;
  const message = `this machine's limit ${limit} is reached: raise it or watch less`;
  return new AppError('unavailable', message, { limit });
}
