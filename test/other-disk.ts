// A file system other than that of the temporary folder, for what happens between two of them.
import { existsSync, statSync } from 'node:fs';
import { tmpdir } from 'node:os';

/** A directory on it that anybody may write to; undefined where there is none. */
export const otherDisk = ['/dev/shm', process.env.FARHAND_TEST_DISK ?? '/tmp'].find(
  (path) => existsSync(path) && statSync(path).dev !== statSync(tmpdir()).dev,
);
