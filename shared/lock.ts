// One process per data directory, and one owner: an exclusive SQLite lock, refused at once and free after kill -9.
import { execFileSync } from 'node:child_process';
import { chmodSync, closeSync, mkdirSync, openSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { DatabaseSync } from 'node:sqlite';
import { StartError } from './errors.ts';
import { inUse } from './program.ts';

/** Takes the directory for this process, made where it is missing; the result gives it back. Throws StartError. */
export function takeDirectory(directory: string, program: string): () => void {
  mkdirSync(directory, { recursive: true, mode: 0o700 });
  refuseForeign(directory);
  chmodSync(directory, 0o700);
  return lock(directory, program);
}

/** What root makes in the directory of another user, that one's service could not use any more. */
function refuseForeign(directory: string): void {
  const { uid } = statSync(directory);
  if (uid === 0 || process.getuid?.() !== 0) return;
  const name = nameOf(uid);
  const way = name ? `put runuser -u ${name} -- before the same command` : 'start it as that user';
  throw new StartError(`${directory} belongs to ${name ?? `user ${uid}`}, and this is root: ${way}`);
}

function nameOf(uid: number): string | undefined {
  try {
    return execFileSync('id', ['-nu', '--', String(uid)], { encoding: 'utf8', stdio: 'pipe' }).trim();
  } catch {
    return undefined;
  }
}

function lock(directory: string, program: string): () => void {
  const file = join(directory, 'lock.db');
  // Made by us first, so that it is private from its first byte.
  closeSync(openSync(file, 'a', 0o600));
  const database = new DatabaseSync(file, { timeout: 0 });
  try {
    database.exec('PRAGMA locking_mode = EXCLUSIVE; BEGIN EXCLUSIVE');
  } catch (error) {
    database.close();
    throw new StartError(`${inUse(program, directory)}: stop it, or choose another --data-dir`, 1, {
      cause: error,
    });
  }
  return () => database.close();
}
