// Unpacks a tar or tar.gz into a directory. Nothing lands outside it; as a whole it is there complete or not at all.
import { createHash } from 'node:crypto';
import { type BigIntStats, constants } from 'node:fs';
import { type FileHandle, mkdir, open, opendir, rmdir } from 'node:fs/promises';
import { posix } from 'node:path';
import type { WriteArchiveOpen__Output } from '../../../proto/types/farhand/agent/v1/WriteArchiveOpen.ts';
import type { WriteArchiveRequest__Output } from '../../../proto/types/farhand/agent/v1/WriteArchiveRequest.ts';
import type { WriteArchiveResponse } from '../../../proto/types/farhand/agent/v1/WriteArchiveResponse.ts';
import { AppError } from '../../../shared/errors.ts';
import type { Logger } from '../../../shared/logger.ts';
import type { AgentMethods } from '../../../shared/rpc.ts';
import { readTar } from '../../../shared/tar/index.ts';
import { failingAs, unlessAborted } from '../abort.ts';
import type { Beneath, Entry } from '../beneath/index.ts';
import { type Bytes, bytes, fault, pathOnly, shown, targetOf } from '../beneath/path.ts';
import { describe } from '../describe.ts';
import { lookAt } from '../draft/index.ts';
import { place, syncDirectory } from '../draft/place.ts';
import { SideRoom } from '../draft/sideroom.ts';
import type { Temporary } from '../draft/temporary.ts';
import type { AskPeople } from '../people.ts';
import { Ground } from './ground.ts';
import { Landing } from './landing.ts';

const { O_DIRECTORY, O_NOFOLLOW } = constants;

type Messages = AsyncIterator<WriteArchiveRequest__Output>;

/** What has been unpacked, and the directory it is in. */
interface Filled {
  summary: NonNullable<WriteArchiveResponse['summary']>;
  stats: BigIntStats;
}

export interface Unpacking {
  beneath: Beneath;
  temporary: Temporary;
  people: AskPeople;
  home: Bytes;
  log: Logger;
}

/** One request: where it goes, and how it is told. */
interface Job extends Unpacking {
  entry: Entry;
  path: Bytes;
  whole: boolean;
  overwrite: boolean;
  signal: AbortSignal;
  upload: Upload;
}

export function openUnpacker(unpacking: Unpacking): AgentMethods['writeArchive'] {
  return async (request, { signal }) => {
    const messages = request[Symbol.asyncIterator]();
    try {
      const upload = new Upload(messages, signal);
      const open = await upload.open();
      const { path } = targetOf(open.path, unpacking.home);
      return await failingAs(path, signal, () => unpack(unpacking, open, path, upload, signal));
    } finally {
      // Nobody reads on; a request that hangs must not hold the answer.
      messages.return?.().catch(() => undefined);
    }
  };
}

async function unpack(
  unpacking: Unpacking,
  { whole, overwrite, create_parents }: WriteArchiveOpen__Output,
  path: Bytes,
  upload: Upload,
  signal: AbortSignal,
): Promise<WriteArchiveResponse> {
  const entry = await unpacking.beneath.entry(path, create_parents);
  let landed = false;
  try {
    const job = { ...unpacking, entry, path, whole, overwrite, upload, signal };
    const answer = await (whole ? unpackWhole(job) : unpackInto(job));
    landed = true;
    return answer;
  } finally {
    if (!landed) await entry.undo();
    entry.close();
  }
}

// ---- As it comes

async function unpackInto(job: Job): Promise<WriteArchiveResponse> {
  const { entry, path } = job;
  let made = false;
  if (entry.found && !entry.found.stats.isDirectory())
    throw fault('not_a_directory', path, 'not a directory');
  try {
    if (!entry.found) {
      await mkdir(bytes(entry.at), 0o700);
      made = true;
    }
    const root = await openRoot(entry.found?.at ?? entry.at);
    const filled = await fill(job, root, made);
    if (made) await syncAbove(entry);
    return await answer(job, filled);
  } catch (error) {
    // Unless something has landed in it.
    if (made) await rmdir(bytes(entry.at)).catch(() => undefined);
    throw error;
  }
}

const openRoot = (at: Bytes): Promise<FileHandle> =>
  // The path of a handle is a symlink itself.
  open(bytes(at), pathOnly | O_DIRECTORY | (/^\/proc\/self\/fd\/\d+$/.test(at) ? 0 : O_NOFOLLOW));

/** Unpacks everything and checks it; durable, with modes and times, when it resolves. Owns the root. */
async function fill(
  { beneath, path, whole, overwrite, temporary, log, upload, signal }: Job,
  root: FileHandle,
  made: boolean,
  room?: SideRoom,
): Promise<Filled> {
  const ground = await Ground.open(root, beneath.boundary, path, made);
  const landing = new Landing({ ground, room, temporary, whole, overwrite, log });
  try {
    for await (const entry of readTar(upload)) await landing.land(entry);
    const sha256 = upload.demandCommit(path);
    await landing.settle();
    await ground.finish();
    signal.throwIfAborted();
    const summary = { files: landing.files, bytes: landing.bytes, sha256 };
    return { summary, stats: await root.stat({ bigint: true }) };
  } finally {
    await landing.end();
    ground.close();
  }
}

// ---- As a whole

async function unpackWhole(job: Job): Promise<WriteArchiveResponse> {
  const { entry, path, overwrite, temporary, log, signal } = job;
  await demandVacant(job, entry.found?.stats);
  const room = await SideRoom.open(entry.directory, temporary, log);
  try {
    const from = room.content;
    await mkdir(bytes(from), 0o700);
    const filled = await fill(job, await openRoot(from), true, room);
    const present = await lookAt(entry.at);
    await entry.recheck(present);
    await demandVacant(job, present);
    signal.throwIfAborted();
    await place({ from, to: entry.at, directory: true, overwrite, path });
    await syncAbove(entry);
    return await answer(job, filled);
  } finally {
    await room.end();
  }
}

/** Nothing may be there; with `overwrite` an empty directory may. */
async function demandVacant(job: Job, present: BigIntStats | undefined): Promise<void> {
  const { beneath, entry, path, home, overwrite } = job;
  if (!present) return;
  // The file system's root and the like cannot be replaced.
  const nameless = entry.name === '' || entry.name === '.';
  if (!overwrite || !present.isDirectory() || nameless) throw fault('already_exists', path, 'exists');
  await beneath.boundary.demandLoose(present, home, path);
  const directory = await opendir(bytes(entry.at));
  try {
    if (await directory.read()) throw fault('directory_not_empty', path, 'is not empty');
  } finally {
    await directory.close();
  }
}

// ---- Both

async function syncAbove({ directory, madeIn }: Entry): Promise<void> {
  for (const at of [directory, ...madeIn]) await syncDirectory(at);
}

async function answer(
  { entry, path, people }: Job,
  { stats, summary }: Filled,
): Promise<WriteArchiveResponse> {
  const described = { path, name: posix.basename(path), link: entry.link };
  return { entry: describe(described, stats, await people()), summary };
}

/** The chunks of a request as they come, until commit and the request's end. */
class Upload implements AsyncIterable<Buffer> {
  readonly #messages: Messages;
  readonly #signal: AbortSignal;
  readonly #hash = createHash('sha256');
  #wanted: string | undefined;
  #committed = false;

  constructor(messages: Messages, signal: AbortSignal) {
    this.#messages = messages;
    this.#signal = signal;
  }

  async open(): Promise<WriteArchiveOpen__Output> {
    const open = (await this.#next())?.open;
    if (!open) throw new AppError('invalid_request', 'an upload starts with open');
    return open;
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Buffer> {
    for (;;) {
      const message = await this.#next();
      if (!message) throw new AppError('invalid_request', 'the upload ended without commit');
      if (message.commit) return this.#commit(message.commit.sha256);
      if (!message.chunk) throw new AppError('invalid_request', 'only chunks and commit may follow open');
      this.#hash.update(message.chunk);
      if (message.chunk.length > 0) yield message.chunk;
    }
  }

  /** The digest of what came, once all of it did. */
  demandCommit(path: Bytes): string {
    if (!this.#committed) throw new Error('the upload has not been read to its end');
    const sha256 = this.#hash.digest('hex');
    if (this.#wanted === undefined || this.#wanted.toLowerCase() === sha256) return sha256;
    const message = 'does not match the bytes that arrived';
    const details = { issues: [{ path: 'sha256', message }], sha256 };
    throw new AppError('validation_failed', `${shown(path)}: sha256 ${message}`, details);
  }

  /** The request's end after commit is what makes it count; a cut one throws instead. */
  async #commit(sha256: string | undefined): Promise<void> {
    if (await this.#next()) throw new AppError('invalid_request', 'nothing may follow commit');
    this.#wanted = sha256;
    this.#committed = true;
  }

  async #next(): Promise<WriteArchiveRequest__Output | undefined> {
    const message = await unlessAborted(this.#signal, this.#messages.next());
    return message.done ? undefined : message.value;
  }
}
