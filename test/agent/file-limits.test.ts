// Limits of the agent's file operations: many simultaneous calls, and errors that reveal nothing about paths outside
// the roots.
import { execFileSync } from 'node:child_process';
import {
  existsSync,
  mkdirSync,
  readdirSync,
  readlinkSync,
  symlinkSync,
  truncateSync,
  writeFileSync,
} from 'node:fs';
import { afterEach, beforeEach, describe, expect, test } from 'vitest';
import { Boundary } from '../../agent/files/confine/boundary.ts';
import { fromText } from '../../agent/files/confine/parse-request-path.ts';
import { Confinement } from '../../agent/files/confine/resolve-inside-roots.ts';
import { walk } from '../../agent/files/confine/walk-tree.ts';
import type { Files } from '../../agent/files/index.ts';
import { longestSilence } from '../../agent/files/search/index.ts';
import { watchQuota } from '../../agent/files/watch.ts';
import type { SearchFilesResponse } from '../../proto/types/farhand/agent/v1/SearchFilesResponse.ts';
import type { WatchFilesResponse } from '../../proto/types/farhand/agent/v1/WatchFilesResponse.ts';
import { AppError } from '../../shared/errors.ts';
import { Semaphore } from '../../shared/semaphore.ts';
import { fakeClock } from '../fake-clock.ts';
import { call, Disk, refused } from '../file-operations-fixture.ts';
import { waitFor } from '../wait-for.ts';

let disk: Disk;
let files: Files;
const path = (...parts: string[]): string => disk.path(...parts);

beforeEach(async () => {
  disk = new Disk();
  files = await disk.open();
});
afterEach(() => disk.remove());

const never = (): AbortSignal => new AbortController().signal;

describe('the semaphore', () => {
  const limited = (atOnce: number, mostWaiting: number): Semaphore =>
    new Semaphore(atOnce, (waiting) =>
      waiting < mostWaiting ? undefined : new AppError('unavailable', 'full'),
    );
  /** Occupies a slot of the semaphore until the test calls `end`. */
  function working(semaphore: Semaphore, signal = never()) {
    const { promise, resolve } = Promise.withResolvers<void>();
    let started = false;
    const done = semaphore.run(signal, () => {
      started = true;
      return promise;
    });
    done.catch(() => undefined);
    return { done, end: resolve, started: () => started };
  }

  test('runs up to the limit, queues the others in order, and refuses more when the queue is full', async () => {
    const semaphore = limited(2, 2);
    const [first, second, third, fourth] = Array.from({ length: 4 }, () => working(semaphore));
    await expect(working(semaphore).done).rejects.toEqual(expect.objectContaining({ code: 'unavailable' }));
    expect([third?.started(), fourth?.started()]).toEqual([false, false]);
    first?.end();
    await waitFor(() => expect(third?.started()).toBe(true));
    expect(fourth?.started()).toBe(false);
    second?.end();
    await waitFor(() => expect(fourth?.started()).toBe(true));
    for (const one of [third, fourth]) one?.end();
    await fourth?.done;
    expect(working(semaphore).started()).toBe(true);
  });

  test('a cancelled request leaves the queue and takes no slot', async () => {
    const semaphore = limited(1, 1);
    const stop = new AbortController();
    const first = working(semaphore);
    const waiting = working(semaphore, stop.signal);
    stop.abort(new Error('left'));
    await expect(waiting.done).rejects.toThrow('left');
    await expect(working(semaphore, stop.signal).done).rejects.toThrow('left');
    const next = semaphore.run(never(), () => Promise.reject(new Error('failed')));
    first.end();
    await expect(next).rejects.toThrow('failed');
    await expect(semaphore.run(never(), () => Promise.resolve('done'))).resolves.toBe('done');
  });
});

describe('heavy calls', () => {
  test('eight run at once, further ones wait, and light calls are not delayed', async () => {
    writeFileSync(path('huge'), '');
    // A sparse file that takes hours to hash.
    truncateSync(path('huge'), 1e12);
    writeFileSync(path('small'), 'x');
    const stop = new AbortController();
    const hashes = Array.from({ length: 8 }, () =>
      files.statFile({ path: Buffer.from(path('huge')), sha256: true }, call(stop.signal)),
    );
    const settled = Promise.allSettled(hashes);
    const small = Buffer.from(path('small'));
    const names = { source: small, destination: Buffer.from(path('b')), overwrite: false };
    const left = new AbortController();
    const leaving = files.copyFile(names, call(left.signal));
    const moved = files.moveFile(names, call());
    const light = await files.statFile({ path: small, sha256: false }, call());
    expect(light.entry?.size).toBe(1);
    left.abort(new Error('left'));
    await expect(leaving).rejects.toThrow('left');
    expect(existsSync(path('b'))).toBe(false);
    stop.abort(new Error('over'));
    await settled;
    await moved;
    expect(existsSync(path('b'))).toBe(true);
    await files.removeFile({ path: Buffer.from(path('b')), recursive: false }, call());
  });
});

describe('searches', () => {
  type Searching = AsyncIterator<SearchFilesResponse>;
  const search = (content: string, signal: AbortSignal = never()): Searching => {
    const wanted = { name: '', content, ignore_case: false, hidden: true, limit: 0 };
    const request = { path: Buffer.from(disk.root), ...wanted };
    return files.searchFiles(request, call(signal))[Symbol.asyncIterator]();
  };
  const readersOf = (file: string): number =>
    readdirSync('/proc/self/fd').filter((fd) => {
      try {
        return readlinkSync(`/proc/self/fd/${fd}`) === file;
      } catch {
        return false;
      }
    }).length;
  const empty = { done: false, value: { matches: { matches: [] } } };
  const many = { matches: { matches: { length: 64 } } };

  test('four run at once, and one that finds nothing sends an empty batch in time and lets others run', async () => {
    for (let index = 0; index < 200; index += 1) writeFileSync(path(`f${index}`), '');
    writeFileSync(path('huge'), 'x'.repeat(10_000));
    // A sparse file that takes hours to search.
    truncateSync(path('huge'), 1e12);
    const clock = fakeClock(1_000_000);
    const stops = Array.from({ length: 5 }, () => new AbortController());
    const running = stops.slice(0, 4).map(({ signal }) => search('missing', signal));
    const silent = running.map((one) => one.next());
    // All searches are reading the sparse file.
    await waitFor(() => expect(readersOf(path('huge'))).toBe(4));
    const [fifth, sixth] = [search('', stops[4]?.signal), search('')];
    const waiting = [fifth.next(), sixth.next()];
    stops[4]?.abort(new Error('left'));
    await expect(waiting[0]).rejects.toThrow('left');
    let entered = false;
    const turn = waiting[1]!.finally(() => {
      entered = true;
    });
    for (let round = 0; round < 20; round += 1) await new Promise(setImmediate);
    expect(entered).toBe(false);
    await clock.advance(longestSilence);
    expect(await Promise.all(silent)).toEqual(Array.from({ length: 4 }, () => empty));
    expect((await turn).value).toMatchObject(many);
    for (const one of [...running, sixth]) await one.return?.();
  });

  test('stalled readers do not make other requests wait', async () => {
    for (let index = 0; index < 200; index += 1) writeFileSync(path(`f${index}`), '');
    const readers = Array.from({ length: 6 }, () => search(''));
    for (const reader of readers) expect((await reader.next()).value).toMatchObject(many);
    for (const reader of readers) await reader.return?.();
  });
});

describe('watches', () => {
  test('share one quota, which is released when names and watches are removed', async () => {
    const { watchFiles: watch } = await disk.open({ watches: watchQuota(78) });
    mkdirSync(path('dir/sub'), { recursive: true });
    for (let index = 0; index < 8; index += 1) writeFileSync(path(`dir/f${index}`), '');
    type Watching = { iterator: AsyncIterator<WatchFilesResponse>; end(): Promise<unknown> };
    const begin = (at = 'dir'): Watching => {
      const stop = new AbortController();
      const request = { path: Buffer.from(path(at)), recursive: true, may_be_missing: false };
      const iterator = watch(request, call(stop.signal))[Symbol.asyncIterator]();
      const end = (): Promise<unknown> => {
        stop.abort(new Error('over'));
        return iterator.next().catch(() => undefined);
      };
      return { iterator, end };
    };
    const [one, two] = [begin(), begin()];
    expect(await one.iterator.next()).toEqual({
      done: false,
      value: { changes: [], path: Buffer.from(path('dir')) },
    });
    await two.iterator.next();
    // The first two watches use the whole quota of 78 units. Each of them watches two directories (15 units each) and
    // nine names (1 unit each).
    const third = begin();
    await expect(third.iterator.next()).rejects.toEqual(expect.objectContaining({ code: 'unavailable' }));
    await two.end();
    // A watch does not wait for free quota: it begins or fails at once. So the test tries again until the quota is
    // free.
    await waitFor(async () => {
      const again = begin();
      try {
        await again.iterator.next();
      } finally {
        await again.end();
      }
    });
    for (let index = 0; index < 40; index += 1) writeFileSync(path(`dir/sub/g${index}`), '');
    const received = async (): Promise<void> => {
      for (;;) await one.iterator.next();
    };
    await expect(received()).rejects.toEqual(expect.objectContaining({ code: 'unavailable' }));
    mkdirSync(path('other'));
    for (let index = 0; index < 20; index += 1) writeFileSync(path(`other/f${index}`), '');
    await waitFor(async () => {
      const all = begin('other');
      try {
        await all.iterator.next();
      } finally {
        await all.end();
      }
    });
  });
});

test('if the quota is too small for all watches that begin together, some of them succeed', async () => {
  const { watchFiles: watch } = await disk.open({ watches: watchQuota(60) });
  mkdirSync(path('dir'));
  for (let index = 0; index < 10; index += 1) writeFileSync(path(`dir/f${index}`), '');
  const stop = new AbortController();
  const recursive = { path: Buffer.from(path('dir')), recursive: true };
  const watching = Array.from({ length: 8 }, () =>
    watch({ ...recursive, may_be_missing: false }, call(stop.signal))[Symbol.asyncIterator](),
  );
  const begun = await Promise.allSettled(watching.map((one) => one.next()));
  expect(begun.filter(({ status }) => status === 'fulfilled')).toHaveLength(2);
  stop.abort(new Error('over'));
  await Promise.allSettled(watching.map((one) => one.next()));
});

describe('large directories', () => {
  test('large directories are walked in pieces, also nested ones, and removed completely', async () => {
    const script = 'd=.; for i in $(seq 35); do d=$d/d; mkdir $d; (cd $d && seq 280 | xargs touch); done';
    mkdirSync(path('top'));
    execFileSync('sh', ['-c', script], { cwd: path('top') });
    const beneath = new Confinement(await Boundary.open([disk.root], []));
    const directory = await beneath.directory(fromText(path('top')));
    const seen = new Set<string>();
    const options = { path: fromText(path('top')), signal: never() };
    for await (const step of walk(directory.at, beneath.boundary, options)) seen.add(step.path);
    expect(seen.size).toBe(35 * 281);
    for await (const _ of walk(directory.at, beneath.boundary, options)) break;
    directory[Symbol.dispose]();
    await files.removeFile({ path: Buffer.from(path('top')), recursive: true }, call());
    expect(existsSync(path('top'))).toBe(false);
  });
});

describe('outside the roots', () => {
  type Work = (at: Buffer) => AsyncIterable<unknown> | Promise<unknown>;
  const long = 'x'.repeat(300);
  const wanted = { name: '', content: '', ignore_case: false, hidden: true, limit: 0 };
  const listings: [string, Work][] = [
    ['list', (at) => files.listFiles({ path: at, hidden: true, offset: 0, limit: 0 }, call())],
    ['search', (at) => files.searchFiles({ path: at, ...wanted }, call())],
    ['archive', (at) => files.readArchive({ path: at, gzip: false }, call())],
  ];
  async function* opening(path: Buffer, create_parents: boolean) {
    yield { open: { path, create_parents } };
    yield { commit: { overwrite: true } };
  }
  const others: [string, Work][] = [
    ['read', (at) => files.readFile({ path: at, offset: 0, max_bytes: 0, digest: false }, call())],
    ['write', (at) => files.writeFile(opening(at, false), call())],
    ['write with parents', (at) => files.writeFile(opening(at, true), call())],
    ['watch', (at) => files.watchFiles({ path: at, recursive: false, may_be_missing: false }, call())],
  ];
  const below: [string, Work][] = [
    ['stat', (at) => files.statFile({ path: at, sha256: false }, call())],
    ['remove', (at) => files.removeFile({ path: at, recursive: false }, call())],
    ['make', (at) => files.makeDirectory({ path: at, parents: true }, call())],
  ];
  const links = ['link', 'to-file', 'to-missing', 'to-below-file', 'chain'];
  const further = ['dir', 'secret', 'missing', 'missing/below', 'secret/below', long, `${long}/below`];

  async function received(work: Work, at: string): Promise<string> {
    try {
      const result = work(Buffer.from(at));
      if (result instanceof Promise) await result;
      else for await (const _ of result);
      return 'done';
    } catch (error) {
      return error instanceof AppError
        ? `${error.code} ${error.message.replaceAll(at, 'PATH')}`
        : String(error);
    }
  }

  test('a path through a symlink out of the root is refused with the same words, whatever the target is', async () => {
    mkdirSync(`${disk.outside}/dir`);
    symlinkSync(disk.outside, path('link'));
    symlinkSync('../outside/secret', path('to-file'));
    symlinkSync('../outside/missing/./deep/', path('to-missing'));
    symlinkSync(`${disk.outside}/secret/below`, path('to-below-file'));
    symlinkSync('to-missing/', path('chain'));
    const ways = links.flatMap((link) => further.map((rest) => `${link}/${rest}`));
    const same = 'permission_denied PATH: is outside the directories that the agent serves (--root)';
    for (const [works, names] of [
      [
        [...listings, ...others],
        [...links, ...ways],
      ],
      [below, ways],
    ] as const) {
      for (const [name, work] of works) {
        for (const way of names) {
          expect([name, way, await received(work, path(way))]).toEqual([name, way, same]);
        }
      }
    }
  });

  test('failures inside a slot reach the caller unchanged', async () => {
    writeFileSync(path('file'), 'x');
    symlinkSync('missing/deep', path('dangling'));
    symlinkSync('loop', path('loop'));
    for (const [way, code] of [
      ['missing', 'file_not_found'],
      ['missing/deep', 'file_not_found'],
      ['file', 'not_a_directory'],
      ['file/deep', 'not_a_directory'],
      ['dangling', 'file_not_found'],
      ['dangling/deep', 'file_not_found'],
      ['loop/deep', 'invalid_path'],
      ['forbidden/missing', 'permission_denied'],
    ] as const) {
      for (const [, work] of listings)
        expect([way, (await received(work, path(way))).split(' ')[0]]).toEqual([way, code]);
    }
    const list = listings[0]?.[1](Buffer.from(path('missing'))) as AsyncIterable<unknown>;
    await expect(list[Symbol.asyncIterator]().next()).rejects.toEqual(refused('file_not_found'));
  });
});
