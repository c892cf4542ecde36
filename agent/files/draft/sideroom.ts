// A private directory beside a place, for what is on its way there or from there: nobody else sees into it, and with
// all in it it is gone at the end, or at the next start of a killed agent.

import type { FileHandle } from 'node:fs/promises';
import { mkdir, readdir, readlink } from 'node:fs/promises';
import { posix } from 'node:path';
import { fromErrno } from '../../../shared/errors.ts';
import type { Logger } from '../../../shared/logger.ts';
import { letGo, pathOf, pin } from '../beneath/descent.ts';
import { type Bytes, bytes, fault, shown } from '../beneath/path.ts';
import { clear, drop } from '../tree/clear.ts';
import { markOf, type Temporary, temporaryName } from './temporary.ts';

export class SideRoom {
  readonly #at: Bytes;
  readonly #recorded: Bytes;
  readonly #temporary: Temporary;
  readonly #log: Logger;
  #handle: FileHandle | undefined;

  private constructor(at: Bytes, recorded: Bytes, temporary: Temporary, log: Logger) {
    this.#at = at;
    this.#recorded = recorded;
    this.#temporary = temporary;
    this.#log = log;
  }

  /** In an open directory (/proc/self/fd/N), which stays open until the end. */
  static async open(directory: Bytes, temporary: Temporary, log: Logger): Promise<SideRoom> {
    const name = temporaryName();
    const recorded = `${await readlink(directory, 'latin1')}/${name}`;
    const room = new SideRoom(`${directory}/${name}`, recorded, temporary, log);
    await temporary.add(recorded);
    try {
      await mkdir(bytes(room.#at), 0o700);
      await room.#enter();
      return room;
    } catch (error) {
      await room.end();
      throw fromErrno(error, shown(posix.dirname(recorded)));
    }
  }

  /** Where the one thing is that it is made for: a name that is free at first. */
  get content(): Bytes {
    if (!this.#handle) throw new Error('the side room is not open');
    return `${pathOf(this.#handle)}/content`;
  }

  /** Removes it with all that is in it. */
  async end(): Promise<void> {
    try {
      const never = new AbortController().signal;
      const at = this.#handle && pathOf(this.#handle);
      if (at) await clear(at, undefined, { path: this.#recorded, signal: never, own: true });
      await drop(this.#at, true);
      await this.#temporary.drop(this.#recorded);
    } catch (error) {
      // It stays in the journal, so the next start tries again.
      this.#log.warn({ err: error, path: shown(this.#recorded) }, 'a temporary directory stays behind');
    } finally {
      letGo(this.#handle);
      this.#handle = undefined;
    }
  }

  /** Whoever may rename beside it could have put another directory in its place, which must not be emptied. */
  async #enter(): Promise<void> {
    const handle = await pin(this.#at);
    try {
      const stats = await handle.stat({ bigint: true });
      const ours = stats.isDirectory() && Number(stats.uid) === process.geteuid?.();
      if (!ours || (await readdir(pathOf(handle))).length > 0)
        throw fault('conflict', this.#recorded, 'was replaced meanwhile, try again');
      await this.#temporary.mark(this.#recorded, markOf(stats));
      this.#handle = handle;
    } finally {
      if (!this.#handle) letGo(handle);
    }
  }
}
