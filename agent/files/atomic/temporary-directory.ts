// A temporary directory that only the agent's user can enter. Disposal removes it with its content. After a crash, the
// agent's next start removes it.
import { posix } from 'node:path';
import { fromErrno } from '../../../shared/errors.ts';
import { clear } from '../clear-directory.ts';
import { type Confined, child, isEmpty, mkdir, type Pinned, pin } from '../confine/confined-fs.ts';
import { type Bytes, fault, toText } from '../confine/parse-request-path.ts';
import { type Journal, markOf, type TemporaryName } from './temporary-files-journal.ts';

export class PrivateDirectory implements AsyncDisposable {
  readonly #name: TemporaryName;
  readonly #pinned: Pinned;
  #isKept = false;

  private constructor(name: TemporaryName, pinned: Pinned) {
    this.#name = name;
    this.#pinned = pinned;
  }

  /** Creates the temporary directory in `directory`, which must stay open until disposal. */
  static async open(directory: Confined, journal: Journal): Promise<PrivateDirectory> {
    const name = await journal.reserve(directory);
    try {
      await mkdir(name.at, 0o700);
      return new PrivateDirectory(name, await enter(name));
    } catch (error) {
      await name.release();
      throw fromErrno(error, toText(posix.dirname(name.path)));
    }
  }

  /** Returns the path of `name` in the temporary directory. The directory is empty at first. */
  content(name = 'content'): Confined {
    return child(this.#pinned.at, name);
  }

  /** Leaves the directory with its content on the disk, and returns its path. */
  async keep(): Promise<Bytes> {
    this.#isKept = true;
    await this.#name.keep();
    return this.#name.path;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    using pinned = this.#pinned;
    if (this.#isKept) return;
    const never = new AbortController().signal;
    await this.#name.release(() => clear(pinned.at, undefined, { path: this.#name.path, signal: never }));
  }
}

/**
 * Opens the new directory. Throws `conflict` if another program replaced it, so that disposal never empties that
 * program's directory.
 */
async function enter(name: TemporaryName): Promise<Pinned> {
  const pinned = await pin(name.at);
  try {
    const stats = await pinned.stat();
    const ours = stats.isDirectory() && Number(stats.uid) === process.geteuid?.();
    if (!ours || !(await isEmpty(pinned.at)))
      throw fault('conflict', name.path, 'another program replaced this temporary directory; try again');
    await name.mark(markOf(stats));
    return pinned;
  } catch (error) {
    pinned[Symbol.dispose]();
    throw error;
  }
}
