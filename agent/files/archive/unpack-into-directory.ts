// Unpacks a tar or tar.gz into a directory, and never outside it. With `whole` the directory appears complete
// or not at all.
import type { WriteArchiveCommit__Output } from '../../../proto/types/farhand/agent/v1/WriteArchiveCommit.ts';
import type { WriteArchiveOpen__Output } from '../../../proto/types/farhand/agent/v1/WriteArchiveOpen.ts';
import type { WriteArchiveResponse } from '../../../proto/types/farhand/agent/v1/WriteArchiveResponse.ts';
import { readTar } from '../../../shared/tar/index.ts';
import { placeOwn } from '../atomic/rename-into-place.ts';
import { PrivateDirectory } from '../atomic/temporary-directory.ts';
import * as fs from '../confine/confined-fs.ts';
import { fault, type Target } from '../confine/parse-request-path.ts';
import type { PathEntry } from '../confine/resolve-inside-roots.ts';
import { describe } from '../file-description.ts';
import type { Disk } from '../handler-adapters.ts';
import type { Upload } from '../upload-messages.ts';
import { Tree } from './destination-directories.ts';
import { Extractor } from './extract-entries.ts';

interface Job {
  disk: Disk;
  upload: Upload<WriteArchiveOpen__Output, WriteArchiveCommit__Output>;
  entry: PathEntry;
  signal: AbortSignal;
}

export async function writeArchive(
  disk: Disk,
  upload: Job['upload'],
  { path }: Target,
  signal: AbortSignal,
): Promise<WriteArchiveResponse> {
  await using entry = await disk.writing.entry(path, upload.open.create_parents);
  const job = { disk, upload, entry, signal };
  const answer = await (upload.open.whole ? unpackWhole(job) : unpackInto(job));
  await entry.keep();
  return answer;
}

/** Places each entry as soon as it arrives. After a failure the entries placed so far remain. */
async function unpackInto(job: Job): Promise<WriteArchiveResponse> {
  const { entry } = job;
  const { found, at } = entry;
  if (found && !found.stats.isDirectory()) throw fault('not_a_directory', entry.path, 'is not a directory');
  if (found) return fill(job, found.at);
  // The directory is private until the first entry of the archive arrives (see Tree.describeTop).
  await fs.mkdir(at, 0o700);
  try {
    return await fill(job, at);
  } catch (error) {
    // Removes the directory only if it is still empty.
    await fs.rmdir(at).catch(() => undefined);
    throw error;
  }
}

async function unpackWhole(job: Job): Promise<WriteArchiveResponse> {
  const { disk, entry, signal, upload } = job;
  const { overwrite } = upload.open;
  await assertVacant(job, entry.found?.stats);
  await using temporary = await PrivateDirectory.open(entry.directory, disk.journal);
  const from = temporary.content();
  await fs.mkdir(from, 0o700);
  const answer = await fill(job, from);
  const present = await fs.lookAt(entry.at);
  await entry.recheck(present);
  await assertVacant(job, present);
  signal.throwIfAborted();
  await placeOwn({ from, to: entry.at, directory: true, overwrite, path: entry.path });
  return answer;
}

/** Throws if the path exists, unless `overwrite` is set and the path is an empty directory. */
async function assertVacant({ disk, entry, upload }: Job, present?: fs.BigIntStats): Promise<void> {
  const { path, name } = entry;
  if (!present) return;
  // A rename cannot replace "/" or a path whose last part is ".", because such a path does not end in a name.
  const nameless = name === '' || name === '.';
  if (!upload.open.overwrite || !present.isDirectory() || nameless)
    throw fault(
      'already_exists',
      path,
      'exists; remove it first, because overwrite replaces only an empty directory',
    );
  await disk.writing.boundary.assertRemovable(present, disk.home, path);
  if (!(await fs.isEmpty(entry.at))) throw fault('directory_not_empty', path, 'is not empty');
}

/** Unpacks and checks the archive. Resolves when all its files are durable, with their modes and times. */
async function fill({ disk, upload, entry, signal }: Job, at: fs.Confined): Promise<WriteArchiveResponse> {
  const { path, found, link } = entry;
  const { whole, overwrite } = upload.open;
  // If the destination exists, `at` is a path /proc/self/fd/N. That path is a symlink itself, so it must be followed.
  const flags = at === found?.at ? 0 : fs.O_NOFOLLOW;
  using root = await fs.pin(at, fs.pathOnly | fs.O_DIRECTORY | flags);
  using tree = await Tree.open(root, disk.writing.boundary, path, at !== found?.at);
  await using extractor = new Extractor({ tree, journal: disk.journal, whole, overwrite });
  for await (const one of readTar(upload.chunks())) await extractor.extract(one);
  const { sha256 } = upload.finish(path);
  await extractor.finish();
  await tree.finish();
  signal.throwIfAborted();
  const { files, bytes } = extractor;
  const described = describe(path, await root.stat(), await disk.users(), link);
  return { entry: described, summary: { files, bytes, sha256 } };
}
