// Writes a private file so that after any crash it is the old or the new one, whole.
import { randomBytes } from 'node:crypto';
import { open, readdir, rename, rm } from 'node:fs/promises';
import { basename, dirname, join } from 'node:path';

/**
 * Replaces a file; it is 0600 from its first byte and on disk when this resolves. A failure leaves the old one and
 * nothing else. `beforeRename` runs once the new content is safe beside the old.
 */
export async function writeDurably(
  file: string,
  text: string,
  beforeRename: () => Promise<void> = async () => {},
): Promise<void> {
  const directory = dirname(file);
  const temporary = join(directory, `${prefixOf(file)}${randomBytes(8).toString('hex')}`);
  try {
    await fill(temporary, text);
    await beforeRename();
    await rename(temporary, file);
    await syncDirectory(directory);
  } catch (error) {
    await rm(temporary, { force: true });
    throw error;
  }
}

/** Removes what a killed program left half-written beside a file. */
export async function removeLeftovers(file: string): Promise<void> {
  const names = await readdir(dirname(file));
  const left = names.filter((name) => name.startsWith(prefixOf(file)));
  for (const name of left) await rm(join(dirname(file), name), { force: true });
}

const prefixOf = (file: string): string => `.${basename(file)}-`;

async function fill(path: string, text: string): Promise<void> {
  const handle = await open(path, 'wx', 0o600);
  try {
    await handle.writeFile(text);
    await handle.sync();
  } finally {
    await handle.close();
  }
}

async function syncDirectory(directory: string): Promise<void> {
  const handle = await open(directory, 'r');
  try {
    await handle.sync();
  } finally {
    await handle.close();
  }
}
