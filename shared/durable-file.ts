// Writes a file so that after any crash it is the old or the new one, whole; readable by its owner only, by default.
import { randomBytes } from 'node:crypto';
import { open, readdir, rename, rm } from 'node:fs/promises';
import { basename, dirname, join } from 'node:path';

export interface WriteOptions {
  /** 0600 by default. */
  mode?: number;
  /** The writing user by default. */
  owner?: { uid: number; gid: number };
  /** Runs once the new content is safe beside the old. */
  beforeRename?(): Promise<void>;
}

/**
 * Replaces a file; it is 0600 from its first byte, then as set by `options`, and on disk when this resolves. A failure leaves the
 * old one and nothing else, but for one after the rename, when the directory cannot be synced: then it is the new one.
 */
export async function writeDurably(file: string, text: string, options: WriteOptions = {}): Promise<void> {
  const directory = dirname(file);
  const temporary = join(directory, `${prefixOf(file)}${randomBytes(8).toString('hex')}`);
  try {
    await fill(temporary, text, options);
    await options.beforeRename?.();
    await rename(temporary, file);
    await syncDirectory(directory);
  } catch (error) {
    await rm(temporary, { force: true });
    throw error;
  }
}

/** Removes half-written files that a killed program left beside a file. */
export async function removeLeftovers(file: string): Promise<void> {
  const names = await readdir(dirname(file));
  const left = names.filter((name) => name.startsWith(prefixOf(file)));
  for (const name of left) await rm(join(dirname(file), name), { force: true });
}

const prefixOf = (file: string): string => `.${basename(file)}-`;

async function fill(path: string, text: string, { mode, owner }: WriteOptions): Promise<void> {
  await using handle = await open(path, 'wx', 0o600);
  await handle.writeFile(text);
  // By handle: the directory may belong to another user, who could replace the name with a link.
  if (owner) await handle.chown(owner.uid, owner.gid);
  if (mode !== undefined) await handle.chmod(mode);
  await handle.sync();
}

/** Names in it are on the disk when this resolves. */
export async function syncDirectory(directory: string): Promise<void> {
  await using handle = await open(directory, 'r');
  await handle.sync();
}
