// Opens regular files to read their bytes: files named by a request, and files found by a walk.
import { ignoring } from '../../../shared/errors.ts';
import type { Boundary } from './boundary.ts';
import * as fs from './confined-fs.ts';
import { isProcessMemory } from './kernel-file-systems.ts';
import { fault, type Target } from './parse-request-path.ts';
import type { Confinement } from './resolve-inside-roots.ts';
import type { Step } from './walk-tree.ts';

/** An open file, which the caller closes. */
export interface Contents {
  file: fs.Pinned;
  stats: fs.BigIntStats;
}

/** True if the bytes before `end` may have changed between `then` and `now`. A file that only grew has not changed. */
export function hasChanged(
  then: fs.BigIntStats,
  now: fs.BigIntStats,
  end: bigint | number = then.size,
): boolean {
  return now.size < end || (now.size === then.size && now.mtimeNs !== then.mtimeNs);
}

/** Opens the regular file that a request names. Refuses every other type of file before opening it for reading. */
export async function openTargetFile(
  confinement: Confinement,
  { path, folder }: Target,
): Promise<Contents & { link: string | undefined }> {
  await using entry = await confinement.entry(path);
  const { at, stats } = entry.present;
  if (stats.isDirectory()) throw fault('is_a_directory', path, 'is a directory, where a file is needed');
  if (!stats.isFile()) throw fault('unsupported_file', path, 'is not a regular file');
  if (folder) throw fault('not_a_directory', path, 'ends in a slash, but is not a directory');
  if (await isProcessMemory(entry.name, at, stats))
    throw fault('unsupported_file', path, 'is not served: it gives access to the memory of a process');
  // The entry was opened with O_PATH, which cannot read. `at` opens the same inode again for reading.
  return { file: await fs.pin(at, fs.readOnly), stats, link: entry.link };
}

/**
 * Opens a file found by a walk. Returns undefined if it is gone, is no longer a regular file, is protected, or gives
 * access to the memory of a process.
 */
export async function openFileContents(step: Step, boundary: Boundary): Promise<Contents | undefined> {
  // These errors mean that the file is gone, or that a symlink, socket or device has its name now.
  const other = ignoring('ENOENT', 'ELOOP', 'ENXIO', 'ENODEV');
  const file = await fs.pin(step.at, fs.readOnly | fs.O_NOFOLLOW).catch(other);
  if (!file) return undefined;
  let contents: Contents | undefined;
  try {
    const stats = await file.stat();
    // The walk has checked the file that had this name. If another file has the name now, it is checked here.
    const isOther = fs.identityOf(step.stats) !== fs.identityOf(stats);
    const isProtected =
      isOther && (await boundary.protection())(await fs.identify(step.parent), step.name, stats);
    if (stats.isFile() && !isProtected && !(await isProcessMemory(step.name, file.at, stats)))
      contents = { file, stats };
    return contents;
  } finally {
    if (!contents) file[Symbol.dispose]();
  }
}
