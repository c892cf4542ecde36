// Removes a file, a symlink or a directory; never what a symlink leads to, nor what the machine cannot do without.
import type { RemoveFileRequest__Output } from '../../proto/types/farhand/agent/v1/RemoveFileRequest.ts';
import type { RemoveFileResponse } from '../../proto/types/farhand/agent/v1/RemoveFileResponse.ts';
import { clear } from './clear.ts';
import { drop, mountOf, syncDirectory } from './confine/fs.ts';
import { assertFolder, bytes, fault, type Target } from './confine/path.ts';
import type { Disk } from './operation.ts';

export async function removeFile(
  { writing, home }: Disk,
  { recursive }: RemoveFileRequest__Output,
  target: Target,
  signal: AbortSignal,
): Promise<RemoveFileResponse> {
  const { path } = target;
  await using entry = await writing.name(path);
  const { stats, at } = entry.present;
  assertFolder(target, stats);
  await writing.boundary.assertRemovable(stats, home, path);
  const directory = stats.isDirectory();
  if (directory && mountOf(at) !== mountOf(entry.directory))
    throw fault('file_busy', path, 'another file system is mounted here');
  signal.throwIfAborted();
  if (directory && recursive) await clear(at, writing.boundary, { path, signal });
  await drop(entry.at, directory);
  await syncDirectory(entry.directory);
  return { path: bytes(path), size: stats.isFile() ? Number(stats.size) : 0, directory };
}
