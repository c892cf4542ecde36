// Writes a file atomically: readers see the old content or the new, never a part. Nothing changes before the
// commit message and the end of the request have arrived.
import type { WriteFileCommit__Output } from '../../proto/types/farhand/agent/v1/WriteFileCommit.ts';
import type { WriteFileOpen__Output } from '../../proto/types/farhand/agent/v1/WriteFileOpen.ts';
import type { WriteFileResponse } from '../../proto/types/farhand/agent/v1/WriteFileResponse.ts';
import { fromErrno } from '../../shared/errors.ts';
import { AtomicWrite } from './atomic/atomic-write.ts';
import { type BigIntStats, lookAt } from './confine/confined-fs.ts';
import {
  assertFile,
  assertMode,
  type Bytes,
  bytes,
  fault,
  type Target,
} from './confine/parse-request-path.ts';
import type { PathEntry } from './confine/resolve-inside-roots.ts';
import { describe, etagOf } from './file-description.ts';
import type { Disk } from './handler-adapters.ts';
import type { Upload } from './upload-messages.ts';

type FileUpload = Upload<WriteFileOpen__Output, WriteFileCommit__Output>;

export async function writeFile(
  disk: Disk,
  upload: FileUpload,
  target: Target,
  signal: AbortSignal,
): Promise<WriteFileResponse> {
  assertFile(target);
  const { path } = target;
  const draft = await begin(disk, upload.open, path);
  await using entry = draft.entry;
  await using _ = draft;
  if (entry.found) await draft.tryOwner(entry.found.stats);
  for await (const chunk of upload.chunks()) await draft.file.append(chunk);
  const { commit, sha256 } = upload.finish(path);
  assertMode(commit.mode);
  await draft.take(entry.found?.stats, commit.mode);
  await draft.file.sync();
  const created = await publish(draft, upload.open, commit, signal);
  const stats = await draft.file.pinned.stat();
  return {
    ...{ path: bytes(path), size: draft.file.size, created, sha256, etag: etagOf(stats) },
    entry: describe(path, stats, await disk.users(), entry.link),
  };
}

/**
 * Opens the directory, and creates the temporary file in it. Tries again if the directory was removed in between:
 * another upload had created it, and failed.
 */
async function begin(
  disk: Disk,
  open: WriteFileOpen__Output,
  path: Bytes,
  attempts = 3,
): Promise<AtomicWrite> {
  let entry: PathEntry | undefined;
  try {
    entry = await disk.writing.entry(path, open.create_parents);
    assertAllowed(entry.found?.stats, open, path);
    return await AtomicWrite.begin(entry, disk.journal);
  } catch (error) {
    await entry?.[Symbol.asyncDispose]();
    const { code } = fromErrno(error, '');
    if (!open.create_parents || code !== 'file_not_found' || attempts === 1) throw error;
    return begin(disk, open, path, attempts - 1);
  }
}

/** Gives the new file its name. Returns true if no file had that name before. */
async function publish(
  draft: AtomicWrite,
  { if_match }: WriteFileOpen__Output,
  { overwrite, mode }: WriteFileCommit__Output,
  signal: AbortSignal,
): Promise<boolean> {
  const { entry } = draft;
  // If two uploads have the same if_match, the first replaces the file. The second must see the new file, and fail.
  return entry.inTurn(async () => {
    const present = await lookAt(entry.at);
    await entry.recheck(present);
    assertAllowed(present, { overwrite }, entry.path);
    if (await draft.take(present, mode)) await draft.file.sync();
    assertMatch(present, if_match, entry.path);
    signal.throwIfAborted();
    await draft.place(overwrite);
    return present === undefined;
  });
}

/** Throws if the existing file may not be replaced. */
function assertAllowed(
  present: BigIntStats | undefined,
  { overwrite, if_match }: Pick<WriteFileOpen__Output, 'overwrite' | 'if_match'>,
  path: Bytes,
): void {
  if (present?.isDirectory())
    throw fault('is_a_directory', path, 'is a directory; the path must be that of a file');
  if (present && overwrite === false)
    throw fault('already_exists', path, 'exists already; set overwrite to true to replace it');
  // The upload followed symlinks when it began, so this symlink was created later.
  if (present?.isSymbolicLink()) throw fault('conflict', path, 'was replaced by a symlink; try again');
  if (present && !present.isFile()) throw fault('unsupported_file', path, 'is not a regular file');
  assertMatch(present, if_match, path);
}

/**
 * Throws precondition_failed unless the existing file matches `wanted`, the value of an If-Match header: an etag, a
 * list of etags, or "*" for any file.
 */
function assertMatch(present: BigIntStats | undefined, wanted: string | undefined, path: Bytes): void {
  if (wanted === undefined) return;
  const etag = present && etagOf(present);
  const matches = wanted.split(',').some((one) => one.trim() === '*' || one.trim() === etag);
  if (!present || !matches)
    throw fault(
      'precondition_failed',
      path,
      'does not match the ETag in If-Match: it was changed or removed; read it again',
      { etag },
    );
}
