// Packs a directory as a tar.gz whose bytes do not depend on the time and the computer (a reproducible build).
import { createHash } from 'node:crypto';
import { createReadStream } from 'node:fs';
import { basename, dirname } from 'node:path';
import { pipeline } from 'node:stream/promises';
import { run } from './shared-by-packaging-steps.ts';

/**
 * Modification time of all packed files, in seconds since 1970. A constant gives the same bytes in each build.
 * SOURCE_DATE_EPOCH sets another time (reproducible-builds.org).
 */
export const epoch = process.env.SOURCE_DATE_EPOCH ?? '1767225600';

/** Packs `folder` into `file`. `level` is the compression level of gzip. */
export async function archive(folder: string, file: string, level: number): Promise<void> {
  const same = [
    '--sort=name',
    `--mtime=@${epoch}`,
    '--owner=0',
    '--group=0',
    '--numeric-owner',
    '--format=gnu',
  ];
  const modes = ['--mode=u+rwX,go+rX,go-w', '--hard-dereference'];
  const zip = `--use-compress-program=gzip -n -${level}`;
  await run('tar', ['-cf', file, ...same, ...modes, zip, '-C', dirname(folder), basename(folder)]);
}

export async function sha256Of(file: string): Promise<string> {
  const hash = createHash('sha256');
  await pipeline(createReadStream(file), hash);
  return hash.digest('hex');
}
