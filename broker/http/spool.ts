// Where a form's file waits when what it is for is said after it: nameless files, so that nothing can be left behind.
import { constants } from 'node:fs';
import { type FileHandle, mkdir, open, rm } from 'node:fs/promises';
import { join } from 'node:path';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';

export type Spool = Awaited<ReturnType<typeof openSpool>>;

/** Bytes that may wait, all uploads together. */
const maxBytes = 1024 * 1024 * 1024;
const chunkBytes = 256 * 1024;

/** A spool in a directory of its own, made when first needed; what a killed broker may have left goes now. */
export async function openSpool(directory: string) {
  await rm(directory, { recursive: true, force: true });
  let held = 0;
  return {
    /** Takes all of it in. Throws payload_too_large or unavailable when it does not fit. */
    async keep(chunks: AsyncIterable<Uint8Array>) {
      const handle = await openNameless(directory);
      let size = 0;
      const close = (): void => {
        held -= size;
        size = 0;
        handle.close().catch(() => undefined);
      };
      try {
        for await (const chunk of chunks) {
          refuseMore(size + chunk.length, held + chunk.length);
          held += chunk.length;
          size += chunk.length;
          await handle.writeFile(chunk);
        }
        return { chunks: () => read(handle, size), close };
      } catch (error) {
        close();
        throw error;
      }
    },
  };
}

/** `size`: of one file; `held`: of all. */
function refuseMore(size: number, held: number): void {
  const limit = maxBytes;
  const message = `a file whose path comes after it may have ${limit} bytes: send path first, or in the query`;
  if (size > limit) throw new AppError('payload_too_large', message, { limit });
  if (held > limit)
    throw new AppError('unavailable', 'too many uploads wait: send path before the file, or in the query');
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
