// REST handlers that change files. A copy to another machine streams through the broker. At the end the broker sends
// the checksum of the original, and the other machine checks it.
import type { ArchiveSummary__Output } from '../../proto/types/farhand/agent/v1/ArchiveSummary.ts';
import type { FileEntry__Output } from '../../proto/types/farhand/agent/v1/FileEntry.ts';
import type { WriteFileRequest } from '../../proto/types/farhand/agent/v1/WriteFileRequest.ts';
import { type CallOptions, present } from '../../shared/agent-rpcs.ts';
import type { Api, Caller, Handlers, Input } from '../../shared/api/route-table.ts';
import { AppError, fieldError } from '../../shared/errors.ts';
import {
  assertEntry,
  assertEtag,
  badAnswer,
  bulk,
  entryOf,
  type FileServices,
  long,
  modeOf,
  oneFile,
  pathBytes,
  pathOf,
  recordFileEvent,
  short,
  withMachine,
} from './shared-by-file-routes.ts';

type Route<O extends keyof Api['files']> = Api['files'][O];
type Open = NonNullable<WriteFileRequest['open']>;
type Commit = NonNullable<WriteFileRequest['commit']>;
type Chunks = AsyncIterable<Uint8Array> | Iterable<Uint8Array>;

type Form = ReturnType<Input<Route<'upload'>>['content']['fields']>;

const chunkBytes = 256 * 1024;

export function writeHandlers(services: FileServices) {
  return {
    write: (input, caller) => writeContent(services, input, caller),
    writeAnywhere: (input, caller) => writeContent(services, withMachine(input), caller),
    remove: (input, caller) => removeFile(services, input, caller),
    removeAnywhere: (input, caller) => removeFile(services, withMachine(input), caller),
    upload: (input, caller) => uploadFile(services, input, caller),
    extract: (input, caller) => extractArchive(services, input, caller),
    copy: (input, caller) => copy(services, input, caller),

    async change({ machine_id, path, path_encoding, mode, owner, group }, caller) {
      const change = present({ mode: modeOf(mode), owner, group });
      const request = { path: pathBytes(path, path_encoding), ...change };
      const { entry } = await services.presence.get(machine_id).stub.changeFile(request, oneFile(caller));
      return entryOf(entry);
    },

    async mkdir({ machine_id, path, path_encoding, mode, parents }, caller) {
      const directory = { parents, ...present({ mode: modeOf(mode) }) };
      const request = { path: pathBytes(path, path_encoding), ...directory };
      const { entry } = await services.presence.get(machine_id).stub.makeDirectory(request, oneFile(caller));
      return entryOf(entry);
    },

    async touch({ machine_id, path, path_encoding, modified_at, create }, caller) {
      const time = present({ modified_at_ms: modified_at?.getTime() });
      const request = { path: pathBytes(path, path_encoding), create, ...time };
      const { entry } = await services.presence.get(machine_id).stub.touchFile(request, oneFile(caller));
      return entryOf(entry);
    },

    async move(input, caller) {
      const { entry } = await services.presence
        .get(input.machine_id)
        .stub.moveFile(fromTo(input), long(caller));
      return entryOf(entry);
    },

    put: (input, caller) => putFile(services, input, input.content.chunks, caller, bulk(caller)),
  } satisfies Partial<Handlers['files']>;
}

function uploadFile(services: FileServices, input: Input<Route<'upload'>>, caller: Caller) {
  const { path, content, create_parents, overwrite } = input;
  if (path === undefined) throw fieldError('form', 'path', 'is missing: name the file to write');
  const open = { path: pathBytes(path, input.path_encoding), create_parents, overwrite };
  // Called after the whole file was read, because form fields may come after the file.
  const commit = (): Commit => {
    const fields = content.fields();
    assertBeforeFile(input, fields);
    return commitOf(fields);
  };
  return store(services, input, upload(open, content.chunks, commit), caller, bulk(caller));
}

async function extractArchive(services: FileServices, input: Input<Route<'extract'>>, caller: Caller) {
  const { machine_id, overwrite, create_parents, content } = input;
  const path = pathBytes(input.path, input.path_encoding);
  const requests = upload({ path, whole: false, overwrite, create_parents }, content.chunks, () => ({}));
  const { entry, summary } = await services.presence
    .get(machine_id)
    .stub.writeArchive(requests, bulk(caller));
  const { files, bytes, sha256 } = assertSummary(summary);
  const at = pathOf(assertEntry(entry).path);
  await recordFileEvent(services, caller, 'file.uploaded', machine_id, { ...at, size: bytes });
  return { ...at, files, bytes, sha256 };
}

/**
 * Throws if a form field after the file changes path, path_encoding or create_parents. `early` has the values that came
 * before the file. The machine already has these values, so a change is too late.
 */
function assertBeforeFile(early: Partial<Form>, fields: Form): void {
  for (const name of ['path', 'path_encoding', 'create_parents'] as const) {
    if (fields[name] === early[name] || (name === 'path' && fields[name] === undefined)) continue;
    throw fieldError('form', name, 'must be sent before the file');
  }
}

/** Returns the request to move or copy on one machine. */
function fromTo(input: Input<Route<'move'>>) {
  return {
    source: pathBytes(input.source, input.source_encoding),
    destination: pathBytes(input.destination, input.destination_encoding),
    overwrite: input.overwrite,
  };
}

async function writeContent(services: FileServices, input: Input<Route<'write'>>, caller: Caller) {
  const content = Buffer.from(input.content, input.encoding === 'base64' ? 'base64' : 'utf8');
  return putFile(services, { ...input, overwrite: true }, pieces(content), caller, short(caller));
}

/** Writes a file whose parameters are all known before its bytes. Fields of a form may come later: see uploadFile(). */
async function putFile(
  services: FileServices,
  input: Omit<Input<Route<'put'>>, 'content'>,
  chunks: Chunks,
  caller: Caller,
  options: CallOptions,
) {
  const { mode, create_parents, if_match, if_none_match } = input;
  const path = pathBytes(input.path, input.path_encoding);
  const overwrite = input.overwrite && if_none_match === undefined;
  const open = { path, create_parents, overwrite, ...present({ if_match }) };
  const requests = upload(open, chunks, () => commitOf({ mode, overwrite }));
  return store(services, input, requests, caller, options).catch((error: unknown) => {
    // If the request has If-None-Match and the file exists, the answer is 412 (RFC 9110 section 13.1.2).
    const isOld = if_none_match !== undefined && error instanceof AppError && error.code === 'already_exists';
    throw isOld ? new AppError('precondition_failed', error.message, error.details) : error;
  });
}

async function store(
  services: FileServices,
  { machine_id }: Pick<Input<Route<'put'>>, 'machine_id'>,
  requests: ReturnType<typeof upload<Open, Commit>>,
  caller: Caller,
  options: CallOptions,
) {
  const written = await services.presence.get(machine_id).stub.writeFile(requests, options);
  caller.headers.set('ETag', assertEtag(written.etag));
  const at = pathOf(written.path);
  const { size, created, sha256 } = written;
  await recordFileEvent(services, caller, 'file.uploaded', machine_id, { ...at, size });
  return { ...at, size, created, sha256 };
}

function commitOf({ mode, overwrite }: { mode?: string | undefined; overwrite: boolean }): Commit {
  return { overwrite, ...present({ mode: modeOf(mode) }) };
}

function assertSummary(summary: ArchiveSummary__Output | null): ArchiveSummary__Output {
  if (summary) return summary;
  throw badAnswer('has no summary of the archive');
}

/** Yields the messages of an upload. `commit` is called once all chunks have been sent. */
async function* upload<O, C>(
  open: O,
  chunks: Chunks,
  commit: () => C,
): AsyncGenerator<{ open: O } | { chunk: Uint8Array } | { commit: C }> {
  yield { open };
  for await (const chunk of chunks) yield { chunk };
  yield { commit: commit() };
}

function* pieces(content: Buffer): Generator<Uint8Array> {
  for (let at = 0; at < content.length; at += chunkBytes) yield content.subarray(at, at + chunkBytes);
}

async function removeFile(services: FileServices, input: Input<Route<'remove'>>, caller: Caller) {
  const { machine_id, recursive } = input;
  const request = { path: pathBytes(input.path, input.path_encoding), recursive };
  const { path, size } = await services.presence.get(machine_id).stub.removeFile(request, long(caller));
  const at = pathOf(path);
  await recordFileEvent(services, caller, 'file.deleted', machine_id, { ...at, size, recursive });
  return { deleted: true as const, ...at };
}

type CopyInput = Input<Api['files']['copy']>;

/** A message of an agent that sends a file or archive: the next bytes, or at the end the checksum. */
interface Part {
  head?: { entry: FileEntry__Output | null } | null;
  chunk?: Buffer | null;
  tail?: { sha256: string } | null;
}

async function copy(services: FileServices, input: CopyInput, caller: Caller) {
  const { machine_id, destination_machine_id: target = machine_id } = input;
  if (target !== machine_id)
    return copyAcross(services, { ...input, destination_machine_id: target }, caller);
  const { entry, files, bytes } = await services.presence
    .get(machine_id)
    .stub.copyFile(fromTo(input), long(caller));
  return { ...entryOf(entry), files_copied: files, bytes_copied: bytes };
}

async function copyAcross(
  services: FileServices,
  input: CopyInput & { destination_machine_id: CopyInput['machine_id'] },
  caller: Caller,
) {
  // The broker reads the source for the caller, so the key needs the scope for reading too.
  if (!caller.may('files:read')) {
    throw new AppError('forbidden', 'a copy to another machine also needs a key with the scope files:read', {
      required_scope: 'files:read',
    });
  }
  const from = services.presence.get(input.machine_id).stub;
  const target = input.destination_machine_id;
  const to = services.others?.writerOn(target, caller) ?? services.presence.get(target).stub;
  const { source, destination: path, overwrite } = fromTo(input);
  const { type } = assertEntry((await from.statFile({ path: source }, oneFile(caller))).entry);
  const options = bulk(caller);
  let copied: { entry: FileEntry__Output | null; files: number; bytes: number };
  // If writing fails, the end of the request closes the stream that reads the source.
  if (type === 'FILE_TYPE_DIRECTORY') {
    const sent = digested(from.readArchive({ path: source, gzip: false }, options));
    const requests = upload({ path, whole: true, overwrite }, sent.chunks, () => ({ sha256: sent.sha256() }));
    const { entry, summary } = await to.writeArchive(requests, options);
    copied = { entry, ...assertSummary(summary) };
  } else {
    const sent = digested(from.readFile({ path: source, digest: true }, options));
    // The mode is that of the file that was read. Setuid and setgid bits are not copied to another machine.
    const commit = () => ({ overwrite, mode: sent.mode() & 0o777, sha256: sent.sha256() });
    const { entry, size } = await to.writeFile(upload({ path, overwrite }, sent.chunks, commit), options);
    copied = { entry, files: 1, bytes: size };
  }
  const at = assertEntry(copied.entry);
  const what = { ...pathOf(at.path), size: copied.bytes };
  await recordFileEvent(services, caller, 'file.uploaded', input.destination_machine_id, what);
  return { ...entryOf(at), files_copied: copied.files, bytes_copied: copied.bytes };
}

/** Returns the chunks of a file, and functions that return its mode and the sender's checksum after the last chunk. */
function digested(parts: AsyncIterable<Part>) {
  let digest = '';
  let entry: FileEntry__Output | null | undefined;
  return {
    mode: () => assertEntry(entry).mode,
    chunks: (async function* (): AsyncGenerator<Uint8Array> {
      for await (const { head, chunk, tail } of parts) {
        entry ??= head?.entry;
        if (chunk) yield chunk;
        digest = tail?.sha256 ?? digest;
      }
    })(),
    sha256() {
      if (digest) return digest;
      throw new AppError(
        'machine_error',
        'the machine sent a file without its checksum: update the agent of the machine',
      );
    },
  };
}
