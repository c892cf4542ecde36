// Locks a data directory for one process by an exclusive SQLite lock, which the kernel releases even after kill -9.
import { chmodSync, closeSync, mkdirSync, openSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { DatabaseSync } from 'node:sqlite';
import { StartError } from './errors.ts';
import { inUse, userName } from './program-start-and-end.ts';
import { reasonOf } from './system-error-messages.ts';

/**
 * Locks a directory for this process, and creates it if it is missing. Returns a function that unlocks it. Throws
 * StartError if the directory cannot be used.
 */
export function takeDirectory(directory: string, program: string): () => void {
  mkdirSync(directory, { recursive: true, mode: 0o700 });
  refuseForeign(directory);
  chmodSync(directory, 0o700);
  return lock(directory, program);
}

/** Throws if root uses another user's directory, because that user's service could not use files created by root. */
export function refuseForeign(directory: string): void {
  const { uid } = statSync(directory);
  if (uid === 0 || process.getuid?.() !== 0) return;
  const name = userName(uid);
  const way = name
    ? `run the command as this user: runuser -u ${name} -- COMMAND`
    : 'run the command as that user';
  throw new StartError(`${directory} belongs to ${name ?? `user ${uid}`}, not root: ${way}`);
}

function lock(directory: string, program: string): () => void {
  const file = join(directory, 'lock.db');
  // SQLite would create the file readable for other users, so it is created here first.
  closeSync(openSync(file, 'a', 0o600));
  const database = new DatabaseSync(file, { timeout: 0 });
  try {
    // The journal is in memory, because a journal file cannot be created on a full disk. No data is at risk: nothing is
    // written to lock.db.
    database.exec('PRAGMA locking_mode = EXCLUSIVE; PRAGMA journal_mode = MEMORY; BEGIN EXCLUSIVE');
  } catch (error) {
    database.close();
    const isInUse = error instanceof Error && error.message.includes('locked');
    const message = isInUse
      ? `${inUse(program, directory)}; stop that process, or choose another --data-dir`
      : `${file} cannot be locked (${reasonOf(error)}); fix the cause and start again`;
    throw new StartError(message, 1, { cause: error });
  }
  return () => database.close();
}
