// Removes a file, a directory, or a symlink (never its target). Refuses to remove "/", the agent's home directory, the
// allowed roots and protected paths.

import { clear } from './clear-directory.ts';
import { drop, mountOf, syncDirectory } from './confine/confined-fs.ts';
import { assertFolder, bytes, fault } from './confine/parse-request-path.ts';
import type { Operation } from './handler-adapters.ts';

export const removeFile: Operation<'removeFile'> = async (disk, request, target, signal) => {
  const { writing, home } = disk;
  const { path } = target;
  await using entry = await writing.name(path);
  const { stats, at } = entry.present;
  assertFolder(target, stats);
  await writing.boundary.assertRemovable(stats, home, path);
  const directory = stats.isDirectory();
  if (directory && mountOf(at) !== mountOf(entry.directory))
    throw fault('file_busy', path, 'another file system is mounted here; unmount it first');
  signal.throwIfAborted();
  if (directory && request.recursive) await clear(at, writing.boundary, { path, signal });
  await drop(entry.at);
  await syncDirectory(entry.directory);
  return { path: bytes(path), size: stats.isFile() ? Number(stats.size) : 0, directory };
};
