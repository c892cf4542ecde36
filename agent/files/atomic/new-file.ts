// A file that is being made: its bytes, then its attributes. The disk is set to work on the way, so that the last fsync
// of a large file does not take minutes.
import { errnoOf } from '../../../shared/errors.ts';
import type { Confined, Pinned } from '../confine/fs.ts';
import * as fs from '../confine/fs.ts';
import { type Bytes, fault } from '../confine/path.ts';

/** Bytes after which the disk is set to work. */
const flushBytes = 64 * 1024 * 1024;

export class NewFile implements AsyncDisposable {
  readonly pinned: Pinned;
  #flushing: Promise<unknown> = Promise.resolve();
  #unflushed = 0;
  size = 0;

  private constructor(pinned: Pinned) {
    this.pinned = pinned;
  }

  /** Empty and private, under a name that nothing has. */
  static async create(at: Confined): Promise<NewFile> {
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
    await this.#flushing;
    this.#flushing = handle.datasync();
    // Its failure is thrown where it is awaited; until then nobody listens.
    this.#flushing.catch(() => undefined);
  }

  /** Leaves a hole; one at the end takes a truncate to the size. */
  skip(length: number): void {
    this.size += length;
  }

  /** Nothing is under way when it resolves, and nothing has failed. */
  async flushed(): Promise<void> {
    await this.#flushing;
  }

  /** Everything so far is on the disk when it resolves. */
  async sync(): Promise<void> {
    await this.#flushing;
    await this.pinned.handle.sync();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.#flushing.catch(() => undefined);
    // What matters has been told by fsync.
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
    // Its failure is thrown where it is awaited; until then nobody listens.
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

/** As Node takes times: exact to less than a microsecond. */
export const seconds = (ns: bigint): number => Number(ns) / 1e9;

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
