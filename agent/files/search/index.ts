// Searches below a directory by name and by text. Matches are sent as they are found.
import { posix } from 'node:path';
import type { FileEntry } from '../../../proto/types/farhand/agent/v1/FileEntry.ts';
import type { FileMatch } from '../../../proto/types/farhand/agent/v1/FileMatch.ts';
import type { SearchFilesResponse } from '../../../proto/types/farhand/agent/v1/SearchFilesResponse.ts';
import { monotonic } from '../../../shared/clock.ts';
import { AppError, errnoOf } from '../../../shared/errors.ts';
import { Semaphore } from '../../../shared/semaphore.ts';
import type { Confined } from '../confine/confined-fs.ts';
import { isOnOrdinaryFileSystem } from '../confine/kernel-file-systems.ts';
import { openFileContents } from '../confine/open-regular-file.ts';
import { type Bytes, toText } from '../confine/parse-request-path.ts';
import type { Confinement } from '../confine/resolve-inside-roots.ts';
import { type Step, walk } from '../confine/walk-tree.ts';
import { describeName } from '../file-description.ts';
import type { Operation } from '../handler-adapters.ts';
import type { Users } from '../users-groups.ts';
import { compileGlob, type Glob } from './glob.ts';
import { compileText, linesWith, type Text } from './matching-lines.ts';

const longestContent = 1_000;
const batchSize = 64;
/** Milliseconds that a match waits for further matches, to be sent in one batch. */
const longestWait = 50;
/** After this many milliseconds without a match, an empty batch is sent, because the broker cancels silent calls. */
export const longestSilence = 1_000;
/** Slots for searches that read the disk. More than four at once would not make a disk faster. */
const working = new Semaphore(4);

interface Job {
  reading: Confinement;
  directory: Confined;
  path: Bytes;
  users: Users;
  signal: AbortSignal;
  hidden: boolean;
  name: Glob | undefined;
  text: Text | undefined;
  limit: number;
  leaveOut: (name: Bytes) => boolean;
  visited: number;
  unreadable: number;
  truncated: boolean;
}

export const searchFiles: Operation<'searchFiles'> = async function* (disk, request, { path }, signal) {
  const { reading, users } = disk;
  const { name, content, ignore_case, hidden, limit } = request;
  if (content.length > longestContent || /[\n\0]/.test(content)) {
    const reason = `content must be one line of at most ${longestContent} characters`;
    throw new AppError('invalid_request', reason);
  }
  const glob = name === '' ? undefined : compileGlob(name, ignore_case);
  const text = content === '' ? undefined : compileText(content, ignore_case);
  using opened = await reading.directory(path);
  const job: Job = {
    ...{ reading, directory: opened.at, path, users: await users(), signal, hidden, name: glob, text },
    leaveOut: disk.journal.isTemporary,
    ...{ limit: limit || Number.POSITIVE_INFINITY, visited: 0, unreadable: 0, truncated: false },
  };
  yield* inTurn(signal, batchesOf(job));
  const { truncated, visited, unreadable } = job;
  yield { tail: { truncated, visited, unreadable } };
};

/**
 * Yields matches. Yields undefined after each entry and each piece of a file, so that the caller can check the time.
 */
async function* everyMatch(job: Job): AsyncGenerator<FileMatch | undefined, void, void> {
  const { reading, directory, path, signal, hidden, name, text, leaveOut } = job;
  const seen = (step: Step): boolean => hidden || !step.name.startsWith('.');
  const skip = (skipped: Bytes, error: unknown): void => {
    // If the directory of the request is unreadable, the search fails. Protected paths are not counted as unreadable.
    if (skipped === path) throw error;
    if (!(error instanceof AppError)) job.unreadable += 1;
  };
  const enter = async (step: Step, inside: Confined): Promise<boolean> =>
    seen(step) && (await isOnOrdinaryFileSystem(inside));
  for await (const step of walk(directory, reading.boundary, { path, signal, skip, enter, leaveOut })) {
    if (step.left || !seen(step)) continue;
    job.visited += 1;
    yield undefined;
    if (name && !name(toText(step.path))) continue;
    if (text) yield* linesOf(step, job, text);
    else yield { entry: await entryOf(step, job), line: 0 };
  }
}

async function* linesOf(step: Step, job: Job, text: Text): AsyncGenerator<FileMatch | undefined> {
  if (!step.stats.isFile()) return;
  try {
    const contents = await openFileContents(step, job.reading.boundary);
    if (!contents) return;
    using _ = contents.file;
    let entry: FileEntry | undefined;
    for await (const line of linesWith(contents, text, job.signal)) {
      if (line) entry ??= await entryOf(step, job);
      yield line && entry && { entry, line: line.number, text: line.text };
    }
  } catch (error) {
    if (errnoOf(error) === undefined) throw error;
    job.unreadable += 1;
  }
}

const entryOf = ({ parent, name, path, stats }: Step, job: Job): Promise<FileEntry> => {
  const place = { directory: parent, name, path: posix.join(job.path, path) };
  return describeName(job.reading, place, stats, job.users);
};

type Batches = AsyncGenerator<SearchFilesResponse, void, void>;

/**
 * Collects matches into batches. Sends a batch when it is full or after 50 ms, and an empty batch after 1 s without a
 * match.
 */
async function* batchesOf(job: Job): Batches {
  let matches: FileMatch[] = [];
  let [found, sentAt] = [0, monotonic()];
  for await (const match of everyMatch(job)) {
    // Reads one match more than the limit, to find out whether there are further matches.
    job.truncated = match !== undefined && found === job.limit;
    if (job.truncated) break;
    if (match) {
      found += 1;
      matches.push(match);
    }
    const most = matches.length === 0 ? longestSilence : longestWait;
    if (matches.length < batchSize && monotonic() - sentAt < most) continue;
    yield { matches: { matches } };
    matches = [];
    sentAt = monotonic();
  }
  if (matches.length > 0) yield { matches: { matches } };
}

/**
 * Yields the batches of a search. The search takes a slot only while it produces a batch, so a client that stops
 * reading does not delay other searches.
 */
async function* inTurn(signal: AbortSignal, batches: Batches): Batches {
  try {
    for (;;) {
      const { value, done } = await working.run(signal, () => batches.next());
      if (done) return;
      yield value;
    }
  } finally {
    await batches.return();
  }
}
