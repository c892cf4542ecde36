// The directories that one watch looks at, through inotify on pinned directories: it follows the inode, so nothing
// that is swapped on the way leads elsewhere. (chokidar watches by path and takes names for UTF-8.)
import { type BigIntStats, constants, type FSWatcher, watch } from 'node:fs';
import { type FileHandle, open } from 'node:fs/promises';
import { AppError, errnoOf } from '../../../shared/errors.ts';
import { identityOf, type Kept } from '../beneath/boundary.ts';
import { letGo, pathOf } from '../beneath/descent.ts';
import { holdsFiles } from '../beneath/kernel.ts';
import { namesIn } from '../beneath/names.ts';
import { type Bytes, bytes, pathOnly } from '../beneath/path.ts';

const { O_DIRECTORY, O_NOFOLLOW } = constants;

export type Kind = 'file' | 'directory';

/** What all watches of an agent may know together: thirty of one large directory cost thirty times its names. */
export class Budget {
  readonly #folders: number;
  readonly #names: number;
  #usedFolders = 0;
  #usedNames = 0;

  constructor(folders = 20_000, names = 300_000) {
    this.#folders = folders;
    this.#names = names;
  }

  /** Takes nothing where there is not enough. */
  take(folders: number, names: number): void {
    const fits = this.#usedFolders + folders <= this.#folders && this.#usedNames + names <= this.#names;
    if (!fits) {
      const most = `${this.#folders} directories and ${this.#names} names`;
      const reason = `all watches of this machine may hold ${most} together`;
      throw new AppError('unavailable', `${reason}: watch a directory further down, or end other watches`);
    }
    this.giveBack(-folders, -names);
  }

  giveBack(folders: number, names: number): void {
    this.#usedFolders -= folders;
    this.#usedNames -= names;
  }
}

/** A watched directory. */
export interface Folder {
  self: string;
  stats: BigIntStats;
  watcher: FSWatcher;
  /** What was last known to be in it. */
  names: Map<Bytes, Kind>;
}

/** A name in a watched directory, by the directory's path from the start; name "." is the directory itself. */
export type Mark = (folder: Bytes, name: Bytes) => void;

export class Watched {
  readonly #start: Bytes;
  readonly #only: Bytes | undefined;
  readonly #mark: Mark;
  readonly #budget: Budget;
  readonly #folders = new Map<Bytes, Folder>();

  /** From an open directory (/proc/self/fd/N), which is the caller's to close; of all names or `only` one. */
  constructor(start: Bytes, only: Bytes | undefined, budget: Budget, mark: Mark) {
    this.#start = start;
    this.#budget = budget;
    this.#only = only;
    this.#mark = mark;
  }

  get(path: Bytes): Folder | undefined {
    return this.#folders.get(path);
  }

  /**
   * Watches a directory, then reads what is in it, so that nothing is missed in between. Undefined where it is gone,
   * may not be read, or must not be.
   */
  async add(path: Bytes, kept: Kept): Promise<Folder | undefined> {
    const handle = await this.#open(path).catch(unlessGone);
    if (!handle) return undefined;
    try {
      const at = pathOf(handle);
      const stats = await handle.stat({ bigint: true });
      if (path !== '' && (kept('', '', stats) || !(await holdsFiles(at)))) return undefined;
      this.drop(path);
      const folder: Folder = {
        self: identityOf(stats),
        stats,
        watcher: this.#watch(path, at),
        names: new Map(),
      };
      this.#folders.set(path, folder);
      for await (const { name, directory } of namesIn(at)) {
        if (this.#only !== undefined && name !== this.#only) continue;
        this.know(folder, name, directory ? 'directory' : 'file');
      }
      return folder;
    } catch (error) {
      this.drop(path);
      if (path !== '' && ['EACCES', 'ENOENT'].includes(errnoOf(error) ?? '')) return undefined;
      throw error;
    } finally {
      letGo(handle);
    }
  }

  /** A watched directory, pinned; undefined where its path leads to another one by now. The caller's to close. */
  async pin(path: Bytes): Promise<FileHandle | undefined> {
    const handle = await this.#open(path).catch(unlessGone);
    const stats = await handle?.stat({ bigint: true });
    if (stats && identityOf(stats) === this.#folders.get(path)?.self) return handle;
    letGo(handle);
    return undefined;
  }

  know(folder: Folder, name: Bytes, kind: Kind): void {
    if (!folder.names.has(name)) this.#take(0, 1);
    folder.names.set(name, kind);
  }

  forget(folder: Folder, name: Bytes): void {
    if (folder.names.delete(name)) this.#budget.giveBack(0, 1);
  }

  drop(path: Bytes): void {
    const folder = this.#folders.get(path);
    if (!folder) return;
    folder.watcher.close();
    this.#budget.giveBack(1, folder.names.size);
    this.#folders.delete(path);
  }

  close(): void {
    for (const path of [...this.#folders.keys()]) this.drop(path);
  }

  /** Step by step from the start, and never through a symlink. */
  async #open(path: Bytes): Promise<FileHandle> {
    const flags = pathOnly | O_DIRECTORY;
    let handle = await open(bytes(this.#start), flags);
    for (const name of path === '' ? [] : path.split('/')) {
      try {
        const next = await open(bytes(`${pathOf(handle)}/${name}`), flags | O_NOFOLLOW);
        letGo(handle);
        handle = next;
      } catch (error) {
        letGo(handle);
        throw error;
      }
    }
    return handle;
  }

  /** Where there is not enough, all is given back at once: of many that begin together some can go on. */
  #take(folders: number, names: number): void {
    try {
      this.#budget.take(folders, names);
    } catch (error) {
      this.close();
      throw error;
    }
  }

  /** Of the budget for folders it takes one. */
  #watch(path: Bytes, at: Bytes): FSWatcher {
    this.#take(1, 0);
    try {
      // With the dot an event of the directory itself has a name that nothing in it can have.
      const watcher = watch(`${at}/.`, { encoding: 'latin1', persistent: false });
      watcher.on('change', (_, name) => this.#mark(path, String(name)));
      watcher.on('error', () => this.#mark(path, '.'));
      return watcher;
    } catch (error) {
      this.#budget.giveBack(1, 0);
      throw exhausted(error);
    }
  }
}

function exhausted(error: unknown): unknown {
  const limits: Readonly<Record<string, string>> = {
    ENOSPC: 'fs.inotify.max_user_watches',
    EMFILE: 'fs.inotify.max_user_instances',
  };
  const limit = limits[errnoOf(error) ?? ''];
  if (limit === undefined) return error;
  return new AppError('unavailable', `this machine's limit ${limit} is reached: raise it or watch less`, {
    limit,
  });
}

function unlessGone(error: unknown): undefined {
  if (!['ENOENT', 'ENOTDIR', 'ELOOP', 'EACCES'].includes(errnoOf(error) ?? '')) throw error;
}
