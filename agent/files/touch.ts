// Sets the modification time of a file or directory, or creates an empty file if the path does not exist.
import { latestInstant, now } from '../../shared/clock.ts';
import { AppError, isErrno } from '../../shared/errors.ts';
import { NewFile, seconds } from './atomic/atomic-write.ts';
import { type BigIntStats, type Pinned, pin, readOnly, syncChange } from './confine/confined-fs.ts';
import { assertFile, assertFolder, fault, type Target } from './confine/parse-request-path.ts';
import type { PathEntry } from './confine/resolve-inside-roots.ts';
import { describe } from './file-description.ts';
import type { Disk, Operation, RequestOf } from './handler-adapters.ts';

type Request = RequestOf<'touchFile'>;

export const touchFile: Operation<'touchFile'> = async (disk, request, target, signal) => {
  assertTime(request);
  const entry = await touch(disk, request, target, signal).catch((error: unknown) => {
    // Another process has created the file first. The second attempt finds it.
    if (isErrno(error, 'EEXIST')) return touch(disk, request, target, signal);
    throw error;
  });
  return { entry };
};

async function touch(disk: Disk, request: Request, target: Target, signal: AbortSignal) {
  await using entry = await disk.writing.entry(target.path);
  if (!entry.found && !request.create)
    throw fault('file_not_found', target.path, 'does not exist; set create to true to create it');
  if (!entry.found) assertFile(target);
  signal.throwIfAborted();
  const stats = entry.found ? await change(entry, request, target) : await create(entry, request);
  return describe(target.path, stats, await disk.users(), entry.link);
}

/** Sets the time of the file that was opened, even if its name was changed or removed after that. */
async function change(entry: PathEntry, request: Request, target: Target): Promise<BigIntStats> {
  const { at, stats } = entry.present;
  assertFolder(target, stats);
  // Devices, pipes and sockets are refused, because opening such a file for reading may have side effects. The O_PATH
  // handle `at` has no side effects, but cannot set times.
  if (!stats.isFile() && !stats.isDirectory())
    throw fault('unsupported_file', target.path, 'is neither a regular file nor a directory');
  using file = await pin(at, readOnly);
  const changed = await setTime(file, request.modified_at_ms ?? now());
  await syncChange(file);
  return changed;
}

/**
 * Creates the file. Fails with EEXIST if another process has created a file with this name first. If a later step
 * fails, the new file stays: another file may have its name by then and must not be removed.
 */
async function create(entry: PathEntry, { modified_at_ms }: Request): Promise<BigIntStats> {
  await using file = await NewFile.create(entry.at);
  // Sets the mode exactly, because open(2) applies the umask.
  await file.pinned.handle.chmod(0o644);
  if (modified_at_ms !== undefined) await setTime(file.pinned, modified_at_ms);
  await file.sync();
  await entry.keep();
  return await file.pinned.stat();
}

/** Sets the modification time, in milliseconds since 1970. The access time stays unchanged. */
async function setTime(file: Pinned, ms: number): Promise<BigIntStats> {
  const { atimeNs } = await file.stat();
  await file.handle.utimes(seconds(atimeNs), seconds(BigInt(Math.trunc(ms)) * 1_000_000n));
  return file.stat();
}

/** Throws invalid_request if a time is outside the range of dates. */
function assertTime({ modified_at_ms = 0 }: Request): void {
  if (Math.abs(modified_at_ms) > latestInstant)
    throw new AppError(
      'invalid_request',
      `modified_at_ms: must be from -${latestInstant} to ${latestInstant}`,
    );
}
