// What is done to files: written, uploaded, unpacked, made, moved, changed and removed.
import type { ArchiveSummary__Output } from '../../proto/types/farhand/agent/v1/ArchiveSummary.ts';
import type { WriteFileRequest } from '../../proto/types/farhand/agent/v1/WriteFileRequest.ts';
import type { Api, Caller, Handlers, Input } from '../../shared/api/index.ts';
import { AppError } from '../../shared/errors.ts';
import { bulk, demandMachine, type FileRooms, long, short, stubOf, tell } from './calls.ts';
import { bytesOf, demandEntry, entryOf, modeOf, pathOf, soundEtag } from './entries.ts';

type Route<O extends keyof Api['files']> = Api['files'][O];
type Open = NonNullable<WriteFileRequest['open']>;
type Commit = NonNullable<WriteFileRequest['commit']>;

type Form = ReturnType<Input<Route<'upload'>>['content']['fields']>;

const chunkBytes = 256 * 1024;

type Writing =
  | 'write'
  | 'writeAnywhere'
  | 'remove'
  | 'removeAnywhere'
  | 'change'
  | 'mkdir'
  | 'move'
  | 'upload'
  | 'put'
  | 'extract';

export function writeHandlers(rooms: FileRooms): Pick<Handlers['files'], Writing> {
  const write = (input: Input<Route<'write'>>, caller: Caller) => writeContent(rooms, input, caller);
  const remove = (input: Input<Route<'remove'>>, caller: Caller) => removeFile(rooms, input, caller);
  return {
    write,
    writeAnywhere: (input, caller) =>
      write({ ...input, machine_id: demandMachine(input.machine_id) }, caller),
    remove,
    removeAnywhere: (input, caller) =>
      remove({ ...input, machine_id: demandMachine(input.machine_id) }, caller),

    async change({ machine_id, path, path_encoding, mode, owner, group }, caller) {
      const request = {
        path: bytesOf(path, path_encoding),
        ...(mode !== undefined && { mode: modeOf(mode) }),
        ...(owner !== undefined && { owner }),
        ...(group !== undefined && { group }),
      };
      const { entry } = await stubOf(rooms, machine_id).changeFile(request, short(caller));
      return entryOf(demandEntry(entry));
    },

    async mkdir({ machine_id, path, path_encoding, mode, parents }, caller) {
      const request = {
        path: bytesOf(path, path_encoding),
        parents,
        ...(mode !== undefined && { mode: modeOf(mode) }),
      };
      const { entry } = await stubOf(rooms, machine_id).makeDirectory(request, short(caller));
      return entryOf(demandEntry(entry));
    },

    async move(input, caller) {
      const { entry } = await stubOf(rooms, input.machine_id).moveFile(fromTo(input), long(caller));
      return entryOf(demandEntry(entry));
    },

    async upload(input, caller) {
      const { machine_id, path, content, create_parents } = input;
      if (path === undefined) {
        const issues = [{ path: 'path', message: 'is missing: where shall the file go?' }];
        throw new AppError('validation_failed', 'form: path: is missing', { issues });
      }
      const { overwrite } = input;
      const open = { path: bytesOf(path, input.path_encoding), create_parents, overwrite };
      // Those after the file count too.
      const commit = (): Commit => {
        const fields = content.fields();
        demandEarly(input, fields);
        return commitOf(fields);
      };
      return store(rooms, machine_id, open, content.chunks, commit, caller);
    },

    put(input, caller) {
      const open = {
        path: bytesOf(input.path, input.path_encoding),
        create_parents: input.create_parents,
        overwrite: input.overwrite,
        ...(input.if_match !== undefined && { if_match: input.if_match }),
      };
      return store(rooms, input.machine_id, open, input.content.chunks, () => commitOf(input), caller);
    },

    async extract({ machine_id, path, path_encoding, overwrite, create_parents, content }, caller) {
      const open = { path: bytesOf(path, path_encoding), whole: false, overwrite, create_parents };
      const requests = upload(open, content.chunks, () => ({}));
      const { entry, summary } = await stubOf(rooms, machine_id).writeArchive(requests, bulk(caller));
      const { files, bytes, sha256 } = demandSummary(summary);
      const at = pathOf(demandEntry(entry).path);
      await tell(rooms, caller, 'file.uploaded', machine_id, { ...at, size: bytes });
      return { ...at, files, bytes, sha256 };
    },
  };
}

/** What the machine was told before the file began cannot be changed after it. */
function demandEarly(early: Partial<Form>, fields: Form): void {
  for (const name of ['path', 'path_encoding', 'create_parents'] as const) {
    if (fields[name] === early[name] || (name === 'path' && fields[name] === undefined)) continue;
    const issues = [{ path: name, message: 'must come before the file' }];
    throw new AppError('validation_failed', `form: ${name}: must come before the file`, { issues });
  }
}

/** What a move or copy asks of one machine. */
export function fromTo(
  input: Pick<
    Input<Route<'move'>>,
    'source' | 'source_encoding' | 'destination' | 'destination_encoding' | 'overwrite'
  >,
) {
  return {
    source: bytesOf(input.source, input.source_encoding),
    destination: bytesOf(input.destination, input.destination_encoding),
    overwrite: input.overwrite,
  };
}

async function writeContent(rooms: FileRooms, input: Input<Route<'write'>>, caller: Caller) {
  const content = Buffer.from(input.content, input.encoding === 'base64' ? 'base64' : 'utf8');
  const open = {
    path: bytesOf(input.path, input.path_encoding),
    create_parents: input.create_parents,
    ...(input.if_match !== undefined && { if_match: input.if_match }),
  };
  const commit = { overwrite: true, ...(input.mode !== undefined && { mode: modeOf(input.mode) }) };
  const requests = upload(open, pieces(content), () => commit);
  const written = await stubOf(rooms, input.machine_id).writeFile(requests, short(caller));
  caller.headers.set('ETag', soundEtag(written.etag));
  const at = pathOf(written.path);
  await tell(rooms, caller, 'file.uploaded', input.machine_id, { ...at, size: written.size });
  return { ...at, size: written.size, created: written.created };
}

async function store(
  rooms: FileRooms,
  machine: Input<Route<'put'>>['machine_id'],
  open: Open,
  chunks: AsyncIterable<Uint8Array>,
  commit: () => Commit,
  caller: Caller,
) {
  const requests = upload(open, chunks, commit);
  const written = await stubOf(rooms, machine).writeFile(requests, bulk(caller));
  caller.headers.set('ETag', soundEtag(written.etag));
  const at = pathOf(written.path);
  const { size, created, sha256 } = written;
  await tell(rooms, caller, 'file.uploaded', machine, { ...at, size });
  return { ...at, size, created, sha256 };
}

function commitOf({ mode, overwrite }: { mode?: string | undefined; overwrite: boolean }): Commit {
  return { overwrite, ...(mode !== undefined && { mode: modeOf(mode) }) };
}

export function demandSummary(summary: ArchiveSummary__Output | null): ArchiveSummary__Output {
  if (summary) return summary;
  throw new AppError('machine_error', 'the machine answered without a summary');
}

/** The commit is asked for when all chunks have come. */
export async function* upload<O, C>(
  open: O,
  chunks: AsyncIterable<Uint8Array> | Iterable<Uint8Array>,
  commit: () => C,
): AsyncGenerator<{ open: O } | { chunk: Uint8Array } | { commit: C }> {
  yield { open };
  for await (const chunk of chunks) yield { chunk };
  yield { commit: commit() };
}

function* pieces(content: Buffer): Generator<Uint8Array> {
  for (let at = 0; at < content.length; at += chunkBytes) yield content.subarray(at, at + chunkBytes);
}

async function removeFile(rooms: FileRooms, input: Input<Route<'remove'>>, caller: Caller) {
  const { machine_id, recursive } = input;
  const request = { path: bytesOf(input.path, input.path_encoding), recursive };
  const { path, size } = await stubOf(rooms, machine_id).removeFile(request, long(caller));
  const at = pathOf(path);
  await tell(rooms, caller, 'file.deleted', machine_id, { ...at, size, recursive });
  return { deleted: true as const, ...at };
}
