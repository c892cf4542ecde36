// Finds file systems other than that of the temporary folder, which may be in memory (see global-setup.ts).
import { existsSync, statSync } from 'node:fs';
import { tmpdir } from 'node:os';

/**
 * A folder on a real disk. Tests of delayed writes and slow renames need it, because the temporary folder may be in
 * memory.
 */
export const diskFolder = process.env.FARHAND_TEST_DISK ?? tmpdir();

/**
 * Returns a directory on another file system than `folder`, with write access for all users; undefined if there is
 * none.
 */
export const onOtherDisk = (folder: string): string | undefined =>
  ['/dev/shm', diskFolder].find((path) => existsSync(path) && statSync(path).dev !== statSync(folder).dev);
