// Shared by the file routes: the machine's stub, time limits of calls, and file events.

import type { AgentStub, CallOptions } from '../../shared/agent-rpcs.ts';
import type { MachineId } from '../../shared/api/route.ts';
import type { Caller } from '../../shared/api/route-table.ts';
import { AppError, fieldError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Quota } from '../../shared/quota.ts';
import type { Events } from '../events.ts';
import type { History } from '../history.ts';
import type { Presence } from '../presence/index.ts';
import type { State } from '../state/state.ts';

export interface FileServices {
  presence: Presence;
  state: State;
  history: History;
  events: Events;
  /** Memory quota of file contents that are being converted to JSON. */
  contents: Quota;
  log: Logger;
}

type FileEvent = 'file.uploaded' | 'file.downloaded' | 'file.deleted';

const lasting =
  (limits: Partial<CallOptions>) =>
  (caller: Caller): CallOptions => ({
    ...{ request_id: caller.request_id, signal: caller.signal, caller },
    ...limits,
  });
/** Options of calls for small work, such as one content or one entry: at most 2 minutes. */
export const short = lasting({ deadline_ms: 120_000 });
/** Options of calls for work on the machine's own disk, however large: at most 24 hours. */
export const long = lasting({ deadline_ms: 24 * 3_600_000 });
/** Options of calls that transfer any number of bytes: without a limit as long as bytes flow. */
export const bulk = lasting({ lane: 'bulk' });
/** Options of calls that stream entries at the reader's pace. */
export const listing = lasting({});
/** Options of calls that may be silent for long, so without an idle timeout. */
export const watching = lasting({ lane: 'watch', idle_ms: 0 });

/** The gRPC stub that calls a machine's agent. Throws machine_offline. */
export function stubOf({ presence }: FileServices, machine: MachineId): AgentStub {
  return presence.get(machine).stub;
}

/** Writes an event about a file and the caller's audit record; both are on disk when the promise resolves. */
export async function recordFileEvent(
  { state, history, events }: FileServices,
  caller: Caller,
  type: FileEvent,
  machine: MachineId,
  data: Record<string, unknown>,
): Promise<void> {
  await history.write((transaction) => {
    events.emit(transaction, type, state.machines.get(machine), data);
    caller.commit(transaction);
  });
}

/**
 * The input of a route without a machine in its path; admission has added the id if only one machine exists.
 */
export function withMachine<T extends { machine_id?: MachineId | undefined }>(
  input: T,
): T & { machine_id: MachineId } {
  const { machine_id } = input;
  if (machine_id !== undefined) return { ...input, machine_id };
  const message = 'name one: it may be left out only while this key reaches the only machine there is';
  throw fieldError('query', 'machine_id', message, 'invalid_request');
}

/** Splits a streamed answer into its head and the rest; the rest is closed when the request ends. */
export async function splitHead<T, H>(
  parts: AsyncIterable<T>,
  headOf: (part: T) => H | null | undefined,
): Promise<{ head: H; rest: AsyncIterable<T> }> {
  const rest = parts[Symbol.asyncIterator]();
  const first = await rest.next();
  const head = first.done ? undefined : headOf(first.value);
  if (!head) throw new AppError('machine_error', 'the machine answered without a head');
  return { head, rest: { [Symbol.asyncIterator]: () => rest } };
}
