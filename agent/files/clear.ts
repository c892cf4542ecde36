// Empties a pinned directory. Symlinks are removed, never followed, also those swapped in meanwhile.
import { posix } from 'node:path';
import { fromErrno } from '../../shared/errors.ts';
import type { Boundary } from './confine/boundary.ts';
import { type Confined, chmod, drop } from './confine/fs.ts';
import { type Bytes, toText } from './confine/request-path.ts';
import { walk } from './confine/walk.ts';

/**
 * Removes all in an open directory, but nothing on another mount; `path` is for messages. With `own` the tree is the
 * agent's own: directories that forbid it are opened up.
 */
export async function clear(
  start: Confined,
  boundary: Boundary | undefined,
  { path, signal, own = false }: { path: Bytes; signal: AbortSignal; own?: boolean },
): Promise<void> {
  const enter = async (_: unknown, inside: Confined): Promise<boolean> => {
    if (own) await chmod(inside, 0o700);
    return true;
  };
  // All names of a directory are read before the first goes: not every file system reads on well while they go.
  const options = { path, signal, sorted: true, oneMount: true, enter } as const;
  for await (const step of walk(start, boundary, options)) {
    if (step.stats.isDirectory() && !step.left) continue;
    await drop(step.at, step.stats.isDirectory()).catch((error: unknown) => {
      throw fromErrno(error, toText(posix.join(path, step.path)));
    });
  }
}
