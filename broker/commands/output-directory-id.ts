// The id of a data directory. Other brokers find a command's output files by this id, because it survives restarts,
// unlike the broker's id.
import { randomBytes } from 'node:crypto';
import { readFile } from 'node:fs/promises';
import { join } from 'node:path';
import { writeDurably } from '../../shared/durable-file.ts';
import { ignoring } from '../../shared/errors.ts';

const fileName = 'directory-id';

/** Reads the id. Returns undefined if the directory has none yet. Rejects if the file cannot be read. */
export async function storedDirectoryId(directory: string): Promise<string | undefined> {
  const text = (await readFile(join(directory, fileName), 'utf8').catch(ignoring('ENOENT'))) ?? '';
  return /^[0-9a-f]{32}$/.test(text) ? text : undefined;
}

/** Reads the id, or creates a missing one. */
export async function dataDirectoryId(directory: string): Promise<string> {
  const stored = await storedDirectoryId(directory);
  if (stored !== undefined) return stored;
  const id = randomBytes(16).toString('hex');
  await writeDurably(join(directory, fileName), id);
  return id;
}
