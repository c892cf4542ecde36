// Makes a directory: a new one or none, with exactly the mode asked for.
import type { MakeDirectoryRequest__Output } from '../../proto/types/farhand/agent/v1/MakeDirectoryRequest.ts';
import type { MakeDirectoryResponse } from '../../proto/types/farhand/agent/v1/MakeDirectoryResponse.ts';
import { type BigIntStats, chmod, mkdir, pin, rmdir, syncDirectory } from './confine/fs.ts';
import { assertMode, fault, type Target } from './confine/path.ts';
import type { Entry } from './confine/resolve.ts';
import { describe } from './describe.ts';
import type { Disk } from './operation.ts';

export async function makeDirectory(
  { writing, users }: Disk,
  { mode = 0o755, parents }: MakeDirectoryRequest__Output,
  { path }: Target,
  signal: AbortSignal,
): Promise<MakeDirectoryResponse> {
  assertMode(mode);
  await using entry = await writing.name(path, parents);
  if (entry.found) throw fault('already_exists', path, 'exists');
  signal.throwIfAborted();
  const stats = await make(entry, mode);
  entry.keep();
  return { entry: describe(path, stats, await users()) };
}

async function make(entry: Entry, mode: number): Promise<BigIntStats> {
  await mkdir(entry.at, mode & 0o777);
  try {
    using made = await pin(entry.at);
    // Against the umask; a setgid bit inherited from above stays, as everywhere.
    const inherited = Number((await made.stat()).mode) & 0o2000;
    await chmod(made.at, mode | inherited);
    for (const at of [entry.directory, ...entry.madeIn]) await syncDirectory(at);
    return await made.stat();
  } catch (error) {
    await rmdir(entry.at).catch(() => undefined);
    throw error;
  }
}
