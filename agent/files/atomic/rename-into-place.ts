// Moves a finished file or directory to its final name atomically. Without `overwrite` nothing is replaced.
import { isErrno } from '../../../shared/errors.ts';
import * as fs from '../confine/confined-fs.ts';
import { type Bytes, fault } from '../confine/parse-request-path.ts';

export interface Placement {
  from: fs.Confined;
  to: fs.Confined;
  directory: boolean;
  overwrite: boolean;
  /** Path of the target, for messages. */
  path: Bytes;
}

/** Renames `from` to `to`. Throws EXDEV if they are on different file systems. */
export async function place({ from, to, directory, overwrite, path }: Placement): Promise<void> {
  if (overwrite) return fs.rename(from, to);
  if (directory) return claim(from, to);
  const placed = fs.identityOf(await fs.lstat(from));
  await linkAs(from, to, path);
  // `from` is removed only if it still names the placed file: another program may have replaced it. This check does not
  // use `to`, because another program may have removed it already.
  if (!(await fs.isStill(from, placed))) return;
  await fs.unlink(from).catch(async (error: unknown) => {
    if (await fs.isStill(to, placed)) await fs.unlink(to);
    throw error;
  });
}

/**
 * Places a file or directory that the agent has made. Moving a directory to another parent needs write permission in
 * it, even for its owner. If the permission is missing, it is granted during the rename.
 */
export async function placeOwn(placement: Placement): Promise<void> {
  using made = await fs.pin(placement.from);
  const mode = Number((await made.stat()).mode) & 0o7777;
  const closed = placement.directory && (mode & 0o200) === 0;
  if (closed) await fs.chmod(made.at, mode | 0o200);
  await place(placement);
  if (closed) await fs.chmod(made.at, mode);
}

/** Gives a file a second name. Fails with EEXIST if the name is taken, and cannot link directories. */
async function linkAs(from: fs.Confined, to: fs.Confined, path: Bytes): Promise<void> {
  try {
    await fs.link(from, to);
  } catch (error) {
    if (!isErrno(error, 'EPERM', 'EOPNOTSUPP')) throw error;
    throw fault(
      'not_supported',
      path,
      'cannot be created without overwrite, because its file system has no hard links; set overwrite to true',
    );
  }
}

/**
 * Renames a directory to a free name. First mkdir(2) creates an empty directory there, and fails if the name is taken.
 * Then rename(2) replaces this empty directory.
 */
async function claim(from: fs.Confined, to: fs.Confined): Promise<void> {
  await fs.mkdir(to, 0o700);
  try {
    await fs.rename(from, to);
  } catch (error) {
    await fs.rmdir(to).catch(() => undefined);
    throw error;
  }
}

/**
 * Throws if the target exists and may not be replaced: without `overwrite`, or if only one of source and target is a
 * directory. Called before anything is copied.
 */
export function assertPlace(
  present: { isDirectory(): boolean } | undefined,
  { directory, overwrite, path }: Omit<Placement, 'from' | 'to'>,
): void {
  if (!present) return;
  if (!overwrite) throw fault('already_exists', path, 'exists already; set overwrite to true to replace it');
  if (present.isDirectory() && !directory) throw fault('is_a_directory', path, 'is a directory');
  if (!present.isDirectory() && directory) throw fault('not_a_directory', path, 'is not a directory');
}
