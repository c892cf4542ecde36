// Publishes a finished file or directory under its name in one step; without overwrite nothing is replaced.
import { errnoOf } from '../../../shared/errors.ts';
import { type Confined, identityOf, link, lstat, mkdir, rename, rmdir, unlink } from '../confine/fs.ts';
import { type Bytes, fault } from '../confine/request-path.ts';

export interface Placement {
  from: Confined;
  to: Confined;
  directory: boolean;
  overwrite: boolean;
  /** Of the target, for messages. */
  path: Bytes;
}

/** Moves a name inside one file system. */
export async function place({ from, to, directory, overwrite, path }: Placement): Promise<void> {
  if (overwrite) return rename(from, to);
  if (directory) return claim(from, to);
  await linkAs(from, to, path);
  const [old, made] = await Promise.all([lstat(from), lstat(to)]);
  // Another file that has taken the name meanwhile stays.
  if (identityOf(old) === identityOf(made)) await unlink(from);
}

/** Gives a second name to anything but a directory, which only works where the name is free. */
export async function linkAs(from: Confined, to: Confined, path: Bytes): Promise<void> {
  try {
    await link(from, to);
  } catch (error) {
    if (!['EPERM', 'EOPNOTSUPP'].includes(errnoOf(error) ?? '')) throw error;
    throw fault('not_supported', path, 'hard links are needed to never overwrite, and refused here');
  }
}

/** A directory replaces nothing but an empty directory: the one made here takes the name, and fails if it is taken. */
async function claim(from: Confined, to: Confined): Promise<void> {
  await mkdir(to, 0o700);
  try {
    await rename(from, to);
  } catch (error) {
    await rmdir(to).catch(() => undefined);
    throw error;
  }
}

/** Refuses what rename would refuse, before anything is copied for it. */
export function assertPlace(
  present: { isDirectory(): boolean } | undefined,
  { directory, overwrite, path }: Omit<Placement, 'from' | 'to'>,
): void {
  if (!present) return;
  if (!overwrite) throw fault('already_exists', path, 'exists');
  if (present.isDirectory() && !directory) throw fault('is_a_directory', path, 'is a directory');
  if (!present.isDirectory() && directory) throw fault('not_a_directory', path, 'not a directory');
}
