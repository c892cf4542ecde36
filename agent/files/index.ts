// The file operations of the agent, inside the roots that the machine's owner allows.
import { StartError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import type { AgentCall, AgentMethods } from '../../shared/rpc.ts';
import { readArchive } from './archive/pack.ts';
import { writeArchive } from './archive/unpack.ts';
import { Journal } from './atomic/journal.ts';
import { changeFile } from './change.ts';
import { Boundary } from './confine/boundary.ts';
import { fromText } from './confine/path.ts';
import { Confinement } from './confine/resolve.ts';
import { copyFile } from './copy.ts';
import { listFiles } from './list.ts';
import { makeDirectory } from './make.ts';
import { moveFile } from './move.ts';
import { type Disk, streaming, unary } from './operation.ts';
import { readFile } from './read.ts';
import { removeFile } from './remove.ts';
import { searchFiles } from './search/index.ts';
import { Semaphore } from './semaphore.ts';
import { statFile } from './stat.ts';
import { createUsers } from './users-groups.ts';
import { watchFiles } from './watch/index.ts';
import { Quota } from './watch/watched.ts';
import { writeFile } from './write.ts';

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
  /** What all watches may hold together. */
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

/** Fails when a root cannot be used; removes temporary files of a killed agent. */
export async function openFiles(options: FilesOptions): Promise<Files> {
  const { roots, home, forbidden, fixed = [], processes, directory, log } = options;
  // First, so that its directory is there to be protected.
  const journal = await Journal.open(directory, log);
  // Whoever could write the journal could have files removed.
  const secret = [...forbidden, directory];
  const disk: Disk = {
    reading: new Confinement(await Boundary.open(roots, secret, processes)),
    writing: new Confinement(await Boundary.open(roots, [...secret, ...fixed], processes)),
    users: createUsers(),
    home: fromText(home),
    journal,
    watches: options.watches ?? new Quota(),
  };
  const heavy = heavyCalls();
  const path = (request: { path: Buffer }): Buffer => request.path;
  const source = (request: { source: Buffer }): Buffer => request.source;
  return {
    listFiles: streaming(disk, listFiles),
    readFile: streaming(disk, readFile),
    writeFile: (request, { signal }) => writeFile(disk, request, signal),
    statFile: heavy(unary(disk, path, statFile), ({ sha256 }) => sha256),
    makeDirectory: unary(disk, path, makeDirectory),
    removeFile: heavy(unary(disk, path, removeFile), ({ recursive }) => recursive),
    moveFile: heavy(unary(disk, source, moveFile)),
    copyFile: heavy(unary(disk, source, copyFile)),
    changeFile: unary(disk, path, changeFile),
    readArchive: streaming(disk, readArchive),
    writeArchive: (request, { signal }) => writeArchive(disk, request, signal),
    searchFiles: streaming(disk, searchFiles),
    watchFiles: streaming(disk, watchFiles),
  };
}

type Handler<Request, Response> = (request: Request, call: AgentCall) => Promise<Response>;

/** Heavy calls wait for their turn, others do not. */
function heavyCalls() {
  const semaphore = new Semaphore(mostHeavy, mostWaiting);
  return <Request, Response>(
    handler: Handler<Request, Response>,
    isHeavy: (request: Request) => boolean = () => true,
  ): Handler<Request, Response> =>
    async (request, call) =>
      isHeavy(request) ? semaphore.run(call.signal, () => handler(request, call)) : handler(request, call);
}
