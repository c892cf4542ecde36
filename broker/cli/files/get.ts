// Fetches files and directories from machines, each completely or not at all.
import { randomBytes } from 'node:crypto';
import { link, lstat, rename, rm, stat } from 'node:fs/promises';
import { join } from 'node:path';
import { ignoring, StartError } from '../../../shared/errors.ts';
import type { Farhand } from '../../../shared/sdk/index.ts';
import { atPath } from '../../../shared/system-error-messages.ts';
import { copyOut, orAborted } from '../stdout-stderr-and-exit.ts';
import { extractNew, writeChunks } from './local-tar.ts';
import { tarBytes, withProgress } from './progress.ts';
import { assertDistinct, localNameOf, pathText, type RemotePath, resolve } from './remote-path.ts';

/**
 * Fetches sources into the directory `to`, or one source as the file `to` ("-": standard output). Returns the
 * local paths.
 */
export async function getEach(
  client: Farhand,
  from: string[],
  to: string,
  overwrite: boolean,
  signal: AbortSignal,
): Promise<string[]> {
  const sources = await orAborted(
    signal,
    Array.fromAsync(from, (one) => resolve(client, one)),
  );
  const isDirectory = to !== '-' && (await stat(to).catch(() => undefined))?.isDirectory() === true;
  if (to !== '-') assertDistinct(sources, to, isDirectory);
  const paths: string[] = [];
  for (const source of sources) {
    const target = isDirectory ? join(to, localNameOf(source)) : to;
    if (!overwrite && target !== '-' && (await lstat(target).catch(() => undefined)))
      throw new StartError(`${target} already exists; add --overwrite to replace it`, 1);
    await get(client, source, target, overwrite, signal).catch((error: unknown) => {
      throw atPath(error, target);
    });
    paths.push(target);
  }
  return paths;
}

async function get(
  client: Farhand,
  source: RemotePath,
  target: string,
  overwrite: boolean,
  signal: AbortSignal,
): Promise<void> {
  const { type, mode, size } = await client.files.stat(source, { signal });
  const isDirectory = type === 'directory';
  const archive = isDirectory ? ({ archive: 'tar' } as const) : {};
  const { body } = await client.files.download({ ...source, ...archive }, { signal });
  const total = async () => (isDirectory ? await bytesBelow(client, source, signal) : size);
  const bytes = withProgress(body ?? ReadableStream.from([]), { name: pathText(source), total }, signal);
  if (target === '-') await orAborted(signal, copyOut(bytes));
  else if (isDirectory) await extractNew(asBuffers(bytes), target);
  else await writeWhole(target, bytes, Number.parseInt(mode, 8), overwrite, signal);
}

/**
 * Estimates the size of a directory's tar archive, in bytes, by a search on the machine. Returns undefined if the
 * directory has more than 10,000 entries, the limit of a search.
 */
async function bytesBelow(
  client: Farhand,
  place: RemotePath,
  signal: AbortSignal,
): Promise<number | undefined> {
  let total = tarBytes();
  const all = { ...place, name: '*', hidden: true, limit: 10_000 };
  for await (const found of await client.files.search(all, { signal })) {
    if ('end' in found) return found.end.truncated ? undefined : total;
    const { size, link_target } = found.entry;
    total += tarBytes(link_target === undefined ? size : 0);
  }
  return undefined;
}

async function* asBuffers(chunks: AsyncIterable<Uint8Array>): AsyncGenerator<Buffer> {
  for await (const chunk of chunks) yield Buffer.from(chunk.buffer, chunk.byteOffset, chunk.length);
}

/** Writes a temporary file beside the target and renames it. A fetch that fails changes nothing. */
async function writeWhole(
  target: string,
  bytes: AsyncIterable<Uint8Array>,
  mode: number,
  overwrite: boolean,
  signal: AbortSignal,
): Promise<void> {
  const existing = await stat(target).catch(() => undefined);
  if (existing?.isDirectory()) throw new StartError(`${target} is a directory; choose the name of a file`, 1);
  if (target.endsWith('/'))
    throw new StartError(`${target} does not exist; create this directory, or leave out the slash`, 1);
  // A device or pipe, such as /dev/null, cannot be replaced, so it is written directly. The target may be a link to it,
  // such as /dev/stdout. Opening a pipe waits for a reader, which may never come.
  if (existing && !existing.isFile()) return orAborted(signal, writeChunks(target, bytes, 'w'));
  // The temporary name does not contain the target's name: a longer name could exceed the limit of the file system.
  const draft = join(target, '..', `.farhand-${randomBytes(6).toString('hex')}`);
  try {
    await writeChunks(draft, bytes, 'wx', mode & 0o777);
    // Another program may have created the target during the transfer.
    if (overwrite || !(await linkNew(draft, target))) await rename(draft, target);
  } finally {
    await rm(draft, { force: true });
  }
}

/** Gives a file a second name. Fails if the name is taken, and returns false if the file system has no hard links. */
async function linkNew(from: string, to: string): Promise<boolean> {
  const linked = await link(from, to)
    .then(() => true)
    .catch(ignoring('EPERM', 'EOPNOTSUPP', 'ENOTSUP'));
  return linked === true;
}
