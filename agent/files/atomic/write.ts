// The new content of a file on its way: a temporary file beside the target, which becomes it in one step or goes.
import { rename, unlink } from '../confine/fs.ts';
import type { Entry } from '../confine/resolve.ts';
import type { Journal, TemporaryName } from './journal.ts';
import { keepOwner, NewFile } from './new-file.ts';
import { linkAs } from './place.ts';

interface Owner {
  uid: number;
  gid: number;
}

interface Attributes extends Owner {
  mode: number;
}

export class AtomicWrite implements AsyncDisposable {
  readonly entry: Entry;
  readonly #name: TemporaryName;
  /** What the entry's name will have. */
  readonly file: NewFile;
  readonly #born: Owner;
  #has: Attributes;

  private constructor(entry: Entry, name: TemporaryName, file: NewFile, born: Owner) {
    this.entry = entry;
    this.#name = name;
    this.file = file;
    this.#born = born;
    this.#has = { ...born, mode: 0o600 };
  }

  /** Makes the temporary file, empty and private. */
  static async begin(entry: Entry, journal: Journal): Promise<AtomicWrite> {
    const name = await journal.reserve(entry.directory);
    try {
      const file = await NewFile.create(name.at);
      const { uid, gid } = await file.pinned.stat();
      return new AtomicWrite(entry, name, file, { uid: Number(uid), gid: Number(gid) });
    } catch (error) {
      await name.release(false);
      throw error;
    }
  }

  /** Fails where owner and group could not be kept, before a byte is sent; changes nothing. */
  async tryOwner(owner: Owner): Promise<void> {
    const before = this.#has;
    if (await this.take({ ...owner, mode: before.mode })) await this.take(before);
  }

  /** Takes mode and owner, the agent's own unless told; true if that changed anything. */
  async take(attributes: { mode: number } & Partial<Owner>): Promise<boolean> {
    const wanted = { ...this.#born, ...attributes };
    const moves = wanted.uid !== this.#has.uid || wanted.gid !== this.#has.gid;
    if (!moves && wanted.mode === this.#has.mode) return false;
    const { handle } = this.file.pinned;
    // A change of owner clears setuid and setgid, so the mode comes second.
    if (moves) await keepOwner(handle.chown(wanted.uid, wanted.gid), this.entry.path);
    await handle.chmod(wanted.mode);
    this.#has = wanted;
    return true;
  }

  /** Takes the target's name: in one step, and without `overwrite` only if it is free. */
  async place(overwrite: boolean): Promise<void> {
    const { at } = this.#name;
    const { entry } = this;
    if (overwrite) await rename(at, entry.at);
    else {
      await linkAs(at, entry.at, entry.path);
      // Before its times are told: a name less changes them.
      await unlink(at);
    }
    await entry.keep();
  }

  /** What has not been placed is gone afterwards. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.file[Symbol.asyncDispose]();
    await this.#name.release(false);
  }
}
