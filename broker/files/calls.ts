// What the file routes share: the machine's stub, time limits of calls, and file events.
import type { Caller } from '../../shared/api/index.ts';
import type { MachineId } from '../../shared/api/route.ts';
import { AppError, fieldError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Quota } from '../../shared/quota.ts';
import type { AgentStub, CallOptions } from '../../shared/rpc.ts';
import type { Events } from '../events.ts';
import type { History } from '../history.ts';
import type { Presence } from '../presence/index.ts';
import type { State } from '../state/index.ts';

export interface FileServices {
  presence: Presence;
  state: State;
  history: History;
  events: Events;
  /** Of contents that are on their way into JSON. */
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
/** For what is small: a content, an entry. */
export const short = lasting({ deadline_ms: 120_000 });
/** For work on the machine's own disk, however large. */
export const long = lasting({ deadline_ms: 24 * 3_600_000 });
/** For bytes in any number: as long as they flow. */
export const bulk = lasting({ lane: 'bulk' });
/** For entries that are sent as they come, at the reader's pace. */
export const listing = lasting({});
/** For what is mostly silent. */
export const watching = lasting({ lane: 'watch', idle_ms: 0 });

/** The way to a machine. Throws machine_offline. */
export function stubOf({ presence }: FileServices, machine: MachineId): AgentStub {
  return presence.get(machine).stub;
}

/** Commits an event about a file, and with it that the caller did it: both are on disk when it resolves. */
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

/** The input of an unprefixed route with its machine: admission has named the only one there is. */
export function withMachine<T extends { machine_id?: MachineId | undefined }>(
  input: T,
): T & { machine_id: MachineId } {
  const { machine_id } = input;
  if (machine_id !== undefined) return { ...input, machine_id };
  const message = 'name one: it may be left out only while this key reaches the only machine there is';
  throw fieldError('query', 'machine_id', message, 'invalid_request');
}

/** The head that a streamed answer begins with, and what follows, which ends with the request. */
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
