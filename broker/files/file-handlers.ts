// REST handlers of the file routes, which call the agent of the machine. The handlers in this file only read: list,
// stat, content, search and watch.
import { isUtf8 } from 'node:buffer';
import type { FileChange__Output } from '../../proto/types/farhand/agent/v1/FileChange.ts';
import type { FileMatch__Output } from '../../proto/types/farhand/agent/v1/FileMatch.ts';
import type { ListFilesResponse__Output } from '../../proto/types/farhand/agent/v1/ListFilesResponse.ts';
import type { ReadFileHead__Output } from '../../proto/types/farhand/agent/v1/ReadFileHead.ts';
import { present } from '../../shared/agent-rpcs.ts';
import type { Api, Caller, Handlers, Input, Reply, SentEvent } from '../../shared/api/route-table.ts';
import { AppError, fieldError } from '../../shared/errors.ts';
import { download } from './download.ts';
import {
  assertEntry,
  assertEtag,
  badAnswer,
  bulk,
  type Entry,
  entryOf,
  type FileServices,
  listing,
  long,
  oneFile,
  pathBytes,
  pathOf,
  short,
  splitHead,
  watching,
  withMachine,
} from './shared-by-file-routes.ts';
import { writeHandlers } from './write-handlers.ts';

type Route<O extends keyof Api['files']> = Api['files'][O];
type Listing = Reply<Route<'list'>>;
type Line = Reply<Route<'search'>> extends AsyncIterable<infer T> ? T : never;
type Change = Reply<Route<'watch'>> extends AsyncIterable<SentEvent<infer T>> ? T : never;

/** Maximum size in bytes of a file's content inside JSON. */
export const contentBytes = 10 * 1024 * 1024;
/** Maximum number of entries of a listing that is requested without a limit. */
const listedEntries = 200_000;

export function fileHandlers(services: FileServices): Handlers['files'] {
  return {
    ...writeHandlers(services),
    download: (input, caller) => download(services, input, caller),
    list: (input, caller) => listFiles(services, input, caller),
    listAnywhere: (input, caller) => listFiles(services, withMachine(input), caller),
    read: (input, caller) => readContent(services, input, caller),
    readAnywhere: (input, caller) => readContent(services, withMachine(input), caller),
    search: (input, caller) => searchFiles(services, input, caller),
    watch: (input, caller) => watchFiles(services, input, caller),

    async stat(input, caller) {
      const path = pathBytes(input.path, input.path_encoding);
      const request = { path, sha256: input.checksum !== undefined };
      const options = input.checksum ? long(caller) : oneFile(caller);
      const { entry, etag, sha256 } = await services.presence
        .get(input.machine_id)
        .stub.statFile(request, options);
      caller.headers.set('ETag', assertEtag(etag));
      return { ...entryOf(entry), ...(input.checksum && { sha256 }) };
    },
  };
}

async function listFiles(
  services: FileServices,
  input: Input<Route<'list'>>,
  caller: Caller,
): Promise<Listing> {
  const { offset = 0, limit = 0, hidden = false } = input;
  const request = { path: pathBytes(input.path ?? '', input.path_encoding), hidden, offset, limit };
  const parts = services.presence.get(input.machine_id).stub.listFiles(request, listing(caller));
  const { head, rest } = await splitHead(parts, (part) => part.head);
  if (limit === 0 && head.total - offset > listedEntries) {
    const message = `the directory has more than ${listedEntries} entries: list it in pages, with limit and offset`;
    throw new AppError('payload_too_large', message, { total: head.total });
  }
  const has_more = limit > 0 && offset + limit < head.total;
  return {
    head: pathOf(head.path),
    meta: { total: head.total, limit: limit || head.total, offset, has_more },
    items: batches(rest, limit || listedEntries),
  };
}

async function* batches(
  parts: AsyncIterable<ListFilesResponse__Output>,
  most: number,
): AsyncGenerator<Entry[]> {
  let seen = 0;
  for await (const { batch } of parts) {
    const { entries = [] } = batch ?? {};
    seen += entries.length;
    if (seen > most) throw badAnswer('is larger than requested');
    yield entries.map(entryOf);
  }
}

async function readContent(services: FileServices, input: Input<Route<'read'>>, caller: Caller) {
  const { offset = 0, length } = input;
  const path = pathBytes(input.path, input.path_encoding);
  const request = { path, offset, max_bytes: contentBytes, ...present({ length }) };
  let head: ReadFileHead__Output | undefined;
  const chunks: Buffer[] = [];
  let received = 0;
  let release = (): void => {};
  try {
    for await (const part of services.presence.get(input.machine_id).stub.readFile(request, short(caller))) {
      if (part.head) {
        if (head) throw badAnswer('has two first parts');
        head = part.head;
        release = services.contents.take(head.length ?? contentBytes);
      }
      if (part.chunk) chunks.push(Buffer.from(part.chunk));
      received += part.chunk?.length ?? 0;
      if (received > (head?.length ?? contentBytes)) throw badAnswer('is larger than requested');
    }
  } finally {
    // The quota `contents` counts bytes only while they arrive, so the bytes of this request are released here. The
    // JSON text of the answer counts toward another quota.
    release();
  }
  const entry = assertEntry(head?.entry);
  caller.headers.set('ETag', assertEtag(head?.etag ?? ''));
  const bytes = Buffer.concat(chunks);
  const encoding = input.encoding === 'base64' || !isUtf8(bytes) ? 'base64' : 'utf-8';
  return {
    ...pathOf(entry.path),
    content: bytes.toString(encoding === 'base64' ? 'base64' : 'utf8'),
    // The size of a file of /proc is unknown before the file is read.
    size: head?.length === undefined ? bytes.length : entry.size,
    encoding,
  } as const;
}

async function* searchFiles(
  services: FileServices,
  input: Input<Route<'search'>>,
  caller: Caller,
): AsyncGenerator<Line> {
  const { name = '', content = '', ignore_case, hidden, limit } = input;
  if (name === '' && content === '') {
    throw fieldError('query', 'name', 'is missing: search for name, content or both', 'invalid_request');
  }
  const path = pathBytes(input.path ?? '', input.path_encoding);
  const request = { path, name, content, ignore_case, hidden, limit };
  let matches = 0;
  let tail: { truncated: boolean; visited: number; unreadable: number } | undefined;
  for await (const part of services.presence.get(input.machine_id).stub.searchFiles(request, bulk(caller))) {
    for (const match of part.matches?.matches ?? []) yield lineOf(match);
    matches += part.matches?.matches.length ?? 0;
    if (matches > limit) throw badAnswer('is larger than requested');
    tail = part.tail ?? tail;
  }
  if (!tail) throw badAnswer('has no summary');
  const { truncated, visited, unreadable } = tail;
  yield { end: { matches, truncated, visited, unreadable } };
}

function lineOf({ entry, line, text }: FileMatch__Output): Line {
  return { entry: entryOf(entry), ...(line > 0 && { line, text: text.toString() }) };
}

const kinds = {
  FILE_CHANGE_KIND_ADDED: 'added',
  FILE_CHANGE_KIND_CHANGED: 'changed',
  FILE_CHANGE_KIND_REMOVED: 'removed',
} as const;

/** Resolves once the machine watches the path. Rejects with the machine's error if the machine refuses. */
async function watchFiles(services: FileServices, input: Input<Route<'watch'>>, caller: Caller) {
  const request = {
    path: pathBytes(input.path ?? '', input.path_encoding),
    recursive: input.recursive,
    may_be_missing: false,
  };
  const answers = services.presence.get(input.machine_id).stub.watchFiles(request, watching(caller));
  const { head, rest } = await splitHead(answers, (first) => first);
  return eventsOf(head.path, rest);
}

async function* eventsOf(
  path: Buffer,
  answers: AsyncIterable<{ changes: FileChange__Output[] }>,
): AsyncGenerator<SentEvent<Change>, undefined> {
  // The machine has sent its first answer: it reports all changes from now on.
  yield { event: 'ready', data: pathOf(path) };
  for await (const { changes } of answers) for (const change of changes) yield changeOf(change);
}

function changeOf({ kind, path, type }: FileChange__Output): SentEvent<Change> {
  const known = Object.entries(kinds).find(([name]) => name === kind)?.[1];
  if (!known) return { event: 'overflow', data: pathOf(path) };
  const data = {
    ...pathOf(path),
    kind: known,
    type: type === 'FILE_TYPE_DIRECTORY' ? 'directory' : 'file',
  } as const;
  return { event: 'change', data };
}
