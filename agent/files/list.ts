// Lists one directory: first its subdirectories, then its other entries, both in bytewise order of the names. All names
// are read first. The stats of the entries are read only as fast as the caller takes them.
import { posix } from 'node:path';
import type { FileEntry } from '../../proto/types/farhand/agent/v1/FileEntry.ts';
import { errnoOf } from '../../shared/errors.ts';
import { Quota } from '../../shared/quota.ts';
import { type Confined, child, lookAt, type Named, namesIn } from './confine/confined-fs.ts';
import { type Bytes, bytes } from './confine/parse-request-path.ts';
import type { Confinement } from './confine/resolve-inside-roots.ts';
import { describeName } from './file-description.ts';
import type { Operation, RequestOf } from './handler-adapters.ts';

/** Number of entries in a batch. The stats of all entries in a batch are read at the same time. */
const batchSize = 256;
/**
 * Number of names above which the broker refuses a listing, if the request sets no limit. The agent stores and sends at
 * most one name more, so that the broker notices a longer listing.
 */
const mostAtOnce = 200_000;
/** Quota of names that all listings of this process have in memory together. */
const held = new Quota(
  600_000,
  'too many large directory listings are running on this machine; try again later',
);

export const listFiles: Operation<'listFiles'> = async function* ({ reading, users }, request, { path }) {
  using directory = await reading.directory(path);
  const { names, total } = await namesOf(reading, directory.at, request);
  const release = held.take(names.length);
  try {
    // `total` counts the entries of all pages. An entry that is removed before its stats are read is in no batch.
    yield { head: { path: bytes(path), total } };
    const known = await users();
    const look = async (key: Bytes): Promise<FileEntry | undefined> => {
      const name = key.slice(1);
      const place = { directory: directory.at, name, path: posix.join(path, name) };
      try {
        const stats = await lookAt(child(directory.at, name));
        return stats && (await describeName(reading, place, stats, known));
      } catch (error) {
        if (errnoOf(error) === undefined) throw error;
        return unknownEntry(place, key.startsWith('/'));
      }
    };
    for (let at = 0; at < names.length; at += batchSize) {
      const found = await Promise.all(names.slice(at, at + batchSize).map(look));
      const entries = found.filter((entry) => entry !== undefined);
      if (entries.length > 0) yield { batch: { entries } };
    }
  } finally {
    release();
  }
};

/**
 * Describes an entry whose stats cannot be read, such as the mount point of a file server that is lost, or that belongs
 * to another user. As in `ls`, such an entry does not hide the others.
 */
const unknownEntry = ({ name, path }: { name: Bytes; path: Bytes }, directory: boolean): FileEntry => ({
  ...{ name: bytes(name), path: bytes(path), size: 0, mode: 0, owner: '?', group: '?', modified_at_ms: 0 },
  type: directory ? 'FILE_TYPE_DIRECTORY' : 'FILE_TYPE_FILE',
});

/** Returns the sorted names of the requested page, with the prefix of their kind, and the total number of names. */
async function namesOf(
  confinement: Confinement,
  directory: Confined,
  { hidden, offset, limit }: RequestOf<'listFiles'>,
): Promise<{ names: Bytes[]; total: number }> {
  const end = offset + (limit || mostAtOnce + 1);
  // Each name gets the prefix "/" if it is a directory, otherwise "0", so that directories sort first.
  let names: Bytes[] = [];
  let total = 0;
  const first = (): Bytes[] => names.sort().slice(0, end);
  for await (const batch of namesIn(directory)) {
    const wanted = batch.filter(({ name }) => hidden || !name.startsWith('.'));
    const keyOf = async ({ name, ...entry }: Named): Promise<Bytes> => {
      const target = entry.symlink ? await confinement.linkTarget(directory, name) : undefined;
      return ((target?.isDirectory() ?? entry.directory) ? '/' : '0') + name;
    };
    names.push(...(await Promise.all(wanted.map(keyOf))));
    total += wanted.length;
    // Frees memory: only the first `end` names are needed.
    if (names.length > 2 * end + batchSize) names = first();
  }
  return { names: first().slice(offset), total };
}
