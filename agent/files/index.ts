// The files room of the agent: lists, reads, writes and arranges files inside the roots that the machine's owner allows.
import { access } from 'node:fs/promises';
import { AppError, StartError } from '../../shared/errors.ts';
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
  /** Absolute paths, refused whatever the roots. */
  forbidden: string[];
  /** Absolute paths that may be read and never changed. */
  fixed?: string[];
  /** The agent's own processes, of which nothing is shown: this one, unless told. */
  processes?: () => number[];
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

/** Throws StartError when a root cannot be used. */
export async function checkRoots(roots: string[]): Promise<void> {
  await Boundary.open(roots, []).catch((error: unknown) => {
    throw new StartError(`--root: ${error instanceof Error ? error.message : String(error)}`, 78, {
      cause: error,
    });
  });
}

/** Fails when a root cannot be used; removes temporary files of a killed agent. */
export async function openFiles(options: FilesOptions): Promise<Files> {
  const { roots, home, forbidden, fixed = [], processes, directory, log } = options;
  await access('/proc/self/fd').catch(() => {
    throw new AppError('not_supported', 'files need Linux with /proc mounted');
  });
  const temporary = await Temporary.open(directory, log);
  // Whoever could write the journal could have files removed.
  const secret = [...forbidden, directory];
  const reading = new Beneath(await Boundary.open(roots, secret, processes));
  const beneath = new Beneath(await Boundary.open(roots, [...secret, ...fixed], processes));
  const people = openPeople();
  const start = fromText(home);
  const guarded = guard(new Turnstile(mostHeavy, mostWaiting));
  const describer = openDescriber(reading, people, start);
  const remover = openRemover(beneath, start);
  const changing = { beneath, reading, temporary, people, home: start, log };
  return {
    listFiles: openLister(reading, people, start),
    readFile: openReader(reading, people, start),
    writeFile: openWriter(changing),
    statFile: guarded(describer, ({ sha256 }) => sha256),
    makeDirectory: openMaker(beneath, people, start),
    removeFile: guarded(remover, ({ recursive }) => recursive),
    moveFile: guarded(openMover(changing)),
    copyFile: guarded(openCopier(changing)),
    changeFile: openChanger(beneath, people, start),
    readArchive: openPacker(reading, people, start),
    writeArchive: openUnpacker(changing),
    searchFiles: openSearcher(reading, people, start),
    watchFiles: openWatcher(reading, start),
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
