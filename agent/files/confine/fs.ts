// The disk as the operations see it: node:fs for confined paths alone. No other file here that serves a request imports
// node:fs (test/architecture.test.ts).
import * as callbacks from 'node:fs';
import { type BigIntStats, type Dirent, type FSWatcher, readFileSync, type Stats } from 'node:fs';
import * as fs from 'node:fs/promises';
import { posix } from 'node:path';
import { errnoOf } from '../../../shared/errors.ts';
import { type Bytes, bytes } from './request-path.ts';

export type { BigIntStats, FSWatcher, Stats } from 'node:fs';
export type { FileHandle } from 'node:fs/promises';

export const { O_CREAT, O_DIRECTORY, O_EXCL, O_NOCTTY, O_NOFOLLOW, O_RDONLY, O_WRONLY } = callbacks.constants;
/** O_PATH, which Node does not name: such a handle reads nothing, never blocks and has no effect on devices. */
export const pathOnly = 0o10000000;
/** For a file known to be plain a moment ago: opening another file that has its name by now neither blocks nor takes a terminal. */
export const readOnly = O_RDONLY | callbacks.constants.O_NONBLOCK | O_NOCTTY;

declare const confined: unique symbol;
/** A path through an open handle, /proc/self/fd/N or /proc/self/fd/N/name: it stays there whatever is renamed. */
export type Confined = Bytes & { readonly [confined]: true };

/** A name in an open directory. */
export function child(directory: Confined, name: Bytes): Confined {
  if (name.includes('/') || name === '..') throw new Error('not the name of one entry of a directory');
  return `${directory}/${name}` as Confined;
}

/** An open handle: O_PATH unless opened for its bytes. */
export class Pinned implements Disposable {
  readonly handle: fs.FileHandle;
  readonly at: Confined;

  constructor(handle: fs.FileHandle) {
    this.handle = handle;
    // For as long as it is open.
    this.at = `/proc/self/fd/${handle.fd}` as Confined;
  }

  stat(): Promise<BigIntStats> {
    return this.handle.stat({ bigint: true });
  }

  /** Not awaited: closing waits for a read under way, which may hang, and the last close of something deleted takes time. */
  [Symbol.dispose](): void {
    this.handle.close().catch(() => undefined);
  }
}

/** Pins a path whatever it is, without following a symlink at its end unless the flags say so. */
export const pin = async (
  at: Confined,
  flags: number = pathOnly | O_NOFOLLOW,
  mode?: number,
): Promise<Pinned> => new Pinned(await fs.open(bytes(at), flags, mode));

const on =
  <Rest extends unknown[], Result>(call: (path: Buffer, ...rest: Rest) => Promise<Result>) =>
  (at: Confined, ...rest: Rest): Promise<Result> =>
    call(bytes(at), ...rest);

export const chmod = on(fs.chmod);
export const chown = on(fs.chown);
export const lchown = on(fs.lchown);
export const lutimes = on(fs.lutimes);
export const mkdir = on((path, mode: number) => fs.mkdir(path, mode));
export const rmdir = on((path) => fs.rmdir(path));
export const unlink = on(fs.unlink);
export const readlink = on((path): Promise<Bytes> => fs.readlink(path, 'latin1'));
/** Follows a symlink at the end, such as the one that /proc has for a handle. */
export const stat = on((path) => fs.stat(path, { bigint: true }));

export const rename = (from: Confined, to: Confined): Promise<void> => fs.rename(bytes(from), bytes(to));
export const link = (from: Confined, to: Confined): Promise<void> => fs.link(bytes(from), bytes(to));
export const symlink = (target: Bytes, at: Confined): Promise<void> => fs.symlink(bytes(target), bytes(at));

/** The callback form costs half of what the promise form does. */
export const lstat = (at: Confined): Promise<BigIntStats> =>
  new Promise((resolve, reject) => {
    callbacks.lstat(bytes(at), { bigint: true }, (error, stats) => (error ? reject(error) : resolve(stats)));
  });

/**
 * To describe a name in a long list, at four fifths of the processor time: plain numbers, of which inodes and times are not
 * exact, and must not be compared. Sizes are exact up to 2^53, and so are milliseconds: their fraction has 12 bits left,
 * so only a time less than 122 ns before a millisecond is rounded up to that. Those are looked at again, except at a whole
 * second: so many files have such times (packages, archives) that one in eight million is let off a millisecond.
 */
export async function lstatPlain(at: Confined): Promise<Stats | BigIntStats | undefined> {
  const stats = await new Promise<Stats>((resolve, reject) => {
    callbacks.lstat(bytes(at), (error, found) => (error ? reject(error) : resolve(found)));
  }).catch(ignoreMissing);
  const isUnsure = stats && stats.mtimeMs % 1 === 0 && stats.mtimeMs % 1000 !== 0;
  return isUnsure ? lookAt(at) : stats;
}

/** Stats of a name, a symlink not followed; undefined where it is missing. */
export const lookAt = (at: Confined): Promise<BigIntStats | undefined> => lstat(at).catch(ignoreMissing);

/** Watches an open directory and its entries; its own changes have the name ".". */
export const watch = (directory: Confined): FSWatcher =>
  callbacks.watch(`${directory}/.`, { encoding: 'latin1', persistent: false });

/** Device and inode: identifies a file under any name. */
export const identityOf = (stats: BigIntStats): string => `${stats.dev}:${stats.ino}`;
export const identify = async (at: Confined): Promise<string> => identityOf(await stat(at));

/** Which mount an open directory was reached through. The device is the same for all bind mounts. */
export function mountOf(at: Confined): string | undefined {
  // The kernel answers from memory, so this waits for no disk.
  const info = readFileSync(`/proc/self/fdinfo/${posix.basename(at)}`, 'latin1');
  return /^mnt_id:\s*(\d+)/m.exec(info)?.[1];
}

/** Removes one name. If it has meanwhile become something else, that goes; a directory only if it is empty. */
export async function drop(at: Confined, directory: boolean): Promise<void> {
  const [first, second, other] = directory ? [rmdir, unlink, 'ENOTDIR'] : [unlink, rmdir, 'EISDIR'];
  try {
    await first(at);
  } catch (error) {
    if (errnoOf(error) === other) await second(at);
    else ignoreMissing(error);
  }
}

/** Makes names in a directory durable. Some cannot be opened for that, some file systems cannot do it. */
export async function syncDirectory(at: Confined): Promise<void> {
  try {
    using directory = await pin(at, O_RDONLY | O_DIRECTORY);
    await directory.handle.sync();
  } catch (error) {
    if (!['EACCES', 'EINVAL', 'EOPNOTSUPP'].includes(errnoOf(error) ?? '')) throw error;
  }
}

export function ignoreMissing(error: unknown): undefined {
  if (errnoOf(error) !== 'ENOENT') throw error;
}

// ---- Names in a directory

export interface Named {
  name: Bytes;
  directory: boolean;
  symlink: boolean;
}

const namesAtOnce = 256;

/** In the order of the file system, a bounded number at a time: readdir() has all in memory before it gives the first. */
export async function* namesIn(at: Confined): AsyncGenerator<Named[], void, void> {
  // Node takes 'buffer' here as readdir() does, which its types do not know: where a file system reports no types, Node
  // looks at each name itself and must have its true bytes.
  const options = { bufferSize: namesAtOnce, encoding: 'buffer' as 'latin1' };
  const entries: AsyncIterable<Dirent<string | Buffer>> = await fs.opendir(at, options);
  let batch: Named[] = [];
  for await (const entry of entries) {
    const name = entry.name.toString('latin1' as never);
    batch.push({ name, directory: entry.isDirectory(), symlink: entry.isSymbolicLink() });
    if (batch.length < namesAtOnce) continue;
    yield batch;
    batch = [];
  }
  if (batch.length > 0) yield batch;
}

export async function isEmpty(at: Confined): Promise<boolean> {
  for await (const _ of namesIn(at)) return false;
  return true;
}

/** All names, in the order of their bytes: names have one character per byte. */
export const sortedNames = async (at: Confined): Promise<Bytes[]> => (await fs.readdir(at, 'latin1')).sort();
