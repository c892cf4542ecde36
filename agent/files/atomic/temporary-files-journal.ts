// A journal with the paths of the agent's temporary files, which can be anywhere on the disk. After a crash, the
// agent's next start removes these files.
import { randomUUID } from 'node:crypto';
import { appendFile, mkdir, open, readFile, rename, writeFile } from 'node:fs/promises';
import { join, posix } from 'node:path';
import { endsWithin } from '../../../shared/clock.ts';
import { ignoring } from '../../../shared/errors.ts';
import type { Logger } from '../../../shared/logger.ts';
import { clear } from '../clear-directory.ts';
import type { BigIntStats, Confined } from '../confine/confined-fs.ts';
import * as fs from '../confine/confined-fs.ts';
import { type Bytes, bytes, toText } from '../confine/parse-request-path.ts';

const prefix = '.farhand-';
const notRemoved = 'a temporary file could not be removed; the agent tries again at its next start';
/** Size in bytes beyond which the journal is rewritten, without the lines about files that are already removed. */
const largest = 256 * 1024;
/**
 * Longest time in milliseconds that the agent's start waits for the removal of old temporary files. A dead network
 * disk must not block the start.
 */
const longestRemoval = 5_000;

/**
 * Returns the mark that identifies a directory: its inode and birth time. Device numbers are left out, because they
 * may change when the machine restarts.
 */
export const markOf = ({ ino, birthtimeNs }: BigIntStats): string => `${ino}-${birthtimeNs}`;

/** A line of the journal: "+" for an added name, "*" for a directory with its mark, "-" for a removed name. */
const line = (sign: '+' | '*' | '-', path: Bytes, mark = ''): string =>
  `${sign}${bytes(path).toString('base64url')}${mark && ` ${mark}`}\n`;

/** A random temporary name, recorded in the journal. */
export interface TemporaryName {
  at: Confined;
  /** Absolute path of the temporary file or directory, for the journal and for messages. */
  path: Bytes;
  /**
   * Records that `path` is a directory with this mark (see markOf). Put files into the directory only after the
   * promise has resolved.
   */
  mark(mark: string): Promise<void>;
  /**
   * Removes the file or directory; `empty` removes its content first. Never rejects: after a failure the agent's next
   * start tries again.
   */
  release(empty?: () => Promise<void>): Promise<void>;
  /** Leaves the file or directory on the disk. From now on it is an ordinary file. */
  keep(): Promise<void>;
}

export class Journal {
  readonly #path: string;
  readonly #log: Logger;
  #size: number;
  /** True if the last append may have written only a part of its line, for example on a full disk. */
  #isCut: boolean;
  readonly #live: Map<Bytes, string>;
  #turn: Promise<void> = Promise.resolve();

  private constructor(path: string, text: string, log: Logger) {
    this.#path = path;
    this.#size = text.length;
    this.#isCut = !text.endsWith('\n');
    this.#live = leftovers(text);
    this.#log = log;
  }

  /**
   * Opens the journal and removes the temporary files that a killed agent left. A file that cannot be removed stays
   * in the journal.
   */
  static async open(directory: string, log: Logger): Promise<Journal> {
    await mkdir(directory, { recursive: true, mode: 0o700 });
    const path = join(directory, 'temporary.journal');
    const text = (await readFile(path, 'utf8').catch(ignoring('ENOENT'))) ?? '';
    const journal = new Journal(path, text, log);
    // Nothing else is written here, because the disk may be full until the temporary files are removed.
    if (journal.#live.size === 0) await journal.#clear();
    const left = [...journal.#live].map(([file, mark]) => journal.#removeLeftover(file, mark));
    await endsWithin(longestRemoval, Promise.all(left));
    return journal;
  }

  /** Reserves a free name in an open directory. Resolves when the name is in the journal. */
  async reserve(directory: Confined): Promise<TemporaryName> {
    const name = prefix + randomUUID();
    const at = fs.child(directory, name);
    const path = `${await fs.readlink(directory)}/${name}`;
    try {
      await this.#add(path);
    } catch (error) {
      this.#live.delete(path);
      throw error;
    }
    return {
      at,
      path,
      mark: (mark) => this.#add(path, mark),
      release: async (empty) => {
        try {
          await empty?.();
          // A read-only file system also refuses to remove a name that does not exist.
          await fs.drop(at).catch(async (error: unknown) => {
            if (await fs.lookAt(at)) throw error;
          });
          await this.#remove(path);
        } catch (error) {
          this.#log.warn({ err: error, path: toText(path) }, notRemoved);
        }
      },
      keep: () => this.#remove(path),
    };
  }

  /** True if a name is that of a temporary file of this agent. Each name is random, so it identifies its file. */
  readonly isTemporary = (name: Bytes): boolean =>
    name.startsWith(prefix) && [...this.#live.keys()].some((path) => posix.basename(path) === name);

  /** Adds a name to the journal. Resolves when its line is durable. */
  #add(path: Bytes, mark = ''): Promise<void> {
    this.#live.set(path, mark);
    return this.#inTurn(() => this.#append(line(mark ? '*' : '+', path, mark), true));
  }

  /** Removes a file that a killed agent left. Never rejects. */
  async #removeLeftover(path: Bytes, mark: string): Promise<void> {
    try {
      if (await remove(path, mark))
        this.#log.info(
          { path: toText(path) },
          'removed a temporary file that an earlier run of the agent left',
        );
      await this.#remove(path);
    } catch (error) {
      this.#log.warn({ err: error, path: toText(path) }, notRemoved);
    }
  }

  #remove(path: Bytes): Promise<void> {
    this.#live.delete(path);
    return this.#inTurn(async () => {
      if (this.#live.size === 0) await this.#clear();
      // This line need not be durable: after a crash, removing the file a second time does no harm.
      else await this.#append(line('-', path), false);
      if (this.#size > largest) await this.#rewrite();
    });
  }

  #inTurn(work: () => Promise<void>): Promise<void> {
    const done = this.#turn.then(work);
    this.#turn = done.catch(() => undefined);
    return done;
  }

  /**
   * Appends a line. The file is opened for each line, so that it need not be closed when the agent ends. If the
   * previous append failed, it may have left a part of a line. In this case a newline is written first, so that the new
   * line stays readable.
   */
  async #append(line: string, flush: boolean): Promise<void> {
    const text = this.#isCut ? `\n${line}` : line;
    this.#isCut = true;
    await appendFile(this.#path, text, { flush });
    this.#isCut = false;
    this.#size += text.length;
  }

  async #clear(): Promise<void> {
    await writeFile(this.#path, '', { mode: 0o600 });
    this.#isCut = false;
    this.#size = 0;
  }

  async #rewrite(): Promise<void> {
    const text = [...this.#live].map(([path, mark]) => line(mark ? '*' : '+', path, mark)).join('');
    await writeFile(`${this.#path}.new`, text, { mode: 0o600, flush: true });
    await rename(`${this.#path}.new`, this.#path);
    this.#isCut = false;
    this.#size = text.length;
  }
}

/**
 * Returns the temporary files and directories that a killed agent left, with their marks (see markOf). The mark of a
 * file is empty.
 */
function leftovers(text: string): Map<Bytes, string> {
  const live = new Map<Bytes, string>();
  // The text after the last newline is left out: it is empty, or a line that a crash cut off. A cut line is not needed:
  // - "+": the file has not been created yet
  // - "*": the directory is still empty, and an earlier "+" line has its name
  // - "-": the file is removed a second time, which does no harm
  for (const entry of text.split('\n').slice(0, -1)) {
    const [path = '', mark = ''] = entry.slice(1).split(' ');
    const left = Buffer.from(path, 'base64url').toString('latin1');
    if (/^[+*]/.test(entry)) live.set(left, mark);
    else live.delete(left);
  }
  return live;
}

/**
 * Removes a leftover if it is a file or directory with the agent's prefix, owned by the agent's user. Returns false if
 * nothing was removed.
 */
async function remove(path: Bytes, mark: string): Promise<boolean> {
  const name = posix.basename(path);
  if (!name.startsWith(prefix)) return false;
  const above = bytes(posix.dirname(path));
  const flags = fs.pathOnly | fs.O_DIRECTORY | fs.O_NOFOLLOW;
  const handle = await open(above, flags).catch(ignoring('ENOENT'));
  if (!handle) return false;
  using directory = new fs.Pinned(handle);
  const at = fs.child(directory.at, name);
  const stats = await fs.lookAt(at);
  if (!stats) return false;
  if (stats.isDirectory()) return await removeDirectory(at, mark, path);
  if (!stats.isFile()) return false;
  await fs.drop(at);
  return true;
}

/** Removes a leftover directory with its content. Returns false if it has another mark and is not empty. */
async function removeDirectory(at: Confined, mark: string, path: Bytes): Promise<boolean> {
  using pinned = await fs.pin(at);
  // A directory with another mark may be another program's, so it is removed only if it is empty.
  if (markOf(await pinned.stat()) !== mark)
    return (await fs.drop(at).then(() => true, ignoring('ENOTEMPTY'))) ?? false;
  await clear(pinned.at, undefined, { path, signal: new AbortController().signal });
  await fs.drop(at);
  return true;
}
