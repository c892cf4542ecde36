// Writes a new file under a temporary name, sets its attributes, and renames it atomically.
import { isErrno } from '../../../shared/errors.ts';
import * as fs from '../confine/confined-fs.ts';
import { type Bytes, fault } from '../confine/parse-request-path.ts';
import type { PathEntry } from '../confine/resolve-inside-roots.ts';
import { place } from './rename-into-place.ts';
import type { Journal, TemporaryName } from './temporary-files-journal.ts';

/** Number of bytes written between two flushes. A single flush at the end of a large file could take minutes. */
const flushBytes = 64 * 1024 * 1024;

export class NewFile implements AsyncDisposable {
  readonly pinned: fs.Pinned;
  /** The last flush, which may be in progress. Rejects if the flush fails. */
  flushing: Promise<unknown> = Promise.resolve();
  #unflushed = 0;
  size = 0;

  private constructor(pinned: fs.Pinned) {
    this.pinned = pinned;
  }

  /** Creates an empty file with mode 0600. Fails with EEXIST if the name is taken. */
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
    // Prevents an unhandled rejection. The error is thrown where `flushing` is awaited.
    this.flushing.catch(() => undefined);
  }

  /**
   * Leaves a hole of `length` bytes. A hole at the end does not lengthen the file, so the caller must finally call
   * `truncate(size)`.
   */
  skip(length: number): void {
    this.size += length;
  }

  /** Resolves when everything written so far is on the disk. */
  async sync(): Promise<void> {
    await this.flushing;
    await this.pinned.handle.sync();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.flushing.catch(() => undefined);
    // An error of close is ignored: fsync has reported every failure that matters.
    await this.pinned.handle.close().catch(() => undefined);
  }
}

/** Runs up to `most` flushes at once, which is cheaper than one after the other. */
export class Flushes implements AsyncDisposable {
  readonly #most: number;
  #pending: Promise<void>[] = [];

  constructor(most: number) {
    this.#most = most;
  }

  async add(flush: Promise<void>): Promise<void> {
    // Prevents an unhandled rejection. The error is thrown where the flush is awaited.
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

/** Returns a time for Node's utimes(), exact to less than a microsecond. */
export function seconds(ns: bigint): string {
  // Most whole milliseconds cannot be represented exactly as floating point seconds, and rounding could yield the
  // neighboring millisecond. To prevent this, half a microsecond is added (subtracted from a negative time).
  const isInexact = ns % 1_000_000n === 0n && ns % 125_000_000n !== 0n;
  const halfMicrosecond = ns < 0n ? -500n : 500n;
  // The result is a string, because Node replaces a negative number by the current time.
  return String(Number(isInexact ? ns + halfMicrosecond : ns) / 1e9);
}

/** Awaits a change of a file's owner. Throws permission_denied if the agent may not set this owner. */
export async function keepOwner(change: Promise<void>, path: Bytes): Promise<void> {
  try {
    await change;
  } catch (error) {
    // chown(2) fails with EINVAL if the new owner has no id in the agent's user namespace.
    if (!isErrno(error, 'EPERM', 'EINVAL')) throw error;
    throw fault(
      'permission_denied',
      path,
      'cannot keep its owner and group: the agent has no permission to set them; usually only an agent that runs as root may set them',
    );
  }
}

interface Attributes {
  uid: number;
  gid: number;
  mode: number;
}

const attributesOf = ({ uid, gid, mode }: fs.BigIntStats): Attributes => ({
  uid: Number(uid),
  gid: Number(gid),
  mode: Number(mode) & 0o7777,
});

export class AtomicWrite implements AsyncDisposable {
  readonly entry: PathEntry;
  readonly #name: TemporaryName;
  /** The temporary file with the new content of the entry. */
  readonly file: NewFile;
  readonly #initial: Attributes;
  #current: Attributes;

  private constructor(entry: PathEntry, name: TemporaryName, file: NewFile, initial: Attributes) {
    this.entry = entry;
    this.#name = name;
    this.file = file;
    this.#initial = initial;
    this.#current = initial;
  }

  /** Begins a write, with an empty temporary file of mode 0600. */
  static async begin(entry: PathEntry, journal: Journal): Promise<AtomicWrite> {
    const name = await journal.reserve(entry.directory);
    try {
      const file = await NewFile.create(name.at);
      return new AtomicWrite(entry, name, file, attributesOf(await file.pinned.stat()));
    } catch (error) {
      await name.release();
      throw error;
    }
  }

  /**
   * Throws if the agent may not give the new file the owner and group of `replaced`. Called before the first byte, to
   * fail early.
   */
  async tryOwner(replaced: fs.BigIntStats): Promise<void> {
    const before = this.#current;
    if (await this.#set({ ...attributesOf(replaced), mode: before.mode })) await this.#set(before);
  }

  /**
   * Gives the new file the owner, group and mode of the file that it replaces. If it replaces none, it gets the agent's
   * user and mode 0644. In both cases `mode`, if set, overrides that mode. Returns true if anything changed.
   */
  take(replaced: fs.BigIntStats | undefined, mode?: number): Promise<boolean> {
    const wanted = replaced ? attributesOf(replaced) : { ...this.#initial, mode: 0o644 };
    return this.#set({ ...wanted, ...(mode !== undefined && { mode }) });
  }

  async #set(wanted: Attributes): Promise<boolean> {
    const { uid, gid, mode } = this.#current;
    const moves = wanted.uid !== uid || wanted.gid !== gid;
    if (!moves && wanted.mode === mode) return false;
    const { handle } = this.file.pinned;
    // The mode is set second, because a change of owner clears setuid and setgid.
    if (moves) await keepOwner(handle.chown(wanted.uid, wanted.gid), this.entry.path);
    await handle.chmod(wanted.mode);
    this.#current = wanted;
    return true;
  }

  /** Gives the file its final name atomically. Without `overwrite` it fails if the name exists. */
  async place(overwrite: boolean): Promise<void> {
    const { at: to, path } = this.entry;
    // Without `overwrite`, place() also removes the temporary name. unlink(2) updates the change time of the file, so
    // the caller must read that time for the etag afterwards.
    await place({ from: this.#name.at, to, directory: false, overwrite, path });
    await this.entry.keep();
  }

  /** Removes the temporary file unless it got its final name. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.file[Symbol.asyncDispose]();
    await this.#name.release();
  }
}
