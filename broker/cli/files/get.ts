// Files and directories from a machine: each here whole or not at all.
import { randomBytes } from 'node:crypto';
import { lstat, open, rename, rm, stat } from 'node:fs/promises';
import { join } from 'node:path';
import { StartError } from '../../../shared/errors.ts';
import type { Farhand } from '../../../shared/sdk/index.ts';
import { atPath } from '../../../shared/system-errors.ts';
import { write } from '../told.ts';
import { demandApart, nameOf, resolve, type Target } from './place.ts';
import { shownProgress, tarBytes } from './progress.ts';
import { unpackNew } from './unpack.ts';

/** Fetches all of them; into `to` where that is a directory, else the only one under that name; - is standard output. */
export async function getEach(
  client: Farhand,
  from: string[],
  to: string,
  overwrite: boolean,
  signal: AbortSignal,
): Promise<string[]> {
  const places: Target[] = [];
  for (const one of from) places.push(await resolve(client, one));
  const directory = to !== '-' && (await isDirectory(to));
  if (to !== '-')
    demandApart(
      places.map(({ path }) => path),
      to,
      directory,
    );
  const paths: string[] = [];
  for (const place of places) {
    const target = directory ? join(to, nameOf(place.path)) : to;
    if (!overwrite && target !== '-' && (await lstat(target).catch(() => undefined)))
      throw new StartError(`${target} exists already; where it may be replaced, say --overwrite`, 1);
    const got = get(client, place, target, signal).catch((error: unknown) => {
      throw atPath(error, target);
    });
    paths.push(await got);
  }
  return paths;
}

const isDirectory = (path: string): Promise<boolean> =>
  stat(path).then(
    (there) => there.isDirectory(),
    () => false,
  );

async function get(client: Farhand, place: Target, target: string, signal: AbortSignal): Promise<string> {
  const { type, mode, size } = await client.files.stat(place);
  const directory = type === 'directory';
  const archive = directory ? ({ archive: 'tar' } as const) : {};
  const { body } = await client.files.download({ ...place, ...archive }, { signal });
  const total = async (): Promise<number | undefined> =>
    directory ? await bytesBelow(client, place, signal) : size;
  const bytes = body ? shownProgress(body, { name: place.path, total, signal }) : nothing();
  if (target === '-') for await (const chunk of bytes) await write('stdout', chunk);
  else if (directory) await unpackNew(asBuffers(bytes), target);
  else await keep(bytes, target, Number.parseInt(mode, 8));
  return target;
}

/** Of the tar of a directory, about; undefined where it has more entries than one search tells. */
async function bytesBelow(client: Farhand, place: Target, signal: AbortSignal): Promise<number | undefined> {
  let total = tarBytes();
  const all = { ...place, name: '*', hidden: true, limit: 10_000 };
  for await (const found of await client.files.search(all, { signal })) {
    if ('end' in found) return found.end.truncated ? undefined : total;
    const { size, link_target } = found.entry;
    total += tarBytes(link_target === undefined ? size : 0);
  }
  return undefined;
}

async function* nothing(): AsyncGenerator<Uint8Array> {}

async function* asBuffers(chunks: AsyncIterable<Uint8Array>): AsyncGenerator<Buffer> {
  for await (const chunk of chunks) yield Buffer.from(chunk.buffer, chunk.byteOffset, chunk.length);
}

/** Beside its target first; a fetch that fails changes nothing. */
async function keep(bytes: AsyncIterable<Uint8Array>, target: string, mode: number): Promise<void> {
  const there = await lstat(target).catch(() => undefined);
  if (there?.isDirectory()) throw new StartError(`${target} is a directory`, 1);
  // What is no plain file, such as /dev/null or a pipe, is written as it is.
  if (there && !there.isFile() && !there.isSymbolicLink()) return pour(bytes, target, 'w');
  // The name of its own is as long as a name may be already.
  const draft = join(target, '..', `.farhand-${randomBytes(6).toString('hex')}`);
  try {
    await pour(bytes, draft, 'wx', mode & 0o777);
    await rename(draft, target);
  } catch (error) {
    await rm(draft, { force: true });
    throw error;
  }
}

async function pour(
  bytes: AsyncIterable<Uint8Array>,
  file: string,
  flags: string,
  mode = 0o666,
): Promise<void> {
  const handle = await open(file, flags, mode);
  try {
    for await (const chunk of bytes) await handle.writeFile(chunk);
  } finally {
    await handle.close();
  }
}
