// The way down from an open directory, however deep: only its last levels are held open. Those above are found again
// through "..", and taken only if they are what they were.
import type { BigIntStats, Confined, Pinned } from './fs.ts';
import * as fs from './fs.ts';
import { type Bytes, fault } from './path.ts';

/** Levels held open at once: enough that trees as people have them are never reopened. */
const mostHeld = 32;

interface Level {
  self: string;
  /** Always there in the last two levels. */
  pinned: Pinned | undefined;
}

export class Descent implements Disposable {
  readonly #start: Confined;
  readonly #path: Bytes;
  readonly #levels: Level[] = [];

  /** From an open directory, the caller's to close; `path` is for messages. */
  constructor(start: Confined, path: Bytes) {
    this.#start = start;
    this.#path = path;
  }

  /** The directory reached; the one above it stays open, too. */
  get at(): Confined {
    return this.#levels.at(-1)?.pinned?.at ?? this.#start;
  }

  /** Goes down into a directory of the present one. Owns its handle from here on. */
  enter(pinned: Pinned, stats: BigIntStats): void {
    this.#levels.push({ pinned, self: fs.identityOf(stats) });
    const far = this.#levels.at(-1 - mostHeld);
    far?.pinned?.[Symbol.dispose]();
    if (far) far.pinned = undefined;
  }

  /** Goes up again: to the same directory from which this one was entered, wherever that lies by now. */
  async leave(): Promise<void> {
    const above = this.#levels.at(-2);
    if (above && !above.pinned) above.pinned = await this.#reopen(above.self);
    this.#levels.pop()?.pinned?.[Symbol.dispose]();
  }

  [Symbol.dispose](): void {
    for (const { pinned } of this.#levels.splice(0)) pinned?.[Symbol.dispose]();
  }

  async #reopen(self: string): Promise<Pinned> {
    // The one way up there is: the kernel's, of a directory that is open.
    const pinned = await fs.pin(`${this.at}/..` as Confined, fs.pathOnly | fs.O_DIRECTORY);
    try {
      if (fs.identityOf(await pinned.stat()) === self) return pinned;
      throw fault('conflict', this.#path, 'a directory in it was moved meanwhile, try again');
    } catch (error) {
      pinned[Symbol.dispose]();
      throw error;
    }
  }
}
