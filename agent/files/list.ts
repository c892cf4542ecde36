// Lists one directory: directories first, then by name, bytewise; entries are looked at only as they are asked for.
import { lstat, type Stats } from 'node:fs';
import { opendir, readlink } from 'node:fs/promises';
import type { FileEntry } from '../../proto/types/farhand/agent/v1/FileEntry.ts';
import { errnoOf, fromErrno } from '../../shared/errors.ts';
import type { AgentMethods } from '../../shared/rpc.ts';
import { unlessAborted } from './abort.ts';
import type { Beneath, Directory } from './beneath/index.ts';
import { type Bytes, bytes, shown, targetOf } from './beneath/path.ts';
import { describe } from './describe.ts';
import type { AskPeople, People } from './people.ts';

/** Entries of a batch, which are also those looked at at once. */
const batchSize = 256;
/** Entries that the kernel is asked for at once. */
const readAhead = 512;

export function openLister(beneath: Beneath, people: AskPeople, home: Bytes): AgentMethods['listFiles'] {
  return async function* listFiles(request, { signal }) {
    const { path } = targetOf(request.path, home);
    let directory: Directory | undefined;
    let last: Promise<unknown> = Promise.resolve();
    const wait = <T>(work: Promise<T>): Promise<T> => {
      last = work;
      return unlessAborted(signal, work);
    };
    try {
      directory = await unlessAborted(signal, beneath.directory(path), (late) => late.close());
      const names = await wait(namesOf(beneath, directory, request.hidden));
      // Of names: an entry that vanishes later is left out of the batches all the same.
      yield { head: { path: bytes(path), total: names.length } };
      const { offset, limit } = request;
      const end = limit === 0 ? names.length : Math.min(names.length, offset + limit);
      const look = lookerOf(beneath, directory, path, await people());
      for (let at = offset; at < end; at += batchSize) {
        const batch = names.slice(at, Math.min(end, at + batchSize));
        const found = await wait(Promise.all(batch.map(look)));
        const entries = found.filter((entry) => entry !== undefined);
        if (entries.length > 0) yield { batch: { entries } };
      }
    } catch (error) {
      throw signal.aborted ? signal.reason : fromErrno(error, shown(path));
    } finally {
      // Not before the last look is over: the number of a closed handle may soon be another directory's.
      last.catch(() => undefined).finally(() => directory?.close());
    }
  };
}

/** Sorted. Of 200,000 names nothing but the names is kept. */
async function namesOf(beneath: Beneath, directory: Directory, hidden: boolean): Promise<Bytes[]> {
  const { directories, others, links } = await read(directory.at, hidden);
  for (let at = 0; at < links.length; at += batchSize) {
    const batch = links.slice(at, at + batchSize);
    const targets = await Promise.all(batch.map((name) => beneath.linkTarget(directory, name)));
    batch.forEach((name, index) => {
      (targets[index]?.isDirectory() ? directories : others).push(name);
    });
  }
  // Names have one character per byte, so this is the order of bytes.
  return directories.sort().concat(others.sort());
}

type Names = Record<'directories' | 'others' | 'links', Bytes[]>;

/** Where a file system does not tell types, Node looks at each name itself, and must have their true bytes. */
async function read(at: Bytes, hidden: boolean): Promise<Names> {
  try {
    return await collect(at, hidden, 'latin1');
  } catch (error) {
    if (errnoOf(error) !== 'ENOENT') throw error;
    return collect(at, hidden, 'buffer');
  }
}

/** Not by readdir(), which makes an object of every entry before it gives the first. */
async function collect(at: Bytes, hidden: boolean, encoding: 'latin1' | 'buffer'): Promise<Names> {
  const names: Names = { directories: [], others: [], links: [] };
  // Node takes 'buffer' here as readdir() does, which its types do not know.
  const options = { bufferSize: readAhead, encoding: encoding as 'latin1' };
  for await (const entry of await opendir(at, options)) {
    const name = Buffer.from(entry.name, 'latin1').toString('latin1');
    if (!hidden && name.startsWith('.')) continue;
    const kind = entry.isDirectory() ? 'directories' : entry.isSymbolicLink() ? 'links' : 'others';
    names[kind].push(name);
  }
  return names;
}

type Look = (name: Bytes) => Promise<FileEntry | undefined>;

/** A symlink is described as its target, where that can be reached: its size is what a download yields. */
function lookerOf(beneath: Beneath, directory: Directory, path: Bytes, people: People): Look {
  const prefix = path === '/' ? path : `${path}/`;
  return async (name) => {
    const at = `${directory.at}/${name}`;
    const described = { path: prefix + name, name };
    try {
      const stats = await look(at);
      if (!stats.isSymbolicLink()) return describe(described, stats, people);
      const link = await readlink(bytes(at), 'latin1');
      const target = await beneath.linkTarget(directory, name);
      return describe({ ...described, link }, target ?? stats, people);
    } catch (error) {
      // Gone, or another thing by now: EINVAL is a symlink that no longer is one.
      if (errnoOf(error) === 'ENOENT' || errnoOf(error) === 'EINVAL') return undefined;
      throw error;
    }
  };
}

/** The callback form costs half of what the promise form does. */
function look(at: Bytes): Promise<Stats> {
  return new Promise((resolve, reject) => {
    lstat(bytes(at), (error, stats) => (error ? reject(error) : resolve(stats)));
  });
}
