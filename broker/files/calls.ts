// What the routes of files have in common: the machine that is meant, how long a call may take, and what is told of it.
import type { Caller } from '../../shared/api/index.ts';
import type { MachineId } from '../../shared/api/route.ts';
import { AppError } from '../../shared/errors.ts';
import type { AgentStub, CallOptions } from '../../shared/rpc.ts';
import type { Events } from '../events.ts';
import type { History } from '../history.ts';
import type { Presence } from '../link/presence.ts';
import type { State } from '../state/index.ts';

export interface FileRooms {
  presence: Presence;
  state: State;
  history: History;
  events: Events;
}

type FileEvent = 'file.uploaded' | 'file.downloaded' | 'file.deleted';

/** Time for what is small: a listing, a content, an entry. */
const shortMs = 120_000;
/** Time for work on the machine's own disk, however large. */
const longMs = 24 * 3_600_000;

export const short = ({ request_id, signal }: Caller): CallOptions => ({
  request_id,
  signal,
  deadline_ms: shortMs,
});
export const long = ({ request_id, signal }: Caller): CallOptions => ({
  request_id,
  signal,
  deadline_ms: longMs,
});
/** For bytes in any number: as long as they flow. */
export const bulk = ({ request_id, signal }: Caller): CallOptions => ({ request_id, signal, lane: 'bulk' });
/** For what is mostly silent. */
export const lasting = ({ request_id, signal }: Caller): CallOptions => ({
  request_id,
  signal,
  lane: 'lasting',
  idle_ms: 0,
});

/** The way to a machine. Throws machine_offline. */
export function stubOf({ presence }: FileRooms, machine: MachineId): AgentStub {
  return presence.get(machine).stub;
}

/** Commits an event about a file; what a caller was promised to hear is on disk when it resolves. */
export async function tell(
  { state, history, events }: FileRooms,
  type: FileEvent,
  machine: MachineId,
  data: Record<string, unknown>,
): Promise<void> {
  await history.write((transaction) => events.emit(transaction, type, state.machines.get(machine), data));
}

/** The machine of an unprefixed route: named, or the only one there is. */
export function machineOf({ state }: FileRooms, named: MachineId | undefined, caller: Caller): MachineId {
  if (named !== undefined) return named;
  const [only, ...more] = [...state.machines.values()];
  if (!only || more.length > 0) {
    const message = only ? 'several machines are registered: say which' : 'no machine is registered yet';
    const issues = [{ path: 'machine_id', message }];
    throw new AppError('invalid_request', `machine_id: ${message}`, { issues });
  }
  if (caller.reaches(only.id)) return only.id;
  throw new AppError('forbidden', 'this key does not reach that machine', { machine_id: only.id });
}

/** The head that a streamed answer begins with, and what follows. One that begins otherwise is given up. */
export async function opened<T, H>(
  parts: AsyncIterable<T>,
  headOf: (part: T) => H | null | undefined,
): Promise<{ head: H; rest: AsyncIterator<T> }> {
  const rest = parts[Symbol.asyncIterator]();
  const first = await rest.next();
  const head = first.done ? undefined : headOf(first.value);
  if (head) return { head, rest };
  await rest.return?.();
  throw new AppError('machine_error', 'the machine answered without a head');
}
