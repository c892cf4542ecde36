// Reads a regular file. Sends a head first, then the bytes. If the head contains a length, exactly that number of bytes
// follows, or an error.
import { createHash } from 'node:crypto';
import { AppError, type Code, errnoOf, fromErrno } from '../../shared/errors.ts';
import type { FileHandle } from './confine/confined-fs.ts';
import { type Contents, hasChanged, openTargetFile } from './confine/open-regular-file.ts';
import { type Bytes, fault, toText } from './confine/parse-request-path.ts';
import { describe, etagOf } from './file-description.ts';
import type { Operation, RequestOf } from './handler-adapters.ts';

const largeChunkBytes = 256 * 1024;
/**
 * Size in bytes of a small chunk. Small chunks slow a download by up to a fifth, but save memory: a stalled download
 * has several chunks in memory.
 */
const smallChunkBytes = 64 * 1024;
/** A newly opened file gets small chunks if more than this number of files, including itself, are being read. */
const mostLargeChunks = 4;
let openReads = 0;

/** The range to read, in bytes. `length` is infinite if stat(2) reports size 0 and the request sets no length. */
interface Range {
  start: number;
  length: number;
  /** Largest number of bytes to send, set by the request. A longer range is an error. */
  max: number;
  chunkBytes: number;
}

export const readFile: Operation<'readFile'> = async function* ({ reading, users }, request, target) {
  const { path } = target;
  openReads += 1;
  try {
    const source = await openTargetFile(reading, target);
    const { stats, link } = source;
    using file = source.file;
    const range = rangeOf(request, path, Number(stats.size));
    const read = readerOf(file.handle, range);
    const first = await read(0);
    const length = await lengthOf(source, range, first.length, path);
    const entry = describe(path, stats, await users(), link);
    yield {
      head: { entry, etag: etagOf(stats), offset: range.start, ...(length !== undefined && { length }) },
    };
    const hash = request.digest ? createHash('sha256') : undefined;
    let sent = 0;
    // Sends as many bytes as the head announced. If the head announced no length, sends all bytes to the end.
    for (let chunk = first; length === undefined ? chunk.length > 0 : sent < length; ) {
      if (length !== undefined && chunk.length < Math.min(range.chunkBytes, length - sent))
        throw changed(path);
      sent += chunk.length;
      if (sent > range.max) throw tooLarge(path, { max: range.max });
      // The file is checked before the last chunk is sent: a client that has all announced bytes ignores a later error.
      if (sent === length && hasChanged(stats, await file.stat(), range.start + sent)) throw changed(path);
      // The next chunk is read while this chunk is sent.
      const ahead = read(sent);
      ahead.catch(() => undefined);
      hash?.update(chunk);
      yield { chunk };
      chunk = await ahead;
    }
    if (hash) yield { tail: { sha256: hash.digest('hex') } };
  } catch (error) {
    throw readingFailure(error, path);
  } finally {
    openReads -= 1;
  }
};

function rangeOf(request: RequestOf<'readFile'>, path: Bytes, size: number): Range {
  const { offset } = request;
  const start = offset < 0 ? Math.max(0, size + offset) : offset;
  if (start > size)
    throw fault('range_not_satisfiable', path, `the range starts after the end of the file (${size} bytes)`, {
      size,
    });
  const asked = request.length ?? Number.POSITIVE_INFINITY;
  const length = size === 0 ? asked : Math.min(asked, size - start);
  const max = request.max_bytes || Number.POSITIVE_INFINITY;
  if (size > 0 && length > max) throw tooLarge(path, { size, max });
  const chunkBytes = openReads > mostLargeChunks ? smallChunkBytes : largeChunkBytes;
  return { start, length, max, chunkBytes };
}

/** Reads the chunk after `sent` bytes of the range. A short chunk means the end of the file. */
type Read = (sent: number) => Promise<Buffer>;

/**
 * Reads into two buffers in turn: one is filled while the other is sent. A chunk stays valid during the next read, and
 * is overwritten by the read after that.
 */
function readerOf(handle: FileHandle, { start, length, chunkBytes }: Range): Read {
  const pages: Buffer[] = [];
  let turn = 0;
  return async (sent) => {
    turn = 1 - turn;
    pages[turn] ??= Buffer.allocUnsafeSlow(Math.min(chunkBytes, length));
    const page = pages[turn]?.subarray(0, Math.min(chunkBytes, length - sent)) ?? Buffer.alloc(0);
    let filled = 0;
    while (filled < page.length) {
      const position = start + sent + filled;
      const { bytesRead } = await handle.read(page, filled, page.length - filled, position);
      if (bytesRead === 0) break;
      filled += bytesRead;
    }
    return page.subarray(0, filled);
  };
}

/** Returns the length to announce; undefined if stat(2) reports a wrong size, as for /proc and /sys. */
async function lengthOf(
  { file, stats }: Contents,
  range: Range,
  got: number,
  path: Bytes,
): Promise<number | undefined> {
  // Files of /proc report 0 bytes and contain more.
  if (stats.size === 0n) return got === 0 ? 0 : undefined;
  if (got === Math.min(range.chunkBytes, range.length)) return range.length;
  const now = await file.stat();
  if (now.size !== stats.size || now.mtimeNs !== stats.mtimeNs) throw changed(path);
  // Files of /sys report 4096 bytes and contain less.
  return undefined;
}

const changed = (path: Bytes): AppError => fault('conflict', path, 'changed while it was read; try again');
const tooLarge = (path: Bytes, details: { size?: number; max: number }): AppError =>
  fault('file_too_large', path, `is larger than the limit of ${details.max} bytes`, details);

/** Error codes for the system errors that the kernel reports for its own files (/proc, /sys). */
const readingErrnos: Readonly<Record<string, Code>> = {
  EAGAIN: 'unsupported_file',
  EINVAL: 'unsupported_file',
  ESPIPE: 'unsupported_file',
  ESRCH: 'file_not_found',
};

function readingFailure(error: unknown, path: Bytes): AppError {
  const code = error instanceof AppError ? undefined : readingErrnos[errnoOf(error) ?? ''];
  return code ? fault(code, path, 'the kernel refuses to read this file') : fromErrno(error, toText(path));
}
