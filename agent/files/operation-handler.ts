// Turns file operations into handlers of the agent's link. Each operation gets the disk, the path and a
// signal. A cancelled read is not awaited, because a disk may hang. It ends by itself and closes its handles.

import type { AgentCall, AgentMethods } from '../../shared/agent-rpcs.ts';
import { fromErrno } from '../../shared/errors.ts';
import type { Quota } from '../../shared/quota.ts';
import type { Journal } from './atomic/temporary-files-journal.ts';
import { type Bytes, type Target, targetOf, toText } from './confine/request-path.ts';
import type { Confinement } from './confine/resolve.ts';
import type { Semaphore } from './semaphore.ts';
import type { AskUsers } from './users-groups.ts';

/** The objects that all operations share. */
export interface Disk {
  /** Resolves paths for reading, which allows more paths than `writing`. */
  reading: Confinement;
  writing: Confinement;
  users: AskUsers;
  /** Directory at which relative paths start. */
  home: Bytes;
  journal: Journal;
  /** Limits the calls that may keep the disk busy for hours. */
  heavy: Semaphore;
  /** Quota of all watches together. */
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

/**
 * Makes a unary handler. `named`: the path of a request, for errors. `isHeavy`: whether a request waits for a
 * slot.
 */
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

/** Makes a handler that streams its response. */
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
      // Not awaited, because it may hang with the disk.
      source.return().catch(() => undefined);
    }
  };
}

/**
 * Resolves to the result of `work`. Rejects with the signal's reason when it fires, while the work goes on.
 */
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

/**
 * Runs the work of a call. Fails with the signal's reason if it has fired, else with a documented error code.
 */
export async function failingAs<T>(path: Bytes, signal: AbortSignal, work: () => Promise<T>): Promise<T> {
  try {
    signal.throwIfAborted();
    return await work();
  } catch (error) {
    throw signal.aborted ? signal.reason : fromErrno(error, toText(path));
  }
}
