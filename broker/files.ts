// Files on machines: between REST and the machine's stub. Bytes are passed on as they come.
import { isUtf8 } from 'node:buffer';
import type { FileEntry__Output } from '../proto/types/farhand/agent/v1/FileEntry.ts';
import type { ReadFileHead__Output } from '../proto/types/farhand/agent/v1/ReadFileHead.ts';
import type { WriteFileRequest } from '../proto/types/farhand/agent/v1/WriteFileRequest.ts';
import type { Api, Handlers, Reply } from '../shared/api/index.ts';
import { iso, latestInstant } from '../shared/clock.ts';
import { AppError } from '../shared/errors.ts';
import type { Presence } from './link/presence.ts';

type Entry = Reply<Api['files']['list']>['files'][number];

/** Largest file that is answered inside JSON. */
export const contentBytes = 10 * 1024 * 1024;
/** Entries of one listing without a limit. */
const listedEntries = 200_000;
/** Time for one listing or one content, which are small; downloads will have none. */
const deadlineMs = 120_000;
const chunkBytes = 256 * 1024;
const specials = new Set(['fifo', 'socket', 'block', 'char']);

export function fileHandlers(presence: Presence): Handlers['files'] {
  return {
    async list(input, caller) {
      const parts = presence.get(input.machine_id).stub.listFiles(
        {
          path: bytesOf(input.path ?? '', input.path_encoding),
          hidden: input.hidden ?? false,
          offset: input.offset ?? 0,
          limit: input.limit ?? 0,
        },
        { request_id: caller.request_id, signal: caller.signal, deadline_ms: deadlineMs },
      );
      let path: Buffer = Buffer.alloc(0);
      let total = 0;
      const files: Entry[] = [];
      const most = Math.min(input.limit ?? listedEntries, listedEntries);
      for await (const part of parts) {
        if (part.head) ({ path, total } = part.head);
        for (const entry of part.batch?.entries ?? []) files.push(entryOf(entry));
        if (files.length > most) throw tooMuch(input.limit === undefined);
      }
      const seen = (input.offset ?? 0) + files.length;
      return { ...pathOf(path), files, total, has_more: input.limit !== undefined && seen < total };
    },

    async read(input, caller) {
      const parts = presence.get(input.machine_id).stub.readFile(
        {
          path: bytesOf(input.path, input.path_encoding),
          offset: input.offset ?? 0,
          max_bytes: contentBytes,
          ...(input.length !== undefined && { length: input.length }),
        },
        { request_id: caller.request_id, signal: caller.signal, deadline_ms: deadlineMs },
      );
      let head: ReadFileHead__Output | undefined;
      const chunks: Buffer[] = [];
      let received = 0;
      for await (const part of parts) {
        head ??= part.head ?? undefined;
        if (part.chunk) chunks.push(Buffer.from(part.chunk));
        received += part.chunk?.length ?? 0;
        if (received > contentBytes) throw tooMuch(false);
      }
      if (!head?.entry) throw new AppError('machine_error', 'the machine answered without the file’s entry');
      caller.headers.set('ETag', soundEtag(head.etag));
      const bytes = Buffer.concat(chunks);
      const encoding = input.encoding === 'base64' || !isUtf8(bytes) ? 'base64' : 'utf-8';
      return {
        ...pathOf(head.entry.path),
        content: bytes.toString(encoding === 'base64' ? 'base64' : 'utf8'),
        // A file of /proc does not know its size beforehand.
        size: head.length === undefined ? bytes.length : head.entry.size,
        encoding,
      };
    },

    async write(input, caller) {
      const content = Buffer.from(input.content, input.encoding === 'base64' ? 'base64' : 'utf8');
      const written = await presence.get(input.machine_id).stub.writeFile(
        writeRequests(
          {
            path: bytesOf(input.path, input.path_encoding),
            create_parents: input.create_parents,
            ...(input.if_match !== undefined && { if_match: input.if_match }),
          },
          content,
          { overwrite: true, ...(input.mode !== undefined && { mode: Number.parseInt(input.mode, 8) }) },
        ),
        { request_id: caller.request_id, signal: caller.signal, deadline_ms: deadlineMs },
      );
      caller.headers.set('ETag', soundEtag(written.etag));
      return { ...pathOf(written.path), size: written.size, created: written.created };
    },
  };
}

async function* writeRequests(
  open: NonNullable<WriteFileRequest['open']>,
  content: Buffer,
  commit: NonNullable<WriteFileRequest['commit']>,
): AsyncGenerator<WriteFileRequest> {
  yield { open };
  for (let at = 0; at < content.length; at += chunkBytes)
    yield { chunk: content.subarray(at, at + chunkBytes) };
  yield { commit };
}

function entryOf(entry: FileEntry__Output): Entry {
  const directory = entry.type === 'FILE_TYPE_DIRECTORY';
  const foreign = !isUtf8(entry.name) || !isUtf8(entry.path) || !isUtf8(entry.link_target ?? Buffer.alloc(0));
  const text = (bytes: Buffer): string => bytes.toString(foreign ? 'base64' : 'utf8');
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
    modified_at: soundTime(entry.modified_at_ms),
    ...(entry.link_target && { link_target: text(entry.link_target) }),
    ...(isSpecial(entry.special) && { special: entry.special }),
    ...(foreign && { name_encoding: 'base64' as const }),
  };
}

/** The agent was asked for less: a directory may really be too large, anything else breaks the contract. */
function tooMuch(asked: boolean): AppError {
  if (asked)
    return new AppError(
      'payload_too_large',
      `more than ${listedEntries} entries: list it in pages, with limit and offset`,
    );
  return new AppError('machine_error', 'the machine answered with more than it was asked for');
}

/** What a machine says goes into our headers and dates only if it can (RFC 9110 section 8.8.3). */
function soundEtag(etag: string): string {
  if (/^"[\x21\x23-\x7e]{0,200}"$/.test(etag)) return etag;
  throw new AppError('machine_error', 'the machine answered with an ETag that is none');
}

function soundTime(ms: number): string {
  if (Math.abs(ms) <= latestInstant) return iso(ms);
  throw new AppError('machine_error', 'the machine answered with a time that is none');
}

function isSpecial(text: string): text is NonNullable<Entry['special']> {
  return specials.has(text);
}

/** A path as text, or as base64 where it is not UTF-8. */
function pathOf(path: Buffer): { path: string; path_encoding?: 'base64' } {
  return isUtf8(path)
    ? { path: path.toString('utf8') }
    : { path: path.toString('base64'), path_encoding: 'base64' };
}

function bytesOf(path: string, encoding: 'base64' | undefined): Buffer {
  return Buffer.from(path, encoding ?? 'utf8');
}
