// Replaces files atomically: after a crash a file has either its old or its new content.
import { randomBytes } from 'node:crypto';
import { open, readdir, rename, rm } from 'node:fs/promises';
import { basename, dirname, join } from 'node:path';

export interface WriteOptions {
  /** Mode of the file; 0600 by default. */
  mode?: number;
  /** Owner of the file; by default the user of this process. */
  owner?: { uid: number; gid: number };
  /** Called when the new content is on the disk under a temporary name. */
  beforeRename?(): Promise<void>;
}

/**
 * Replaces a file. Resolves when the new file is on the disk. After a failure, the promise rejects and the old file is
 * still in place. Exception: if only the final flush of the directory fails, the new file is already in place.
 */
export async function writeDurably(
  file: string,
  content: string | Buffer,
  options: WriteOptions = {},
): Promise<void> {
  const directory = dirname(file);
  const temporary = join(directory, `${prefixOf(file)}${randomBytes(8).toString('hex')}`);
  try {
    await fill(temporary, content, options);
    await options.beforeRename?.();
    await rename(temporary, file);
    await syncDirectory(directory);
  } catch (error) {
    await rm(temporary, { force: true });
    throw error;
  }
}

/** Removes the temporary files of writeDurably() that a killed program left beside `file`. */
export async function removeLeftovers(file: string): Promise<void> {
  const names = await readdir(dirname(file));
  const left = names.filter((name) => name.startsWith(prefixOf(file)));
  for (const name of left) await rm(join(dirname(file), name), { force: true });
}

const prefixOf = (file: string): string => `.${basename(file)}-`;

async function fill(path: string, content: string | Buffer, { mode, owner }: WriteOptions): Promise<void> {
  await using handle = await open(path, 'wx', 0o600);
  await handle.writeFile(content);
  // Sets owner and mode of the open file, not of its path: a user who owns the directory could replace the path with a
  // link to another file.
  if (owner) await handle.chown(owner.uid, owner.gid);
  if (mode !== undefined) await handle.chmod(mode);
  await handle.sync();
}

/** Flushes a directory. Resolves when its new names are on the disk. */
export async function syncDirectory(directory: string): Promise<void> {
  await using handle = await open(directory, 'r');
  await handle.sync();
}
