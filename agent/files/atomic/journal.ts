// A journal of the temporary files that exist, so that those of a killed agent are removed at its next start: they lie
// beside their targets, anywhere on the disk. Append-only, one line per file: + added, * a directory with the mark that
// identifies it, - removed.
import { randomUUID } from 'node:crypto';
import { appendFile, mkdir, open, readFile, rename, truncate, writeFile } from 'node:fs/promises';
import { join, posix } from 'node:path';
import { sleep } from '../../../shared/clock.ts';
import { errnoOf } from '../../../shared/errors.ts';
import type { Logger } from '../../../shared/logger.ts';
import { clear } from '../clear.ts';
import type { BigIntStats, Confined } from '../confine/fs.ts';
import * as fs from '../confine/fs.ts';
import { type Bytes, bytes, toText } from '../confine/request-path.ts';

const prefix = '.farhand-';
/** The journal is written anew beyond this, if it was never empty in between. */
const largest = 256 * 1024;
/** A leftover on a dead network disk must not keep the agent from starting. */
const longestRemoval = 5_000;

/** Identifies a directory also after a restart of the machine, when device numbers may change. */
export const markOf = ({ ino, birthtimeNs }: BigIntStats): string => `${ino}-${birthtimeNs}`;

const line = (sign: '+' | '*' | '-', path: Bytes, mark = ''): string =>
  `${sign}${bytes(path).toString('base64url')}${mark && ` ${mark}`}\n`;

/** A random temporary name, recorded in the journal. */
export interface TemporaryName {
  at: Confined;
  /** Where that is, for the journal and for messages. */
  path: Bytes;
  /** It is a directory; only then, and once this is durable, it may be filled. */
  mark(mark: string): Promise<void>;
  /** Removes the file or directory of that name, emptied first if need be. Never rejects: the next start tries again. */
  release(directory: boolean, empty?: () => Promise<void>): Promise<void>;
}

export class Journal {
  readonly #path: string;
  readonly #log: Logger;
  #size = 0;
  readonly #live = new Map<Bytes, string>();
  #turn: Promise<void> = Promise.resolve();

  private constructor(path: string, log: Logger) {
    this.#path = path;
    this.#log = log;
  }

  /** Removes temporary files of a killed agent, then starts an empty journal. */
  static async open(directory: string, log: Logger): Promise<Journal> {
    await mkdir(directory, { recursive: true, mode: 0o700 });
    const path = join(directory, 'temporary.journal');
    const left = [...(await leftovers(path))].map(([file, mark]) => remove(file, mark, log));
    await Promise.race([Promise.all(left), sleep(longestRemoval)]);
    await writeFile(path, '', { mode: 0o600 });
    return new Journal(path, log);
  }

  /** A free name in an open directory; it is in the journal when this resolves. */
  async reserve(directory: Confined): Promise<TemporaryName> {
    const name = prefix + randomUUID();
    const at = fs.child(directory, name);
    const path = `${await fs.readlink(directory)}/${name}`;
    await this.#add(path);
    return {
      at,
      path,
      mark: (mark) => this.#add(path, mark),
      release: async (isDirectory, empty) => {
        try {
          await empty?.();
          await fs.drop(at, isDirectory);
          await this.#remove(path);
        } catch (error) {
          this.#log.warn({ err: error, path: toText(path) }, 'a temporary file stays behind');
        }
      },
    };
  }

  /** Durable when it resolves. */
  #add(path: Bytes, mark = ''): Promise<void> {
    this.#live.set(path, mark);
    return this.#inTurn(() => this.#append(line(mark ? '*' : '+', path, mark), true));
  }

  #remove(path: Bytes): Promise<void> {
    this.#live.delete(path);
    return this.#inTurn(async () => {
      if (this.#live.size === 0) {
        await truncate(this.#path);
        this.#size = 0;
      }
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

  /** Opened each time, so that nothing has to be closed at the end. */
  async #append(text: string, flush: boolean): Promise<void> {
    await appendFile(this.#path, text, { flush });
    this.#size += text.length;
  }

  async #rewrite(): Promise<void> {
    const text = [...this.#live].map(([path, mark]) => line(mark ? '*' : '+', path, mark)).join('');
    await writeFile(`${this.#path}.new`, text, { mode: 0o600, flush: true });
    await rename(`${this.#path}.new`, this.#path);
    this.#size = text.length;
  }
}

/** A line that was cut off by the end was never answered, so its file was never made. */
async function leftovers(path: string): Promise<Map<Bytes, string>> {
  const text = await readFile(path, 'utf8').catch((error: unknown) => {
    if (errnoOf(error) === 'ENOENT') return '';
    throw error;
  });
  const live = new Map<Bytes, string>();
  for (const entry of text.split('\n').slice(0, -1)) {
    const [path = '', mark = ''] = entry.slice(1).split(' ');
    const left = Buffer.from(path, 'base64url').toString('latin1');
    if (/^[+*]/.test(entry)) live.set(left, mark);
    else live.delete(left);
  }
  return live;
}

/** Only a plain file or a directory of our own and of our naming goes, whatever the journal says. */
async function remove(path: Bytes, mark: string, log: Logger): Promise<void> {
  const name = posix.basename(path);
  if (!name.startsWith(prefix)) return;
  try {
    const above = bytes(posix.dirname(path));
    using directory = new fs.Pinned(await open(above, fs.pathOnly | fs.O_DIRECTORY | fs.O_NOFOLLOW));
    const at = fs.child(directory.at, name);
    const stats = await fs.lstat(at);
    if (Number(stats.uid) !== process.geteuid?.()) return;
    if (stats.isDirectory()) await empty(at, mark, path);
    else if (!stats.isFile()) return;
    await fs.drop(at, stats.isDirectory());
    log.info({ path: toText(path) }, 'removed a temporary file of an earlier run');
  } catch (error) {
    if (errnoOf(error) !== 'ENOENT')
      log.warn({ err: error, path: toText(path) }, 'a temporary file stays behind');
  }
}

/** Another user with write access there could have given our name to another directory: only the marked one is emptied. */
async function empty(at: Confined, mark: string, path: Bytes): Promise<void> {
  using pinned = await fs.pin(at);
  if (markOf(await pinned.stat()) !== mark) return;
  await clear(pinned.at, undefined, { path, signal: new AbortController().signal, own: true });
}
