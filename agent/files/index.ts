// The files room of the agent: lists, reads, writes and arranges files inside the roots that the machine's owner allows.
import { access } from 'node:fs/promises';
import { AppError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import type { AgentCall, AgentMethods } from '../../shared/rpc.ts';
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
import { Turnstile } from './turnstile.ts';
import { openWatcher } from './watch/index.ts';
import { openWriter } from './write.ts';

/** Calls at once that may keep the disk busy for hours: Node has four threads for all of the agent. */
const mostHeavy = 8;
/** Those that wait for that. */
const mostWaiting = 32;

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
  const guarded = guard(new Turnstile(mostHeavy, mostWaiting));
  const describer = openDescriber(beneath, people, start);
  const remover = openRemover(beneath, start);
  const changing = { beneath, temporary, people, home: start, log };
  return {
    listFiles: openLister(beneath, people, start),
    readFile: openReader(beneath, people, start),
    writeFile: openWriter(changing),
    statFile: guarded(describer, ({ sha256 }) => sha256),
    makeDirectory: openMaker(beneath, people, start),
    removeFile: guarded(remover, ({ recursive }) => recursive),
    moveFile: guarded(openMover(changing)),
    copyFile: guarded(openCopier(changing)),
    changeFile: openChanger(beneath, people, start),
    readArchive: openPacker(beneath, people, start),
    writeArchive: openUnpacker(changing),
    searchFiles: openSearcher(beneath, people, start),
    watchFiles: openWatcher(beneath, start),
  };
}

type Unary<Request, Response> = (request: Request, call: AgentCall) => Promise<Response>;
type Guarded = <Request, Response>(
  method: Unary<Request, Response>,
  isHeavy?: (request: Request) => boolean,
) => Unary<Request, Response>;

/** Heavy requests wait for their turn, others do not. */
function guard(turnstile: Turnstile): Guarded {
  return (method, isHeavy) => async (request, call) => {
    const work = () => method(request, call);
    return isHeavy && !isHeavy(request) ? work() : turnstile.pass(call.signal, work);
  };
}
