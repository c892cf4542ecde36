// Functions that the file routes share: time limits of calls, events, and the conversion of entries and paths
// between the agent protocol and REST.
import { isUtf8 } from 'node:buffer';
import type { FileEntry__Output } from '../../proto/types/farhand/agent/v1/FileEntry.ts';
import type { CallOptions } from '../../shared/agent-rpcs.ts';
import type { Api, Caller, Reply } from '../../shared/api/route-table.ts';
import type { MachineId } from '../../shared/api/shared-schemas.ts';
import { iso, latestInstant } from '../../shared/clock.ts';
import { AppError, fieldError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Quota } from '../../shared/quota.ts';
import type { OtherBrokers } from '../cluster/peers/owner-interfaces.ts';
import type { Events } from '../event-log.ts';
import type { History } from '../history/history-database.ts';
import type { Presence } from '../presence/index.ts';
import type { State } from '../state/index.ts';

export interface FileServices {
  presence: Presence;
  state: State;
  history: History;
  events: Events;
  /** The other brokers on the same database; undefined with a single broker. */
  others: OtherBrokers | undefined;
  /** Memory quota for file contents that arrive from machines and will be sent as JSON. */
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
/** For calls about one file or directory. Timeout: 2 minutes. */
export const oneFile = lasting({ deadline_ms: 120_000, lane: 'single' });
/** For calls that stream one small file. Timeout: 2 minutes. */
export const short = lasting({ deadline_ms: 120_000, lane: 'short' });
/** For calls that may read or write much of the machine's disk, such as a copy. Timeout: 24 hours. */
export const long = lasting({ deadline_ms: 24 * 3_600_000, lane: 'long' });
/** For calls that transfer any number of bytes. No timeout while bytes arrive. */
export const bulk = lasting({ lane: 'bulk' });
/** For calls that stream the entries of a directory, as fast as the client reads them. */
export const listing = lasting({ lane: 'short' });
/** For calls that may be silent for long, such as a watch. No idle timeout. */
export const watching = lasting({ lane: 'watch', idle_ms: 0 });

/**
 * Writes an event about a file and the caller's audit record. Resolves once both are on disk. Throws internal_error if
 * they cannot be stored. `unavailable` would be wrong, because the machine has made the change already.
 */
export async function recordFileEvent(
  { state, history, events, log }: FileServices,
  caller: Caller,
  type: FileEvent,
  machine: MachineId,
  data: Record<string, unknown>,
): Promise<void> {
  try {
    await history.write((transaction) => {
      events.emit(transaction, type, state.machines.get(machine), data);
      caller.commit(transaction);
    });
  } catch (error) {
    log.error(
      { err: error, machine_id: machine, type, ...data },
      'an event about a file could not be stored',
    );
    throw new AppError(
      'internal_error',
      `the machine has carried out the request, but the broker could not store the event ${type}; see the broker’s log`,
    );
  }
}

/**
 * Throws invalid_request if the request names no machine. If the broker has only one machine, the request checks have
 * already added its id.
 */
export function withMachine<T extends { machine_id?: MachineId | undefined }>(
  input: T,
): T & { machine_id: MachineId } {
  const { machine_id } = input;
  if (machine_id !== undefined) return { ...input, machine_id };
  const message = 'is missing: it may be omitted only if exactly one machine is registered';
  throw fieldError('query', 'machine_id', message, 'invalid_request');
}

/**
 * Splits a streamed answer into its first message (the head) and all others (the rest). The rest is closed at the end
 * of the request.
 */
export async function splitHead<T, H>(
  parts: AsyncIterable<T>,
  headOf: (part: T) => H | null | undefined,
): Promise<{ head: H; rest: AsyncIterable<T> }> {
  const rest = parts[Symbol.asyncIterator]();
  const first = await rest.next();
  const head = first.done ? undefined : headOf(first.value);
  if (!head) throw badAnswer('lacks its first part');
  return { head, rest: { [Symbol.asyncIterator]: () => rest } };
}

/** Returns the error for an answer of a machine that does not follow the agent protocol. */
export function badAnswer(fault: string): AppError {
  return new AppError('machine_error', `the answer of the machine ${fault}: update the agent of the machine`);
}

// ---- Entries and paths

export type Entry = Reply<Api['files']['change']>;

/**
 * Maximum length in bytes of a path that is sent to an agent. No system accepts longer paths; Linux accepts 4,095
 * bytes.
 */
const longestPath = 16 * 1024;
const specials = new Set(['fifo', 'socket', 'block', 'char']);

/**
 * Converts an entry of a machine's answer for REST. Throws machine_error if the entry is missing or invalid.
 */
export function entryOf(answered: FileEntry__Output | null | undefined): Entry {
  const entry = assertEntry(answered);
  const directory = entry.type === 'FILE_TYPE_DIRECTORY';
  const foreign = !isUtf8(entry.name) || !isUtf8(entry.path) || !isUtf8(entry.link_target ?? Buffer.alloc(0));
  const text = (bytes: Buffer): string => bytes.toString(foreign ? 'base64' : 'utf8');
  if (Number.isNaN(entry.modified_at_ms)) throw badAnswer('has an invalid time');
  return {
    name: text(entry.name),
    path: text(entry.path),
    type: directory ? 'directory' : 'file',
    ...(!directory && { size: entry.size }),
    mode: (entry.mode & 0o777).toString(8).padStart(4, '0'),
    ...(entry.mode & 0o4000 && { setuid: true }),
    ...(entry.mode & 0o2000 && { setgid: true }),
    ...(entry.mode & 0o1000 && { sticky: true }),
    owner: entry.owner,
    group: entry.group,
    // A file system may store times that ISO 8601 cannot express. Such a time becomes the
    // nearest time that ISO 8601 can express.
    modified_at: iso(Math.min(latestInstant, Math.max(-latestInstant, entry.modified_at_ms))),
    ...(entry.link_target && { link_target: text(entry.link_target) }),
    ...(isSpecial(entry.special) && { special: entry.special }),
    ...(foreign && { name_encoding: 'base64' as const }),
  };
}

/** Returns the entry in a machine's answer. Throws machine_error if it is missing. */
export function assertEntry(entry: FileEntry__Output | null | undefined): FileEntry__Output {
  if (entry) return entry;
  throw badAnswer('lacks the details of the file');
}

/** Returns a machine's ETag for a header. Throws machine_error if it violates RFC 9110 section 8.8.3. */
export function assertEtag(etag: string): string {
  if (/^"[\x21\x23-\x7e]{0,200}"$/.test(etag)) return etag;
  throw badAnswer('has an invalid ETag');
}

function isSpecial(text: string): text is NonNullable<Entry['special']> {
  return specials.has(text);
}

/** Converts a path to text, or to base64 if it is not UTF-8. */
export function pathOf(path: Buffer): { path: string; path_encoding?: 'base64' } {
  return isUtf8(path)
    ? { path: path.toString('utf8') }
    : { path: path.toString('base64'), path_encoding: 'base64' };
}

/**
 * Converts a path of a request to the bytes that agents get. Throws invalid_path for bad base64 and for a
 * path that is too long.
 */
export function pathBytes(path: string, encoding: 'base64' | undefined): Buffer {
  const bytes = Buffer.from(path, encoding ?? 'utf8');
  // Node ignores characters that are not base64. Without this check a mistyped path would become another
  // path.
  if (encoding && bytes.toString('base64') !== path) {
    throw new AppError('invalid_path', 'the path is not valid base64; in a query, write + as %2B');
  }
  if (bytes.length <= longestPath) return bytes;
  throw new AppError('invalid_path', `the path is too long: send at most ${longestPath} bytes`);
}

export function modeOf(digits: string | undefined): number | undefined {
  return digits === undefined ? undefined : Number.parseInt(digits, 8);
}
