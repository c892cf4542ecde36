// Wraps node:fs so that it takes only confined paths. In agent/files, only this folder and two modules may import
// node:fs: users-groups and temporary-files-journal, whose paths never come from a request. test/architecture.test.ts
// checks this.
import * as callbacks from 'node:fs';
import { type BigIntStats, type Dirent, type FSWatcher, readFileSync } from 'node:fs';
import * as fs from 'node:fs/promises';
import { posix } from 'node:path';
import { ignoring, isErrno } from '../../../shared/errors.ts';
import { type Bytes, bytes } from './parse-request-path.ts';

export type { BigIntStats, FSWatcher } from 'node:fs';
export type { FileHandle } from 'node:fs/promises';

export const { O_CREAT, O_DIRECTORY, O_EXCL, O_NOCTTY, O_NOFOLLOW, O_RDONLY, O_WRONLY } = callbacks.constants;
/**
 * O_PATH, which Node does not define. Opening with it never blocks and has no effect on devices, but the
 * handle cannot read.
 */
export const pathOnly = 0o10000000;
/** Flags to open a regular file for reading, harmless even if a FIFO or terminal has replaced the file meanwhile. */
export const readOnly = O_RDONLY | callbacks.constants.O_NONBLOCK | O_NOCTTY;

declare const confined: unique symbol;
/** A path through an open handle, /proc/self/fd/N or /proc/self/fd/N/name. A rename cannot redirect it. */
export type Confined = Bytes & { readonly [confined]: true };

/** Returns the confined path of a name in an open directory. */
export function child(directory: Confined, name: Bytes): Confined {
  if (name.includes('/') || name === '..') throw new Error('a file name must not contain "/" or be ".."');
  return `${directory}/${name}` as Confined;
}

/** An open handle, and the confined path /proc/self/fd/N, which leads to the open file even if it is renamed. */
export class Pinned implements Disposable {
  readonly handle: fs.FileHandle;
  readonly at: Confined;

  constructor(handle: fs.FileHandle) {
    this.handle = handle;
    // The path of a handle in /proc is valid as long as the handle is open.
    this.at = `/proc/self/fd/${handle.fd}` as Confined;
  }

  stat(): Promise<BigIntStats> {
    return this.handle.stat({ bigint: true });
  }

  /**
   * Starts to close the handle, but does not wait for the end: close() waits for reads in progress, which may hang. For
   * a deleted file, close() may also take long.
   */
  [Symbol.dispose](): void {
    this.handle.close().catch(() => undefined);
  }
}

/** Opens a path, by default with O_PATH and without following a symlink at its end. */
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
/** Follows a symlink at the end, such as /proc/self/fd/N of a handle. */
export const stat = on((path) => fs.stat(path, { bigint: true }));

export const rename = (from: Confined, to: Confined): Promise<void> => fs.rename(bytes(from), bytes(to));
export const link = (from: Confined, to: Confined): Promise<void> => fs.link(bytes(from), bytes(to));
export const symlink = (target: Bytes, at: Confined): Promise<void> => fs.symlink(bytes(target), bytes(at));

/** Does not follow a symlink. The callback form of lstat costs half as much as the promise form. */
export const lstat = (at: Confined): Promise<BigIntStats> =>
  new Promise((resolve, reject) => {
    callbacks.lstat(bytes(at), { bigint: true }, (error, stats) => (error ? reject(error) : resolve(stats)));
  });

/**
 * Sets the mode of a directory, whatever the umask is. A setgid bit inherited from the parent directory stays. A
 * correct mode is not set again: chmod(2) removes setgid if the agent's user is not in the directory's group.
 */
export async function chmodDirectory(directory: Pinned, mode: number): Promise<void> {
  const present = Number((await directory.stat()).mode) & 0o7777;
  const wanted = (present & 0o2000) | mode;
  if (present !== wanted) await chmod(directory.at, wanted);
}

export const ignoreMissing = ignoring('ENOENT');

/** Stats of a name without following a symlink; undefined if it is missing. */
export const lookAt = (at: Confined): Promise<BigIntStats | undefined> => lstat(at).catch(ignoreMissing);

/** Watches an open directory and its entries. Changes of the directory itself have the name ".". */
export const watch = (directory: Confined): FSWatcher =>
  callbacks.watch(`${directory}/.`, { encoding: 'latin1', persistent: false });

/** Returns device and inode, which identify a file under any name. */
export const identityOf = (stats: BigIntStats): string => `${stats.dev}:${stats.ino}`;
export const identify = async (at: Confined): Promise<string> => identityOf(await stat(at));
/** True if a name, without following a symlink, is that of the file with this identity. */
export async function isStill(at: Confined, identity: string): Promise<boolean> {
  const stats = await lookAt(at);
  return stats !== undefined && identityOf(stats) === identity;
}

/**
 * Returns the id of the mount through which a directory was opened. A bind mount has the same device as its source, but
 * another id.
 */
export function mountOf(at: Confined): string | undefined {
  // A synchronous read is safe here: the kernel answers from memory, without the disk.
  const info = readFileSync(`/proc/self/fdinfo/${posix.basename(at)}`, 'latin1');
  return /^mnt_id:\s*(\d+)/m.exec(info)?.[1];
}

/** Removes a file, a symlink or an empty directory. Does nothing if the name is missing. */
export const drop = (at: Confined): Promise<void> =>
  unlink(at)
    .catch((error: unknown) => (isErrno(error, 'EISDIR') ? rmdir(at) : Promise.reject(error)))
    .catch(ignoreMissing);

/**
 * Makes a change of an open file's mode, owner or times durable, or the names in an open directory. Does nothing if the
 * file system cannot flush this.
 */
export const syncChange = (file: Pinned): Promise<void> =>
  file.handle.sync().catch(ignoring('EINVAL', 'EBADF', 'EOPNOTSUPP'));

/**
 * Makes the names in a directory durable. Does nothing if the directory is unreadable or its file system cannot flush
 * directories.
 */
export async function syncDirectory(at: Confined): Promise<void> {
  using directory = await pin(at, O_RDONLY | O_DIRECTORY).catch(ignoring('EACCES'));
  if (directory) await syncChange(directory);
}

// ---- Names in a directory

export interface Named {
  name: Bytes;
  directory: boolean;
  symlink: boolean;
}

const namesAtOnce = 256;

/**
 * Yields names in the order of the file system, in batches. readdir() would read all names into memory first.
 */
export async function* namesIn(at: Confined): AsyncGenerator<Named[], void, void> {
  // If a file system reports no file types, Node calls lstat() for every name, which needs the exact bytes of the name.
  // Only the encoding 'buffer' provides them. The cast is needed because Node's type definitions lack this encoding.
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

/** Returns all names in bytewise order. Each character of a name is one byte. */
export const sortedNames = async (at: Confined): Promise<Bytes[]> => (await fs.readdir(at, 'latin1')).sort();

export const isEmpty = async (at: Confined): Promise<boolean> => (await fs.readdir(at)).length === 0;
