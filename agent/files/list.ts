// Lists one directory: directories first, then by name, bytewise; entries are looked at only as they are asked for.
import { type Dirent, lstat, type Stats } from 'node:fs';
import { opendir, readlink } from 'node:fs/promises';
import type { FileEntry } from '../../proto/types/farhand/agent/v1/FileEntry.ts';
import type { ListFilesRequest__Output } from '../../proto/types/farhand/agent/v1/ListFilesRequest.ts';
import { openBudget } from '../../shared/budget.ts';
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
/** Names of one listing without a limit; one more shows that there are too many. */
const mostAtOnce = 200_000;
/** Names that all listings hold together. */
const mostNames = 600_000;

export function openLister(beneath: Beneath, people: AskPeople, home: Bytes): AgentMethods['listFiles'] {
  const shelf = openBudget(mostNames, 'large listings are under way on this machine');
  return async function* listFiles(request, { signal }) {
    const { path } = targetOf(request.path, home);
    let directory: Directory | undefined;
    let last: Promise<unknown> = Promise.resolve();
    let release = (): void => {};
    const wait = <T>(work: Promise<T>): Promise<T> => {
      last = work;
      return unlessAborted(signal, work);
    };
    try {
      directory = await unlessAborted(signal, beneath.directory(path), (late) => late.close());
      const { names, total } = await wait(namesOf(beneath, directory, request));
      release = shelf.take(names.length);
      // Of names: an entry that vanishes later is left out of the batches all the same.
      yield { head: { path: bytes(path), total } };
      const look = lookerOf(beneath, directory, path, await people());
      for (let at = 0; at < names.length; at += batchSize) {
        const found = await wait(Promise.all(names.slice(at, at + batchSize).map(look)));
        const entries = found.filter((entry) => entry !== undefined);
        if (entries.length > 0) yield { batch: { entries } };
      }
    } catch (error) {
      throw signal.aborted ? signal.reason : fromErrno(error, shown(path));
    } finally {
      release();
      // Not before the last look is over: the number of a closed handle may soon be another directory's.
      last.catch(() => undefined).finally(() => directory?.close());
    }
  };
}

/** Those of the page, sorted; and how many there are in all. */
async function namesOf(
  beneath: Beneath,
  directory: Directory,
  { hidden, offset, limit }: ListFilesRequest__Output,
): Promise<{ names: Bytes[]; total: number }> {
  const end = offset + (limit || mostAtOnce + 1);
  try {
    return await collect(beneath, directory, hidden, { offset, end }, 'latin1');
  } catch (error) {
    if (errnoOf(error) !== 'ENOENT') throw error;
    // A file system that does not tell types: Node looks at each name itself, and must have their true bytes.
    return collect(beneath, directory, hidden, { offset, end }, 'buffer');
  }
}

/** Not by readdir(), which makes an object of every entry before it gives the first. */
async function collect(
  beneath: Beneath,
  directory: Directory,
  hidden: boolean,
  page: { offset: number; end: number },
  encoding: 'latin1' | 'buffer',
): Promise<{ names: Bytes[]; total: number }> {
  const [directories, others] = [new Least(page.end), new Least(page.end)];
  let links: Bytes[] = [];
  const resolve = async (): Promise<void> => {
    const targets = await Promise.all(links.map((name) => beneath.linkTarget(directory, name)));
    links.forEach((name, index) => {
      (targets[index]?.isDirectory() ? directories : others).add(name);
    });
    links = [];
  };
  // Node takes 'buffer' here as readdir() does, which its types do not know.
  const options = { bufferSize: readAhead, encoding: encoding as 'latin1' };
  const entries: AsyncIterable<Dirent<Bytes | Buffer>> = await opendir(directory.at, options);
  for await (const entry of entries) {
    const name = typeof entry.name === 'string' ? entry.name : entry.name.toString('latin1');
    if (!hidden && name.startsWith('.')) continue;
    if (entry.isSymbolicLink()) links.push(name);
    else (entry.isDirectory() ? directories : others).add(name);
    if (links.length === batchSize) await resolve();
  }
  await resolve();
  const names = directories.sorted().concat(others.sorted()).slice(page.offset, page.end);
  return { names, total: directories.count + others.count };
}

/** The first so many names of any number, in the order of their bytes. */
class Least {
  count = 0;
  readonly #most: number;
  #names: Bytes[] = [];

  constructor(most: number) {
    this.#most = most;
  }

  add(name: Bytes): void {
    this.count += 1;
    this.#names.push(name);
    if (this.#names.length > 2 * this.#most + readAhead) this.#names = this.sorted();
  }

  sorted(): Bytes[] {
    // Names have one character per byte.
    return this.#names.sort().slice(0, this.#most);
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
