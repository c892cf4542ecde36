// Writes a file: the old content or the new, never part of it. Nothing changes before commit and the request's end.
import type { BigIntStats } from 'node:fs';
import { posix } from 'node:path';
import type { WriteFileCommit__Output } from '../../proto/types/farhand/agent/v1/WriteFileCommit.ts';
import type { WriteFileOpen__Output } from '../../proto/types/farhand/agent/v1/WriteFileOpen.ts';
import type { WriteFileRequest__Output } from '../../proto/types/farhand/agent/v1/WriteFileRequest.ts';
import type { WriteFileResponse } from '../../proto/types/farhand/agent/v1/WriteFileResponse.ts';
import { AppError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import type { AgentMethods } from '../../shared/rpc.ts';
import { failingAs, unlessAborted } from './abort.ts';
import { identify } from './beneath/boundary.ts';
import type { Beneath } from './beneath/index.ts';
import { type Bytes, bytes, fault, shown, type Target, targetOf } from './beneath/path.ts';
import { describe, etagOf } from './describe.ts';
import { Draft, lookAt } from './draft/index.ts';
import type { Temporary } from './draft/temporary.ts';
import type { AskPeople } from './people.ts';

type Next = () => Promise<WriteFileRequest__Output | undefined>;
type InTurn = <T>(key: string, work: () => Promise<T>) => Promise<T>;

export interface Writing {
  beneath: Beneath;
  temporary: Temporary;
  people: AskPeople;
  home: Bytes;
  log: Logger;
}

export function openWriter({ beneath, temporary, people, home, log }: Writing): AgentMethods['writeFile'] {
  const inTurn = turns();
  return async (request, { signal }) => {
    const messages = request[Symbol.asyncIterator]();
    const next: Next = async () => {
      const message = await unlessAborted(signal, messages.next());
      return message.done ? undefined : message.value;
    };
    try {
      const { open } = (await next()) ?? {};
      if (!open) throw new AppError('invalid_request', 'an upload starts with open');
      const target = targetOf(open.path, home);
      return await failingAs(target.path, signal, async () => {
        const draft = await openDraft(beneath, temporary, log, open, target);
        try {
          const commit = await receive(draft, next);
          const created = await publish(draft, open, commit, inTurn, signal);
          return await answerOf(draft, created, people);
        } finally {
          await draft.end();
        }
      });
    } finally {
      // Nobody reads on; a request that hangs must not hold the answer.
      messages.return?.().catch(() => undefined);
    }
  };
}

/** Refuses what can be refused before a byte is sent. */
async function openDraft(
  beneath: Beneath,
  temporary: Temporary,
  log: Logger,
  { create_parents, if_match, overwrite }: WriteFileOpen__Output,
  { path, folder }: Target,
): Promise<Draft> {
  if (folder) throw fault('is_a_directory', path, 'names a directory');
  const draft = new Draft(await beneath.entry(path, create_parents), path, temporary, log);
  try {
    const present = draft.entry.found?.stats;
    demandReplaceable(present, path);
    if (present && overwrite === false) throw fault('already_exists', path, 'exists');
    demandMatch(present, if_match, path);
    await draft.begin();
    if (present) await draft.tryOwner({ uid: Number(present.uid), gid: Number(present.gid) });
    return draft;
  } catch (error) {
    await draft.end();
    throw error;
  }
}

/** Appends all chunks. The request's end after commit is what makes it count; a cut one throws instead. */
async function receive(draft: Draft, next: Next): Promise<WriteFileCommit__Output> {
  for (;;) {
    const message = await next();
    if (!message)
      throw new AppError('invalid_request', 'the upload ended without commit; nothing was changed');
    if (message.chunk) await draft.append(message.chunk);
    else if (!message.commit) throw new AppError('invalid_request', 'only chunks and commit may follow open');
    else if (await next()) throw new AppError('invalid_request', 'nothing may follow commit');
    else return message.commit;
  }
}

/** Tells whether nothing had the name before. */
async function publish(
  draft: Draft,
  { if_match }: WriteFileOpen__Output,
  commit: WriteFileCommit__Output,
  inTurn: InTurn,
  signal: AbortSignal,
): Promise<boolean> {
  const { entry, path } = draft;
  demandDigest(commit.sha256, draft.sha256, path);
  demandMode(commit.mode);
  await applyTo(draft, entry.found?.stats, commit.mode);
  await draft.sync();
  // Two writers with the same if_match: the second must see what the first has made.
  return inTurn(`${await identify(entry.directory)}/${entry.name}`, async () => {
    const present = await lookAt(entry.at);
    await entry.recheck(present);
    if (present && !commit.overwrite) throw fault('already_exists', path, 'exists');
    demandReplaceable(present, path);
    if (await applyTo(draft, present, commit.mode)) await draft.sync();
    demandMatch(present, if_match, path);
    signal.throwIfAborted();
    await draft.place(commit.overwrite);
    return present === undefined;
  });
}

async function answerOf(draft: Draft, created: boolean, people: AskPeople): Promise<WriteFileResponse> {
  const { entry, path, size, sha256 } = draft;
  const stats = await draft.stats();
  const described = { path, name: posix.basename(path), link: entry.link };
  return {
    ...{ path: bytes(path), size, created, sha256, etag: etagOf(stats) },
    entry: describe(described, stats, await people()),
  };
}

/** The mode asked for, else that of the replaced file, else 0644; owner and group of the replaced file. */
function applyTo(draft: Draft, present: BigIntStats | undefined, mode?: number): Promise<boolean> {
  if (!present) return draft.take({ mode: mode ?? 0o644 });
  const owner = { uid: Number(present.uid), gid: Number(present.gid) };
  return draft.take({ ...owner, mode: mode ?? Number(present.mode) & 0o7777 });
}

function demandReplaceable(present: BigIntStats | undefined, path: Bytes): void {
  if (present?.isDirectory()) throw fault('is_a_directory', path, 'is a directory');
  // Symlinks have been followed: one that is here now was not when the upload began.
  if (present?.isSymbolicLink()) throw fault('conflict', path, 'became a symlink meanwhile, try again');
  if (present && !present.isFile()) throw fault('unsupported_file', path, 'not a regular file');
}

/** If-Match of HTTP: an etag, several, or "*" for any file. */
function demandMatch(present: BigIntStats | undefined, wanted: string | undefined, path: Bytes): void {
  if (wanted === undefined) return;
  const etag = present && etagOf(present);
  const matches = wanted.split(',').some((one) => one.trim() === '*' || one.trim() === etag);
  if (!present || !matches) throw fault('precondition_failed', path, 'is not what if_match names', { etag });
}

function demandDigest(wanted: string | undefined, sha256: string, path: Bytes): void {
  if (wanted === undefined || wanted.toLowerCase() === sha256) return;
  const message = 'does not match the bytes that arrived; nothing was changed';
  const details = { issues: [{ path: 'sha256', message }], sha256 };
  throw new AppError('validation_failed', `${shown(path)}: sha256 ${message}`, details);
}

/** For all that take a mode. */
export function demandMode(mode: number | undefined): void {
  if (mode !== undefined && mode > 0o7777)
    throw new AppError('invalid_request', 'mode has more than 12 bits');
}

/** Runs what has the same key one after another. */
function turns(): InTurn {
  const last = new Map<string, Promise<unknown>>();
  return async (key, work) => {
    const run = (last.get(key) ?? Promise.resolve()).then(work, work);
    last.set(key, run);
    try {
      return await run;
    } finally {
      if (last.get(key) === run) last.delete(key);
    }
  };
}
