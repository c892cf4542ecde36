// Creates an empty file where there is none, else sets the modification time of what is there.
import { latestInstant, now } from '../../shared/clock.ts';
import { AppError, errnoOf } from '../../shared/errors.ts';
import { NewFile, seconds } from './atomic/new-file.ts';
import { type BigIntStats, type Pinned, pin, readOnly } from './confine/fs.ts';
import { assertFolder, fault, type Target } from './confine/request-path.ts';
import type { PathEntry } from './confine/resolve.ts';
import { describe } from './describe.ts';
import type { Disk, Operation, RequestOf } from './operation.ts';

type Request = RequestOf<'touchFile'>;

export const touchFile: Operation<'touchFile'> = async (disk, request, target, signal) => {
  assertTime(request);
  // Undefined: another process has created the file first, so now there is one.
  const entry = (await touch(disk, request, target, signal)) ?? (await touch(disk, request, target, signal));
  if (!entry) throw fault('conflict', target.path, 'was created and removed meanwhile, try again');
  return { entry };
};

async function touch(disk: Disk, request: Request, target: Target, signal: AbortSignal) {
  await using entry = await disk.writing.entry(target.path);
  if (!entry.found) assertCreate(request, target);
  signal.throwIfAborted();
  const stats = entry.found ? await change(entry, request, target) : await create(entry, request);
  return stats && describe(target.path, stats, await disk.users(), entry.link);
}

/** Sets the time of the pinned file, also when it has lost its name meanwhile. */
async function change(entry: PathEntry, request: Request, target: Target): Promise<BigIntStats> {
  const { at, stats } = entry.present;
  assertFolder(target, stats);
  // Opening a device or a pipe may have effects, and a pinned handle takes no times.
  if (!stats.isFile() && !stats.isDirectory())
    throw fault('unsupported_file', target.path, 'neither a regular file nor a directory');
  using file = await pin(at, readOnly);
  return await setTime(file, request.modified_at_ms ?? now());
}

/** Undefined where the name is taken by now. A failure later on leaves the empty file: its name may be another's then. */
async function create(entry: PathEntry, { modified_at_ms }: Request): Promise<BigIntStats | undefined> {
  await using file = await NewFile.create(entry.at).catch(unlessTaken);
  if (!file) return undefined;
  // Against the umask.
  await file.pinned.handle.chmod(0o644);
  if (modified_at_ms !== undefined) await setTime(file.pinned, modified_at_ms);
  await file.sync();
  await entry.keep();
  return await file.pinned.stat();
}

function unlessTaken(error: unknown): undefined {
  if (errnoOf(error) !== 'EEXIST') throw error;
}

/** The access time stays as it is. */
async function setTime(file: Pinned, ms: number): Promise<BigIntStats> {
  const { atimeNs } = await file.stat();
  await file.handle.utimes(seconds(atimeNs), seconds(BigInt(Math.trunc(ms)) * 1_000_000n));
  return file.stat();
}

/** Throws invalid_request where a time is none that a calendar has. */
function assertTime({ modified_at_ms = 0 }: Request): void {
  if (Math.abs(modified_at_ms) > latestInstant)
    throw new AppError('invalid_request', 'modified_at_ms is no time');
}

function assertCreate(request: Request, { path, folder }: Target): void {
  if (!request.create) throw fault('file_not_found', path, 'no such file');
  if (folder) throw fault('is_a_directory', path, 'names a directory');
}
