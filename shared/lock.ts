// One process per data directory: an exclusive SQLite lock, refused at once and free after kill -9.
import { closeSync, openSync } from 'node:fs';
import { join } from 'node:path';
import { DatabaseSync } from 'node:sqlite';
import { StartError } from './errors.ts';

/** Takes the directory for this process; the result gives it back. Throws StartError while another holds it. */
export function lockDirectory(directory: string, program: string): () => void {
  const file = join(directory, 'lock.db');
  // Made by us first, so that it is private from its first byte.
  closeSync(openSync(file, 'a', 0o600));
  const database = new DatabaseSync(file, { timeout: 0 });
  try {
    database.exec('PRAGMA locking_mode = EXCLUSIVE; BEGIN EXCLUSIVE');
  } catch (error) {
    database.close();
    throw new StartError(
      `another ${program} already uses ${directory}: stop it, or choose another --data-dir`,
      1,
      {
        cause: error,
      },
    );
  }
  return () => database.close();
}
