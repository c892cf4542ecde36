// The way down from an open directory, however deep: only its last levels are held open. Those above are found again
// through "..", and taken only if they are what they were.
import { type BigIntStats, constants } from 'node:fs';
import { type FileHandle, open } from 'node:fs/promises';
import { identityOf } from './boundary.ts';
import { type Bytes, bytes, fault, pathOnly } from './path.ts';

const { O_DIRECTORY, O_NOFOLLOW } = constants;
/** Levels held open at once: enough that trees as people have them are never reopened. */
const mostHeld = 32;

interface Level {
  self: string;
  /** Always there in the last two levels. */
  handle: FileHandle | undefined;
}

/** A name in an open directory, pinned whatever it is, a symlink there not followed. */
export const pin = (at: Bytes): Promise<FileHandle> => open(bytes(at), pathOnly | O_NOFOLLOW);

/** The path of a handle, for as long as it is open. */
export const pathOf = (handle: FileHandle): Bytes => `/proc/self/fd/${handle.fd}`;

/** Nobody waits: the last close of something deleted may take its time. */
export const letGo = (handle: FileHandle | undefined): void => {
  handle?.close().catch(() => undefined);
};

export class Descent {
  readonly #start: Bytes;
  readonly #path: Bytes;
  readonly #levels: Level[] = [];

  /** From an open directory (/proc/self/fd/N, the caller's to close); `path` is for messages. */
  constructor(start: Bytes, path: Bytes) {
    this.#start = start;
    this.#path = path;
  }

  /** The directory reached; the one above it stays open, too. */
  get at(): Bytes {
    const handle = this.#levels.at(-1)?.handle;
    return handle ? pathOf(handle) : this.#start;
  }

  /** Goes down into a directory of the present one. Owns its handle from here on. */
  enter(handle: FileHandle, stats: BigIntStats): void {
    this.#levels.push({ handle, self: identityOf(stats) });
    const far = this.#levels.at(-1 - mostHeld);
    letGo(far?.handle);
    if (far) far.handle = undefined;
  }

  /** Goes up again: to the same directory from which this one was entered, wherever that lies by now. */
  async leave(): Promise<void> {
    const above = this.#levels.at(-2);
    if (above && !above.handle) above.handle = await this.#reopen(above.self);
    letGo(this.#levels.pop()?.handle);
  }

  close(): void {
    for (const { handle } of this.#levels.splice(0)) letGo(handle);
  }

  async #reopen(self: string): Promise<FileHandle> {
    const handle = await open(bytes(`${this.at}/..`), pathOnly | O_DIRECTORY);
    try {
      if (identityOf(await handle.stat({ bigint: true })) === self) return handle;
      throw fault('conflict', this.#path, 'a directory in it was moved meanwhile, try again');
    } catch (error) {
      letGo(handle);
      throw error;
    }
  }
}
