// Searches below a directory by name and by text; matches go out as they are found.
import { readlink } from 'node:fs/promises';
import { posix } from 'node:path';
import type { FileEntry } from '../../../proto/types/farhand/agent/v1/FileEntry.ts';
import type { FileMatch } from '../../../proto/types/farhand/agent/v1/FileMatch.ts';
import type { SearchFilesRequest__Output } from '../../../proto/types/farhand/agent/v1/SearchFilesRequest.ts';
import type { SearchFilesResponse } from '../../../proto/types/farhand/agent/v1/SearchFilesResponse.ts';
import { after, monotonic } from '../../../shared/clock.ts';
import { AppError, errnoOf, fromErrno } from '../../../shared/errors.ts';
import type { AgentMethods } from '../../../shared/rpc.ts';
import { unlessAborted, untilAborted } from '../abort.ts';
import { type Contents, openContents } from '../beneath/contents.ts';
import { letGo } from '../beneath/descent.ts';
import type { Beneath, Directory } from '../beneath/index.ts';
import { holdsFiles } from '../beneath/kernel.ts';
import { type Bytes, bytes, shown, targetOf } from '../beneath/path.ts';
import { type Step, walk } from '../beneath/walk.ts';
import { describe } from '../describe.ts';
import type { AskPeople, People } from '../people.ts';
import { Turnstile } from '../turnstile.ts';
import { compileGlob, type Glob } from './glob.ts';
import { compileText, linesWith } from './lines.ts';

const longestContent = 1_000;
const batchSize = 64;
/** Milliseconds that a match waits for company. */
const longestWait = 50;
/** Milliseconds of silence after which an empty batch goes out: the broker takes who is silent for dead. */
export const longestSilence = 10_000;
/** Searches at once; a disk is not faster for more. */
const mostAtOnce = 4;

/** One search. */
interface Job {
  beneath: Beneath;
  directory: Directory;
  path: Bytes;
  people: People;
  signal: AbortSignal;
  hidden: boolean;
  name: Glob | undefined;
  text: ReturnType<typeof compileText> | undefined;
  limit: number;
  visited: number;
  unreadable: number;
  truncated: boolean;
}

export function openSearcher(beneath: Beneath, people: AskPeople, home: Bytes): AgentMethods['searchFiles'] {
  const turnstile = new Turnstile(mostAtOnce);
  return async function* searchFiles(request, { signal }) {
    const { path } = targetOf(request.path, home);
    const wanted = compile(request);
    let directory: Directory | undefined;
    try {
      directory = await unlessAborted(signal, beneath.directory(path), (late) => late.close());
      const close = directory.close;
      const job: Job = {
        ...{ beneath, directory, path, signal, people: await people(), hidden: request.hidden },
        ...wanted,
        ...{ visited: 0, unreadable: 0, truncated: false },
      };
      // From here on it is closed when the search has come to rest.
      const found = heard(inTurn(turnstile, signal, batchesOf(matchesOf(job))));
      directory = undefined;
      yield* untilAborted(signal, found, close);
      const { truncated, visited, unreadable } = job;
      yield { tail: { truncated, visited, unreadable } };
    } catch (error) {
      throw signal.aborted ? signal.reason : fromErrno(error, shown(path));
    } finally {
      directory?.close();
    }
  };
}

function compile(request: SearchFilesRequest__Output): Pick<Job, 'name' | 'text' | 'limit'> {
  const { name, content, ignore_case, limit } = request;
  if (content.length > longestContent || /[\n\0]/.test(content)) {
    const reason = `content must be one line of at most ${longestContent} characters`;
    throw new AppError('invalid_request', reason);
  }
  return {
    name: name === '' ? undefined : compileGlob(name, ignore_case),
    text: content === '' ? undefined : compileText(content, ignore_case),
    limit: limit || Number.POSITIVE_INFINITY,
  };
}

/** At most `limit`; the one after them only tells that there is more. */
async function* matchesOf(job: Job): AsyncGenerator<FileMatch | undefined, void, void> {
  let told = 0;
  for await (const match of everyMatch(job)) {
    job.truncated = match !== undefined && told === job.limit;
    if (job.truncated) return;
    if (match) told += 1;
    yield match;
  }
}

/** Nothing comes once per entry, too: a moment to see how long earlier matches have waited. */
async function* everyMatch(job: Job): AsyncGenerator<FileMatch | undefined, void, void> {
  const { beneath, directory, path, signal, hidden, name, text } = job;
  const seen = (step: Step): boolean => hidden || !step.name.startsWith('.');
  const skip = (skipped: Bytes, error: unknown): void => {
    // Nothing is told of what the agent keeps to itself; a start that cannot be read is no search.
    if (skipped === path) throw error;
    if (!(error instanceof AppError)) job.unreadable += 1;
  };
  const enter = async (step: Step, inside: Bytes): Promise<boolean> =>
    seen(step) && (await holdsFiles(inside));
  for await (const step of walk(directory.at, beneath.boundary, { path, signal, skip, enter })) {
    if (!seen(step)) continue;
    job.visited += 1;
    yield undefined;
    if (name && !name(shown(step.path))) continue;
    if (text) yield* linesOf(step, job, text);
    else yield { entry: await entryOf(step, job), line: 0 };
  }
}

async function* linesOf(step: Step, job: Job, text: NonNullable<Job['text']>): AsyncGenerator<FileMatch> {
  if (!step.stats.isFile()) return;
  let contents: Contents | undefined;
  try {
    contents = await openContents(step, job.beneath.boundary);
    if (!contents) return;
    let entry: FileEntry | undefined;
    for await (const line of linesWith(contents, text, job.signal)) {
      entry ??= await entryOf(step, job);
      yield { entry, line: line.number, text: line.text };
    }
  } catch (error) {
    if (errnoOf(error) === undefined) throw error;
    job.unreadable += 1;
  } finally {
    letGo(contents?.handle);
  }
}

/** As a listing has it: a symlink is described as its target, where that can be reached. */
async function entryOf(step: Step, { beneath, path, people }: Job): Promise<FileEntry> {
  const described = { path: posix.join(path, step.path), name: step.name };
  const link = step.stats.isSymbolicLink()
    ? await readlink(bytes(step.at), 'latin1').catch(() => undefined)
    : undefined;
  if (link === undefined) return describe(described, step.stats, people);
  const target = await beneath.linkTarget({ at: step.parent, close: () => undefined }, step.name);
  return describe({ ...described, link }, target ?? step.stats, people);
}

type Batches = AsyncGenerator<SearchFilesResponse, void, void>;

/** Many matches go out together; few do not wait for more than a moment. */
async function* batchesOf(found: AsyncIterable<FileMatch | undefined>): Batches {
  let matches: FileMatch[] = [];
  let oldest = 0;
  for await (const match of found) {
    if (match && matches.push(match) === 1) oldest = monotonic();
    const due = matches.length >= batchSize || monotonic() - oldest >= longestWait;
    if (matches.length === 0 || !due) continue;
    yield { matches: { matches } };
    matches = [];
  }
  if (matches.length > 0) yield { matches: { matches } };
}

/** Each batch in its turn: a search whose reader has stopped keeps no other waiting. */
async function* inTurn(turnstile: Turnstile, signal: AbortSignal, batches: Batches): Batches {
  try {
    for (;;) {
      const { value, done } = await turnstile.pass(signal, () => batches.next());
      if (done) return;
      yield value;
    }
  } finally {
    await batches.return();
  }
}

/** The same, and an empty one whenever none has come for a while. */
async function* heard(batches: Batches): Batches {
  try {
    for (;;) {
      const next = batches.next();
      while (!(await settlesWithin(longestSilence, next))) yield { matches: { matches: [] } };
      const { value, done } = await next;
      if (done) return;
      yield value;
    }
  } finally {
    // Not at rest before the walk is.
    await batches.return();
  }
}

function settlesWithin(ms: number, work: Promise<unknown>): Promise<boolean> {
  return new Promise((resolve) => {
    const cancel = after(ms, () => resolve(false));
    const settled = (): void => {
      cancel();
      resolve(true);
    };
    work.then(settled, settled);
  });
}
