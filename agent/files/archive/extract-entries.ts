// Extracts the entries of an archive into a directory tree. Each file is written under a temporary name, flushed,
// and renamed.
import { posix } from 'node:path';
import { AppError, errnoOf, fromErrno, isErrno } from '../../../shared/errors.ts';
import {
  assertInside,
  assertTarget,
  entryFault,
  pathOfEntry,
  type TarEntry,
} from '../../../shared/tar/index.ts';
import { keepOwner, NewFile, seconds } from '../atomic/atomic-write.ts';
import { place } from '../atomic/rename-into-place.ts';
import { PrivateDirectory } from '../atomic/temporary-directory.ts';
import type { Journal } from '../atomic/temporary-files-journal.ts';
import * as fs from '../confine/confined-fs.ts';
import { type Bytes, parentOf, toText } from '../confine/parse-request-path.ts';
import type { Tree, TreeDirectory } from './destination-directories.ts';

/** A file of at most this number of bytes is read into memory first, and written while the next files are read. */
const smallBytes = 256 * 1024;
/** Maximum number of small files that are written at once. */
const mostUnderway = 16;
/** Maximum number of private directories (see `#temporary`) at once. Each needs two open handles. */
const mostTemporary = 64;

interface ExtractorOptions {
  tree: Tree;
  journal: Journal;
  overwrite: boolean;
  /**
   * True if the archive becomes a new directory as a whole. The symlinks in the archive may then lead outside that
   * directory, which is safe because no entry is placed through a symlink.
   */
  whole: boolean;
}

interface Arrival {
  entry: TarEntry;
  /** Path relative to the top of the tree. */
  path: Bytes;
  directory: TreeDirectory;
  name: Bytes;
  to: fs.Confined;
}

export class Extractor implements AsyncDisposable {
  readonly #options: ExtractorOptions;
  /**
   * Private directories in which files are written before they are moved to their destination. The key is
   * `inheritsFrom` of the destination directory.
   */
  readonly #temporary = new Map<Bytes, { temporary: PrivateDirectory; pinned: fs.Pinned }>();
  readonly #underway = new Map<Bytes, Promise<void>>();
  #failure: { reason: unknown } | undefined;
  #names = 0;
  files = 0;
  bytes = 0;

  constructor(options: ExtractorOptions) {
    this.#options = options;
  }

  /**
   * Extracts one entry. Small files are written in the background: if such a write fails, a later call throws
   * its error.
   */
  async extract(entry: TarEntry): Promise<void> {
    const path = pathOfEntry(entry.name);
    await this.#settled(path);
    const { tree } = this.#options;
    if (tree.full) {
      await Promise.all(this.#underway.values());
      tree[Symbol.dispose]();
    }
    await asEntry(path, async () => {
      if (path !== '') await tree.describeTop();
      const { kind, mode, mtimeNs } = entry;
      await (kind === 'directory'
        ? tree.describe(path, { mode: mode & 0o777, mtimeNs })
        : this.#one(entry, path));
    });
  }

  /** Resolves when all entries are placed and the temporary files are removed. Throws the first failure. */
  async finish(): Promise<void> {
    await this[Symbol.asyncDispose]();
    if (this.#failure) throw this.#failure.reason;
  }

  /** Waits for the small files, then removes the temporary directories. */
  async [Symbol.asyncDispose](): Promise<void> {
    await Promise.all(this.#underway.values());
    for (const { temporary, pinned } of this.#temporary.values()) {
      await temporary[Symbol.asyncDispose]();
      pinned[Symbol.dispose]();
    }
    this.#temporary.clear();
  }

  async #one(entry: TarEntry, path: Bytes): Promise<void> {
    const { whole, tree } = this.#options;
    if (path === '')
      throw entryFault(
        'invalid_path',
        entry.name,
        'has the path of the destination directory, but is not a directory; remove this entry from the archive',
      );
    // The link's target is checked first, so that an invalid link leaves no new parent directory behind.
    const { kind, target = '' } = entry;
    if (kind === 'symlink') (whole ? assertTarget : assertInside)(path, target);
    if (kind === 'link') pathOfEntry(target);
    const directory = await tree.directory(parentOf(path));
    const name = posix.basename(path);
    const arrival: Arrival = { entry, path, directory, name, to: fs.child(directory.pinned.at, name) };
    await (kind === 'file' ? this.#file(arrival) : this.#link(arrival));
  }

  async #file(arrival: Arrival): Promise<void> {
    const { entry, directory, path } = arrival;
    const at = await this.#temporaryFor(directory);
    this.files += 1;
    this.bytes += entry.size;
    if (entry.size > smallBytes) return this.#write(arrival, at, entry.body);
    const pieces: Buffer[] = [];
    for await (const piece of entry.body) pieces.push(piece);
    while (this.#underway.size >= mostUnderway) await Promise.race(this.#underway.values());
    const work = asEntry(path, () => this.#write(arrival, at, pieces))
      .catch((reason: unknown) => {
        this.#failure ??= { reason };
      })
      .finally(() => this.#underway.delete(path));
    this.#underway.set(path, work);
  }

  async #write(arrival: Arrival, at: fs.Confined, pieces: TarEntry['body'] | Buffer[]): Promise<void> {
    const { mode, mtimeNs } = arrival.entry;
    // Name and owner are checked before the bytes of a large file are read, so that a refused entry fails early.
    const replaced = await this.#assertFree(arrival);
    {
      await using made = await NewFile.create(at);
      if (replaced?.isFile()) await this.#takeOwner(made, replaced, arrival.path);
      for await (const piece of pieces) await made.append(piece);
      const { handle } = made.pinned;
      // An archive may not set setuid, setgid or sticky. chmod() ignores the umask.
      await handle.chmod(mode & 0o777);
      // Sets both access and modification time, as tar does: an archive has only one time.
      await handle.utimes(seconds(mtimeNs), seconds(mtimeNs));
      await made.sync();
    }
    await this.#place(arrival, at);
  }

  /** Gives a new file the owner and group of the file that it replaces, as the upload of a single file does. */
  async #takeOwner({ pinned }: NewFile, { uid, gid }: fs.BigIntStats, path: Bytes): Promise<void> {
    const made = await pinned.stat();
    if (made.uid === uid && made.gid === gid) return;
    await keepOwner(pinned.handle.chown(Number(uid), Number(gid)), this.#options.tree.pathOf(path));
  }

  async #link(arrival: Arrival): Promise<void> {
    const { kind, target = '', mtimeNs } = arrival.entry;
    const at = await this.#temporaryFor(arrival.directory);
    if (kind === 'link') await this.#hardLink(arrival.path, target, at);
    else {
      await fs.symlink(target, at);
      await fs.lutimes(at, seconds(mtimeNs), seconds(mtimeNs));
    }
    await this.#place(arrival, at);
    // If the destination is already a hard link of the same file, rename(2) succeeds but leaves the temporary name. It
    // is removed here.
    await fs.unlink(at).catch(fs.ignoreMissing);
  }

  /**
   * Makes a hard link to a regular file of the tree. The file has been extracted already, because in an archive a file
   * comes before its hard links.
   */
  async #hardLink(path: Bytes, target: Bytes, at: fs.Confined): Promise<void> {
    const { tree } = this.#options;
    const inside = pathOfEntry(target);
    const name = posix.basename(inside);
    await this.#settled(inside);
    const refusal = (why = 'whose target is not a file of the archive') =>
      entryFault('invalid_path', path, `is a hard link ${why}`);
    if (inside === '') throw refusal();
    const directory = await tree.directory(parentOf(inside), false).catch(unlessMissing(refusal));
    await fs.link(fs.child(directory.pinned.at, name), at).catch(unlessMissing(refusal));
    // Checks the new hard link, and not the name `target`: after link(), that name may belong to a different file.
    const got = await fs.lookAt(at);
    // Such a link is refused, because it could lead outside: its target is relative to another directory.
    if (got?.isSymbolicLink())
      throw refusal(
        'to a symlink; make the archive with tar --hard-dereference, which stores symlinks instead',
      );
    if (!got?.isFile()) throw refusal();
    tree.assertFree(directory, name, got, path);
  }

  /**
   * Throws if the name belongs to a file that may not be replaced. A symlink is replaced, never its target. Returns the
   * stats of the file that has the name.
   */
  async #assertFree({ directory, name, path, to }: Arrival): Promise<fs.BigIntStats | undefined> {
    const { tree, overwrite } = this.#options;
    const present = await fs.lookAt(to);
    tree.assertFree(directory, name, present, path);
    if (present?.isDirectory())
      throw entryFault(
        'is_a_directory',
        path,
        'a directory on the machine has this name; remove or rename it there',
      );
    if (present && !overwrite)
      throw entryFault('already_exists', path, 'exists already; set overwrite to true to replace it');
    if (present && !present.isFile() && !present.isSymbolicLink())
      throw entryFault(
        'unsupported_file',
        path,
        'a device, socket or FIFO on the machine has this name; remove or rename it there',
      );
    return present;
  }

  async #place(arrival: Arrival, at: fs.Confined): Promise<void> {
    const { to, path } = arrival;
    await this.#assertFree(arrival);
    await place({ from: at, to, directory: false, overwrite: this.#options.overwrite, path });
  }

  /**
   * Waits until no file is being written at this path or at one of its parents. Throws the first write error
   * so far.
   */
  async #settled(path: Bytes): Promise<void> {
    for (let name = path; name !== ''; name = parentOf(name)) await this.#underway.get(name);
    if (this.#failure) throw this.#failure.reason;
  }

  /**
   * Returns an unused path for a temporary file that will be moved into `directory`. The path is in a private directory
   * on the same mount, so that rename(2) works. There the file inherits the same group and default ACL as in
   * `directory`.
   */
  async #temporaryFor(directory: TreeDirectory): Promise<fs.Confined> {
    let temporary = this.#temporary.get(directory.inheritsFrom)?.temporary;
    if (!temporary) {
      if (this.#temporary.size >= mostTemporary) await this[Symbol.asyncDispose]();
      const pinned = await fs.pin(directory.pinned.at, fs.pathOnly | fs.O_DIRECTORY);
      temporary = await PrivateDirectory.open(pinned.at, this.#options.journal).catch((error: unknown) => {
        pinned[Symbol.dispose]();
        throw error;
      });
      this.#temporary.set(directory.inheritsFrom, { temporary, pinned });
    }
    this.#names += 1;
    return temporary.content(`content-${this.#names}`);
  }
}

const unlessMissing =
  (refusal: () => AppError) =>
  (error: unknown): never => {
    throw isErrno(error, 'ENOENT') ? refusal() : error;
  };

/** Runs `work` and adds the path of the entry to a system error. */
async function asEntry(path: Bytes, work: () => Promise<void>): Promise<void> {
  try {
    await work();
  } catch (error) {
    if (error instanceof AppError || errnoOf(error) === undefined) throw error;
    const { code, message, details } = fromErrno(error, `entry ${toText(path)}`);
    throw new AppError(code, message, { ...details, entry: toText(path) }, { cause: error });
  }
}
