// Opens the regular files that a walk comes by, for reading; a name that has become something else is no file.
import { type BigIntStats, constants } from 'node:fs';
import { type FileHandle, open } from 'node:fs/promises';
import { errnoOf } from '../../../shared/errors.ts';
import { type Boundary, identify, identityOf } from './boundary.ts';
import { letGo, pathOf } from './descent.ts';
import { holdsMemory } from './kernel.ts';
import { bytes } from './path.ts';
import type { Step } from './walk.ts';

const { O_RDONLY, O_NONBLOCK, O_NOCTTY, O_NOFOLLOW } = constants;

export interface Contents {
  handle: FileHandle;
  stats: BigIntStats;
}

/**
 * Whether a change may have torn what was read up to `end`: a file that only grew still has it. The same size with
 * another time means other bytes.
 */
export function isTorn(then: BigIntStats, now: BigIntStats, end: bigint | number = then.size): boolean {
  return now.size < end || (now.size === then.size && now.mtimeNs !== then.mtimeNs);
}

/** Undefined where it is gone, no regular file by now, or the agent keeps it to itself. */
export async function openContents(step: Step, boundary: Boundary): Promise<Contents | undefined> {
  const handle = await open(bytes(step.at), O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_NOCTTY).catch(unlessOther);
  let contents: Contents | undefined;
  try {
    const stats = await handle?.stat({ bigint: true });
    if (!handle || !stats?.isFile() || (await isForbidden(step, stats, boundary))) return undefined;
    if (await holdsMemory(step.name, pathOf(handle), stats)) return undefined;
    contents = { handle, stats };
    return contents;
  } finally {
    if (!contents) letGo(handle);
  }
}

/** Gone, a symlink, or a socket by now. */
function unlessOther(error: unknown): undefined {
  if (!['ENOENT', 'ELOOP', 'ENXIO', 'ENODEV'].includes(errnoOf(error) ?? '')) throw error;
}

/** The walk has judged what had the name a moment ago; another file that has it now is judged again. */
async function isForbidden(
  { parent, name, stats }: Step,
  now: BigIntStats,
  boundary: Boundary,
): Promise<boolean> {
  if (identityOf(stats) === identityOf(now)) return false;
  const kept = await boundary.kept();
  return kept(await identify(parent), name, now);
}
