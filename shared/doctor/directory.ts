// Checks a data directory: its owner, whether others may use it, and free disk space.
import { stat, statfs } from 'node:fs/promises';
import { join } from 'node:path';
import { reasonOf } from '../system-errors.ts';
import { refusedIn } from './directory-owner.ts';
import { type Finding, fail, ok, warn } from './finding.ts';

const gib = 1024 ** 3;

/** Checks that only the owner may use the directory and `files` in it, and that over 1 GiB is free. */
export async function examineDirectory(dataDir: string, files: string[]): Promise<Finding[]> {
  const refused = refusedIn(dataDir);
  if (refused) return [fail('directory', refused, 'say sudo before the same command')];
  const there = await stat(dataDir).catch((error: unknown) => reasonOf(error));
  if (typeof there === 'string')
    return [fail('directory', there, 'is --data-dir right, and may you read it?')];
  const open: string[] = [];
  const foreign: string[] = [];
  for (const name of ['', ...files]) {
    const one = await stat(join(dataDir, name)).catch(() => undefined);
    if (one && one.mode & 0o077) open.push(name || dataDir);
    if (one && one.uid !== there.uid) foreign.push(name);
  }
  return [modes(dataDir, open), ...owners(dataDir, foreign), await room(dataDir)];
}

function modes(dataDir: string, open: string[]): Finding {
  if (open.length === 0) return ok('directory', `${dataDir} is its owner’s alone`);
  return fail(
    'directory',
    `others may use ${open.join(', ')}`,
    `chmod -R go= ${dataDir}; keys may be known already`,
  );
}

function owners(dataDir: string, foreign: string[]): Finding[] {
  if (foreign.length === 0) return [];
  const what = `${foreign.join(', ')} is not of the owner of ${dataDir}`;
  return [fail('owner', what, `chown -R --reference=${dataDir} ${dataDir}`)];
}

async function room(dataDir: string): Promise<Finding> {
  const { bavail, bsize, blocks } = await statfs(dataDir);
  const free = bavail * bsize;
  const [left, all] = [free, blocks * bsize].map((bytes) => `${(bytes / gib).toFixed(1)} GiB`);
  const what = `${left} free of ${all}`;
  return free > gib ? ok('disk', what) : warn('disk', what, `make room where ${dataDir} lies`);
}
