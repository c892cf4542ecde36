// Reads a regular file: a head, then exactly the bytes that it announced, or an error.
import { createHash } from 'node:crypto';
import { type BigIntStats, constants } from 'node:fs';
import { type FileHandle, open } from 'node:fs/promises';
import { posix } from 'node:path';
import type { ReadFileRequest__Output } from '../../proto/types/farhand/agent/v1/ReadFileRequest.ts';
import { AppError, type Code, errnoOf, fromErrno } from '../../shared/errors.ts';
import type { AgentMethods } from '../../shared/rpc.ts';
import { unlessAborted } from './abort.ts';
import { isTorn } from './beneath/contents.ts';
import type { Beneath, Entry } from './beneath/index.ts';
import { holdsMemory } from './beneath/kernel.ts';
import { type Bytes, bytes, fault, shown, type Target, targetOf } from './beneath/path.ts';
import { describe, etagOf } from './describe.ts';
import type { AskPeople } from './people.ts';

const { O_RDONLY, O_NONBLOCK, O_NOCTTY } = constants;
const chunkBytes = 256 * 1024;
interface Source {
  handle: FileHandle;
  stats: BigIntStats;
  link: Bytes | undefined;
}

/** What is wanted of a file; `length` is infinite where only reading tells. */
interface Range {
  start: number;
  length: number;
  /** Largest number of bytes to send. */
  max: number;
}

/** Reads up to a number of bytes at a position; fewer mean the end of the file. */
type Read = (start: number, length: number) => Promise<Buffer>;

export function openReader(beneath: Beneath, people: AskPeople, home: Bytes): AgentMethods['readFile'] {
  return async function* readFile(request, { signal }) {
    const { path, folder } = targetOf(request.path, home);
    let source: Source | undefined;
    const asked = people();
    try {
      source = await unlessAborted(signal, openSource(beneath, { path, folder }), (late) =>
        late.handle.close(),
      );
      const { handle, stats, link } = source;
      const range = rangeOf(request, path, Number(stats.size));
      const pages = new Pages(Math.min(chunkBytes, range.length));
      const read: Read = (start, length) =>
        unlessAborted(signal, readFully(handle, pages.next().subarray(0, length), start));
      const first = await read(range.start, Math.min(chunkBytes, range.length));
      const length = await lengthOf(source, range, first.length, path);
      const entry = describe({ path, name: posix.basename(path), link }, stats, await asked);
      const known = length === undefined ? {} : { length };
      yield { head: { entry, etag: etagOf(stats), offset: range.start, ...known } };
      const chunks =
        length === undefined
          ? untilEnd(read, range, first, path)
          : exactly(read, { ...range, length }, first, source, path);
      const hash = request.digest ? createHash('sha256') : undefined;
      for await (const chunk of chunks) {
        hash?.update(chunk);
        yield { chunk };
      }
      if (hash) yield { tail: { sha256: hash.digest('hex') } };
    } catch (error) {
      throw signal.aborted ? signal.reason : readingFailure(error, path);
    } finally {
      // Nobody waits: closing waits for a read under way, which may hang.
      source?.handle.close().catch(() => undefined);
    }
  };
}

/** Opens a regular file for its bytes; anything else is refused unopened. */
export async function openSource(beneath: Beneath, { path, folder }: Target): Promise<Source> {
  const entry = await beneath.entry(path);
  try {
    const found = readable(entry, path);
    if (folder) throw fault('not_a_directory', path, 'not a directory');
    if (await holdsMemory(entry.name, found.at, found.stats))
      throw fault('unsupported_file', path, 'the memory of a process');
    // The same inode again, this time for its bytes: it is known to be a plain file, so this cannot block.
    const handle = await open(bytes(found.at), O_RDONLY | O_NONBLOCK | O_NOCTTY);
    return { handle, stats: found.stats, link: entry.link };
  } finally {
    entry.close();
  }
}

function readable(entry: Entry, path: Bytes): NonNullable<Entry['found']> {
  if (!entry.found) throw fault('file_not_found', path, 'no such file');
  if (entry.found.stats.isDirectory()) throw fault('is_a_directory', path, 'is a directory');
  if (!entry.found.stats.isFile()) throw fault('unsupported_file', path, 'not a regular file');
  return entry.found;
}

function rangeOf(request: ReadFileRequest__Output, path: Bytes, size: number): Range {
  const { offset } = request;
  const start = offset < 0 ? Math.max(0, size + offset) : offset;
  if (start > size) throw fault('range_not_satisfiable', path, `has ${size} bytes`, { size });
  const asked = request.length ?? Number.POSITIVE_INFINITY;
  const length = size === 0 ? asked : Math.min(asked, size - start);
  const max = request.max_bytes || Number.POSITIVE_INFINITY;
  if (size > 0 && length > max) throw tooLarge(path, { size, max });
  return { start, length, max };
}

/**
 * The length to announce; undefined where the file cannot tell: those of /proc say 0 and have more, those of
 * /sys say 4096 and have less. The first bytes give it away.
 */
async function lengthOf(source: Source, range: Range, got: number, path: Bytes): Promise<number | undefined> {
  const { handle, stats } = source;
  if (stats.size === 0n) return got === 0 ? 0 : undefined;
  if (got === Math.min(chunkBytes, range.length)) return range.length;
  const now = await handle.stat({ bigint: true });
  if (now.size !== stats.size || now.mtimeNs !== stats.mtimeNs) throw changed(path);
  return undefined;
}

async function* exactly(
  read: Read,
  { start, length }: Range,
  first: Buffer,
  source: Source,
  path: Bytes,
): AsyncGenerator<Buffer> {
  let sent = 0;
  for (let chunk = first; sent < length; ) {
    if (chunk.length < Math.min(chunkBytes, length - sent)) throw changed(path);
    sent += chunk.length;
    // Judged before the last bytes go out: a reader who has them all does not wait for a verdict.
    if (sent === length) await demandUnchanged(source, start + length, path);
    // The disk works while this one is on its way.
    const ahead = read(start + sent, Math.min(chunkBytes, length - sent));
    ahead.catch(() => undefined);
    yield chunk;
    chunk = await ahead;
  }
}

async function* untilEnd(
  read: Read,
  { start, length, max }: Range,
  first: Buffer,
  path: Bytes,
): AsyncGenerator<Buffer> {
  let sent = 0;
  for (let chunk = first; chunk.length > 0; ) {
    sent += chunk.length;
    if (sent > max) throw tooLarge(path, { max });
    yield chunk;
    chunk = await read(start + sent, Math.min(chunkBytes, length - sent));
  }
}

/** Two buffers in turn: one on its way while the other is filled. Who takes a chunk must copy what it keeps. */
class Pages {
  readonly #bytes: number;
  readonly #pages: Buffer[] = [];
  #turn = 0;

  constructor(bytes: number) {
    this.#bytes = bytes;
  }

  next(): Buffer {
    this.#turn = 1 - this.#turn;
    const page = this.#pages[this.#turn] ?? Buffer.allocUnsafeSlow(this.#bytes);
    this.#pages[this.#turn] = page;
    return page;
  }
}

async function readFully(handle: FileHandle, buffer: Buffer, start: number): Promise<Buffer> {
  let filled = 0;
  while (filled < buffer.length) {
    const { bytesRead } = await handle.read(buffer, filled, buffer.length - filled, start + filled);
    if (bytesRead === 0) break;
    filled += bytesRead;
  }
  return buffer.subarray(0, filled);
}

async function demandUnchanged({ handle, stats }: Source, end: number, path: Bytes): Promise<void> {
  if (isTorn(stats, await handle.stat({ bigint: true }), end)) throw changed(path);
}

const changed = (path: Bytes): AppError => fault('conflict', path, 'changed while it was read, try again');
const tooLarge = (path: Bytes, details: { size?: number; max: number }): AppError =>
  fault('file_too_large', path, `more than ${details.max} bytes`, details);

/** Files of the kernel fail in ways of their own. */
const readingErrnos: Readonly<Record<string, Code>> = {
  EAGAIN: 'unsupported_file',
  EINVAL: 'unsupported_file',
  ESPIPE: 'unsupported_file',
  ESRCH: 'file_not_found',
};

export function readingFailure(error: unknown, path: Bytes): AppError {
  const code = error instanceof AppError ? undefined : readingErrnos[errnoOf(error) ?? ''];
  return code ? fault(code, path, 'cannot be read') : fromErrno(error, shown(path));
}
