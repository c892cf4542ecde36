// Bodies that are not JSON: handed to the noun as they come, never kept. A form's file waits on disk only where the
// fields that say what it is for come after it.
import type { IncomingMessage } from 'node:http';
import type { Readable } from 'node:stream';
import { Busboy, type BusboyInstance } from '@fastify/busboy';
import type { Content } from '../../shared/api/index.ts';
import { AppError } from '../../shared/errors.ts';
import { pulled } from '../../shared/pace.ts';
import { whenOver } from './body.ts';
import type { Spool } from './spool.ts';

/** A form under way: its file's bytes, and the fields so far. */
export type Incoming = Content<Record<string, string>>;

const limits = {
  fieldNameSize: 100,
  fieldSize: 64 * 1024,
  fields: 20,
  parts: 22,
  headerPairs: 20,
  headerSize: 16 * 1024,
};

const cutOff = (): AppError =>
  new AppError('invalid_request', 'the body was cut off before its end; nothing was changed');

/** A plain body, for as long as its request; `begin` is called when it is first read. */
export async function* bytesOf(
  request: IncomingMessage,
  over: AbortSignal,
  begin: () => void,
): AsyncGenerator<Uint8Array> {
  begin();
  yield* pulled<Uint8Array>(request, over);
  if (!request.complete) throw cutOff();
}

/**
 * A form with one part called file, for as long as its request. It resolves when that part begins and the fields so far
 * are `sufficient`; else the file is spooled and it resolves at the form's end.
 */
export async function openForm(
  request: IncomingMessage,
  spool: Spool,
  sufficient: (fields: Record<string, string>) => boolean,
  over: AbortSignal,
): Promise<Incoming> {
  const form = new Form(request);
  whenOver(over, () => form.stop(cutOff()));
  const chunks = form.chunks(await form.file);
  const fields = () => form.fields();
  return { chunks: sufficient(fields()) ? chunks : await spool.keep(chunks, over), fields };
}

class Form {
  readonly #request: IncomingMessage;
  readonly #parser: BusboyInstance;
  readonly #fields = new Map<string, string>();
  readonly #file = Promise.withResolvers<Readable>();
  readonly #finished = Promise.withResolvers<void>();
  #part: Readable | undefined;
  #reason: unknown;

  constructor(request: IncomingMessage) {
    this.#request = request;
    const parser = parserOf(request);
    this.#parser = parser;
    this.#finished.promise.then(
      () => this.#file.reject(invalid('file', 'is missing: send the content as a part called file')),
      this.#file.reject,
    );
    // Without a reader it must not end the process.
    this.#file.promise.catch(() => undefined);
    parser.once('finish', this.#finished.resolve);
    parser.on('file', (name, part) => this.#takeFile(name, part));
    parser.on('field', (name, value, _nameTruncated, truncated) => this.#takeField(name, value, truncated));
    for (const limit of ['partsLimit', 'fieldsLimit', 'filesLimit'] as const) {
      parser.once(limit, () => this.stop(invalid('file', 'must be the only file, with at most 20 fields')));
    }
    parser.on('error', (error) => this.stop(malformed(error)));
    request.once('close', () => {
      if (!request.complete) this.stop(cutOff());
    });
    request.pipe(parser);
  }

  /** The content, once its part begins. */
  get file(): Promise<Readable> {
    return this.#file.promise;
  }

  fields(): Record<string, string> {
    return Object.fromEntries(this.#fields);
  }

  /** Nothing more is taken in; whoever waits is told. */
  stop(reason: unknown): void {
    if (this.#reason !== undefined) return;
    this.#reason = reason;
    this.#request.unpipe(this.#parser);
    this.#part?.destroy(reason instanceof Error ? reason : cutOff());
    this.#finished.reject(reason);
  }

  async *chunks(file: Readable): AsyncGenerator<Uint8Array> {
    try {
      for await (const chunk of file) yield chunk;
      // The fields that follow, and the closing boundary: without it the file may be a part of one.
      await this.#finished.promise;
    } catch (error) {
      throw this.#reason ?? malformed(error);
    } finally {
      this.stop(cutOff());
    }
  }

  #takeFile(name: string | undefined, part: Readable): void {
    // What a stopped parser still says about a part is of no interest.
    part.on('error', () => undefined);
    if (name === 'file') {
      this.#part = part;
      this.#file.resolve(part);
    } else {
      part.resume();
      this.stop(invalid(name ?? '', 'is no part of this form: the content is called file'));
    }
  }

  #takeField(name: string | undefined, value: string, truncated: boolean): void {
    if (name === undefined) this.stop(invalid('', 'a field needs a name'));
    else if (truncated) this.stop(invalid(name, 'is too long'));
    // What the parser makes of other bytes.
    else if (value.includes('\ufffd')) this.stop(invalid(name, 'must be UTF-8'));
    else if (this.#fields.has(name)) this.stop(invalid(name, 'is given twice'));
    else this.#fields.set(name, value);
  }
}

function parserOf({ headers }: IncomingMessage): BusboyInstance {
  const type = headers['content-type'] ?? '';
  if (!/^multipart\/form-data\s*;/i.test(type)) {
    throw new AppError('invalid_request', 'send a form: Content-Type: multipart/form-data with a boundary');
  }
  try {
    return new Busboy({
      headers: { ...headers, 'content-type': type },
      limits: { ...limits, files: 1 },
      // A file of a form is what is called so, whether it has a file name or not.
      isPartAFile: (name, _type, fileName) => name === 'file' || fileName !== undefined,
    });
  } catch (error) {
    throw malformed(error);
  }
}

function invalid(path: string, message: string): AppError {
  return new AppError('validation_failed', `form: ${path}: ${message}`, { issues: [{ path, message }] });
}

function malformed(error: unknown): AppError {
  if (error instanceof AppError) return error;
  return new AppError('invalid_request', 'the form is malformed or was cut off; nothing was changed');
}
