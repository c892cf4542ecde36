// The id of a broker's data directory. Unlike the id of a broker, it is the same after a restart. Other brokers use it
// to find the broker that has the output files of a command.
import { randomBytes } from 'node:crypto';
import { readFile } from 'node:fs/promises';
import { join } from 'node:path';
import { writeDurably } from '../../shared/durable-file.ts';
import { ignoring } from '../../shared/errors.ts';

const fileName = 'directory-id';

/** Reads the id, or creates a missing one. */
export async function dataDirectoryId(directory: string): Promise<string> {
  const file = join(directory, fileName);
  const text = (await readFile(file, 'utf8').catch(ignoring('ENOENT'))) ?? '';
  if (/^[0-9a-f]{32}$/.test(text)) return text;
  const id = randomBytes(16).toString('hex');
  await writeDurably(file, id);
  return id;
}
