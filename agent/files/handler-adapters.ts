// Turns file operations into handlers of the broker's calls.
import type { AgentCall, AgentMethods } from '../../shared/agent-rpcs.ts';
import { fromErrno } from '../../shared/errors.ts';
import type { Quota } from '../../shared/quota.ts';
import type { Semaphore } from '../../shared/semaphore.ts';
import { unlessAborted } from '../../shared/stop-waiting-on-abort.ts';
import type { Journal } from './atomic/temporary-files-journal.ts';
import { type Bytes, type Target, targetOf, toText } from './confine/parse-request-path.ts';
import type { Confinement } from './confine/resolve-inside-roots.ts';
import { Upload, type UploadMessages } from './upload-messages.ts';
import type { AskUsers } from './users-groups.ts';

export interface Disk {
  /** Resolves paths that may be read. `writing` refuses some of them, such as the agent's program files. */
  reading: Confinement;
  writing: Confinement;
  users: AskUsers;
  /** Directory at which relative paths start. */
  home: Bytes;
  journal: Journal;
  /** Slots for calls that may occupy the disk for hours. */
  heavy: Semaphore;
  /** Quota that all watches share. */
  watches: Quota;
}

/**
 * The operation for an rpc method. It gets the path that the request names, and a signal that fires when the
 * call is cancelled.
 */
export type Operation<M extends keyof AgentMethods> = Work<RequestOf<M>, Result<ReturnType<AgentMethods[M]>>>;
export type RequestOf<M extends keyof AgentMethods> = Parameters<AgentMethods[M]>[0];
type Result<Answer> = Answer extends AsyncIterable<infer Part> ? AsyncGenerator<Part, void, void> : Answer;
type Work<Request, Result> = (disk: Disk, request: Request, target: Target, signal: AbortSignal) => Result;

/** Makes a unary handler. `isHeavy`: true if a request must wait for one of the slots of heavy calls. */
export function unary<Request extends { path: Buffer } | { source: Buffer }, Response>(
  disk: Disk,
  work: Work<Request, Promise<Response>>,
  isHeavy: (request: Request) => boolean = () => false,
) {
  return (request: Request, { signal }: AgentCall): Promise<Response> =>
    withTarget(disk, 'path' in request ? request.path : request.source, signal, (target) => {
      const run = () => work(disk, request, target, signal);
      return isHeavy(request) ? disk.heavy.run(signal, run) : run();
    });
}

export function uploading<Open extends { path: Buffer }, Commit extends { sha256?: string }, Response>(
  disk: Disk,
  work: Work<Upload<Open, Commit>, Promise<Response>>,
) {
  return async (request: UploadMessages<Open, Commit>, { signal }: AgentCall): Promise<Response> => {
    using upload = await Upload.begin(request, signal);
    return await withTarget(disk, upload.open.path, signal, (target) => work(disk, upload, target, signal));
  };
}

/**
 * Makes a handler that streams its response. If the call is cancelled, the handler ends at once. A read in progress
 * then continues in the background, and closes its handles when it ends.
 */
export function streaming<Request extends { path: Buffer }, Response>(
  disk: Disk,
  work: Work<Request, AsyncGenerator<Response, void, void>>,
) {
  return async function* (request: Request, { signal }: AgentCall): AsyncGenerator<Response, void, void> {
    const target = targetOf(request.path, disk.home);
    const source = work(disk, request, target, signal);
    try {
      signal.throwIfAborted();
      for (;;) {
        const next = await unlessAborted(signal, source.next());
        if (next.done) return;
        yield next.value;
      }
    } catch (error) {
      throw failureOf(error, signal, target);
    } finally {
      // return() is not awaited: it waits for a read in progress, which may hang with the disk.
      source.return().catch(() => undefined);
    }
  };
}

/** Runs the work of a call on the path that its request names. */
async function withTarget<T>(
  disk: Disk,
  path: Buffer,
  signal: AbortSignal,
  work: (target: Target) => Promise<T>,
): Promise<T> {
  const target = targetOf(path, disk.home);
  try {
    signal.throwIfAborted();
    return await work(target);
  } catch (error) {
    throw failureOf(error, signal, target);
  }
}

/** Returns the error of a failed call: the signal's reason if the signal has fired, otherwise an error with a code. */
const failureOf = (error: unknown, signal: AbortSignal, { path }: Target): unknown =>
  signal.aborted ? signal.reason : fromErrno(error, toText(path));
