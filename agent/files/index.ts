// Creates the handlers of all file operations. They work only inside the roots that the machine's owner
// allows.

import type { AgentMethods } from '../../shared/agent-rpcs.ts';
import { StartError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Quota } from '../../shared/quota.ts';
import { Semaphore } from '../../shared/semaphore.ts';
import { readArchive } from './archive/pack-directory.ts';
import { writeArchive } from './archive/unpack-into-directory.ts';
import { Journal } from './atomic/temporary-files-journal.ts';
import { changeFile } from './chmod-chown.ts';
import { Boundary } from './confine/boundary.ts';
import { fromText } from './confine/parse-request-path.ts';
import { Confinement } from './confine/resolve-inside-roots.ts';
import { type Disk, streaming, unary, uploading } from './handler-adapters.ts';
import { listFiles } from './list.ts';
import { makeDirectory } from './make-directory.ts';
import { copyFile, moveFile } from './move-copy.ts';
import { readFile } from './read.ts';
import { removeFile } from './remove.ts';
import { searchFiles } from './search/index.ts';
import { statFile } from './stat.ts';
import { touchFile } from './touch.ts';
import { createUsers } from './users-groups.ts';
import { watchFiles, watchQuota } from './watch.ts';
import { writeFile } from './write.ts';

/**
 * Maximum number of heavy calls at once. A heavy call may use the disk for hours, and many of them would delay all
 * other file calls. Further ones wait; the broker sends at most 32 at once.
 */
const mostHeavy = 8;

export interface FilesOptions {
  /** Absolute paths of the directories that requests may use; `['/']` allows the whole disk. */
  roots: string[];
  home: string;
  /** Absolute paths that requests may neither read nor change, even inside a root. */
  forbidden: string[];
  /** Absolute paths that requests may read but not change. */
  fixed?: string[];
  /** Pids of the agent's own processes, whose /proc entries are refused. By default only this process. */
  processes?: () => number[];
  directory: string;
  log: Logger;
  /** Quota of all watches together. Only tests set it. */
  watches?: Quota;
}

export type Files = Pick<
  AgentMethods,
  Extract<keyof AgentMethods, `${string}${'File' | 'Files' | 'Archive' | 'Directory'}`>
>;

/** Throws StartError when a root cannot be used. */
export async function checkRoots(roots: string[]): Promise<void> {
  await Boundary.open(roots, []).catch((error: unknown) => {
    throw new StartError(`--root: ${error instanceof Error ? error.message : String(error)}`, 78, {
      cause: error,
    });
  });
}

/**
 * Creates the handlers, and removes temporary files that a killed agent left. Fails if a root cannot be used.
 */
export async function createFiles(options: FilesOptions): Promise<Files> {
  const { roots, home, forbidden, fixed = [], processes, directory, log } = options;
  // Journal.open() creates the directory, which must exist before it can be protected.
  const journal = await Journal.open(directory, log);
  // Requests must not reach this directory: a forged journal could make the agent remove other files at its next start.
  const secret = [...forbidden, directory];
  const disk: Disk = {
    reading: new Confinement(await Boundary.open(roots, secret, processes)),
    writing: new Confinement(await Boundary.open(roots, [...secret, ...fixed], processes)),
    users: createUsers(),
    home: fromText(home),
    journal,
    heavy: new Semaphore(mostHeavy),
    watches: options.watches ?? watchQuota(),
  };
  return {
    listFiles: streaming(disk, listFiles),
    readFile: streaming(disk, readFile),
    writeFile: uploading(disk, writeFile),
    statFile: unary(disk, statFile, ({ sha256 }) => sha256),
    makeDirectory: unary(disk, makeDirectory),
    removeFile: unary(disk, removeFile, ({ recursive }) => recursive),
    moveFile: unary(disk, moveFile, () => true),
    copyFile: unary(disk, copyFile, () => true),
    changeFile: unary(disk, changeFile),
    touchFile: unary(disk, touchFile),
    readArchive: streaming(disk, readArchive),
    writeArchive: uploading(disk, writeArchive),
    searchFiles: streaming(disk, searchFiles),
    watchFiles: streaming(disk, watchFiles),
  };
}
