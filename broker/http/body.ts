// Reads request bodies: JSON of limited size, raw bytes, and forms with one file. If a form names the destination only
// after the file, the file waits on disk.
import { isUtf8 } from 'node:buffer';
import { addAbortListener } from 'node:events';
import { constants } from 'node:fs';
import { type FileHandle, mkdir, open, rm } from 'node:fs/promises';
import type { IncomingHttpHeaders, IncomingMessage } from 'node:http';
import { join } from 'node:path';
import type { Readable } from 'node:stream';
import { Busboy, type BusboyInstance } from '@fastify/busboy';
import type { Context } from 'koa';
import getRawBody from 'raw-body';
import type { Content } from '../../shared/api/route-table.ts';
import { after } from '../../shared/clock.ts';
import { AppError, fieldError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import type { Quota } from '../../shared/quota.ts';
import { countTransferred } from '../../shared/v8-garbage-collection.ts';
import { readStream } from '../../shared/wait-for-change.ts';

/** Milliseconds in which a whole JSON body must arrive. */
const maxMs = 300_000;
/** JSON bodies up to this size do not count toward the memory quota. */
const smallBytes = 64 * 1024;
const maxDepth = 32;
/**
 * Maximum number of fields of a JSON body. The largest valid bodies have the 256 variables of a command, and some other
 * fields. The maximum leaves a reserve.
 */
const maxFields = 400;
const [quote, backslash, colon, openBrace, closeBrace, openBracket, closeBracket] = Buffer.from('"\\:{}[]');

/** A JSON body, as it was sent and parsed. */
export interface JsonBody {
  bytes: Buffer;
  value: unknown;
}

/**
 * Reads and parses a JSON body; undefined if there is none. Large bodies count against `quota` until the request ends.
 * Throws invalid_request, validation_failed, payload_too_large or unavailable.
 */
export async function parseJsonBody(
  ctx: Context,
  limit: number,
  quota: Quota,
  over: AbortSignal,
): Promise<JsonBody | undefined> {
  sendContinue(ctx);
  const { req: request } = ctx;
  const length = request.headers['content-length'];
  if (length === '0' || (length === undefined && request.headers['transfer-encoding'] === undefined))
    return undefined;
  // If a body declares no length, it counts as if it had the largest allowed size.
  const size = Math.min(Number(length ?? limit), limit);
  if (size > smallBytes) addAbortListener(over, quota.take(size));
  const tooSlow = after(maxMs, () => request.destroy());
  const bytes = await getRawBody(request, { limit, length: length ?? null })
    .catch((error: unknown) => {
      const tooLarge = error instanceof Error && 'status' in error && error.status === 413;
      throw tooLarge
        ? new AppError('payload_too_large', `the body is too large: send at most ${limit} bytes`, { limit })
        : invalid('the body ended before its declared length; send the request again');
    })
    .finally(tooSlow);
  return bytes.length === 0 ? undefined : { bytes, value: parse(bytes, request.headers) };
}

/** A client that sent Expect: 100-continue sends the body only after this answer (RFC 9110 section 10.1.1). */
function sendContinue({ req, res }: Context): void {
  if (req.headers.expect?.toLowerCase() === '100-continue') res.writeContinue();
}

/** Parses a body as JSON. If its type is declared, the type must be JSON. The body must not be compressed. */
function parse(bytes: Buffer, headers: IncomingHttpHeaders): unknown {
  const type = headers['content-type']?.split(';')[0]?.trim().toLowerCase();
  if (type !== undefined && type !== 'application/json' && !type.endsWith('+json')) {
    throw invalid(`the body has the type ${type}: send JSON, with Content-Type: application/json`);
  }
  if (headers['content-encoding'] !== undefined && headers['content-encoding'] !== 'identity') {
    throw invalid('the body has a Content-Encoding: send it uncompressed, without this header');
  }
  if (!isUtf8(bytes)) throw invalid('the body is not valid UTF-8: send JSON in UTF-8');
  assertJsonLimits(bytes);
  try {
    return JSON.parse(bytes.toString('utf8'));
  } catch {
    throw invalid('the body is not valid JSON');
  }
}

/** Refuses JSON that is nested too deeply or has too many fields, because it is costly to parse and check. */
export function assertJsonLimits(bytes: Buffer): void {
  let depth = 0;
  let fields = 0;
  let quoted = false;
  for (let at = 0; at < bytes.length; at += 1) {
    const byte = bytes[at];
    if (byte === quote) quoted = !quoted;
    else if (quoted) at += byte === backslash ? 1 : 0;
    else if (byte === openBrace || byte === openBracket) depth += 1;
    else if (byte === closeBrace || byte === closeBracket) depth -= 1;
    else if (byte === colon) fields += 1;
    if (depth > maxDepth) throw invalid(`the body is nested too deeply: send at most ${maxDepth} levels`);
    if (fields > maxFields) {
      throw fieldError('body', '', `has too many fields: send at most ${maxFields}`);
    }
  }
}

// ---- Forms

type Fields = Record<string, string>;

/** A form that is being read. */
export interface IncomingForm extends Content<Fields> {
  /**
   * The fields that are known when readForm() resolves: those before the file, or all fields if the file was stored on
   * disk.
   */
  firstFields: Fields;
}

const limits = {
  fieldNameSize: 100,
  fieldSize: 64 * 1024,
  fields: 20,
  parts: 22,
  headerPairs: 20,
  headerSize: 16 * 1024,
};

const invalid = (message: string): AppError => new AppError('invalid_request', message);
const cutOff = (): AppError =>
  invalid('the body was cut off before its end, and nothing was changed: send the request again');

/**
 * Yields a raw body. Throws the reason of `over` when it fires. A client that sent Expect: 100-continue sends the
 * content only after the first read, so the content of a refused request is not transferred.
 */
export async function* bodyChunks(ctx: Context, over: AbortSignal): AsyncGenerator<Uint8Array> {
  sendContinue(ctx);
  for await (const chunk of readStream<Uint8Array>(ctx.req, over)) {
    countTransferred(chunk.length);
    yield chunk;
  }
  if (!ctx.req.complete) throw cutOff();
}

/**
 * Reads a form that has fields, and one part called `file`. If `sufficient` returns true for the fields before that
 * part, resolves when the part begins. Otherwise stores the whole file on disk first, because a needed field may come
 * after the file.
 */
export async function readForm(
  ctx: Context,
  spool: Spool,
  sufficient: (fields: Fields) => boolean,
  over: AbortSignal,
): Promise<IncomingForm> {
  sendContinue(ctx);
  const form = new Form(ctx.req);
  addAbortListener(over, () => form.stop(cutOff()));
  const { part, fieldsBefore } = await form.file;
  const chunks = form.chunks(part);
  const fields = () => form.fields();
  if (sufficient(fieldsBefore)) return { chunks, fields, firstFields: fieldsBefore };
  const spooled = await spool.store(chunks, over);
  return { chunks: spooled, fields, firstFields: fields() };
}

interface FilePart {
  part: Readable;
  /**
   * The fields that came before the file. Form.fields() may return more: if a small form arrives in one piece, the
   * fields after the file are read already.
   */
  fieldsBefore: Fields;
}

class Form {
  readonly #request: IncomingMessage;
  readonly #parser: BusboyInstance;
  readonly #fields = new Map<string, string>();
  readonly #file = Promise.withResolvers<FilePart>();
  readonly #finished = Promise.withResolvers<void>();
  #part: Readable | undefined;
  #reason: unknown;

  constructor(request: IncomingMessage) {
    this.#request = request;
    const parser = parserOf(request);
    this.#parser = parser;
    this.#finished.promise.then(
      () =>
        this.#file.reject(fieldError('form', 'file', 'is missing: send the content as a part called file')),
      this.#file.reject,
    );
    // A rejection that is not handled would end the process.
    this.#file.promise.catch(() => undefined);
    parser.once('finish', this.#finished.resolve);
    parser.on('file', (name, part) => this.#takeFile(name, part));
    parser.on('field', (name, value, _nameTruncated, truncated) => this.#takeField(name, value, truncated));
    for (const limit of ['partsLimit', 'fieldsLimit', 'filesLimit'] as const) {
      parser.once(limit, () =>
        this.stop(
          fieldError('form', 'file', 'is in a form with too many parts: send one file and at most 20 fields'),
        ),
      );
    }
    parser.on('error', (error) => this.stop(malformed(error)));
    request.once('close', () => {
      if (!request.complete) this.stop(cutOff());
    });
    request.pipe(parser);
  }

  /** The content of the file, once its part begins. */
  get file(): Promise<FilePart> {
    return this.#file.promise;
  }

  fields(): Fields {
    return Object.fromEntries(this.#fields);
  }

  /** Stops reading the form. Every waiting reader rejects with the reason. */
  stop(reason: unknown): void {
    if (this.#reason !== undefined) return;
    this.#reason = reason;
    this.#request.unpipe(this.#parser);
    this.#part?.destroy(reason instanceof Error ? reason : cutOff());
    this.#finished.reject(reason);
  }

  async *chunks(file: Readable): AsyncGenerator<Uint8Array> {
    try {
      // The chunks are bytes, but the type Readable does not say so.
      for await (const chunk of file as AsyncIterable<Uint8Array>) {
        countTransferred(chunk.length);
        yield chunk;
      }
      // The form is read to its closing boundary, because without it the file may be incomplete.
      await this.#finished.promise;
    } catch (error) {
      throw this.#reason ?? malformed(error);
    } finally {
      this.stop(cutOff());
    }
  }

  #takeFile(name: string | undefined, part: Readable): void {
    // A parser that was stopped may still report errors of a part. They need no handling.
    part.on('error', () => undefined);
    if (name === 'file') {
      this.#part = part;
      this.#file.resolve({ part, fieldsBefore: this.fields() });
    } else {
      part.resume();
      this.stop(
        fieldError('form', name ?? '', 'is unknown; the part with the content must have the name "file"'),
      );
    }
  }

  #takeField(name: string | undefined, value: string, truncated: boolean): void {
    if (name === undefined) this.stop(fieldError('form', '', 'a field of the form has no name'));
    else if (truncated) this.stop(fieldError('form', name, 'has more than 64 KiB'));
    // The parser replaces bytes that are not UTF-8 by U+FFFD.
    else if (value.includes('\ufffd')) this.stop(fieldError('form', name, 'must be UTF-8'));
    else if (this.#fields.has(name)) this.stop(fieldError('form', name, 'is given twice'));
    else this.#fields.set(name, value);
  }
}

function parserOf({ headers }: IncomingMessage): BusboyInstance {
  const type = headers['content-type'] ?? '';
  if (!/^multipart\/form-data\s*;/i.test(type)) {
    throw invalid('the body is not a form: send one, with Content-Type: multipart/form-data and a boundary');
  }
  try {
    return new Busboy({
      headers: { ...headers, 'content-type': type },
      limits: { ...limits, files: 1 },
      // The part called `file` counts as the file, even if it has no file name.
      isPartAFile: (name, _type, fileName) => name === 'file' || fileName !== undefined,
    });
  } catch (error) {
    throw malformed(error);
  }
}

function malformed(error: unknown): AppError {
  if (error instanceof AppError) return error;
  return invalid('the form is malformed or was cut off, and nothing was changed: send it again');
}

// ---- Spooled files

/** Maximum number of bytes of all spooled uploads together. It is also the limit for each upload. */
const maxSpooled = 1024 * 1024 * 1024;
const chunkBytes = 256 * 1024;

export type Spool = Awaited<ReturnType<typeof createSpool>>;

/** Creates a spool, which stores a form's file on disk until the fields after the file have arrived. */
export async function createSpool(directory: string) {
  // Removes files that a killed broker could not unlink.
  await rm(directory, { recursive: true, force: true });
  let spooledBytes = 0;
  return {
    /**
     * Stores all chunks and returns a stream that reads them. The file exists until the end of the request. Throws
     * payload_too_large or unavailable.
     */
    async store(chunks: AsyncIterable<Uint8Array>, over: AbortSignal): Promise<AsyncIterable<Uint8Array>> {
      const handle = await openUnlinkedFile(directory);
      let size = 0;
      addAbortListener(over, () => {
        spooledBytes -= size;
        handle.close().catch(() => undefined);
      });
      for await (const chunk of chunks) {
        if (size + chunk.length > maxSpooled) {
          const message = `a file that comes before the form field "path" may have at most ${maxSpooled} bytes: send "path" before the file, or in the query`;
          throw new AppError('payload_too_large', message, { limit: maxSpooled });
        }
        if (spooledBytes + chunk.length > maxSpooled) {
          const message =
            'files that come before the form field "path" share a disk quota of the broker, and other uploads have used it up: send "path" before the file, or in the query';
          throw new AppError('unavailable', message);
        }
        spooledBytes += chunk.length;
        size += chunk.length;
        await handle.writeFile(chunk);
      }
      return handle.createReadStream({ start: 0, highWaterMark: chunkBytes });
    },
  };
}

async function openUnlinkedFile(directory: string): Promise<FileHandle> {
  await mkdir(directory, { recursive: true, mode: 0o700 });
  const path = join(directory, newId('call'));
  const handle = await open(path, constants.O_RDWR | constants.O_CREAT | constants.O_EXCL, 0o600);
  // The file is unlinked while it is open, so that a crash leaves no file behind.
  await rm(path);
  return handle;
}
