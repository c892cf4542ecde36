// What is said about a file: its entry, and the etag that changes whenever its bytes may have changed.
import type { BigIntStats, Stats } from 'node:fs';
import type { FileEntry } from '../../proto/types/farhand/agent/v1/FileEntry.ts';
import { type Bytes, bytes } from './beneath/path.ts';
import type { People } from './people.ts';

export interface Described {
  /** Absolute. */
  path: Bytes;
  name: Bytes;
  /** Where the symlink of that name points to, as written. */
  link?: Bytes | undefined;
}

export function describe(
  { path, name, link }: Described,
  stats: Stats | BigIntStats,
  people: People,
): FileEntry {
  const mode = Number(stats.mode);
  return {
    name: bytes(name),
    path: bytes(path),
    type: stats.isDirectory() ? 'FILE_TYPE_DIRECTORY' : 'FILE_TYPE_FILE',
    size: Number(stats.size),
    mode: mode & 0o7777,
    owner: people.owner(Number(stats.uid)),
    group: people.group(Number(stats.gid)),
    // Of Stats it has fractions, of BigIntStats it has none.
    modified_at_ms: Math.floor(Number(stats.mtimeMs)),
    ...(link !== undefined && { link_target: bytes(link) }),
    special: special(stats),
  };
}

function special(stats: Stats | BigIntStats): string {
  if (stats.isFIFO()) return 'fifo';
  if (stats.isSocket()) return 'socket';
  if (stats.isBlockDevice()) return 'block';
  return stats.isCharacterDevice() ? 'char' : '';
}

/** Strong, quotes included. The change time is in it because the modification time can be set at will. */
export function etagOf(stats: BigIntStats): string {
  const { dev, ino, size, mtimeNs, ctimeNs } = stats;
  return `"${[dev, ino, size, mtimeNs, ctimeNs].map((part) => part.toString(36)).join('-')}"`;
}
