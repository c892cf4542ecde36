// Lists one directory: directories first, then by name, bytewise; entries are looked at only as they are asked for.
import { type Dirent, lstat, type Stats } from 'node:fs';
import { readdir, readlink } from 'node:fs/promises';
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
  const found = await read(directory.at);
  const directories: Bytes[] = [];
  const others: Bytes[] = [];
  const links: Bytes[] = [];
  for (const entry of found) {
    const name = entry.name.toString('latin1');
    if (!hidden && name.startsWith('.')) continue;
    (entry.isDirectory() ? directories : entry.isSymbolicLink() ? links : others).push(name);
  }
  for (let at = 0; at < links.length; at += batchSize) {
    const batch = links.slice(at, at + batchSize);
    const targets = await Promise.all(batch.map((name) => beneath.linkTarget(directory, name)));
    batch.forEach((name, index) => {
      (targets[index]?.isDirectory() ? directories : others).push(name);
    });
  }
  // Names have one character per byte, so this is the order of bytes.
  return [...directories.sort(), ...others.sort()];
}

/** Where a file system does not tell types, Node looks at each name itself, and must have their true bytes. */
async function read(at: Bytes): Promise<Dirent<Bytes | Buffer>[]> {
  try {
    return await readdir(at, { withFileTypes: true, encoding: 'latin1' });
  } catch (error) {
    if (errnoOf(error) !== 'ENOENT') throw error;
    return readdir(at, { withFileTypes: true, encoding: 'buffer' });
  }
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
