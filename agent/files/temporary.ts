// Remembers the temporary files that exist, so that those of a killed agent go at its next start: they lie beside
// their targets, anywhere on the disk. An append-only journal, one line per file: + added, - removed.
import { randomUUID } from 'node:crypto';
import { constants } from 'node:fs';
import {
  appendFile,
  lstat,
  mkdir,
  open,
  readFile,
  rename,
  truncate,
  unlink,
  writeFile,
} from 'node:fs/promises';
import { join, posix } from 'node:path';
import { sleep } from '../../shared/clock.ts';
import { errnoOf } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import { type Bytes, bytes, pathOnly, shown } from './path.ts';

const { O_DIRECTORY, O_NOFOLLOW } = constants;
const prefix = '.farhand-';
/** The journal is written anew beyond this, if it was never empty in between. */
const largest = 256 * 1024;
/** A leftover on a dead network disk must not keep the agent from starting. */
const longestRemoval = 5_000;

/** A name that nobody can guess. */
export const temporaryName = (): Bytes => prefix + randomUUID();

const line = (sign: '+' | '-', path: Bytes): string => `${sign}${bytes(path).toString('base64url')}\n`;

export class Temporary {
  readonly #path: string;
  #size = 0;
  readonly #live = new Set<Bytes>();
  #turn: Promise<void> = Promise.resolve();

  private constructor(path: string) {
    this.#path = path;
  }

  /** Removes what a killed agent left, then starts an empty journal. */
  static async open(directory: string, log: Logger): Promise<Temporary> {
    await mkdir(directory, { recursive: true, mode: 0o700 });
    const path = join(directory, 'temporary.journal');
    const left = [...(await leftovers(path))].map((file) => remove(file, log));
    await Promise.race([Promise.all(left), sleep(longestRemoval)]);
    await writeFile(path, '', { mode: 0o600 });
    return new Temporary(path);
  }

  /** Durable when it resolves; only then may the file be made. */
  add(path: Bytes): Promise<void> {
    this.#live.add(path);
    return this.#inTurn(() => this.#append(line('+', path), true));
  }

  /** The file is gone, or has become what it was made for. */
  drop(path: Bytes): Promise<void> {
    this.#live.delete(path);
    return this.#inTurn(async () => {
      if (this.#live.size === 0) await this.#empty();
      // Nothing is lost if this line is: the file is not there.
      else await this.#append(line('-', path), false);
      if (this.#size > largest) await this.#rewrite();
    });
  }

  #inTurn(work: () => Promise<void>): Promise<void> {
    const done = this.#turn.then(work);
    this.#turn = done.catch(() => undefined);
    return done;
  }

  /** Opened each time, so that nothing has to be closed when the room is. */
  async #append(text: string, flush: boolean): Promise<void> {
    await appendFile(this.#path, text, { flush });
    this.#size += text.length;
  }

  async #empty(): Promise<void> {
    await truncate(this.#path);
    this.#size = 0;
  }

  async #rewrite(): Promise<void> {
    const text = [...this.#live].map((path) => line('+', path)).join('');
    await writeFile(`${this.#path}.new`, text, { mode: 0o600, flush: true });
    await rename(`${this.#path}.new`, this.#path);
    this.#size = text.length;
  }
}

/** A line that was cut off by the end was never answered, so its file was never made. */
async function leftovers(path: string): Promise<Set<Bytes>> {
  const text = await readFile(path, 'utf8').catch((error: unknown) => {
    if (errnoOf(error) === 'ENOENT') return '';
    throw error;
  });
  const live = new Set<Bytes>();
  for (const entry of text.split('\n').slice(0, -1)) {
    const left = Buffer.from(entry.slice(1), 'base64url').toString('latin1');
    if (entry.startsWith('+')) live.add(left);
    else live.delete(left);
  }
  return live;
}

/** Only a plain file of our own and of our naming goes, whatever the journal says. */
async function remove(path: Bytes, log: Logger): Promise<void> {
  const name = posix.basename(path);
  if (!name.startsWith(prefix)) return;
  try {
    const directory = await open(bytes(posix.dirname(path)), pathOnly | O_DIRECTORY | O_NOFOLLOW);
    try {
      const at = bytes(`/proc/self/fd/${directory.fd}/${name}`);
      const stats = await lstat(at);
      if (!stats.isFile() || stats.uid !== process.geteuid?.()) return;
      await unlink(at);
      log.info({ path: shown(path) }, 'removed a temporary file of an earlier run');
    } finally {
      await directory.close();
    }
  } catch (error) {
    if (errnoOf(error) !== 'ENOENT')
      log.warn({ err: error, path: shown(path) }, 'a temporary file stays behind');
  }
}
