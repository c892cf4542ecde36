// Copies: on one machine by itself; to another one as a stream through the broker, checked at its end by the sender's
// own digest, so that not even the broker can change a byte unnoticed.
import type { Api, Caller, Handlers, Input } from '../../shared/api/index.ts';
import { AppError } from '../../shared/errors.ts';
import type { AgentStub } from '../../shared/rpc.ts';
import { bulk, type FileRooms, long, short, stubOf, tell } from './calls.ts';
import { demandEntry, entryOf, pathOf } from './entries.ts';
import { demandSummary, fromTo, upload } from './write.ts';

type CopyInput = Input<Api['files']['copy']>;

/** What a stub streams of a file or of an archive. */
interface Part {
  chunk?: Buffer | null;
  tail?: { sha256: string } | null;
}

export function copyHandlers(rooms: FileRooms): Pick<Handlers['files'], 'copy'> {
  return {
    async copy(input, caller) {
      const { machine_id, destination_machine_id: target = machine_id } = input;
      if (target !== machine_id)
        return copyAcross(rooms, { ...input, destination_machine_id: target }, caller);
      const { entry, files, bytes } = await stubOf(rooms, machine_id).copyFile(fromTo(input), long(caller));
      return { ...entryOf(demandEntry(entry)), files_copied: files, bytes_copied: bytes };
    },
  };
}

async function copyAcross(
  rooms: FileRooms,
  input: CopyInput & { destination_machine_id: CopyInput['machine_id'] },
  caller: Caller,
) {
  // Here the broker reads for the caller.
  if (!caller.may('files:read')) {
    throw new AppError('forbidden', 'this needs a key with the scope files:read', {
      required_scope: 'files:read',
    });
  }
  const from = stubOf(rooms, input.machine_id);
  const to = stubOf(rooms, input.destination_machine_id);
  const paths = fromTo(input);
  const source = demandEntry((await from.statFile({ path: paths.source }, short(caller))).entry);
  // Where the writing side fails, the reading side ends with the request.
  const copied =
    source.type === 'FILE_TYPE_DIRECTORY'
      ? await copyDirectory(from, to, paths, caller)
      : await copyOne(from, to, paths, source.mode, caller);
  const at = demandEntry(copied.entry);
  const what = { ...pathOf(at.path), size: copied.bytes };
  await tell(rooms, caller, 'file.uploaded', input.destination_machine_id, what);
  return { ...entryOf(at), files_copied: copied.files, bytes_copied: copied.bytes };
}

type Paths = ReturnType<typeof fromTo>;

async function copyOne(
  from: AgentStub,
  to: AgentStub,
  { source, destination, overwrite }: Paths,
  mode: number,
  caller: Caller,
) {
  const sent = digested(from.readFile({ path: source, digest: true }, bulk(caller)));
  const open = { path: destination, overwrite };
  // Who a program runs as is not carried from machine to machine.
  const commit = () => ({ overwrite, mode: mode & 0o777, sha256: sent.sha256() });
  const { size, entry } = await to.writeFile(upload(open, sent.chunks, commit), bulk(caller));
  return { entry, files: 1, bytes: size };
}

async function copyDirectory(
  from: AgentStub,
  to: AgentStub,
  { source, destination, overwrite }: Paths,
  caller: Caller,
) {
  const sent = digested(from.readArchive({ path: source, gzip: false }, bulk(caller)));
  const open = { path: destination, whole: true, overwrite };
  const commit = () => ({ sha256: sent.sha256() });
  const { entry, summary } = await to.writeArchive(upload(open, sent.chunks, commit), bulk(caller));
  const { files, bytes } = demandSummary(summary);
  return { entry, files, bytes };
}

/** The chunks, and once they have ended the sender's digest of them. */
function digested(parts: AsyncIterable<Part>): { chunks: AsyncIterable<Uint8Array>; sha256: () => string } {
  let digest = '';
  return {
    chunks: (async function* () {
      for await (const { chunk, tail } of parts) {
        if (chunk) yield chunk;
        digest = tail?.sha256 ?? digest;
      }
    })(),
    sha256() {
      if (digest) return digest;
      throw new AppError('machine_error', 'the machine ended its file without a checksum');
    },
  };
}
