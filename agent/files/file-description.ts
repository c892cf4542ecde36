// Describes files for responses, and computes the etag of a file, which changes whenever its bytes may have changed.
import { posix } from 'node:path';
import type { FileEntry } from '../../proto/types/farhand/agent/v1/FileEntry.ts';
import { type BigIntStats, type Confined, child, readlink } from './confine/confined-fs.ts';
import { type Bytes, bytes } from './confine/parse-request-path.ts';
import type { Confinement } from './confine/resolve-inside-roots.ts';
import type { Users } from './users-groups.ts';

/** Describes a path. If the path names a symlink, `link` is the target that is stored in the symlink. */
export function describe(path: Bytes, stats: BigIntStats, users: Users, link?: Bytes): FileEntry {
  return {
    name: bytes(posix.basename(path) || '/'),
    path: bytes(path),
    type: stats.isDirectory() ? 'FILE_TYPE_DIRECTORY' : 'FILE_TYPE_FILE',
    size: Number(stats.size),
    mode: Number(stats.mode) & 0o7777,
    owner: users.users.nameOf(Number(stats.uid)),
    group: users.groups.nameOf(Number(stats.gid)),
    modified_at_ms: Number(stats.mtimeMs),
    ...(link !== undefined && { link_target: bytes(link) }),
    special: special(stats),
  };
}

/**
 * Describes a name in an open directory. A symlink gets the type and size of its target if the target exists inside the
 * roots.
 */
export async function describeName(
  confinement: Confinement,
  { directory, name, path }: { directory: Confined; name: Bytes; path: Bytes },
  stats: BigIntStats,
  users: Users,
): Promise<FileEntry> {
  if (!stats.isSymbolicLink()) return describe(path, stats, users);
  const link = await readlink(child(directory, name)).catch(() => undefined);
  return describe(path, (await confinement.linkTarget(directory, name)) ?? stats, users, link);
}

function special(stats: BigIntStats): string {
  if (stats.isFIFO()) return 'fifo';
  if (stats.isSocket()) return 'socket';
  if (stats.isBlockDevice()) return 'block';
  return stats.isCharacterDevice() ? 'char' : '';
}

/**
 * Returns a strong etag, with its quotes. It includes the change time, because any program can set the modification
 * time.
 */
export function etagOf(stats: BigIntStats): string {
  const { dev, ino, size, mtimeNs, ctimeNs } = stats;
  return `"${[dev, ino, size, mtimeNs, ctimeNs].map((part) => part.toString(36)).join('-')}"`;
}
