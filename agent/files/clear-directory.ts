// Empties an open directory. Symlinks are removed and never followed, even if they appear during the removal.
import { posix } from 'node:path';
import { fromErrno } from '../../shared/errors.ts';
import type { Boundary } from './confine/boundary.ts';
import { type Confined, chmod, drop } from './confine/confined-fs.ts';
import { type Bytes, toText } from './confine/parse-request-path.ts';
import { walk } from './confine/walk-tree.ts';

/**
 * Empties an open directory. Fails with file_busy if another file system is mounted below.
 * - `boundary`: undefined if the agent has created the tree
 * - `path`: for messages
 */
export async function clear(
  start: Confined,
  boundary: Boundary | undefined,
  { path, signal }: { path: Bytes; signal: AbortSignal },
): Promise<void> {
  const enter = async (_: unknown, inside: Confined): Promise<boolean> => {
    // A directory that the agent has copied has the mode of its source, which may forbid removing entries.
    if (!boundary) await chmod(inside, 0o700);
    return true;
  };
  const options = { path, signal, oneMount: true, enter } as const;
  for await (const step of walk(start, boundary, options)) {
    if (step.stats.isDirectory() && !step.left) continue;
    await drop(step.at).catch((error: unknown) => {
      throw fromErrno(error, toText(posix.join(path, step.path)));
    });
  }
}
