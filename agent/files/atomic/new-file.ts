// A new file: its bytes, then its attributes, then its name in one step; it is removed on failure. Data is flushed on the
// way, so that the last fsync of a large file does not take minutes.
import { errnoOf } from '../../../shared/errors.ts';
import * as fs from '../confine/fs.ts';
import { type Bytes, fault } from '../confine/request-path.ts';
import type { PathEntry } from '../confine/resolve.ts';
import type { Journal, TemporaryName } from './journal.ts';
import { linkAs } from './place.ts';

/** Bytes after which data is flushed. */
const flushBytes = 64 * 1024 * 1024;

export class NewFile implements AsyncDisposable {
  readonly pinned: fs.Pinned;
  /** Nothing is under way when it resolves, and nothing has failed. */
  flushing: Promise<unknown> = Promise.resolve();
  #unflushed = 0;
  size = 0;

  private constructor(pinned: fs.Pinned) {
    this.pinned = pinned;
  }

  /** Empty and private, under a name that nothing has. */
  static async create(at: fs.Confined): Promise<NewFile> {
    return new NewFile(
      await fs.pin(at, fs.O_WRONLY | fs.O_CREAT | fs.O_EXCL | fs.O_NOFOLLOW | fs.O_NOCTTY, 0o600),
    );
  }

  async append(chunk: Buffer): Promise<void> {
    const { handle } = this.pinned;
    for (let written = 0; written < chunk.length; ) {
      const left = chunk.length - written;
      written += (await handle.write(chunk, written, left, this.size + written)).bytesWritten;
    }
    this.size += chunk.length;
    this.#unflushed += chunk.length;
    if (this.#unflushed < flushBytes) return;
    this.#unflushed = 0;
    await this.flushing;
    this.flushing = handle.datasync();
    // A failure is thrown where the promise is awaited.
    this.flushing.catch(() => undefined);
  }

  /** Leaves a hole; one at the end takes a truncate to the size. */
  skip(length: number): void {
    this.size += length;
  }

  /** Resolves once everything written so far is on the disk. */
  async sync(): Promise<void> {
    await this.flushing;
    await this.pinned.handle.sync();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.flushing.catch(() => undefined);
    // fsync has reported every failure that matters.
    await this.pinned.handle.close().catch(() => undefined);
  }
}

/** Flushes under way while more is made: several at once are cheaper than one by one. */
export class Flushes implements AsyncDisposable {
  readonly #most: number;
  #pending: Promise<void>[] = [];

  constructor(most: number) {
    this.#most = most;
  }

  async add(flush: Promise<void>): Promise<void> {
    // A failure is thrown where the promise is awaited.
    flush.catch(() => undefined);
    if (this.#pending.push(flush) >= this.#most) await this.end();
  }

  async end(): Promise<void> {
    await Promise.all(this.#pending.splice(0));
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await Promise.allSettled(this.#pending.splice(0));
  }
}

/**
 * A time as Node takes it, exact to less than a microsecond. It is a text because Node takes a negative number for the
 * present time. Whole milliseconds get half a microsecond more where they are no multiple of an eighth of a second:
 * floating point does not hold them exactly, and every other one would become a millisecond earlier.
 */
export function seconds(ns: bigint): string {
  const isInexact = ns % 1_000_000n === 0n && ns % 125_000_000n !== 0n;
  const half = ns < 0n ? -500n : 500n;
  return String(Number(isInexact ? ns + half : ns) / 1e9);
}

/** A change of owner that must not be left out. */
export async function keepOwner(change: Promise<void>, path: Bytes): Promise<void> {
  try {
    await change;
  } catch (error) {
    // EINVAL: an owner that the agent's user namespace does not know.
    if (!['EPERM', 'EINVAL'].includes(errnoOf(error) ?? '')) throw error;
    throw fault('permission_denied', path, 'the agent may not keep its owner and group');
  }
}

interface Owner {
  uid: number;
  gid: number;
}

interface Attributes extends Owner {
  mode: number;
}

export class AtomicWrite implements AsyncDisposable {
  readonly entry: PathEntry;
  readonly #name: TemporaryName;
  /** The new content of the entry. */
  readonly file: NewFile;
  readonly #born: Owner;
  #has: Attributes;

  private constructor(entry: PathEntry, name: TemporaryName, file: NewFile, born: Owner) {
    this.entry = entry;
    this.#name = name;
    this.file = file;
    this.#born = born;
    this.#has = { ...born, mode: 0o600 };
  }

  /** Makes the temporary file, empty and private. */
  static async begin(entry: PathEntry, journal: Journal): Promise<AtomicWrite> {
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

  /** Fails where owner and group could not be preserved, before a byte is sent; changes nothing. */
  async tryOwner(owner: Owner): Promise<void> {
    const before = this.#has;
    if (await this.take({ ...owner, mode: before.mode })) await this.take(before);
  }

  /** Sets mode and owner, by default the agent's own; true if that changed anything. */
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
    if (overwrite) await fs.rename(at, entry.at);
    else {
      await linkAs(at, entry.at, entry.path);
      // Before the caller reads its change time, which losing a name updates.
      await fs.unlink(at);
    }
    await entry.keep();
  }

  /** Removes the file unless it has been placed. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.file[Symbol.asyncDispose]();
    await this.#name.release(false);
  }
}
