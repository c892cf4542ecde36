// Gives something its name in one step: nobody ever sees half of it, and without overwrite nothing is replaced.
import { constants } from 'node:fs';
import { link, lstat, mkdir, open, rename, rmdir, unlink } from 'node:fs/promises';
import { AppError, errnoOf } from '../../../shared/errors.ts';
import { identityOf } from '../beneath/boundary.ts';
import { type Bytes, bytes, fault, shown } from '../beneath/path.ts';

const { O_DIRECTORY, O_RDONLY } = constants;

export interface Placing {
  /** As /proc/self/fd/N/name, both. */
  from: Bytes;
  to: Bytes;
  directory: boolean;
  overwrite: boolean;
  /** Of the target, for messages. */
  path: Bytes;
}

/** Moves a name inside one file system. */
export async function place({ from, to, directory, overwrite, path }: Placing): Promise<void> {
  if (overwrite) return rename(bytes(from), bytes(to));
  if (directory) return claim(from, to);
  await linkAs(from, to, path);
  const [old, made] = await Promise.all([identityAt(from), identityAt(to)]);
  // What has been put in its place meanwhile is somebody else's.
  if (old === made) await unlink(bytes(from));
}

/** Gives a second name to anything but a directory, which only works where the name is free. */
export async function linkAs(from: Bytes, to: Bytes, path: Bytes): Promise<void> {
  try {
    await link(bytes(from), bytes(to));
  } catch (error) {
    if (!['EPERM', 'EOPNOTSUPP'].includes(errnoOf(error) ?? '')) throw error;
    const reason = 'hard links are needed to never overwrite, and refused here';
    throw new AppError('not_supported', `${shown(path)}: ${reason}`, { path: shown(path) });
  }
}

/** A directory replaces nothing but an empty directory: the one made here takes the name, and fails if it is taken. */
async function claim(from: Bytes, to: Bytes): Promise<void> {
  await mkdir(bytes(to), 0o700);
  try {
    await rename(bytes(from), bytes(to));
  } catch (error) {
    await rmdir(bytes(to)).catch(() => undefined);
    throw error;
  }
}

const identityAt = async (at: Bytes): Promise<string> => identityOf(await lstat(bytes(at), { bigint: true }));

/** Refuses what rename would refuse, before anything is copied for it. */
export function demandPlace(
  present: { isDirectory(): boolean } | undefined,
  { directory, overwrite, path }: Omit<Placing, 'from' | 'to'>,
): void {
  if (!present) return;
  if (!overwrite) throw fault('already_exists', path, 'exists');
  if (present.isDirectory() && !directory) throw fault('is_a_directory', path, 'is a directory');
  if (!present.isDirectory() && directory) throw fault('not_a_directory', path, 'not a directory');
}

/** Makes names in a directory durable. Some cannot be opened for that, some file systems cannot do it. */
export async function syncDirectory(at: Bytes): Promise<void> {
  try {
    const directory = await open(bytes(at), O_RDONLY | O_DIRECTORY);
    try {
      await directory.sync();
    } finally {
      await directory.close();
    }
  } catch (error) {
    if (!['EACCES', 'EINVAL', 'EOPNOTSUPP'].includes(errnoOf(error) ?? '')) throw error;
  }
}
