// The doctor's checks of a data directory: access, owner, modes, and free disk space.
import { accessSync, constants, Stats, statSync } from 'node:fs';
import { stat, statfs } from 'node:fs/promises';
import { join } from 'node:path';
import { errnoOf, isErrno, StartError } from '../errors.ts';
import { userName } from '../program-start-and-end.ts';
import { reasonOf } from '../system-error-messages.ts';
import { type Finding, fail, ok, warn } from './check-result.ts';

const gib = 1024 ** 3;

/** Checks that only the owner can use the directory and `files` in it, and that over 1 GiB is free. */
export async function examineDirectory(dataDir: string, files: string[]): Promise<Finding[]> {
  const refused = refusedIn(dataDir);
  if (refused)
    return [fail('directory', refused, 'run the same command with sudo, or as the owner of the directory')];
  const there = await stat(dataDir).catch((error: unknown) => error);
  if (!(there instanceof Stats)) {
    const first = isErrno(there, 'ENOENT') ? '; if it is right, the first start creates the directory' : '';
    return [fail('directory', reasonOf(there), `check the path in --data-dir${first}`)];
  }
  const open: string[] = [];
  const foreign: string[] = [];
  for (const name of ['', ...files]) {
    const one = await stat(join(dataDir, name)).catch(() => undefined);
    if (one && one.mode & 0o077) open.push(name || dataDir);
    if (one && one.uid !== there.uid) foreign.push(name);
  }
  return [modes(dataDir, open), ...owners(dataDir, foreign), await space(dataDir)];
}

function modes(dataDir: string, open: string[]): Finding {
  if (open.length === 0) return ok('directory', `only its owner can use ${dataDir}`);
  const what = `other users can use ${open.join(', ')}`;
  return fail(
    'directory',
    what,
    `run chmod -R go= ${dataDir}, and replace the keys in it, because other users may have read them`,
  );
}

function owners(dataDir: string, foreign: string[]): Finding[] {
  if (foreign.length === 0) return [];
  const what = `the owner of ${dataDir} does not own ${foreign.join(', ')}`;
  return [fail('owner', what, `run chown -R --reference=${dataDir} ${dataDir}`)];
}

async function space(dataDir: string): Promise<Finding> {
  const { bavail, bsize, blocks } = await statfs(dataDir);
  const free = bavail * bsize;
  const [left, all] = [free, blocks * bsize].map((bytes) => `${(bytes / gib).toFixed(1)} GiB`);
  const what = `${left} free of ${all}`;
  return free > gib
    ? ok('disk', what)
    : warn('disk', what, `delete files, or enlarge the file system of ${dataDir}`);
}

export function assertAccess(directory: string): void {
  const why = refusedIn(directory);
  if (why) throw new StartError(why, 1);
}

/**
 * Returns an error message if this user may not use the directory; undefined otherwise, and for a missing directory.
 */
function refusedIn(directory: string): string | undefined {
  try {
    accessSync(directory, constants.R_OK | constants.W_OK | constants.X_OK);
    return undefined;
  } catch (error) {
    if (!['EACCES', 'EPERM'].includes(errnoOf(error) ?? '')) return undefined;
    return `${directory} belongs to ${ownerOf(directory)}; run the same command with sudo`;
  }
}

function ownerOf(directory: string): string {
  try {
    const { uid } = statSync(directory);
    return userName(uid) ?? `user ${uid}`;
  } catch {
    return 'another user';
  }
}
