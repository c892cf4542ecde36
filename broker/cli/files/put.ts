// Sends files, directories and standard input to a machine.
import { createHash, type Hash } from 'node:crypto';
import { createReadStream } from 'node:fs';
import { lstat, readdir, realpath, stat } from 'node:fs/promises';
import { resolve as absolute, join } from 'node:path';
import { StartError } from '../../../shared/errors.ts';
import type { Farhand } from '../../../shared/sdk/index.ts';
import { atPath } from '../../../shared/system-error-messages.ts';
import { assertInput } from '../prompt.ts';
import { Interrupted, orAborted } from '../stdout-stderr-and-exit.ts';
import { pack } from './local-tar.ts';
import { type Progress, tarBytes, withProgress } from './progress.ts';
import { assertDistinct, below, isDirectory, pathText, type RemotePath, resolve } from './remote-path.ts';

/** Parameters of an upload, named as in the API. */
interface Params {
  mode?: string;
  create_parents?: boolean;
  overwrite?: boolean;
}

interface Sender {
  client: Farhand;
  params: Params;
  signal: AbortSignal;
}

/**
 * Sends sources into `to` if that is a directory. Otherwise sends the only source to the path `to`. Returns the remote
 * paths.
 */
export async function putEach(
  client: Farhand,
  from: string[],
  to: string,
  params: Params,
  signal: AbortSignal,
): Promise<string[]> {
  const target = await orAborted(signal, resolve(client, to));
  const directory = await orAborted(signal, isDirectory(client, target));
  if (directory && from.includes('-'))
    throw new StartError(
      `${to} is a directory; add the name of the file in which to store standard input`,
      1,
    );
  const sources = from.map((one) => ({ path: absolute(one) }));
  assertDistinct(sources, to, directory);
  const paths: string[] = [];
  for (const one of from) {
    const sent = put(
      { client, params, signal },
      one,
      directory ? below(target, { path: absolute(one) }) : target,
    );
    const named = (error: unknown): never => {
      throw error instanceof Error && 'path' in error ? error : atPath(error, one);
    };
    paths.push(await sent.catch(named));
  }
  return paths;
}

async function put(sender: Sender, from: string, target: RemotePath): Promise<string> {
  if (from === '-') return putInput(sender, target);
  const stats = await stat(from);
  if (stats.isDirectory()) return putTree(sender, from, target);
  // A named pipe is refused, because opening it waits for a writer, and no signal ends this wait. Pipes in /dev/fd are
  // accepted, because they have a writer already.
  if (stats.isFIFO() && !/^\/(dev\/(fd\/|stdin$)|proc\/)/.test(absolute(from)))
    throw new StartError(
      `${from} is a named pipe; send its content as standard input, with "-" as the source`,
      1,
    );
  const mode = (stats.mode & 0o777).toString(8).padStart(4, '0');
  const bytes = createReadStream(from, { highWaterMark: 256 * 1024 });
  return putBytes(sender, bytes, { name: from, total: async () => stats.size }, { ...target, mode });
}

/** Sends standard input, and closes it when the request ends, because the input may never end by itself. */
async function putInput(sender: Sender, target: RemotePath): Promise<string> {
  assertInput();
  const leave = (): void => void process.stdin.destroy();
  sender.signal.addEventListener('abort', leave);
  try {
    return await putBytes(sender, process.stdin, { name: '-' }, target);
  } finally {
    sender.signal.removeEventListener('abort', leave);
    leave();
  }
}

async function putBytes(
  { client, params, signal }: Sender,
  chunks: AsyncIterable<Uint8Array>,
  progress: Progress,
  target: RemotePath & Params,
): Promise<string> {
  const hash = createHash('sha256');
  const sent = await send(
    chunks,
    progress,
    signal,
    (content) => client.files.put({ ...target, ...params, content }, { signal }),
    hash,
  );
  const path = pathText(sent);
  if (sent.sha256 === hash.digest('hex')) return path;
  throw new StartError(`${path} was changed in transit (its SHA-256 differs); send it again`, 1);
}

async function putTree(
  { client, params, signal }: Sender,
  from: string,
  target: RemotePath,
): Promise<string> {
  const { mode, ...rest } = params;
  const directory = await realpath(from);
  const tree = pack(directory, mode === undefined ? undefined : Number.parseInt(mode, 8));
  const progress = { name: from, total: () => bytesBelow(directory) };
  const sent = await send(tree, progress, signal, (content) =>
    client.files.extract({ ...target, ...rest, content }, { signal }),
  ).catch((error: unknown) => {
    // The machine unpacks files as they arrive. If the user interrupts the transfer, those files stay on the machine.
    // The message therefore says where they are.
    if (!(signal.reason instanceof Interrupted)) throw error;
    throw new Interrupted(
      signal.reason.exitCode,
      `the files sent so far stay in ${pathText(target)}; a new transfer begins with the first file`,
    );
  });
  return pathText(sent);
}

/**
 * Sends chunks as a body. If the chunks cannot be read, throws the read error, not the broker's error about the
 * incomplete body.
 */
async function send<T>(
  chunks: AsyncIterable<Uint8Array>,
  progress: Progress,
  signal: AbortSignal,
  call: (content: ReadableStream<Uint8Array>) => Promise<T>,
  hash?: Hash,
): Promise<T> {
  let failed: { error: unknown } | undefined;
  async function* body(): AsyncGenerator<Uint8Array<ArrayBuffer>> {
    try {
      for await (const chunk of withProgress(chunks, progress, signal)) {
        hash?.update(chunk);
        yield chunk;
      }
    } catch (error) {
      failed = { error };
      throw error;
    }
  }
  return call(ReadableStream.from(body())).catch((error: unknown) => {
    throw failed ? failed.error : error;
  });
}

/** Estimates the bytes of a directory's tar. */
async function bytesBelow(directory: string): Promise<number> {
  let total = tarBytes();
  for (const one of await readdir(directory, { recursive: true, withFileTypes: true })) {
    const path = join(one.parentPath, one.name);
    const stats = one.isFile() ? await lstat(path).catch(() => undefined) : undefined;
    total += tarBytes(stats?.size);
  }
  return total;
}
