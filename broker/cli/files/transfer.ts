// Files and directories between here and a machine: whole or not at all, on either side.
import { createHash, randomBytes } from 'node:crypto';
import { createReadStream } from 'node:fs';
import { lstat, open, rename, rm, stat } from 'node:fs/promises';
import { resolve as absolute, basename, join, posix } from 'node:path';
import { StartError } from '../../../shared/errors.ts';
import { type Farhand, FarhandError } from '../../../shared/sdk/index.ts';
import { write } from '../exec/told.ts';
import { given } from '../flags.ts';
import { packed } from './pack.ts';
import { nameOf, resolve } from './place.ts';
import { shownProgress } from './progress.ts';
import { unpackNew } from './unpack.ts';

export interface PutSettings {
  mode?: string;
  parents?: boolean;
  signal: AbortSignal;
}

/** Sends one file, directory or standard input; into `to` where that is a directory, else under that name. */
export async function put(client: Farhand, from: string, to: string, settings: PutSettings): Promise<string> {
  const { machine_id, path } = await resolve(client, to);
  const inside = await isDirectory(client, machine_id, path);
  if (from === '-') {
    if (inside) throw new StartError(`${to} is a directory: say a name for what comes in`, 1);
    return send(client, { machine_id, path }, process.stdin, '-', undefined, settings);
  }
  const stats = await stat(from);
  const target = inside ? posix.join(path, nameOf(absolute(from))) : path;
  if (stats.isDirectory()) return sendTree(client, { machine_id, path: target }, from, settings);
  const mode = settings.mode ?? (stats.mode & 0o777).toString(8).padStart(4, '0');
  const bytes = createReadStream(from, { highWaterMark: 256 * 1024 });
  return send(client, { machine_id, path: target }, bytes, from, stats.size, { ...settings, mode });
}

interface Target {
  machine_id: string;
  path: string;
}

async function isDirectory(client: Farhand, machine_id: string, path: string): Promise<boolean> {
  try {
    return (await client.files.stat({ machine_id, path })).type === 'directory';
  } catch (error) {
    if (error instanceof FarhandError && error.code === 'file_not_found') return false;
    throw error;
  }
}

async function send(
  client: Farhand,
  target: Target,
  bytes: AsyncIterable<Uint8Array>,
  name: string,
  size: number | undefined,
  { mode, parents, signal }: PutSettings,
): Promise<string> {
  const hash = createHash('sha256');
  const content = ReadableStream.from(hashed(shownProgress(bytes, name, size), hash));
  const wish = given({ mode, create_parents: parents });
  const sent = await client.files.put({ ...target, ...wish, content }, { signal });
  if (sent.sha256 !== hash.digest('hex'))
    throw new StartError(`${sent.path} has not become what was sent`, 1);
  return sent.path;
}

async function* hashed(chunks: AsyncIterable<Uint8Array>, hash: ReturnType<typeof createHash>) {
  for await (const chunk of chunks) {
    hash.update(chunk);
    yield chunk;
  }
}

async function sendTree(
  client: Farhand,
  target: Target,
  from: string,
  { parents, signal }: PutSettings,
): Promise<string> {
  const content = ReadableStream.from(shownProgress(packed(from), from));
  const wish = given({ create_parents: parents });
  return (await client.files.extract({ ...target, ...wish, content }, { signal })).path;
}

/** Fetches one file or directory; into `to` where that is a directory, else under that name; - is standard output. */
export async function get(client: Farhand, from: string, to: string, signal: AbortSignal): Promise<string> {
  const { machine_id, path } = await resolve(client, from);
  const { type, mode, size } = await client.files.stat({ machine_id, path });
  const directory = type === 'directory';
  const archive = directory ? ({ archive: 'tar' } as const) : {};
  // Before anything is asked for.
  const target = to === '-' ? '-' : await targetOf(to, path);
  const { body } = await client.files.download({ machine_id, path, ...archive }, { signal });
  const bytes = body ? shownProgress(body, path, directory ? undefined : size) : nothing();
  if (target === '-') for await (const chunk of bytes) await write('stdout', chunk);
  else if (directory) await unpackNew(asBuffers(bytes), target);
  else await keep(bytes, target, Number.parseInt(mode, 8));
  return target;
}

async function* nothing(): AsyncGenerator<Uint8Array> {}

async function* asBuffers(chunks: AsyncIterable<Uint8Array>): AsyncGenerator<Buffer> {
  for await (const chunk of chunks) yield Buffer.from(chunk.buffer, chunk.byteOffset, chunk.length);
}

async function targetOf(to: string, path: string): Promise<string> {
  const there = await stat(to).catch(() => undefined);
  return there?.isDirectory() ? join(to, nameOf(path)) : to;
}

/** Beside its target first; a fetch that fails changes nothing. */
async function keep(bytes: AsyncIterable<Uint8Array>, target: string, mode: number): Promise<void> {
  const there = await lstat(target).catch(() => undefined);
  if (there?.isDirectory()) throw new StartError(`${target} is a directory`, 1);
  // What is no plain file, such as /dev/null or a pipe, is written as it is.
  if (there && !there.isFile() && !there.isSymbolicLink()) return pour(bytes, target, 'w');
  const draft = join(target, '..', `.${basename(target).slice(0, 200)}.${randomBytes(6).toString('hex')}`);
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
