// Reads the entries of a tar archive, plain or gzipped. Throws if the archive is truncated or damaged, or if its
// extended headers exceed limits.
import { pipeline } from 'node:stream/promises';
import { createGunzip } from 'node:zlib';
import { AppError, errnoOf } from '../errors.ts';
import { type Bytes, toText } from './byte-names.ts';
import {
  blockBytes,
  decodeBlock,
  decodePax,
  kindOf,
  nanoseconds,
  paddingOf,
  sparseRecord,
  type TarBlock,
  type TarContent,
} from './header.ts';

/**
 * Maximum number of bytes of a long name or a pax header. It is this high because a pax header may also contain
 * extended attributes, which readTar() ignores.
 */
const longestExtension = 1024 * 1024;
/** Maximum number of extended headers (such as pax headers) before the plain header of an entry. */
const mostExtensions = 8;
const inflatedBytes = 256 * 1024;

export interface TarEntry extends TarContent {
  /** The content of the entry. Bytes that the caller does not read are skipped. */
  body: AsyncIterable<Buffer>;
}

const damaged = (reason: string): AppError => new AppError('invalid_request', `not a tar archive: ${reason}`);

export function entryFault(code: AppError['code'], name: Bytes, reason: string): AppError {
  return new AppError(code, `entry ${toText(name)}: ${reason}`, { entry: toText(name) });
}

/** Yields the entries of a tar. Reads and drops the bytes after the end of the archive. */
export async function* readTar(chunks: AsyncIterable<Buffer>): AsyncGenerator<TarEntry> {
  const source = new Source(unzipped(chunks));
  try {
    const global = new Map<string, Bytes>();
    for (;;) {
      const header = await nextHeader(source, global);
      if (!header) break;
      source.left = header.size;
      yield { ...header, body: source };
      for await (const _ of source);
      await source.exactly(paddingOf(header.size));
    }
    await source.drain();
  } finally {
    await source.close();
  }
}

/** Reads the next entry's header and applies its extended headers. Returns undefined at the archive's end. */
async function nextHeader(source: Source, global: Map<string, Bytes>): Promise<TarContent | undefined> {
  let records = new Map(global);
  for (let extensions = 0; extensions <= mostExtensions; extensions += 1) {
    const bytes = await source.exactly(blockBytes);
    if (bytes.every((byte) => byte === 0)) return undefined;
    const block = decodeBlock(bytes);
    if (!block) throw damaged('a header is damaged or missing');
    if (block.flag === 'g') {
      for (const [key, value] of await paxOf(source, block)) global.set(key, value);
      records = new Map([...global, ...records]);
    } else if (block.flag === 'x') records = new Map([...records, ...(await paxOf(source, block))]);
    else if (block.flag === 'L') records.set('path', await longName(source, block));
    else if (block.flag === 'K') records.set('linkpath', await longName(source, block));
    // Flag "V" is the label of the archive, and describes no entry.
    else if (block.flag !== 'V') return headerOf(block, records);
  }
  throw damaged(`more than ${mostExtensions} extended headers belong to one entry`);
}

async function extension(source: Source, { size }: TarBlock): Promise<Buffer> {
  if (size > longestExtension) throw damaged(`an extended header is larger than ${longestExtension} bytes`);
  const body = await source.exactly(size);
  await source.exactly(paddingOf(size));
  return body;
}

async function paxOf(source: Source, block: TarBlock): Promise<Map<string, Bytes>> {
  const records = decodePax(await extension(source, block));
  if (!records) throw damaged('a pax header is damaged');
  return records;
}

async function longName(source: Source, block: TarBlock): Promise<Bytes> {
  return (await extension(source, block)).toString('latin1').replace(/\0.*$/s, '');
}

function headerOf(block: TarBlock, records: Map<string, Bytes>): TarContent {
  // The name of the plain header applies if there is no record, or if the value of the record is empty. With an empty
  // value, an archive cancels an earlier record.
  const name = records.get('path') || block.name;
  const kind = block.flag === '0' && name.endsWith('/') ? 'directory' : kindOf(block.flag);
  if (!kind || records.has(sparseRecord))
    throw entryFault(
      'unsupported_file',
      name,
      'is a device, FIFO or sparse file; leave it out of the archive',
    );
  return {
    ...block,
    kind,
    name,
    target: records.get('linkpath') || block.target,
    size: kind === 'directory' || kind === 'symlink' ? 0 : sizeOf(block, records),
    mtimeNs: nanoseconds(records.get('mtime') ?? '') ?? block.mtimeNs,
  };
}

function sizeOf(block: TarBlock, records: Map<string, Bytes>): number {
  const text = records.get('size');
  if (!text) return block.size;
  if (!/^\d{1,16}$/.test(text) || !Number.isSafeInteger(Number(text))) throw damaged('a size is damaged');
  return Number(text);
}

/**
 * Reads exact numbers of bytes from chunks of any size. Iterating over a Source yields the body of the current entry.
 */
class Source implements AsyncIterable<Buffer> {
  readonly #chunks: AsyncIterator<Buffer>;
  #rest: Buffer = Buffer.alloc(0);
  /** Bytes of the current body that are still unread. */
  left = 0;

  constructor(chunks: AsyncIterable<Buffer>) {
    this.#chunks = chunks[Symbol.asyncIterator]();
  }

  async exactly(count: number): Promise<Buffer> {
    const parts: Buffer[] = [];
    for (let left = count; left > 0; left -= parts.at(-1)?.length ?? 0) parts.push(await this.#next(left));
    return parts.length === 1 && parts[0] ? parts[0] : Buffer.concat(parts);
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Buffer> {
    while (this.left > 0) {
      const piece = await this.#next(this.left);
      this.left -= piece.length;
      yield piece;
    }
  }

  async drain(): Promise<void> {
    while (!(await this.#chunks.next()).done);
  }

  async close(): Promise<void> {
    await this.#chunks.return?.();
  }

  /** Returns between 1 and `most` bytes. Throws at the end of the source. */
  async #next(most: number): Promise<Buffer> {
    while (this.#rest.length === 0) {
      const next = await this.#chunks.next();
      if (next.done) throw damaged('the data ends within an entry');
      this.#rest = next.value;
    }
    const part = this.#rest.subarray(0, most);
    this.#rest = this.#rest.subarray(most);
    return part;
  }
}

/** Yields the bytes, decompressed if they start with gzip's magic number. */
async function* unzipped(chunks: AsyncIterable<Buffer>): AsyncGenerator<Buffer> {
  const iterator = chunks[Symbol.asyncIterator]();
  let start: Buffer = Buffer.alloc(0);
  while (start.length < 2) {
    const next = await iterator.next();
    if (next.done) break;
    start = Buffer.concat([start, next.value]);
  }
  // gunzip may finish before its input ends. pipeline() then calls return() on the input, which would close `iterator`.
  // `rest` has no return(), so `iterator` stays open. The last line can then read and drop the remaining input.
  const rest = { [Symbol.asyncIterator]: () => ({ next: () => iterator.next() }) };
  const all = async function* (): AsyncGenerator<Buffer> {
    yield start;
    yield* rest;
  };
  yield* start[0] === 0x1f && start[1] === 0x8b ? inflated(all()) : all();
  for await (const _ of rest);
}

async function* inflated(chunks: AsyncIterable<Buffer>): AsyncGenerator<Buffer> {
  const gunzip = createGunzip({ chunkSize: inflatedBytes });
  const fed = pipeline(chunks, gunzip);
  // No handling is needed: the loop over gunzip below throws the same error.
  fed.catch(() => undefined);
  try {
    for await (const chunk of gunzip) yield chunk as Buffer;
  } catch (error) {
    if (errnoOf(error)?.startsWith('Z_')) throw damaged('its gzip compression is damaged or cut off');
    throw error;
  }
}
