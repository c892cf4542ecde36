// Moves and copies files and directories, and moves symlinks. The destination appears complete or not at all.
import { createHash, randomUUID } from 'node:crypto';
import type { FileEntry } from '../../proto/types/farhand/agent/v1/FileEntry.ts';
import { errnoOf, fromErrno } from '../../shared/errors.ts';
import { assertPlace, type Placement, place, placeOwn } from './atomic/rename-into-place.ts';
import { PrivateDirectory } from './atomic/temporary-directory.ts';
import { ancestry } from './confine/boundary.ts';
import * as fs from './confine/confined-fs.ts';
import {
  assertFolder,
  type Bytes,
  fault,
  type Target,
  targetOf,
  toText,
} from './confine/parse-request-path.ts';
import type { PathEntry } from './confine/resolve-inside-roots.ts';
import { walk } from './confine/walk-tree.ts';
import { duplicate } from './copy-tree.ts';
import { describeName } from './file-description.ts';
import type { Disk, Operation } from './handler-adapters.ts';

interface Transfer {
  source: Target;
  destination: Target;
  from: PathEntry;
  to: PathEntry;
  stats: fs.BigIntStats;
  overwrite: boolean;
  signal: AbortSignal;
}

export const moveFile: Operation<'moveFile'> = async (disk, request, source, signal) => {
  const destination = targetOf(request.destination, disk.home);
  await using from = await disk.writing.name(source.path);
  const { stats } = from.present;
  await disk.writing.boundary.assertRemovable(stats, disk.home, source.path);
  await using to = await disk.writing.name(destination.path);
  const transfer = { source, destination, from, to, stats, overwrite: request.overwrite, signal };
  if (from.name !== to.name || !(await inOneDirectory(transfer))) await move(disk, transfer);
  return { entry: await arrived(disk, transfer) };
};

export const copyFile: Operation<'copyFile'> = async (disk, request, source, signal) => {
  const destination = targetOf(request.destination, disk.home);
  await using from = await disk.reading.entry(source.path);
  const { stats } = from.present;
  await using to = await disk.writing.name(destination.path);
  if (!stats.isFile() && !stats.isDirectory())
    throw fault('unsupported_file', source.path, 'cannot be copied: it is neither a file nor a directory');
  const transfer = { source, destination, from, to, stats, overwrite: request.overwrite, signal };
  await assertTransfer(disk, transfer);
  if (to.found && fs.identityOf(to.found.stats) === fs.identityOf(stats))
    throw fault('invalid_path', destination.path, 'source and destination are the same file');
  await using arriving = await PrivateDirectory.open(to.directory, disk.journal);
  const options = {
    boundary: disk.reading.boundary,
    path: source.path,
    destination: destination.path,
    signal,
    moves: false,
    leaveOut: disk.journal.isTemporary,
  };
  const copied = await duplicate({ name: from.name, at: from.at, stats }, arriving.content(), options);
  await publish(transfer, arriving.content());
  return { entry: await arrived(disk, transfer), ...copied };
};

/**
 * Describes the file at the destination. If another process has removed it already, uses the stats that the source had
 * before the transfer.
 */
const arrived = async ({ writing, users }: Disk, { to, stats }: Transfer): Promise<FileEntry> =>
  describeName(writing, to, (await fs.lookAt(to.at)) ?? stats, await users());

const inOneDirectory = async ({ from, to }: Transfer): Promise<boolean> =>
  (await fs.identify(from.directory)) === (await fs.identify(to.directory));

/** Refuses an impossible transfer before anything is changed. */
async function assertTransfer({ writing, home }: Disk, transfer: Transfer): Promise<void> {
  const { source, destination, stats, to, overwrite } = transfer;
  const directory = stats.isDirectory();
  assertFolder(source, stats);
  assertFolder(destination, stats);
  if (directory && (await ancestry(to.directory)).includes(fs.identityOf(stats)))
    throw fault(
      'invalid_path',
      destination.path,
      `lies inside the source ${toText(source.path)}; choose a destination outside it`,
    );
  assertPlace(to.found?.stats, { directory, overwrite, path: destination.path });
  if (to.found) await writing.boundary.assertRemovable(to.found.stats, home, destination.path);
}

async function move(disk: Disk, transfer: Transfer): Promise<void> {
  const { from, to, signal, destination } = transfer;
  await assertTransfer(disk, transfer);
  signal.throwIfAborted();
  try {
    // Without `overwrite`, place() removes the name of the source in a second step.
    await (transfer.overwrite ? to : from).inTurn(() => place(placing(transfer, from.at)));
    await dropTwin(transfer);
  } catch (error) {
    if (errnoOf(error) !== 'EXDEV') throw fromErrno(error, toText(destination.path));
    await moveAcross(disk, transfer);
  }
  await fs.syncDirectory(to.directory);
  await fs.syncDirectory(from.directory);
}

/**
 * If source and destination are hard links of the same file, rename(2) succeeds but leaves both names. In this case
 * removes the name of the source.
 */
async function dropTwin(transfer: Transfer): Promise<void> {
  const { from, to, stats } = transfer;
  if (stats.isDirectory() || !to.found || fs.identityOf(to.found.stats) !== fs.identityOf(stats)) return;
  // On a file system that ignores case, `a` and `A` in one directory are the same name. Removing the source would
  // remove the destination too, so the source stays.
  const [old, now] = [from, to].map(({ name }) => toText(name).toLowerCase());
  if (old !== now || !(await inOneDirectory(transfer))) await fs.drop(from.at);
}

const placing = ({ to, stats, overwrite, destination }: Transfer, from: fs.Confined): Placement => ({
  from,
  to: to.at,
  directory: stats.isDirectory(),
  overwrite,
  path: destination.path,
});

/** Moves between file systems: copies the source, renames the copy to the destination, and removes the source. */
async function moveAcross({ writing, journal }: Disk, transfer: Transfer): Promise<void> {
  const { from, to, stats, source, destination, signal } = transfer;
  await using arriving = await PrivateDirectory.open(to.directory, journal);
  // Creating this directory needs the same permission as removing the source. A forbidden move fails here, before
  // anything is copied.
  await using leaving = await PrivateDirectory.open(from.directory, journal);
  const paths = { path: source.path, destination: destination.path };
  const leaveOut = journal.isTemporary;
  const options = { boundary: writing.boundary, ...paths, signal, moves: true, leaveOut };
  const before = await stateBelow(from.at, stats, leaveOut);
  await duplicate({ name: from.name, at: from.at, stats }, arriving.content(), options);
  const identity = await publish(transfer, arriving.content());
  await withdraw(transfer, leaving, before).catch(async (error: unknown) => {
    // The source could not be removed, so the copy is removed again. A copy that has replaced another file stays.
    if (!to.found && (await fs.isStill(to.at, identity))) {
      using copy = await fs.pin(to.at);
      // As in placeOwn(), a directory must be writable to be moved to another parent.
      if (stats.isDirectory() && fs.identityOf(await copy.stat()) === identity)
        await fs.chmod(copy.at, 0o700);
      await fs.rename(to.at, arriving.content());
    }
    throw error;
  });
}

/**
 * Checks access again, then renames a finished copy to the destination. Returns the copy's device and inode.
 */
async function publish(transfer: Transfer, content: fs.Confined): Promise<string> {
  const { to, signal, destination } = transfer;
  await to.recheck(await fs.lookAt(to.at));
  const identity = fs.identityOf(await fs.lstat(content));
  signal.throwIfAborted();
  await placeOwn(placing(transfer, content)).catch((error: unknown) => {
    throw fromErrno(error, toText(destination.path));
  });
  await fs.syncDirectory(to.directory);
  return identity;
}

/**
 * Moves the source atomically into a private directory, which the caller removes with its content. If the source has
 * changed since the copy began, moves it back, or to a new name if its name is taken, and throws `conflict`. If both
 * renames fail, calls keep() on the private directory, so that the source is not removed with it.
 */
async function withdraw(
  { from, stats, source }: Transfer,
  leaving: PrivateDirectory,
  before: string,
): Promise<void> {
  const away = leaving.content();
  await fs.rename(from.at, away);
  // A source that cannot be read counts as changed.
  const now = await fs.lstat(away).catch(() => undefined);
  const same =
    now &&
    fs.identityOf(now) === fs.identityOf(stats) &&
    now.size === stats.size &&
    now.mtimeNs === stats.mtimeNs;
  // Temporary files count here: an upload that has begun would publish its file in the withdrawn directory.
  if (same && (await stateBelow(away, now).catch(() => undefined)) === before) return;
  // Uses rename(2), because link(2) fails on some file systems and for files of other users. If the name is taken
  // again, the source gets a new name outside the private directory, which the caller removes.
  const isFree = (await fs.lookAt(from.at).catch(() => null)) === undefined;
  const back = (to: fs.Confined) => fs.rename(away, to).then(() => true);
  const changed = (what: string) => fault('conflict', source.path, `changed while it was moved; ${what}`);
  if (isFree && (await back(from.at).catch(() => false))) throw changed('try again');
  const kept = `farhand-kept-${randomUUID()}`;
  if (await back(fs.child(from.directory, kept)).catch(() => false))
    throw changed(`it is now named ${kept}, because another program created a new one`);
  const path = toText(await leaving.keep());
  throw changed(`it could not be moved back, and is now at ${path}/content`);
}

/** Returns a hash of the names, inodes and change times below a directory. */
async function stateBelow(
  at: fs.Confined,
  stats: fs.BigIntStats,
  leaveOut?: (name: Bytes) => boolean,
): Promise<string> {
  if (!stats.isDirectory()) return '';
  const hash = createHash('sha256');
  using pinned = await fs.pin(at);
  // A cancelled request does not stop this: withdraw() must always end with the source removed or moved back.
  const signal = new AbortController().signal;
  for await (const step of walk(pinned.at, undefined, { path: '', signal, ...(leaveOut && { leaveOut }) }))
    if (!step.left) hash.update(`${step.path}\0${step.stats.ino} ${step.stats.ctimeNs}\0`, 'latin1');
  return hash.digest('hex');
}
