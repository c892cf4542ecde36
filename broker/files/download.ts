// Handles downloads: HTTP conditions and ranges (RFC 9110, sections 13 and 14) over a stream from the
// machine's disk.
import { posix } from 'node:path';
import type { ReadFileResponse__Output } from '../../proto/types/farhand/agent/v1/ReadFileResponse.ts';
import { present } from '../../shared/agent-rpcs.ts';
import type { Api, BytesReply, Caller, Input } from '../../shared/api/route-table.ts';
import { latestInstant } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import {
  assertEntry,
  assertEtag,
  bulk,
  type FileServices,
  oneFile,
  pathBytes,
  pathOf,
  recordFileEvent,
  splitHead,
} from './shared-by-file-routes.ts';

type DownloadInput = Input<Api['files']['download']>;

/** The part of a file to send after all conditions were checked. */
type Selection = 'whole' | { offset: number; length: number };

/** A file's ETag, size and modification time. The conditions and the range of a request are checked against them. */
type Version = Awaited<ReturnType<typeof versionOf>>;

export async function download(
  services: FileServices,
  input: DownloadInput,
  caller: Caller,
): Promise<BytesReply> {
  if (input.archive) return downloadArchive(services, input, caller);
  const { range, if_match, if_none_match, if_modified_since, if_unmodified_since } = input;
  const conditions = [range, if_match, if_none_match, if_modified_since, if_unmodified_since];
  if (conditions.every((one) => one === undefined)) return open(services, input, caller, 'whole');
  const version = await versionOf(services, input, caller);
  const selection = checkConditions(input, version, caller);
  // Only these conditions bind the download to the version that they were checked against. Without them, a range of a
  // log that grows between the two calls is sent from the new version.
  const binding = [if_match, if_unmodified_since, input.if_range].some((one) => one !== undefined);
  if (selection !== 'unchanged')
    return open(services, input, caller, selection, binding ? version : undefined);
  setValidators(caller, version.etag, version.modified_at_ms);
  return { status: 304, filename: '' };
}

async function versionOf(services: FileServices, input: DownloadInput, caller: Caller) {
  const path = pathBytes(input.path, input.path_encoding);
  const { entry, etag } = await services.presence
    .get(input.machine_id)
    .stub.statFile({ path }, oneFile(caller));
  const { type, size, modified_at_ms } = assertEntry(entry);
  if (type === 'FILE_TYPE_DIRECTORY') {
    const message = `${input.path} is a directory: add archive=tar to download it`;
    throw new AppError('is_a_directory', message, { path: input.path });
  }
  return { etag: assertEtag(etag), size, modified_at_ms };
}

/**
 * Checks conditions in the order of RFC 9110 section 13.2.2. Throws precondition_failed or
 * range_not_satisfiable.
 */
function checkConditions(input: DownloadInput, version: Version, caller: Caller): Selection | 'unchanged' {
  const { if_match, if_unmodified_since, if_none_match, if_modified_since } = input;
  const unmet =
    if_match !== undefined
      ? !etagMatches(if_match, version.etag, false)
      : if_unmodified_since !== undefined && isNewer(version, if_unmodified_since);
  if (unmet) {
    const message =
      'the ETag or date of the file does not meet the condition of the request; read the file again';
    throw new AppError('precondition_failed', message, { etag: version.etag });
  }
  const unchanged =
    if_none_match !== undefined
      ? etagMatches(if_none_match, version.etag, true)
      : if_modified_since !== undefined && !isNewer(version, if_modified_since, true);
  return unchanged ? 'unchanged' : partOf(input, version, caller);
}

/** True if a list of ETags contains this ETag, or is "*". With `weak`, weak ETags count too. */
function etagMatches(header: string, etag: string, weak: boolean): boolean {
  const all = header.split(',').map((one) => one.trim());
  return all.some((one) => one === '*' || (weak ? one.replace(/^W\//, '') : one) === etag);
}

/**
 * True if a file changed after an HTTP date. Compares whole seconds, because an HTTP date has no fractions of a second.
 * Returns the value of the parameter `invalid` if the text is not a date.
 */
function isNewer({ modified_at_ms }: Version, date: string, invalid = false): boolean {
  const given = Date.parse(date);
  return Number.isNaN(given) ? invalid : Math.floor(modified_at_ms / 1000) > given / 1000;
}

/**
 * Selects the range to send. A Range header with several ranges or an invalid range is ignored, as RFC 9110 section
 * 14.2 allows.
 */
function partOf({ range, if_range }: DownloadInput, version: Version, caller: Caller): Selection {
  const [, from = '', to = ''] = /^bytes=\s*(\d{0,15})-(\d{0,15})\s*$/i.exec(range ?? '') ?? [];
  const { size } = version;
  // A file of /proc reports size 0 but has content, so it is sent whole.
  if ((from === '' && to === '') || size === 0 || !isSame(if_range, version)) return 'whole';
  const first = from === '' ? Math.max(0, size - Number(to)) : Number(from);
  const last = from === '' || to === '' ? size - 1 : Math.min(Number(to), size - 1);
  if (from !== '' && to !== '' && Number(to) < Number(from)) return 'whole';
  if (first >= size) {
    caller.headers.set('Content-Range', `bytes */${size}`);
    throw new AppError(
      'range_not_satisfiable',
      `the range begins after the end of the file, which has ${size} bytes`,
      { size },
    );
  }
  return { offset: first, length: last - first + 1 };
}

/** True if a range may be sent: If-Range is absent, or has exactly the ETag or exactly the date of the file. */
function isSame(condition: string | undefined, { etag, modified_at_ms }: Version): boolean {
  if (condition === undefined || condition === etag) return true;
  return !condition.includes('"') && Date.parse(condition) === Math.floor(modified_at_ms / 1000) * 1000;
}

/** Opens the selected part of a file. With `version`, throws conflict if the file is another version by now. */
async function open(
  services: FileServices,
  input: DownloadInput,
  caller: Caller,
  selection: Selection,
  version?: Version,
): Promise<BytesReply> {
  const path = pathBytes(input.path, input.path_encoding);
  const part = selection === 'whole' ? undefined : selection;
  // The Range header takes precedence over offset and length in the query.
  const slice = part ?? { offset: input.offset ?? 0, ...present({ length: input.length }) };
  const parts = services.presence.get(input.machine_id).stub.readFile({ path, ...slice }, bulk(caller));
  const { head, rest } = await splitHead(parts, validHead);
  const { entry, etag, offset, length } = head;
  if (part && length !== part.length) {
    // The file is shorter than its reported size, as some files in /proc are. A range of it cannot be sent, so the
    // whole file is sent.
    return open(services, input, caller, 'whole', version);
  }
  if (version && etag !== version.etag)
    throw new AppError('conflict', 'the file changed while it was being read: try again');
  setValidators(caller, etag, entry.modified_at_ms);
  if (part) caller.headers.set('Content-Range', `bytes ${offset}-${offset + part.length - 1}/${entry.size}`);
  // A file that is downloaded in several ranges is recorded once, when the range with the last byte has been sent.
  const complete = length === undefined || offset + length >= entry.size;
  return {
    status: part ? 206 : 200,
    filename: nameOf(entry.path),
    ...(length !== undefined && { length }),
    bytes: chunksOf(rest, (size) => {
      if (complete) recordDownload(services, caller, input.machine_id, entry.path, size);
    }),
  };
}

/** Returns the head of an agent's answer, which describes the file. Throws machine_error if a field is invalid. */
function validHead({ head }: ReadFileResponse__Output) {
  return head && { ...head, entry: assertEntry(head.entry), etag: assertEtag(head.etag) };
}

async function downloadArchive(
  services: FileServices,
  input: DownloadInput,
  caller: Caller,
): Promise<BytesReply> {
  const { machine_id, path, path_encoding, archive = 'tar' } = input;
  const request = { path: pathBytes(path, path_encoding), gzip: archive === 'tar.gz' };
  const parts = services.presence.get(machine_id).stub.readArchive(request, bulk(caller));
  const { head, rest } = await splitHead(
    parts,
    ({ head: first }) => first && { entry: assertEntry(first.entry) },
  );
  const { entry } = head;
  return {
    filename: `${nameOf(entry.path) || 'root'}.${archive}`,
    bytes: chunksOf(rest, (size) => recordDownload(services, caller, machine_id, entry.path, size)),
  };
}

/** Returns the name under which browsers save a file. Bytes that are not UTF-8 become U+FFFD. */
function nameOf(path: Buffer): string {
  return posix.basename(path.toString());
}

function setValidators(caller: Caller, etag: string, modified_at_ms: number): void {
  caller.headers.set('ETag', etag);
  caller.headers.set('Accept-Ranges', 'bytes');
  if (Math.abs(modified_at_ms) > latestInstant) return;
  caller.headers.set('Last-Modified', new Date(modified_at_ms).toUTCString());
}

/** Stores the event of a download. If that fails, only logs the error, because the file has been sent already. */
function recordDownload(
  services: FileServices,
  caller: Caller,
  machine: DownloadInput['machine_id'],
  path: Buffer,
  size: number,
): void {
  const data = { ...pathOf(path), size };
  // recordFileEvent() has logged the failure, and the client has its file.
  recordFileEvent(services, caller, 'file.downloaded', machine, data).catch(() => undefined);
}

/** Yields the chunks of a stream. At the end calls `ended` with their total size. */
async function* chunksOf(
  parts: AsyncIterable<{ chunk?: Buffer | null }>,
  ended: (size: number) => void,
): AsyncGenerator<Uint8Array> {
  let size = 0;
  for await (const { chunk } of parts) {
    size += chunk?.length ?? 0;
    if (chunk) yield chunk;
  }
  ended(size);
}
