// The files room of the agent: lists, reads, writes and arranges files inside the roots that the machine's owner allows.
import { access } from 'node:fs/promises';
import { AppError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import type { AgentMethods } from '../../shared/rpc.ts';
import { openPacker, openUnpacker } from './archive/index.ts';
import { Boundary } from './beneath/boundary.ts';
import { Beneath } from './beneath/index.ts';
import { fromText } from './beneath/path.ts';
import { openChanger } from './change.ts';
import { openCopier } from './copy.ts';
import { Temporary } from './draft/temporary.ts';
import { openLister } from './list.ts';
import { openMaker } from './make.ts';
import { openMover } from './move.ts';
import { openPeople } from './people.ts';
import { openReader } from './read.ts';
import { openRemover } from './remove.ts';
import { openSearcher } from './search/index.ts';
import { openDescriber } from './stat.ts';
import { openWatcher } from './watch/index.ts';
import { openWriter } from './write.ts';

export interface FilesOptions {
  /** Absolute; `['/']` allows the whole disk. */
  roots: string[];
  /** Where relative paths start. */
  home: string;
  /** Absolute: the agent's own data directory, configuration and unit; refused whatever the roots. */
  forbidden: string[];
  /** Where the journal of temporary files lies. */
  directory: string;
  log: Logger;
}

export type Files = Pick<
  AgentMethods,
  | 'listFiles'
  | 'readFile'
  | 'writeFile'
  | 'statFile'
  | 'makeDirectory'
  | 'removeFile'
  | 'moveFile'
  | 'copyFile'
  | 'changeFile'
  | 'readArchive'
  | 'writeArchive'
  | 'searchFiles'
  | 'watchFiles'
>;

/** Fails when a root cannot be used; removes temporary files of a killed agent. */
export async function openFiles({ roots, home, forbidden, directory, log }: FilesOptions): Promise<Files> {
  await access('/proc/self/fd').catch(() => {
    throw new AppError('not_supported', 'files need Linux with /proc mounted');
  });
  const temporary = await Temporary.open(directory, log);
  // Whoever could write the journal could have files removed.
  const beneath = new Beneath(await Boundary.open(roots, [...forbidden, directory]));
  const people = openPeople();
  const start = fromText(home);
  const moving = { beneath, temporary, people, home: start, log };
  return {
    listFiles: openLister(beneath, people, start),
    readFile: openReader(beneath, people, start),
    writeFile: openWriter({ beneath, temporary, home: start, log }),
    statFile: openDescriber(beneath, people, start),
    makeDirectory: openMaker(beneath, people, start),
    removeFile: openRemover(beneath, start),
    moveFile: openMover(moving),
    copyFile: openCopier(moving),
    changeFile: openChanger(beneath, people, start),
    readArchive: openPacker(beneath, people, start),
    writeArchive: openUnpacker({ beneath, temporary, people, home: start, log }),
    searchFiles: openSearcher(beneath, people, start),
    watchFiles: openWatcher(beneath, start),
  };
}
