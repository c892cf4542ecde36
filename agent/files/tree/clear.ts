// Removes names below pinned directories. Symlinks go themselves, and what is swapped in meanwhile is never followed.
import { chmod, rmdir, unlink } from 'node:fs/promises';
import { posix } from 'node:path';
import { errnoOf, fromErrno } from '../../../shared/errors.ts';
import type { Boundary } from '../beneath/boundary.ts';
import { type Bytes, bytes, shown } from '../beneath/path.ts';
import { walk } from '../beneath/walk.ts';

export interface Clearing {
  /** Of the directory, for messages. */
  path: Bytes;
  signal: AbortSignal;
  /** The tree is the agent's own: directories that forbid it are opened up. */
  own?: boolean;
}

/** Removes all in an open directory (/proc/self/fd/N), but nothing on another mount. */
export async function clear(
  start: Bytes,
  boundary: Boundary | undefined,
  { path, signal, own = false }: Clearing,
): Promise<void> {
  const enter = async (_: unknown, inside: Bytes): Promise<boolean> => {
    if (own) await chmod(inside, 0o700);
    return true;
  };
  for await (const step of walk(start, boundary, {
    path,
    signal,
    // All names of a directory are read before the first goes: not every file system reads on well while they go.
    sorted: true,
    directories: 'after',
    oneMount: true,
    enter,
  })) {
    await drop(step.at, step.stats.isDirectory()).catch((error: unknown) => {
      throw fromErrno(error, shown(posix.join(path, step.path)));
    });
  }
}

/** Removes one name. If it has meanwhile become something else, that goes; a directory only if it is empty. */
export async function drop(at: Bytes, directory: boolean): Promise<void> {
  const [first, second, other] = directory ? [rmdir, unlink, 'ENOTDIR'] : [unlink, rmdir, 'EISDIR'];
  try {
    await first(bytes(at));
  } catch (error) {
    if (errnoOf(error) === other) await second(bytes(at));
    else if (errnoOf(error) !== 'ENOENT') throw error;
  }
}
