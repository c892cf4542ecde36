// Where a form's file waits when what it is for is said after it: nameless files, so that nothing can be left behind.
import { constants } from 'node:fs';
import { type FileHandle, mkdir, open, rm } from 'node:fs/promises';
import { join } from 'node:path';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';
import { whenOver } from './body.ts';

/** Bytes that may wait, all uploads together. */
const limit = 1024 * 1024 * 1024;
const chunkBytes = 256 * 1024;

/** Files in a directory of its own, made when first needed. */
export class Spool {
  readonly #directory: string;
  #held = 0;

  private constructor(directory: string) {
    this.#directory = directory;
  }

  /** What a killed broker may have left goes now. */
  static async open(directory: string): Promise<Spool> {
    await rm(directory, { recursive: true, force: true });
    return new Spool(directory);
  }

  /** Takes all of it in, and keeps it until the request is over. Throws payload_too_large or unavailable. */
  async keep(chunks: AsyncIterable<Uint8Array>, over: AbortSignal): Promise<AsyncGenerator<Uint8Array>> {
    const handle = await openNameless(this.#directory);
    let size = 0;
    whenOver(over, () => {
      this.#held -= size;
      handle.close().catch(() => undefined);
    });
    for await (const chunk of chunks) {
      if (size + chunk.length > limit) {
        const message = `a file whose path comes after it may have ${limit} bytes: send path first, or in the query`;
        throw new AppError('payload_too_large', message, { limit });
      }
      if (this.#held + chunk.length > limit)
        throw new AppError(
          'unavailable',
          'too many uploads wait: send path before the file, or in the query',
        );
      this.#held += chunk.length;
      size += chunk.length;
      await handle.writeFile(chunk);
    }
    return read(handle, size);
  }
}

async function openNameless(directory: string): Promise<FileHandle> {
  await mkdir(directory, { recursive: true, mode: 0o700 });
  const path = join(directory, newId('call'));
  const handle = await open(path, constants.O_RDWR | constants.O_CREAT | constants.O_EXCL, 0o600);
  await rm(path);
  return handle;
}

async function* read(handle: FileHandle, size: number): AsyncGenerator<Uint8Array> {
  for (let at = 0; at < size; ) {
    const buffer = Buffer.allocUnsafeSlow(Math.min(chunkBytes, size - at));
    const { bytesRead } = await handle.read(buffer, 0, buffer.length, at);
    if (bytesRead === 0) throw new Error('the spooled file became shorter');
    at += bytesRead;
    yield buffer.subarray(0, bytesRead);
  }
}
