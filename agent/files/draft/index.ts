// The new content of a file on its way: a temporary file beside the target, which becomes it in one step or goes.
import { createHash, type Hash } from 'node:crypto';
import { type BigIntStats, constants } from 'node:fs';
import { type FileHandle, lstat, open, readlink, rename, unlink } from 'node:fs/promises';
import { errnoOf } from '../../../shared/errors.ts';
import type { Logger } from '../../../shared/logger.ts';
import type { Entry } from '../beneath/index.ts';
import { type Bytes, bytes, fault, shown } from '../beneath/path.ts';
import { linkAs, syncDirectory } from './place.ts';
import { type Temporary, temporaryName } from './temporary.ts';

const { O_CREAT, O_EXCL, O_NOCTTY, O_NOFOLLOW, O_WRONLY } = constants;
/** Bytes after which the disk is set to work, so that the last fsync of a large file does not take minutes. */
const flushBytes = 64 * 1024 * 1024;

interface Owner {
  uid: number;
  gid: number;
}

interface Attributes extends Owner {
  mode: number;
}

export class Draft {
  readonly entry: Entry;
  readonly path: Bytes;
  readonly #temporary: Temporary;
  readonly #log: Logger;
  readonly #name = temporaryName();
  readonly #hash: Hash = createHash('sha256');
  #sha256: string | undefined;
  #handle: FileHandle | undefined;
  #recorded: Bytes | undefined;
  #born: Owner | undefined;
  #has: Attributes | undefined;
  #flushing: Promise<unknown> = Promise.resolve();
  #unflushed = 0;
  #size = 0;
  #placed = false;

  /** `path` is as requested, for messages. Owns the entry from here on. */
  constructor(entry: Entry, path: Bytes, temporary: Temporary, log: Logger) {
    this.entry = entry;
    this.path = path;
    this.#temporary = temporary;
    this.#log = log;
  }

  get size(): number {
    return this.#size;
  }

  /** Makes the temporary file, empty and private. */
  async begin(): Promise<void> {
    const recorded = `${await readlink(this.entry.directory, 'latin1')}/${this.#name}`;
    this.#recorded = recorded;
    await this.#temporary.add(recorded);
    const flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_NOCTTY;
    this.#handle = await open(bytes(this.#at), flags, 0o600);
    const { uid, gid } = await this.#handle.stat();
    this.#born = { uid, gid };
    this.#has = { uid, gid, mode: 0o600 };
  }

  /** Fails where owner and group could not be kept, before a byte is sent; changes nothing. */
  async tryOwner(owner: Owner): Promise<void> {
    const { uid, gid, mode } = this.#attributes();
    if (await this.take({ ...owner, mode })) await this.take({ uid, gid, mode });
  }

  async append(chunk: Buffer): Promise<void> {
    const handle = this.#open();
    const written = writeFully(handle, chunk, this.#size);
    // While the disk works.
    this.#hash.update(chunk);
    await written;
    this.#size += chunk.length;
    this.#unflushed += chunk.length;
    if (this.#unflushed < flushBytes) return;
    this.#unflushed = 0;
    await this.#flushing;
    this.#flushing = handle.datasync();
    // Its failure is thrown where it is awaited; until then nobody listens.
    this.#flushing.catch(() => undefined);
  }

  /** In hexadecimal; nothing can be appended afterwards. */
  get sha256(): string {
    this.#sha256 ??= this.#hash.digest('hex');
    return this.#sha256;
  }

  /** Takes mode and owner, the agent's own unless told; true if that changed anything. */
  async take({ mode, ...owner }: { mode: number } & Partial<Owner>): Promise<boolean> {
    const has = this.#attributes();
    const wanted = { ...has, ...this.#born, ...owner, mode };
    const moves = wanted.uid !== has.uid || wanted.gid !== has.gid;
    if (!moves && mode === has.mode) return false;
    // A change of owner clears setuid and setgid, so the mode comes second.
    if (moves) await this.#open().chown(wanted.uid, wanted.gid).catch(this.#refused);
    await this.#open().chmod(mode);
    this.#has = wanted;
    return true;
  }

  /** Everything so far is on the disk when it resolves. */
  async sync(): Promise<void> {
    await this.#flushing;
    await this.#open().sync();
  }

  /** Takes the target's name: in one step, and without `overwrite` only if it is free. */
  async place(overwrite: boolean): Promise<void> {
    const [from, to] = [bytes(this.#at), bytes(this.entry.at)];
    if (overwrite) await rename(from, to);
    else await linkAs(this.#at, this.entry.at, this.path);
    this.#placed = true;
    if (!overwrite) await unlink(from);
    for (const at of [this.entry.directory, ...this.entry.madeIn]) await syncDirectory(at);
  }

  /** Of the file as it is now. */
  stats(): Promise<BigIntStats> {
    return this.#open().stat({ bigint: true });
  }

  /** Ends it: what has not been placed is gone afterwards, with the directories made for it. */
  async end(): Promise<void> {
    try {
      await this.#flushing.catch(() => undefined);
      // What matters has been told by fsync.
      await this.#handle?.close().catch(() => undefined);
      if (this.#recorded !== undefined) await this.#forget(this.#recorded);
      if (!this.#placed) await this.entry.undo();
    } finally {
      this.entry.close();
    }
  }

  async #forget(recorded: Bytes): Promise<void> {
    try {
      if (this.#handle) await unlink(bytes(this.#at)).catch(ignoreMissing);
      await this.#temporary.drop(recorded);
    } catch (error) {
      // It stays in the journal, so the next start tries again.
      this.#log.warn({ err: error, path: shown(recorded) }, 'a temporary file stays behind');
    }
  }

  get #at(): Bytes {
    return `${this.entry.directory}/${this.#name}`;
  }

  #open(): FileHandle {
    if (!this.#handle) throw new Error('the draft has not begun');
    return this.#handle;
  }

  #attributes(): Attributes {
    if (!this.#has) throw new Error('the draft has not begun');
    return this.#has;
  }

  #refused = (error: unknown): never => {
    // EINVAL: an owner that the agent's user namespace does not know.
    if (!['EPERM', 'EINVAL'].includes(errnoOf(error) ?? '')) throw error;
    throw fault('permission_denied', this.path, 'the agent may not keep its owner and group');
  };
}

/** What has a name now, a symlink there not followed. */
export async function lookAt(path: Bytes): Promise<BigIntStats | undefined> {
  return lstat(bytes(path), { bigint: true }).catch(ignoreMissing);
}

function ignoreMissing(error: unknown): undefined {
  if (errnoOf(error) !== 'ENOENT') throw error;
}

async function writeFully(handle: FileHandle, chunk: Buffer, position: number): Promise<void> {
  let written = 0;
  while (written < chunk.length) {
    written += (await handle.write(chunk, written, chunk.length - written, position + written)).bytesWritten;
  }
}
