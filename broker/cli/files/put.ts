// Files, directories and standard input to a machine: each there whole or not at all.
import { createHash } from 'node:crypto';
import { createReadStream } from 'node:fs';
import { lstat, readdir, realpath, stat } from 'node:fs/promises';
import { resolve as absolute, join } from 'node:path';
import { StartError } from '../../../shared/errors.ts';
import type { Farhand } from '../../../shared/sdk/index.ts';
import { atPath } from '../../../shared/system-errors.ts';
import { Interrupted } from '../stop.ts';
import { packed } from './pack.ts';
import { demandApart, isDirectory, resolve, type Target, under } from './place.ts';
import { shownProgress, tarBytes } from './progress.ts';

/** As the API has them. */
interface Wish {
  mode?: string;
  create_parents?: boolean;
  overwrite?: boolean;
}

const chunkBytes = 256 * 1024;

/** Sends all of them; into `to` where that is a directory, else the only one under that name. */
export async function putEach(
  client: Farhand,
  from: string[],
  to: string,
  wish: Wish,
  signal: AbortSignal,
): Promise<string[]> {
  const target = await resolve(client, to);
  const directory = await isDirectory(client, target);
  if (directory && from.includes('-'))
    throw new StartError(`${to} is a directory: say a name for what comes in`, 1);
  demandApart(
    from.map((one) => absolute(one)),
    to,
    directory,
  );
  const sender = { client, signal };
  const paths: string[] = [];
  const whither = (one: string): Target => (directory ? under(target, absolute(one)) : target);
  for (const one of from) {
    const sent = put(sender, one, whither(one), wish).catch((error: unknown) => {
      throw error instanceof Error && 'path' in error ? error : atPath(error, one);
    });
    paths.push(await sent);
  }
  return paths;
}

interface Sender {
  client: Farhand;
  signal: AbortSignal;
}

async function put(sender: Sender, from: string, target: Target, wish: Wish): Promise<string> {
  if (from === '-') return putInput(sender, target, wish);
  const stats = await stat(from);
  if (stats.isDirectory()) return sendTree(sender, target, from, wish);
  const mode = wish.mode ?? (stats.mode & 0o777).toString(8).padStart(4, '0');
  const bytes = createReadStream(from, { highWaterMark: chunkBytes });
  const total = async (): Promise<number> => stats.size;
  const watched = { name: from, total, signal: sender.signal };
  return send(sender, target, shownProgress(bytes, watched), { ...wish, mode });
}

/** Somebody may type it, or nothing comes: it is left as soon as nobody wants it. */
async function putInput(sender: Sender, to: Target, wish: Wish): Promise<string> {
  const leave = (): void => void process.stdin.destroy();
  sender.signal.addEventListener('abort', leave);
  try {
    return await send(sender, to, shownProgress(process.stdin, { name: '-', signal: sender.signal }), wish);
  } finally {
    sender.signal.removeEventListener('abort', leave);
    leave();
  }
}

async function send(
  { client, signal }: Sender,
  target: Target,
  bytes: AsyncIterable<Uint8Array<ArrayBuffer>>,
  wish: Wish,
): Promise<string> {
  const hash = createHash('sha256');
  const sent = await told(hashed(bytes, hash), (content) =>
    client.files.put({ ...target, ...wish, content }, { signal }),
  );
  if (sent.sha256 !== hash.digest('hex'))
    throw new StartError(`${sent.path} has not become what was sent`, 1);
  return sent.path;
}

async function* hashed(
  chunks: AsyncIterable<Uint8Array<ArrayBuffer>>,
  hash: ReturnType<typeof createHash>,
): AsyncGenerator<Uint8Array<ArrayBuffer>> {
  for await (const chunk of chunks) {
    hash.update(chunk);
    yield chunk;
  }
}

async function sendTree(
  { client, signal }: Sender,
  target: Target,
  from: string,
  wish: Wish,
): Promise<string> {
  const { mode, ...rest } = wish;
  const directory = await realpath(from);
  const tree = packed(directory, mode === undefined ? undefined : Number.parseInt(mode, 8));
  const watched = { name: from, total: () => bytesBelow(directory), signal };
  const sent = await told(shownProgress(tree, watched), (content) =>
    client.files.extract({ ...target, ...rest, content }, { signal }),
  ).catch((error: unknown) => {
    if (!(signal.reason instanceof Interrupted)) throw error;
    // It is extracted as it comes.
    throw new Interrupted(
      signal.reason.exitCode,
      `${target.path} holds what had arrived; put it again for the rest`,
    );
  });
  return sent.path;
}

/** Of the tar of a directory, about. */
async function bytesBelow(directory: string): Promise<number> {
  let total = tarBytes();
  for (const one of await readdir(directory, { recursive: true, withFileTypes: true })) {
    const stats = one.isFile()
      ? await lstat(join(one.parentPath, one.name)).catch(() => undefined)
      : undefined;
    total += tarBytes(stats?.size);
  }
  return total;
}

/** What cannot be read here is told as that: the broker only sees a body that ends too early. */
async function told<T>(
  chunks: AsyncIterable<Uint8Array<ArrayBuffer>>,
  sending: (content: ReadableStream<Uint8Array>) => Promise<T>,
): Promise<T> {
  let failed: { error: unknown } | undefined;
  async function* read(): AsyncGenerator<Uint8Array<ArrayBuffer>> {
    try {
      yield* chunks;
    } catch (error) {
      failed = { error };
      throw error;
    }
  }
  return sending(ReadableStream.from(read())).catch((error: unknown) => {
    throw failed ? failed.error : error;
  });
}
