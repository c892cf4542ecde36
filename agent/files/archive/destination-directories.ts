// The directory tree that an archive is unpacked into. Creates missing directories with their modes, and sets exact
// modes and times at the end.
import { AppError, ignoring, isErrno } from '../../../shared/errors.ts';
import { entryFault } from '../../../shared/tar/index.ts';
import { Flushes, seconds } from '../atomic/atomic-write.ts';
import type { Boundary, IsProtected } from '../confine/boundary.ts';
import * as fs from '../confine/confined-fs.ts';
import { type Bytes, parentOf } from '../confine/parse-request-path.ts';

/** `full` is true if more than this number of directories are open. A single deep path may open many more. */
const mostHeld = 256;
const mostDirectories = 200_000;
const mostFlushing = 16;
/** Mode of a created directory that has no entry in the archive. */
const defaultMode = 0o755;

interface Attributes {
  mode: number;
  /** Undefined for the top directory if it has no entry in the archive. */
  mtimeNs?: bigint;
}

export interface TreeDirectory {
  pinned: fs.Pinned;
  /** Device and inode. */
  self: string;
  /** Path relative to the top; empty for the top itself. */
  path: Bytes;
  /**
   * Path of the directory from which new files in this directory inherit. They inherit its default ACL and, if it is
   * setgid, its group. The top and a directory that existed before the extraction have their own path here. A created
   * directory has the `inheritsFrom` of its parent.
   */
  inheritsFrom: Bytes;
}

interface Remembered {
  self: string;
  made: boolean;
  /** Mode and time that finish() gives a created directory. Each archive entry for the directory replaces them. */
  attributes?: Attributes;
}

export class Tree implements Disposable {
  readonly #boundary: Boundary;
  readonly #path: Bytes;
  readonly #open = new Map<Bytes, TreeDirectory>();
  readonly #remembered = new Map<Bytes, Remembered>();
  readonly #isProtected: IsProtected;

  private constructor(boundary: Boundary, isProtected: IsProtected, path: Bytes) {
    this.#boundary = boundary;
    this.#isProtected = isProtected;
    this.#path = path;
  }

  /**
   * - `root`: the top directory, which the caller closes after the tree
   * - `path`: path of `root`, for messages
   * - `made`: true if the agent has created `root`
   */
  static async open(root: fs.Pinned, boundary: Boundary, path: Bytes, made: boolean): Promise<Tree> {
    const tree = new Tree(boundary, await boundary.protection(), path);
    await tree.#admit('', root, made);
    return tree;
  }

  /**
   * Opens the directory at a path relative to the top.
   * - `make`: create missing directories
   * - `mode`: mode of the directory if it is created; created parents get mode 0755
   */
  async directory(path: Bytes, make = true, mode = defaultMode): Promise<TreeDirectory> {
    const known = this.#open.get(path);
    if (known) return known;
    const above = await this.directory(parentOf(path), make);
    return this.#enter(above, path, make ? mode : undefined);
  }

  /** Absolute path of a path in the tree, for messages. */
  pathOf(path: Bytes): Bytes {
    return path === '' ? this.#path : `${this.#path}/${path}`;
  }

  /** True if too many directories are open. The caller must then finish its files and call [Symbol.dispose](). */
  get full(): boolean {
    return this.#open.size > mostHeld;
  }

  /**
   * Closes all directories except the top. Call this only when no file in them is being written. directory() opens a
   * closed directory again.
   */
  [Symbol.dispose](): void {
    for (const { path, pinned } of this.#open.values()) {
      if (path === '') continue;
      pinned[Symbol.dispose]();
      this.#open.delete(path);
    }
  }

  /** Throws if the name is protected. `present`: stats of the file that currently has the name. */
  assertFree({ self }: TreeDirectory, name: Bytes, present: fs.BigIntStats | undefined, path: Bytes): void {
    if (!this.#isProtected(self, name, present)) return;
    throw entryFault(
      'permission_denied',
      path,
      "cannot be unpacked: this is the path of one of the agent's own files; unpack into another directory",
    );
  }

  /**
   * Opens or creates a directory that has an entry in the archive. A created directory gets the mode of the entry now,
   * with all permissions for its owner added, so that the agent can write to it. finish() sets the exact mode and the
   * time. A directory that existed before the extraction retains its own mode.
   */
  async describe(path: Bytes, attributes: Attributes): Promise<void> {
    const directory = await this.directory(path, true, attributes.mode);
    const remembered = this.#remembered.get(path);
    if (!remembered?.made) return;
    remembered.attributes = attributes;
    await setMode(directory.pinned, attributes.mode);
  }

  /**
   * Gives a created top directory mode 0755 if the archive has had no entry for it so far. Called before every entry
   * except the top's own. The top has mode 0700 until the first entry arrives, because the first entry is usually the
   * top's own and sets the mode.
   */
  async describeTop(): Promise<void> {
    const top = this.#remembered.get('');
    if (top?.made && !top.attributes) await this.describe('', { mode: defaultMode });
  }

  /** Gives each created directory its mode and time, and makes the names in all directories durable. */
  async finish(): Promise<void> {
    await using flushes = new Flushes(mostFlushing);
    // Subdirectories come first, because the mode of a directory may forbid entering it.
    for (const path of [...this.#remembered.keys()].sort().reverse()) {
      if (this.full) this[Symbol.dispose]();
      const { pinned } = await this.directory(path, false);
      await seal(pinned.at, this.#remembered.get(path), flushes);
    }
    await flushes.end();
  }

  /** Opens a directory. `mode`: if the directory is missing, create it with this mode; undefined: never create it. */
  async #enter(above: TreeDirectory, path: Bytes, mode: number | undefined): Promise<TreeDirectory> {
    const name = path.slice(path.lastIndexOf('/') + 1);
    const at = fs.child(above.pinned.at, name);
    // Without O_NOFOLLOW, a symlink could redirect entries to another directory.
    const open = (): Promise<fs.Pinned> =>
      fs.pin(at, fs.pathOnly | fs.O_DIRECTORY | fs.O_NOFOLLOW).catch((error: unknown) => {
        throw notDirectory(path, error);
      });
    try {
      return await this.#admit(path, await open(), false, above);
    } catch (error) {
      if (mode === undefined || !isErrno(error, 'ENOENT')) throw error;
    }
    this.assertFree(above, name, undefined, path);
    // EEXIST means that another process has created the directory, or that a dangling symlink has the name.
    // Opening the name shows which of the two.
    const made = (await fs.mkdir(at, mode | 0o700).then(() => true, ignoring('EEXIST'))) ?? false;
    const directory = await this.#admit(path, await open(), made, above);
    if (made) await setMode(directory.pinned, mode);
    return directory;
  }

  /** Checks access to an open directory and adds it to the tree. The tree closes it later, unless it is the top. */
  async #admit(path: Bytes, pinned: fs.Pinned, made: boolean, above?: TreeDirectory): Promise<TreeDirectory> {
    try {
      const stats = await pinned.stat();
      this.#boundary.judge(await this.#boundary.survey({ at: pinned.at }), stats, this.pathOf(path));
      const self = fs.identityOf(stats);
      const remembered = this.#remember(path, self, made);
      const inheritsFrom = above && remembered.made ? above.inheritsFrom : path;
      const directory = { pinned, self, path, inheritsFrom };
      this.#open.set(path, directory);
      return directory;
    } catch (error) {
      if (path !== '') pinned[Symbol.dispose]();
      throw error;
    }
  }

  #remember(path: Bytes, self: string, made: boolean): Remembered {
    const remembered = this.#remembered.get(path);
    if (remembered && remembered.self !== self)
      throw entryFault(
        'conflict',
        path,
        'this directory was replaced while the archive was unpacked; try again',
      );
    if (remembered) return remembered;
    if (this.#remembered.size >= mostDirectories)
      throw new AppError(
        'payload_too_large',
        `the archive has more than ${mostDirectories} directories; split it into several archives`,
      );
    const first = { self, made };
    this.#remembered.set(path, first);
    return first;
  }
}

function notDirectory(path: Bytes, error: unknown): unknown {
  if (!isErrno(error, 'ENOTDIR', 'ELOOP')) return error;
  return entryFault(
    'not_a_directory',
    path,
    'is a directory in the archive, but a file or symlink on the machine; remove or rename it there',
  );
}

/**
 * Sets the mode of a created directory, and adds all permissions for its owner. The agent needs them during the
 * extraction, to create files in the directory. At the end, seal() sets the exact mode.
 */
const setMode = (directory: fs.Pinned, mode: number): Promise<void> =>
  fs.chmodDirectory(directory, mode | 0o700);

/**
 * Flushes a directory. If the agent created it, sets the mode and time of its archive entry before the flush, or mode
 * 0755 if the archive has no entry for it.
 */
async function seal(at: fs.Confined, known: Remembered | undefined, flushes: Flushes): Promise<void> {
  // A directory that the agent may write but not read cannot be opened (EACCES). Such a directory is skipped.
  const directory = await fs.pin(at, fs.O_RDONLY | fs.O_DIRECTORY).catch(ignoring('EACCES'));
  if (!directory) return;
  const flush = async (): Promise<void> => {
    using _ = directory;
    if (known?.made) {
      const { attributes } = known;
      const time = attributes?.mtimeNs;
      if (time !== undefined) await directory.handle.utimes(seconds(time), seconds(time));
      await fs.chmodDirectory(directory, attributes?.mode ?? defaultMode);
    }
    await fs.syncChange(directory);
  };
  await flushes.add(flush());
}
