// Creates a directory with the requested mode, and the setgid bit of its parent. Fails if the path exists.
import { type BigIntStats, chmodDirectory, mkdir, pin, rmdir } from './confine/confined-fs.ts';
import { assertMode, fault } from './confine/parse-request-path.ts';
import type { PathEntry } from './confine/resolve-inside-roots.ts';
import { describe } from './file-description.ts';
import type { Operation } from './handler-adapters.ts';

export const makeDirectory: Operation<'makeDirectory'> = async (disk, request, { path }, signal) => {
  const { mode = 0o755, parents } = request;
  assertMode(mode);
  await using entry = await disk.writing.name(path, parents);
  if (entry.found) throw fault('already_exists', path, 'exists already');
  signal.throwIfAborted();
  const stats = await make(entry, mode);
  return { entry: describe(path, stats, await disk.users()) };
};

async function make(entry: PathEntry, mode: number): Promise<BigIntStats> {
  await mkdir(entry.at, mode & 0o777);
  try {
    using made = await pin(entry.at);
    await chmodDirectory(made, mode);
    await entry.keep();
    return await made.stat();
  } catch (error) {
    await rmdir(entry.at).catch(() => undefined);
    throw error;
  }
}
