// Reads a small file from a directory that another user may own. That user could put a link or a FIFO in place of the
// file, so the functions do not follow a link and do not block.
import { constants } from 'node:fs';
import { open } from 'node:fs/promises';
import { errnoOf, StartError } from './errors.ts';

export interface FileContent {
  text: string;
  mode: number;
  uid: number;
  gid: number;
}

const { O_NOCTTY, O_NOFOLLOW, O_NONBLOCK, O_RDONLY } = constants;
const mostBytes = 64 * 1024;

/**
 * Reads a file. Returns undefined if it is missing. Throws StartError unless it is a regular file of at most 64 KiB.
 */
export async function readRegularFile(file: string): Promise<FileContent | undefined> {
  try {
    // Without O_NONBLOCK, open(2) blocks on a FIFO until a process opens it for writing (fifo(7)).
    await using handle = await open(file, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
    const found = await handle.stat();
    if (!found.isFile()) throw notRegular(file);
    const { buffer, bytesRead } = await handle.read({ buffer: Buffer.alloc(mostBytes + 1) });
    if (bytesRead > mostBytes)
      throw new StartError(`${file} is larger than ${mostBytes} bytes; remove it, then try again`);
    const { mode, uid, gid } = found;
    return { text: buffer.toString('utf8', 0, bytesRead), mode: mode & 0o7777, uid, gid };
  } catch (error) {
    const code = errnoOf(error) ?? '';
    if (code === 'ENOENT') return undefined;
    // open(2) fails with ELOOP for a link, because of O_NOFOLLOW, and with ENXIO for a socket.
    throw ['ELOOP', 'ENXIO'].includes(code) ? notRegular(file) : error;
  }
}

function notRegular(file: string): StartError {
  return new StartError(`${file} is not a regular file; remove it, then try again`);
}

/** Parses a JSON file. Returns undefined if it is missing, null if it is not JSON. Throws as readRegularFile does. */
export async function readRegularJson(file: string): Promise<unknown> {
  const content = await readRegularFile(file);
  if (!content) return undefined;
  try {
    return JSON.parse(content.text);
  } catch {
    return null;
  }
}
