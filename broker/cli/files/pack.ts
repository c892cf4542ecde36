// A local directory as a tar, read while it is sent: files, directories and symlinks as such.
import { lstat, open, readdir, readlink } from 'node:fs/promises';
import { AppError, StartError } from '../../../shared/errors.ts';
import {
  assertInside,
  type Bytes,
  bytes,
  encodeHeader,
  endOfArchive,
  fromText,
  paddingOf,
  shown,
} from '../../../shared/tar/index.ts';
import { clean, hint } from '../output.ts';

const chunkBytes = 256 * 1024;

/** With a mode every file has that one. */
export async function* packed(directory: string, mode?: number): AsyncGenerator<Uint8Array> {
  yield* below(fromText(directory), './', mode);
  yield endOfArchive;
}

async function* below(at: Bytes, name: Bytes, mode?: number): AsyncGenerator<Uint8Array> {
  const stats = await lstat(bytes(at), { bigint: true });
  const about = {
    name,
    mode: Number(stats.mode) & 0o777,
    uid: 0,
    gid: 0,
    owner: '',
    group: '',
    size: 0,
    mtimeNs: stats.mtimeNs,
  };
  if (stats.isDirectory()) {
    yield encodeHeader({ ...about, kind: 'directory' });
    const inside = await readdir(bytes(at), { encoding: 'buffer' });
    for (const child of inside.map((one) => one.toString('latin1')).sort()) {
      yield* below(`${at}/${child}`, name === './' ? child : `${name.replace(/\/$/, '')}/${child}`, mode);
    }
  } else if (stats.isSymbolicLink()) {
    const target = (await readlink(bytes(at), { encoding: 'buffer' })).toString('latin1');
    if (leadsInside(name, target)) yield encodeHeader({ ...about, kind: 'symlink', target });
  } else if (stats.isFile()) yield* contents(at, { ...about, mode: mode ?? about.mode });
  else hint(`farhand: ${clean(shown(at))} is no file, directory or symlink: left out`);
}

/** A machine takes no archive with links that lead out of it. */
function leadsInside(name: Bytes, target: Bytes): boolean {
  try {
    assertInside(name, target);
    return true;
  } catch (error) {
    if (!(error instanceof AppError)) throw error;
    hint(`farhand: ${clean(error.message)}: left out`);
    return false;
  }
}

type About = Omit<Parameters<typeof encodeHeader>[0], 'kind'>;

async function* contents(at: Bytes, about: About): AsyncGenerator<Uint8Array> {
  const handle = await open(bytes(at));
  try {
    const { size } = await handle.stat();
    yield encodeHeader({ ...about, kind: 'file', size });
    for (let left = size; left > 0; ) {
      // A new one each time: whoever sends it may still hold the last.
      const chunk = Buffer.allocUnsafe(Math.min(left, chunkBytes));
      const { bytesRead } = await handle.read(chunk, 0, chunk.length, size - left);
      if (bytesRead === 0)
        throw new StartError(`${clean(shown(at))} changed while it was read: try again`, 1);
      left -= bytesRead;
      yield chunk.subarray(0, bytesRead);
    }
    if (paddingOf(size) > 0) yield Buffer.alloc(paddingOf(size));
  } finally {
    await handle.close();
  }
}
