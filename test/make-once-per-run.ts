// Makes something that several test files need, once per run, in the temporary folder of the run.
import { existsSync, mkdirSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

const longestMs = 180_000;

/**
 * Returns a folder that `make` has filled. The first test file to need the folder fills it, and others wait meanwhile.
 * If `make` throws, madeOnce() throws in every file.
 */
export function madeOnce(name: string, make: (folder: string) => void): string {
  const folder = join(tmpdir(), name);
  const [made, failed] = [`${folder}.made`, `${folder}.failed`];
  try {
    mkdirSync(folder);
  } catch (error) {
    if (!(error instanceof Error && 'code' in error && error.code === 'EEXIST')) throw error;
    const sleeper = new Int32Array(new SharedArrayBuffer(4));
    for (let ms = 0; !existsSync(made) && !existsSync(failed) && ms < longestMs; ms += 50)
      Atomics.wait(sleeper, 0, 0, 50);
    if (!existsSync(made)) throw new Error(`another test file could not make ${folder}`, { cause: error });
    return folder;
  }
  try {
    make(folder);
    writeFileSync(made, '');
  } catch (error) {
    writeFileSync(failed, '');
    throw error;
  }
  return folder;
}
