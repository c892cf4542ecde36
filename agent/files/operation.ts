// Turns file operations into handlers of the link: each gets the disk, the path of its request and a signal. A cancelled
// read is not awaited, for a disk may hang: it ends by itself and closes its handles.

import { fromErrno } from '../../shared/errors.ts';
import type { Quota } from '../../shared/quota.ts';
import type { AgentCall, AgentMethods } from '../../shared/rpc.ts';
import type { Journal } from './atomic/journal.ts';
import { type Bytes, type Target, targetOf, toText } from './confine/request-path.ts';
import type { Confinement } from './confine/resolve.ts';
import type { Semaphore } from './semaphore.ts';
import type { AskUsers } from './users-groups.ts';

/** Shared by all operations. */
export interface Disk {
  /** Where files may be read, which is more than may be changed. */
  reading: Confinement;
  writing: Confinement;
  users: AskUsers;
  /** Where relative paths start. */
  home: Bytes;
  journal: Journal;
  /** Calls that may keep the disk busy for hours. */
  heavy: Semaphore;
  /** Quota of all watches together. */
  watches: Quota;
}

/** A method of the wire as an operation: given the path that its request names, and a signal that fires when the call is cancelled. */
export type Operation<M extends keyof AgentMethods> = Work<RequestOf<M>, Result<ReturnType<AgentMethods[M]>>>;
export type RequestOf<M extends keyof AgentMethods> = Parameters<AgentMethods[M]>[0];
type Result<Answer> = Answer extends AsyncIterable<infer Part> ? AsyncGenerator<Part, void, void> : Answer;
type Work<Request, Result> = (disk: Disk, request: Request, target: Target, signal: AbortSignal) => Result;

/** A handler of the link; `named` says which path failures are about, `isHeavy` whether a request waits for a slot. */
export function unary<Request, Response>(
  disk: Disk,
  named: (request: Request) => Buffer,
  work: Work<Request, Promise<Response>>,
  isHeavy: (request: Request) => boolean = () => false,
) {
  return async (request: Request, { signal }: AgentCall): Promise<Response> => {
    const target = targetOf(named(request), disk.home);
    const run = () => failingAs(target.path, signal, () => work(disk, request, target, signal));
    return isHeavy(request) ? disk.heavy.run(signal, run) : run();
  };
}

/** A handler that yields its response piece by piece. */
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
      throw signal.aborted ? signal.reason : fromErrno(error, toText(target.path));
    } finally {
      // Not awaited: it may hang with the disk.
      source.return().catch(() => undefined);
    }
  };
}

/** The result of `work`, or the signal's reason as soon as it fires: the work itself goes on to its own end. */
export function unlessAborted<T>(signal: AbortSignal, work: Promise<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    const leave = (): void => {
      reject(signal.reason);
      work.catch(() => undefined);
    };
    if (signal.aborted) return leave();
    signal.addEventListener('abort', leave, { once: true });
    work.finally(() => signal.removeEventListener('abort', leave)).then(resolve, reject);
  });
}

/** Runs the work of a call; it fails with the signal's reason once that has fired, else with a documented code. */
export async function failingAs<T>(path: Bytes, signal: AbortSignal, work: () => Promise<T>): Promise<T> {
  try {
    signal.throwIfAborted();
    return await work();
  } catch (error) {
    throw signal.aborted ? signal.reason : fromErrno(error, toText(path));
  }
}
