// The agent's operations on trees of files (walk, remove, move, copy), called as the link calls them, on real files.
// Tests of refusals and attacks come first.
import { type ChildProcess, execFileSync } from 'node:child_process';
import { randomUUID } from 'node:crypto';
import { once } from 'node:events';
import {
  appendFileSync,
  chmodSync,
  chownSync,
  closeSync,
  existsSync,
  linkSync,
  lstatSync,
  lutimesSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  renameSync,
  rmdirSync,
  rmSync,
  statSync,
  symlinkSync,
  truncateSync,
  utimesSync,
  writeFileSync,
} from 'node:fs';
import { open as openFile } from 'node:fs/promises';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { inspect } from 'node:util';
import { afterEach, beforeEach, describe, expect, test } from 'vitest';
import { Boundary } from '../../agent/files/confine/boundary.ts';
import { child, lstat, Pinned } from '../../agent/files/confine/confined-fs.ts';
import { fromText } from '../../agent/files/confine/parse-request-path.ts';
import { Confinement, type Directory } from '../../agent/files/confine/resolve-inside-roots.ts';
import { type Step, type WalkOptions, walk } from '../../agent/files/confine/walk-tree.ts';
import { duplicate } from '../../agent/files/copy-tree.ts';
import { createFiles, type Files } from '../../agent/files/index.ts';
import type { ChangeFileRequest__Output } from '../../proto/types/farhand/agent/v1/ChangeFileRequest.ts';
import { AppError } from '../../shared/errors.ts';
import { createLogger } from '../../shared/logger.ts';
import {
  call,
  Disk,
  isRoot,
  mayMount,
  otherDisk,
  printed,
  refused,
  tree,
  tries,
} from '../file-operations-fixture.ts';
import { waitFor } from '../wait-for.ts';

// ---- A disk of its own for each test

const log = createLogger('test', 'silent');

let disk: Disk;
let base: string;
/** The only allowed root in most tests. The home directory is below it, and the directory `outside` is beside it. */
let root: string;
let outside: string;
let forbidden: string;
let home: string;
let files: Files;
/** A directory on another file system; empty if there is none. */
let shm: string;

const path = (...parts: string[]): string => join(root, ...parts);
const open = (roots = shm ? [root, shm] : [root]): Promise<Files> =>
  disk.open({ roots, home, forbidden: [forbidden] });

beforeEach(async () => {
  disk = new Disk({ second: true });
  ({ base, root, outside, forbidden, second: shm } = disk);
  home = path('homes/agent');
  mkdirSync(home, { recursive: true });
  files = await open();
});

afterEach(() => disk.remove());

/**
 * Makes nested directories. Their path exceeds the limit of Linux for paths (PATH_MAX). The innermost one contains a
 * file.
 */
function makeDeep(at: string, levels: number, name = 'd'): void {
  mkdirSync(at);
  let above = openSync(at, 'r');
  for (let level = 0; level < levels; level += 1) {
    mkdirSync(`/proc/self/fd/${above}/${name}`);
    const below = openSync(`/proc/self/fd/${above}/${name}`, 'r');
    closeSync(above);
    above = below;
  }
  writeFileSync(`/proc/self/fd/${above}/bottom`, 'x');
  closeSync(above);
}

/** For one second, a separate process swaps a directory with a symlink in a loop. */
function swap(name: string, target: string): ChildProcess {
  return disk.program(`
    const [name, target] = ${JSON.stringify([name, target])};
    // Ignores errors: the tested operation may have created or removed the same name in the meantime.
    const tried = (work) => { try { work(); } catch {} };
    console.log('ready');
    for (const end = Date.now() + 1000; Date.now() < end; ) {
      tried(() => fs.renameSync(name, name + '.real'));
      tried(() => fs.symlinkSync(target, name));
      tried(() => fs.renameSync(name, name + '.link'));
      tried(() => fs.renameSync(name + '.real', name));
      tried(() => fs.unlinkSync(name + '.link'));
    }
  `);
}

const codeOf = (error: unknown): string => (error instanceof AppError ? error.code : inspect(error));

const expectCode = (work: Promise<unknown>, code: string): Promise<void> =>
  expect(work).rejects.toEqual(refused(code));
const text = (at: string): string => readFileSync(at, 'utf8');
const modeOf = (at: string): number => lstatSync(at).mode & 0o7777;

// ---- Calls of the operations

type Way = string | Buffer;

const aborted = (): AbortSignal => AbortSignal.abort(new Error('the caller left'));

const stat = (at: Way, sha256 = false, by = files) => by.statFile({ path: Buffer.from(at), sha256 }, call());
const make = (at: Way, more: { mode?: number; parents?: boolean; signal?: AbortSignal } = {}) => {
  const { signal, parents = false, ...rest } = more;
  return files.makeDirectory({ path: Buffer.from(at), parents, ...rest }, call(signal));
};
const remove = (at: Way, recursive = false, signal?: AbortSignal, by = files) =>
  by.removeFile({ path: Buffer.from(at), recursive }, call(signal));
const pair = (source: Way, destination: Way, overwrite: boolean) => ({
  source: Buffer.from(source),
  destination: Buffer.from(destination),
  overwrite,
});
const move = (source: Way, destination: Way, overwrite = false, signal?: AbortSignal) =>
  files.moveFile(pair(source, destination, overwrite), call(signal));
const copy = (source: Way, destination: Way, overwrite = false, signal?: AbortSignal) =>
  files.copyFile(pair(source, destination, overwrite), call(signal));
const change = (at: Way, more: Partial<ChangeFileRequest__Output>) =>
  files.changeFile({ path: Buffer.from(at), ...more }, call());

/** A path in directory `at` whose name is not UTF-8. */
const notText = (at: string): Buffer => Buffer.concat([Buffer.from(`${at}/`), Buffer.from([0x66, 0xff])]);

/** Makes a tree with one entry of each type that can be copied. */
function plant(at: string): void {
  mkdirSync(join(at, 'sub/empty'), { recursive: true });
  writeFileSync(join(at, 'sub/file'), 'content');
  writeFileSync(notText(at), 'bytes');
  symlinkSync('../nowhere', join(at, 'sub/link'));
  chmodSync(join(at, 'sub/file'), 0o640);
  utimesSync(join(at, 'sub/file'), 1_000, 2_000.5);
  chmodSync(join(at, 'sub/empty'), 0o2711);
  chmodSync(join(at, 'sub'), 0o555);
  lutimesSync(join(at, 'sub/link'), 5_000, 5_000.25);
  for (const way of ['sub/empty', 'sub', '']) utimesSync(join(at, way), 3_000, 4_000);
}

/** Returns the properties that a copy must preserve, by path. */
function portrait(at: string): Record<string, unknown> {
  // Leaves out the root, because each temporary file in it changes the modification time of the root.
  const ways = [...(at === path() ? [] : ['']), ...tree(at).filter((way) => !way.includes('\ufffd'))];
  return Object.fromEntries(
    ways.map((way) => {
      const stats = lstatSync(join(at, way));
      const { mode, mtimeMs, uid, gid } = stats;
      const content = stats.isFile()
        ? text(join(at, way))
        : stats.isSymbolicLink() && readlinkSync(join(at, way));
      return [way, { mode, mtimeMs: Math.round(mtimeMs), uid, gid, content }];
    }),
  );
}

const leftovers = (): string[] =>
  [root, ...(shm ? [shm] : [])].flatMap(tree).filter((way) => way.includes('.farhand-'));

// ---- Walking

describe('walking', () => {
  let beneath: Confinement;
  const opened: Directory[] = [];
  const all = new AbortController().signal;

  beforeEach(async () => {
    rmSync(path('homes'), { recursive: true });
    beneath = new Confinement(await Boundary.open([root], [forbidden, path('sub/config')]));
  });
  afterEach(() => {
    for (const directory of opened.splice(0)) directory[Symbol.dispose]();
  });

  async function* walking(from = root, options: Partial<WalkOptions> = {}): AsyncGenerator<Step, void, void> {
    const directory = await beneath.directory(fromText(from));
    opened.push(directory);
    yield* walk(directory.at, beneath.boundary, { path: fromText(from), signal: all, ...options });
  }

  async function receivedTwice(options: Partial<WalkOptions> = {}, from = root): Promise<string[]> {
    const steps: string[] = [];
    for await (const { path: way, left } of walking(from, options)) steps.push(left ? `${way}/` : way);
    return steps;
  }

  /** Returns the paths of a walk. A walk yields each directory before and after its content; the second is left out. */
  const received = async (options: Partial<WalkOptions> = {}, from = root): Promise<string[]> =>
    (await receivedTwice(options, from)).filter((way) => !way.endsWith('/'));

  test('a protected directory or file fails the walk, or is reported and left out', async () => {
    mkdirSync(path('sub'));
    writeFileSync(path('sub/config'), 'secret');
    writeFileSync(path('sub/other'), '');
    await expect(received()).rejects.toEqual(refused('permission_denied'));
    const skipped: string[] = [];
    const skip = (way: string, error: unknown): void => {
      skipped.push(`${way} ${codeOf(error)}`);
    };
    expect(await received({ skip })).toEqual(['sub', 'sub/other']);
    expect(skipped).toEqual([`${forbidden} permission_denied`, `${path('sub/config')} permission_denied`]);
  });

  test('a forbidden file that replaces another one during the walk is left out', async () => {
    mkdirSync(path('sub'));
    writeFileSync(path('sub/config'), 'secret');
    const steps: string[] = [];
    for await (const { path: way, left } of walking(root, { skip: () => undefined })) {
      if (left) continue;
      steps.push(way);
      if (way !== 'sub') continue;
      writeFileSync(path('sub/next'), 'newer secret');
      renameSync(path('sub/next'), path('sub/config'));
    }
    expect(steps).toEqual(['sub']);
  });

  test('symlinks are listed and never followed', async () => {
    mkdirSync(path('sub'));
    symlinkSync(outside, path('sub/way'));
    symlinkSync('.', path('sub/loop'));
    expect(await received({}, path('sub'))).toEqual(['loop', 'way']);
  });

  test('a directory that a loop swaps with a symlink never leads the walk out of the root', async () => {
    mkdirSync(path('in/sub'), { recursive: true });
    writeFileSync(path('in/sub/inside'), '');
    const swapping = swap(path('in/sub'), outside);
    await printed(swapping, 'ready');
    const seen = new Set<string>();
    let links = 0;
    while (swapping.exitCode === null) {
      for await (const { path: way, stats } of walking(path('in'))) {
        seen.add(way);
        if (stats.isSymbolicLink()) links += 1;
      }
      for (const directory of opened.splice(0)) directory[Symbol.dispose]();
    }
    // At least one walk met the real directory, and at least one met the symlink.
    expect([...seen].sort()).toContain('sub/inside');
    expect([...seen].filter((way) => way.includes('secret'))).toEqual([]);
    expect(links).toBeGreaterThan(0);
  });

  test.skipIf(!isRoot)('an unreadable path is reported, or fails the walk (needs root)', async () => {
    mkdirSync(path('closed'), { mode: 0o700 });
    mkdirSync(path('open'));
    rmSync(forbidden, { recursive: true });
    const child = disk.program(
      `const at = '/proc/self/fd/' + fs.openSync(${JSON.stringify(root)});
       const options = { path: '/start', signal: new AbortController().signal };
       const seen = [];
       const skip = (way, error) => seen.push(way + ' ' + error.code);
       for await (const step of walk(at, undefined, { ...options, skip })) if (!step.left) seen.push(step.path);
       try { for await (const step of walk(at, undefined, options)); } catch (error) { seen.push(error.code); }
       console.log(JSON.stringify(seen));`,
      65_534,
    );
    await printed(child, '["closed","/start/closed EACCES","open","permission_denied"]');
  });

  test.skipIf(!mayMount)(
    'with oneMount, a mount below fails the walk or is skipped, also a bind mount (needs mount)',
    async () => {
      for (const name of ['in/bind', 'in/tmpfs', 'in/plain']) mkdirSync(path(name), { recursive: true });
      disk.mount('--bind', outside, path('in/bind'));
      disk.mount('-t', 'tmpfs', 'tmpfs', path('in/tmpfs'));
      writeFileSync(path('in/tmpfs/a'), '');
      await expect(received({ oneMount: true }, path('in'))).rejects.toEqual(refused('file_busy'));
      const skipped: string[] = [];
      const skip = (way: string): void => {
        skipped.push(way);
      };
      expect(await received({ oneMount: true, skip }, path('in'))).toEqual(['plain']);
      expect(skipped).toEqual([path('in/bind'), path('in/tmpfs')]);
      expect(await received({}, path('in'))).toEqual(['bind', 'bind/secret', 'plain', 'tmpfs', 'tmpfs/a']);
    },
  );

  test('a signal ends the walk between two steps', async () => {
    for (const name of ['a', 'b', 'c']) writeFileSync(path(name), '');
    const stop = new AbortController();
    const steps = walking(root, { signal: stop.signal, skip: () => undefined });
    await steps.next();
    stop.abort(new Error('the caller left'));
    await expect(steps.next()).rejects.toThrow('the caller left');
  });

  test('a walk that stops early or fails leaves no handle open', async () => {
    makeDeep(path('deep'), 50);
    for await (const { path: way } of walking(path('deep'))) {
      if (way.split('/').length > 40) break;
    }
    const failing = async (): Promise<void> => {
      for await (const { path: way, left } of walking(path('deep'))) {
        if (left && way.split('/').length < 40) throw new Error('enough');
      }
    };
    await expect(failing()).rejects.toThrow('enough');
    for (const directory of opened.splice(0)) directory[Symbol.dispose]();
    // Checks within a second, because the garbage collector would close leaked handles later.
    await waitFor(() => expect(disk.openHandles()).toEqual([]), { timeout: 1_000 });
  });

  test('3,000 levels are walked down and up', async () => {
    makeDeep(path('deep'), 3_000);
    let [entered, left, length] = [0, 0, 0];
    for await (const step of walking(path('deep'))) {
      if (step.left) left += 1;
      else entered += 1;
      length = Math.max(length, step.path.length);
    }
    expect([entered, left, length]).toEqual([3_001, 3_000, 3_000 * 2 + 'bottom'.length]);
  });

  test('a directory comes before and after its content, and without content if the walk does not enter it', async () => {
    for (const name of ['b/c', 'a', '.h/i']) mkdirSync(path('t', name), { recursive: true });
    for (const name of ['b/file', 'B', 'ä', 'b/c/x', '.h/j']) writeFileSync(path('t', name), '');
    const from = path('t');
    const before = ['.h', '.h/i', '.h/j', 'B', 'a', 'b', 'b/c', 'b/c/x', 'b/file', 'Ã¤'];
    expect(await received({}, from)).toEqual(before);
    const [hidden, a] = [
      ['.h', '.h/i', '.h/i/', '.h/j', '.h/'],
      ['a', 'a/'],
    ];
    const b = ['b', 'b/c', 'b/c/x', 'b/c/', 'b/file', 'b/'];
    expect(await receivedTwice({}, from)).toEqual([...hidden, 'B', ...a, ...b, 'Ã¤']);
    const enter = ({ name }: Step): boolean => !name.startsWith('.');
    expect(await received({ enter }, from)).toEqual(before.filter((way) => !way.startsWith('.h/')));
  });

  test('each step has its pinned directory, its name by bytes and its stats', async () => {
    const name = Buffer.from([0x66, 0xff]);
    mkdirSync(path('t'));
    writeFileSync(Buffer.concat([Buffer.from(`${path('t')}/`), name]), 'four');
    for await (const step of walking(path('t'))) {
      expect(readlinkSync(step.parent)).toBe(path('t'));
      expect(step).toMatchObject({ name: name.toString('latin1'), at: `${step.parent}/${step.name}` });
      expect([step.stats.size, step.stats.isFile()]).toEqual([4n, true]);
    }
  });
});

// ---- Describing

describe('describing one path', () => {
  test('a path that is missing, outside or not a directory is refused with that reason', async () => {
    writeFileSync(path('file'), 'x');
    symlinkSync('file', path('link'));
    symlinkSync('nowhere', path('dangling'));
    await expectCode(stat(path('missing')), 'file_not_found');
    await expectCode(stat(path('missing/deep')), 'file_not_found');
    await expectCode(stat(path('file/')), 'not_a_directory');
    await expectCode(stat(path('link/')), 'not_a_directory');
    await expectCode(stat(path('dangling/')), 'file_not_found');
    await expectCode(stat(path('file/x')), 'not_a_directory');
    await expectCode(stat(join(outside, 'secret')), 'permission_denied');
    await expectCode(stat(join(outside, 'missing')), 'permission_denied');
    await expectCode(stat(join(forbidden, 'key')), 'permission_denied');
    await expect(files.statFile({ path: Buffer.from(root), sha256: false }, call(aborted()))).rejects.toThrow(
      'the caller left',
    );
  });

  test('only regular files have a digest, and pipes are described without being opened', async () => {
    execFileSync('mkfifo', [path('fifo')]);
    symlinkSync('fifo', path('link'));
    expect((await stat(path('fifo'))).entry).toMatchObject({ special: 'fifo', type: 'FILE_TYPE_FILE' });
    expect((await stat(path('link'))).entry).toMatchObject({ special: 'fifo' });
    await expectCode(stat(path('fifo'), true), 'unsupported_file');
    await expectCode(stat(root, true), 'is_a_directory');
    await expectCode(stat(path('missing'), true), 'file_not_found');
    await expectCode(stat('/proc/self/environ', true, await open(['/'])), 'permission_denied');
  });

  test('a file that changes while it is hashed is a conflict, and a signal ends the hashing', async () => {
    writeFileSync(path('big'), '');
    truncateSync(path('big'), 500_000_000);
    let running = true;
    const hashing = stat(path('big'), true).finally(() => {
      running = false;
    });
    hashing.catch(() => undefined);
    for (let time = 1; running; time += 1) {
      utimesSync(path('big'), time, time);
      await new Promise(setImmediate);
    }
    await expectCode(hashing, 'conflict');
    const stop = new AbortController();
    const given = files.statFile({ path: Buffer.from(path('big')), sha256: true }, call(stop.signal));
    setImmediate(() => stop.abort(new Error('the caller left')));
    await expect(given).rejects.toThrow('the caller left');
  });

  test('a symlink that dangles, loops, or leads out or to a forbidden path is described as a symlink', async () => {
    symlinkSync('nowhere', path('dangling'));
    symlinkSync('loop', path('loop'));
    symlinkSync(outside, path('out'));
    symlinkSync(join(forbidden, 'key'), path('kept'));
    for (const name of ['dangling', 'loop', 'out', 'kept']) {
      const { size } = lstatSync(path(name));
      const { entry } = await stat(path(name));
      expect(entry).toMatchObject({ type: 'FILE_TYPE_FILE', size, mode: 0o777 });
      expect(entry!.link_target!.toString()).toBe(readlinkSync(path(name)));
    }
  });

  test('the entry is the same as in a listing, with an ETag, and a digest on request', async () => {
    const name = Buffer.concat([Buffer.from(`${root}/`), Buffer.from([0x66, 0xff])]);
    writeFileSync(name, 'abc');
    symlinkSync(Buffer.from([0x66, 0xff]), path('link'));
    const listed = new Map<string, unknown>();
    for await (const { batch } of files.listFiles(
      { path: Buffer.from(root), hidden: true, offset: 0, limit: 0 },
      call(),
    )) {
      for (const entry of batch?.entries ?? []) listed.set(String(entry.path), entry);
    }
    for (const way of [name, Buffer.from(path('link')), Buffer.from(forbidden)].slice(0, 2)) {
      const { entry, etag, sha256 } = await stat(way, true);
      expect(entry).toEqual(listed.get(way.toString()));
      expect(sha256).toBe('ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad');
      expect((await stat(way)).sha256).toBe('');
      for await (const { head } of files.readFile(
        { path: way, offset: 0, max_bytes: 0, digest: false },
        call(),
      )) {
        if (head) expect(head.etag).toBe(etag);
      }
    }
    expect((await stat('~')).entry).toMatchObject({ path: Buffer.from(home), type: 'FILE_TYPE_DIRECTORY' });
    expect((await stat('/', false, await open(['/']))).entry).toMatchObject({ path: Buffer.from('/') });
  });
});

// ---- Making directories

describe('making a directory', () => {
  test('an existing path is refused with already_exists, with parents too', async () => {
    writeFileSync(path('file'), '');
    symlinkSync('nowhere', path('dangling'));
    for (const name of ['homes', 'file', 'dangling', 'homes/', '']) {
      await expectCode(make(path(name)), 'already_exists');
      await expectCode(make(path(name), { parents: true }), 'already_exists');
    }
  });

  test('a missing parent, a file in the path, and an outside or forbidden path are refused and leave nothing', async () => {
    writeFileSync(path('file'), '');
    symlinkSync(outside, path('out'));
    const before = tree(root);
    await expectCode(make(path('a/b')), 'file_not_found');
    await expectCode(make(path('file/b'), { parents: true }), 'not_a_directory');
    await expectCode(make(join(outside, 'a/b'), { parents: true }), 'permission_denied');
    await expectCode(make(path('out/a'), { parents: true }), 'permission_denied');
    await expectCode(make(join(forbidden, 'a')), 'permission_denied');
    await expectCode(make(path('a'), { mode: 0o10_000 }), 'invalid_request');
    await expectCode(make(path('a/b', 'x'.repeat(300)), { parents: true }), 'invalid_path');
    await expect(make(path('a/b'), { parents: true, signal: aborted() })).rejects.toThrow('the caller left');
    const stop = new AbortController();
    const making = make(path('a/b'), { parents: true, signal: stop.signal });
    stop.abort(new Error('left meanwhile'));
    await expect(making).rejects.toThrow('left meanwhile');
    expect(tree(root)).toEqual(before);
    expect(tree(outside)).toEqual(['secret']);
  });

  test('the mode is exactly the requested one, by default 0755, whatever the umask', async () => {
    const umask = process.umask(0o077);
    try {
      expect((await make(path('a'))).entry).toMatchObject({ mode: 0o755, path: Buffer.from(path('a')) });
      await make(path('b/c/d/'), { mode: 0o3777, parents: true });
      await make(path('z'), { mode: 0 });
    } finally {
      process.umask(umask);
    }
    expect(['a', 'b', 'b/c', 'b/c/d', 'z'].map((name) => modeOf(path(name)))).toEqual([
      0o755, 0o755, 0o755, 0o3777, 0,
    ]);
  });
});

// ---- Removing

describe('removing', () => {
  test('the root, the home, their parents and parents of forbidden paths are never removed, under any name', async () => {
    const all = await open(['/']);
    const none = undefined;
    mkdirSync(path('sub/keep'), { recursive: true });
    const inner = await createFiles({
      roots: [root, path('sub/keep')],
      home,
      forbidden: [join(path('holder'), 'unit')],
      directory: join(base, 'data'),
      log,
    });
    mkdirSync(path('holder'));
    symlinkSync('homes', path('alias'));
    const before = tree(root);
    // These two removals are not recursive, because a faulty agent would otherwise empty the disk.
    await expectCode(remove('/', false, none, all), 'permission_denied');
    await expectCode(remove(base, false, none, all), 'permission_denied');
    for (const recursive of [false, true]) {
      for (const way of [home, '~', '', path('homes'), path('alias/agent'), root, `${root}/.`, forbidden]) {
        await expectCode(remove(way, recursive), 'permission_denied');
      }
      await expectCode(remove(path('sub'), recursive, none, inner), 'permission_denied');
      await expectCode(remove(path('sub/keep'), recursive, none, inner), 'permission_denied');
      await expectCode(remove(path('holder'), recursive, none, inner), 'permission_denied');
      await expectCode(remove(join(base, 'data'), recursive, none, all), 'permission_denied');
      await expectCode(remove(join(outside, 'secret'), recursive), 'permission_denied');
    }
    expect(tree(root)).toEqual(before);
    expect(tree(outside)).toEqual(['secret']);
  });

  test('a symlink in the path to the home is never removed', async () => {
    mkdirSync(path('real/agent'), { recursive: true });
    symlinkSync('real', path('way'));
    const by = await createFiles({
      roots: [root],
      home: path('way/agent'),
      forbidden: [],
      directory: join(base, 'data'),
      log,
    });
    await expectCode(remove(path('way'), false, undefined, by), 'permission_denied');
    await expectCode(remove(path('real'), true, undefined, by), 'permission_denied');
  });

  test('a path that is missing, not empty or not a directory is refused', async () => {
    mkdirSync(path('full/sub'), { recursive: true });
    writeFileSync(path('file'), '');
    symlinkSync('full', path('link'));
    await expectCode(remove(path('missing')), 'file_not_found');
    await expectCode(remove(path('full')), 'directory_not_empty');
    await expectCode(remove(path('file/')), 'not_a_directory');
    await expectCode(remove(`${path('file')}/.`, true), 'not_a_directory');
    await expectCode(remove(path('link/'), true), 'not_a_directory');
    await expect(remove(path('full'), true, aborted())).rejects.toThrow('the caller left');
    expect(existsSync(path('full/sub'))).toBe(true);
  });

  test('forbidden files are never removed, not even as a hard link', async () => {
    mkdirSync(path('t'));
    linkSync(join(forbidden, 'key'), path('t/alias'));
    const by = await createFiles({
      roots: [root],
      home,
      forbidden: [join(forbidden, 'key')],
      directory: join(base, 'data'),
      log,
    });
    await expectCode(remove(path('t/alias'), false, undefined, by), 'permission_denied');
    await expectCode(remove(path('t'), true, undefined, by), 'permission_denied');
    expect(text(path('t/alias'))).toBe('forbidden');
  });

  test.skipIf(!mayMount)('no mount, and nothing mounted below, is emptied (needs mount)', async () => {
    mkdirSync(path('t/sub/bind'), { recursive: true });
    mkdirSync(path('source'));
    writeFileSync(path('source/precious'), 'x');
    disk.mount('--bind', path('source'), path('t/sub/bind'));
    const error = await remove(path('t'), true).catch((thrown: unknown) => thrown);
    expect(error).toMatchObject({ code: 'file_busy', details: { path: path('t/sub/bind') } });
    await expectCode(remove(path('t/sub/bind'), true), 'file_busy');
    await expectCode(remove(path('t/sub/bind')), 'file_busy');
    expect(text(path('source/precious'))).toBe('x');
  });

  test('nothing outside is removed through a directory that a loop swaps with a symlink', async () => {
    for (let index = 0; index < 20; index += 1) mkdirSync(join(outside, `d${index}`));
    const before = tree(outside);
    const swapping = swap(path('in/sub'), outside);
    await printed(swapping, 'ready');
    const codes = new Map<string, number>();
    while (swapping.exitCode === null) {
      // Created under another name and renamed, because mkdir itself would follow the symlink.
      mkdirSync(path('next/sub/deep/deeper'), { recursive: true });
      tries(() => renameSync(path('next'), path('in')));
      const code = await remove(path('in'), true).then(() => 'done', codeOf);
      codes.set(code, (codes.get(code) ?? 0) + 1);
      // Removes `in` only while it is the real directory.
      tries(() => execFileSync('rm', ['-rf', path('in')]));
    }
    expect(tree(outside)).toEqual(before);
    expect(codes.get('done')).toBeGreaterThan(0);
    const known = [
      'done',
      'directory_not_empty',
      'file_not_found',
      'conflict',
      'not_a_directory',
      'is_a_directory',
    ];
    expect([...codes.keys()].filter((code) => !known.includes(code))).toEqual([]);
  });

  test('files, symlinks, pipes, devices and empty directories are removed, but never the target of a symlink', async () => {
    writeFileSync(path('file'), 'four');
    mkdirSync(path('empty'));
    mkdirSync(path('full'));
    writeFileSync(path('full/kept'), '');
    symlinkSync('full', path('link'));
    symlinkSync(outside, path('out'));
    execFileSync('mkfifo', [path('fifo')]);
    const name = Buffer.concat([Buffer.from(`${root}/`), Buffer.from([0xff, 0x2e])]);
    writeFileSync(name, '');
    expect(await remove(path('file'))).toEqual({
      path: Buffer.from(path('file')),
      size: 4,
      directory: false,
    });
    expect(await remove(path('empty/'))).toMatchObject({ size: 0, directory: true });
    for (const way of [path('link'), path('out'), path('fifo'), name]) {
      expect(await remove(way, true)).toMatchObject({ size: 0, directory: false });
    }
    if (tries(() => execFileSync('mknod', [path('zero'), 'c', '1', '5'], { stdio: 'ignore' })))
      await remove(path('zero'));
    expect(tree(root)).toEqual(['forbidden', 'forbidden/key', 'full', 'full/kept', 'homes', 'homes/agent']);
    expect(tree(outside)).toEqual(['secret']);
  });

  test('a signal ends a removal between two entries', async () => {
    mkdirSync(path('wide'));
    for (let index = 0; index < 2_000; index += 1) writeFileSync(path(`wide/${index}`), '');
    const stop = new AbortController();
    const removing = remove(path('wide'), true, stop.signal);
    await waitFor(() => expect(readdirSync(path('wide')).length).toBeLessThan(2_000), { interval: 1 });
    stop.abort(new Error('the caller left'));
    await expect(removing).rejects.toThrow('the caller left');
    expect(readdirSync(path('wide')).length).toBeGreaterThan(0);
  });

  test('a tree that is deeper than the longest path is removed', async () => {
    makeDeep(path('deep'), 2_100);
    expect(await remove(path('deep'), true)).toMatchObject({ directory: true });
    expect(existsSync(path('deep'))).toBe(false);
  });
});

// ---- Moving and copying

const refusals: [
  name: string,
  work: (source: Way, destination: Way, overwrite?: boolean) => Promise<unknown>,
][] = [
  ['moving', (...args) => move(...args)],
  ['copying', (...args) => copy(...args)],
];

describe.each(refusals)('%s', (_, work) => {
  beforeEach(() => {
    writeFileSync(path('file'), 'new');
    writeFileSync(path('old'), 'old');
    plant(path('dir'));
    mkdirSync(path('empty'));
    mkdirSync(path('full/sub'), { recursive: true });
  });

  test('a missing, outside or forbidden path is refused, and so is a file path with a slash at its end', async () => {
    symlinkSync(outside, path('out'));
    const before = portrait(path());
    await expectCode(work(path('missing'), path('a')), 'file_not_found');
    await expectCode(work(path('file'), path('missing/a')), 'file_not_found');
    await expectCode(work(path('file'), path('old/a')), 'not_a_directory');
    await expectCode(work(path('file/'), path('a')), 'not_a_directory');
    await expectCode(work(path('file'), path('a/')), 'not_a_directory');
    await expectCode(work(join(outside, 'secret'), path('a')), 'permission_denied');
    await expectCode(work(path('out/secret'), path('a')), 'permission_denied');
    await expectCode(work(path('file'), join(outside, 'a')), 'permission_denied');
    await expectCode(work(path('file'), path('out/a')), 'permission_denied');
    await expectCode(work(join(forbidden, 'key'), path('a')), 'permission_denied');
    await expectCode(work(path('file'), join(forbidden, 'a')), 'permission_denied');
    await expectCode(work(path('file'), join(forbidden, 'key'), true), 'permission_denied');
    await expectCode(work(path('empty'), home, true), 'permission_denied');
    await expectCode(work(path('empty'), root, true), 'permission_denied');
    await expectCode(work(forbidden, path('a')), 'permission_denied');
    expect(portrait(path())).toEqual(before);
    expect(tree(outside)).toEqual(['secret']);
  });

  test('without overwrite nothing is replaced, not even an empty directory or a dangling symlink', async () => {
    symlinkSync('nowhere', path('dangling'));
    const before = portrait(path());
    for (const source of ['file', 'dir']) {
      for (const name of ['old', 'empty', 'full', 'dangling']) {
        await expectCode(work(path(source), path(name)), 'already_exists');
      }
    }
    expect(portrait(path())).toEqual(before);
  });

  test('with overwrite a file replaces no directory, and a directory replaces only an empty directory', async () => {
    const before = portrait(path());
    await expectCode(work(path('file'), path('empty'), true), 'is_a_directory');
    await expectCode(work(path('dir'), path('old'), true), 'not_a_directory');
    await expectCode(work(path('dir'), path('full'), true), 'directory_not_empty');
    expect(portrait(path())).toEqual(before);
  });

  test('a directory never goes into itself, by any name', async () => {
    symlinkSync('dir', path('alias'));
    const before = portrait(path());
    await expectCode(work(path('dir'), path('dir/sub/empty/x')), 'invalid_path');
    await expectCode(work(path('dir'), path('alias/x')), 'invalid_path');
    expect(portrait(path())).toEqual(before);
  });

  test('of many moves or copies at once to one destination exactly one succeeds', async () => {
    for (let n = 0; n < 8; n += 1) {
      writeFileSync(path(`f${n}`), `${n}`);
      mkdirSync(path(`d${n}/${n}`), { recursive: true });
    }
    for (const [kind, target] of [
      ['f', path('one')],
      ['d', path('two')],
    ] as const) {
      const sources = Array.from({ length: 8 }, (__, n) => path(`${kind}${n}`));
      const results = await Promise.allSettled(sources.map((source) => work(source, target)));
      const codes = results.flatMap((r) => (r.status === 'rejected' ? [codeOf(r.reason)] : []));
      expect(codes).toEqual(Array(7).fill('already_exists'));
      const winner = results.findIndex(({ status }) => status === 'fulfilled');
      if (kind === 'f') expect(text(target)).toBe(`${winner}`);
      else expect(readdirSync(target)).toEqual([`${winner}`]);
    }
    expect(leftovers()).toEqual([]);
  });

  test('with overwrite files replace files or symlinks themselves, and directories replace empty ones', async () => {
    symlinkSync('old', path('link'));
    const image = portrait(path('dir'));
    await work(path('file'), path('link'), true);
    expect(lstatSync(path('link')).isFile()).toBe(true);
    expect([text(path('link')), text(path('old'))]).toEqual(['new', 'old']);
    await work(path('link'), path('old'), true);
    expect(text(path('old'))).toBe('new');
    await work(path('dir'), path('empty'), true);
    expect(portrait(path('empty'))).toEqual(image);
    expect(text(join(path('empty'), 'sub/file'))).toBe('content');
    expect(leftovers()).toEqual([]);
  });

  test('modes, times, symlinks and names of a directory are preserved', async () => {
    chmodSync(path('dir'), 0o555);
    const image = portrait(path('dir'));
    const answer = await work(path('dir'), path('there/'));
    expect(answer).toMatchObject({ entry: { path: Buffer.from(path('there')), mode: 0o555 } });
    expect(portrait(path('there'))).toEqual(image);
    expect(readFileSync(notText(path('there')), 'utf8')).toBe('bytes');
  });
});

describe('moving', () => {
  test('the root, the home, their parents and parents of forbidden paths cannot be moved', async () => {
    const before = tree(root);
    for (const way of [home, path('homes'), root, forbidden])
      await expectCode(move(way, path('a'), true), 'permission_denied');
    await expectCode(
      (await open(['/'])).moveFile(pair(base, join(tmpdir(), 'farhand-never'), false), call()),
      'permission_denied',
    );
    expect(tree(root)).toEqual(before);
  });

  test('symlinks, pipes and names that are not UTF-8 are moved', async () => {
    writeFileSync(path('target'), 'x');
    symlinkSync('target', path('link'));
    execFileSync('mkfifo', [path('fifo')]);
    const { entry } = await move(path('link'), path('moved'));
    expect(entry).toMatchObject({ size: 1, link_target: Buffer.from('target') });
    expect(readlinkSync(path('moved'))).toBe('target');
    expect((await move(path('fifo'), path('pipe'))).entry).toMatchObject({ special: 'fifo' });
    await move(path('moved'), notText(root));
    await move(notText(root), path('link'), true);
    expect(tree(root)).toEqual([
      'forbidden',
      'forbidden/key',
      'homes',
      'homes/agent',
      'link',
      'pipe',
      'target',
    ]);
  });

  test('moving a path to itself succeeds and changes nothing, also without overwrite', async () => {
    writeFileSync(path('a'), 'x');
    symlinkSync('.', path('self'));
    const { ino } = statSync(path('a'));
    expect((await move(path('a'), path('a'))).entry).toMatchObject({ size: 1 });
    await move(path('self/a'), path('a'), true);
    expect(statSync(path('a')).ino).toBe(ino);
  });

  test('moving a file onto another hard link of it leaves only that link', async () => {
    writeFileSync(path('a'), 'x');
    linkSync(path('a'), path('b'));
    await move(path('a'), path('b'), true);
    expect([existsSync(path('a')), text(path('b')), statSync(path('b')).nlink]).toEqual([false, 'x', 1]);
  });

  test('a signal that has fired moves nothing', async () => {
    writeFileSync(path('a'), 'x');
    await expect(move(path('a'), path('b'), false, aborted())).rejects.toThrow('the caller left');
    expect(existsSync(path('a'))).toBe(true);
  });
});

describe.skipIf(!otherDisk)('moving between file systems (needs a second one)', () => {
  test('a failed copy leaves the source whole and nothing at the destination', async () => {
    plant(path('dir'));
    execFileSync('mkfifo', [path('dir/zfifo')]);
    const before = portrait(path('dir'));
    const error = await move(path('dir'), join(shm, 'dir')).catch((thrown: unknown) => thrown);
    expect(error).toMatchObject({ code: 'unsupported_file', details: { path: path('dir/zfifo') } });
    expect(portrait(path('dir'))).toEqual(before);
    expect(tree(shm)).toEqual([]);
    expect(leftovers()).toEqual([]);
  });

  test.skipIf(isRoot)(
    'a directory that cannot be removed is not left at the destination (not as root)',
    async () => {
      mkdirSync(path('closed'));
      writeFileSync(path('closed/file'), '1');
      chmodSync(path('closed'), 0o555);
      await expectCode(move(path('closed'), join(shm, 'closed')), 'permission_denied');
      chmodSync(path('closed'), 0o755);
      expect(tree(path('closed'))).toEqual(['file']);
      expect(tree(shm)).toEqual([]);
      expect(leftovers()).toEqual([]);
    },
  );

  test.skipIf(!mayMount)('a source with a mount below it is not moved (needs mount)', async () => {
    mkdirSync(path('dir/bind'), { recursive: true });
    disk.mount('--bind', outside, path('dir/bind'));
    await expectCode(move(path('dir'), join(shm, 'dir')), 'file_busy');
    expect(tree(outside)).toEqual(['secret']);
    expect(tree(shm)).toEqual([]);
  });

  test('a signal in the middle leaves the source whole and nothing behind', async () => {
    mkdirSync(path('dir'));
    for (let n = 0; n < 3_000; n += 1) writeFileSync(path(`dir/${n}`), `${n}`);
    const stop = new AbortController();
    const moving = move(path('dir'), join(shm, 'dir'), false, stop.signal);
    await waitFor(() => expect(tree(shm).length).toBeGreaterThan(10), { interval: 1 });
    stop.abort(new Error('the caller left'));
    await expect(moving).rejects.toThrow('the caller left');
    expect(readdirSync(path('dir')).length).toBe(3_000);
    expect(tree(shm)).toEqual([]);
    expect(leftovers()).toEqual([]);
  });

  test('files, symlinks and trees are moved completely, with owner, mode and times', async () => {
    plant(path('dir'));
    if (isRoot) chownSync(path('dir/sub/file'), 1234, 4321);
    chmodSync(path('dir/sub/file'), 0o6711);
    writeFileSync(path('file'), 'x');
    symlinkSync('file', path('link'));
    const image = portrait(path('dir'));
    await move(path('dir'), join(shm, 'dir'));
    expect(portrait(join(shm, 'dir'))).toEqual(image);
    expect(readFileSync(notText(join(shm, 'dir')), 'utf8')).toBe('bytes');
    await move(path('link'), join(shm, 'link'));
    expect(readlinkSync(join(shm, 'link'))).toBe('file');
    await expectCode(move(path('file'), join(shm, 'link')), 'already_exists');
    await move(path('file'), join(shm, 'link'), true);
    expect(text(join(shm, 'link'))).toBe('x');
    expect(tree(root)).toEqual(['forbidden', 'forbidden/key', 'homes', 'homes/agent']);
    expect(leftovers()).toEqual([]);
  });

  test('a tree that is deeper than the longest path is moved', async () => {
    makeDeep(path('deep'), 400, 'directory-with-name');
    await move(path('deep'), join(shm, 'deep'));
    expect(existsSync(path('deep'))).toBe(false);
    expect(execFileSync('find', ['deep', '-name', 'bottom'], { cwd: shm }).length).toBeGreaterThan(6_000);
  });

  test('temporary files of a killed agent are removed at the next start; a directory of the same name is not', async () => {
    const data = join(base, 'killed');
    mkdirSync(path('dir'));
    for (let n = 0; n < 3_000; n += 1) writeFileSync(path(`dir/${n}`), Buffer.alloc(10_000));
    const child = disk.program(`
      const files = await createFiles({ roots: ['/'], home: '/', forbidden: [],
        directory: ${JSON.stringify(data)}, log: createLogger('x', 'silent') });
      // readdirSync() fails if a directory disappears while it reads the tree.
      const entries = () => {
        try { return fs.readdirSync(${JSON.stringify(shm)}, { recursive: true }).length; } catch { return 0; }
      };
      const watch = setInterval(() => {
        if (entries() > 20) process.kill(process.pid, 'SIGKILL');
      }, 1);
      await files.moveFile({ source: Buffer.from(${JSON.stringify(path('dir'))}),
        destination: Buffer.from(${JSON.stringify(join(shm, 'dir'))}), overwrite: false },
        { signal: new AbortController().signal });
    `);
    await once(child, 'exit');
    expect(child.signalCode).toBe('SIGKILL');
    const [left] = readdirSync(shm);
    expect(left).toMatch(/^\.farhand-/);
    expect(modeOf(join(shm, left!))).toBe(0o700);
    // Replaces the temporary directory in the root with an ordinary directory of the same name.
    const beside = readdirSync(root).find((name) => name.startsWith('.farhand-'))!;
    renameSync(path(beside), path('was'));
    mkdirSync(path(beside));
    writeFileSync(path(beside, 'precious'), 'x');
    await createFiles({ roots: ['/'], home: root, forbidden: [], directory: data, log });
    expect(tree(shm)).toEqual([]);
    expect(tree(path(beside))).toEqual(['precious']);
    expect(readdirSync(path('dir')).length).toBe(3_000);
  });
});

describe('copying', () => {
  test('special files are refused by name, alone or in a tree, and nothing is left', async () => {
    mkdirSync(path('dir/sub'), { recursive: true });
    writeFileSync(path('dir/a'), 'x');
    execFileSync('mkfifo', [path('dir/sub/fifo')]);
    await expectCode(copy(path('dir/sub/fifo'), path('copy')), 'unsupported_file');
    const error = await copy(path('dir'), path('copy')).catch((thrown: unknown) => thrown);
    expect(error).toMatchObject({ code: 'unsupported_file', details: { path: path('dir/sub/fifo') } });
    rmSync(path('dir/sub/fifo'));
    const server = createServer().listen(path('dir/sub/socket'));
    await once(server, 'listening');
    await expectCode(copy(path('dir'), path('copy')), 'unsupported_file');
    server.close();
    await once(server, 'close');
    const proc = (await open(['/'])).copyFile(pair('/proc/self/environ', path('copy'), false), call());
    await expectCode(proc, 'permission_denied');
    for (const made of ['/proc/sys/kernel', `/proc/${process.ppid}/mem`])
      await expectCode(
        (await open(['/'])).copyFile(pair(made, path('copy'), false), call()),
        'unsupported_file',
      );
    expect(existsSync(path('copy'))).toBe(false);
    expect(leftovers()).toEqual([]);
  });

  test('a forbidden path in a tree is named, and nothing is copied', async () => {
    const error = await (await open(['/']))
      .copyFile(pair(root, join(base, 'copy'), false), call())
      .catch((thrown: unknown) => thrown);
    expect(error).toMatchObject({ code: 'permission_denied', details: { path: forbidden } });
    expect(readdirSync(base).filter((name) => name === 'copy' || name.startsWith('.'))).toEqual([]);
  });

  // The kernel's control groups are the file system without fsync(2) for directories that needs no server.
  test.skipIf(!mayMount)('a directory is copied to a file system that cannot flush directories', async () => {
    mkdirSync(path('dir'));
    mkdirSync(path('groups'));
    disk.mount('-t', 'cgroup2', 'cgroup2', path('groups'));
    using from = new Pinned(await openFile(root));
    using to = new Pinned(await openFile(path('groups')));
    const [name, made] = [fromText('dir'), `farhand-test-${randomUUID()}`];
    const at = child(from.at, name);
    const options = {
      ...{ boundary: await Boundary.open([root], []), path: fromText(path('dir')) },
      ...{ destination: fromText(path('groups', made)), signal: call().signal },
      ...{ leaveOut: () => false, moves: false },
    };
    try {
      const copying = duplicate({ name, at, stats: await lstat(at) }, child(to.at, fromText(made)), options);
      expect(await copying).toEqual({ files: 0, bytes: 0 });
    } finally {
      rmdirSync(path('groups', made));
    }
  });

  test('copying a path onto itself is refused, by any name, and changes nothing', async () => {
    writeFileSync(path('a'), 'x');
    linkSync(path('a'), path('b'));
    symlinkSync('a', path('link'));
    await expectCode(copy(path('a'), path('a')), 'already_exists');
    for (const name of ['a', 'b']) await expectCode(copy(path('link'), path(name), true), 'invalid_path');
    await expectCode(copy(path('homes'), path('homes'), true), 'permission_denied');
    expect([text(path('a')), statSync(path('a')).nlink]).toEqual(['x', 2]);
  });

  test('nothing outside is copied through a directory that a loop swaps with a symlink', async () => {
    mkdirSync(path('in/sub'), { recursive: true });
    writeFileSync(path('in/sub/inside'), '');
    const swapping = swap(path('in/sub'), outside);
    await printed(swapping, 'ready');
    const codes = new Map<string, number>();
    const seen = new Set<string>();
    const copyOnce = async (): Promise<void> => {
      const code = await copy(path('in'), path('copy')).then(() => 'done', codeOf);
      codes.set(code, (codes.get(code) ?? 0) + 1);
      if (code !== 'done') return;
      // The copy may contain the symlink that leads out of the root. `find` without -L does not follow it.
      for (const way of execFileSync('find', ['.'], { cwd: path('copy') })
        .toString()
        .split('\n'))
        seen.add(way);
      rmSync(path('copy'), { recursive: true });
    };
    while (swapping.exitCode === null) await copyOnce();
    // The swapping has ended, so this copy succeeds even if the symlink disturbed all earlier ones.
    await copyOnce();
    expect([...seen].filter((way) => way.includes('secret'))).toEqual([]);
    expect([...seen]).toContain('./sub/inside');
    expect(codes.get('done')).toBeGreaterThan(0);
    const known = ['done', 'conflict', 'file_not_found', 'invalid_path'];
    expect([...codes.keys()].filter((code) => !known.includes(code))).toEqual([]);
    expect(leftovers()).toEqual([]);
  });

  test('a file that grows while it is copied is copied with its size at the start', async () => {
    writeFileSync(path('log'), Buffer.alloc(100_000_000, 'x'));
    let running = true;
    const copying = copy(path('log'), path('copy')).finally(() => {
      running = false;
    });
    copying.catch(() => undefined);
    for (; running; await new Promise(setImmediate)) appendFileSync(path('log'), 'more');
    const { bytes, files: count } = await copying;
    // Bytes may have been appended before the copy began, so the size is not exactly 100 MB.
    expect([count, statSync(path('copy')).size]).toEqual([1, bytes]);
    expect(bytes).toBeGreaterThanOrEqual(100_000_000);
    expect(statSync(path('log')).size).toBeGreaterThan(Number(bytes));
  });

  test.skipIf(!otherDisk)(
    'a file that grows while it is moved to another disk stays where it is',
    async () => {
      writeFileSync(path('log'), Buffer.alloc(100_000_000, 'x'));
      let running = true;
      const moving = move(path('log'), join(shm, 'log')).finally(() => {
        running = false;
      });
      moving.catch(() => undefined);
      for (; running; await new Promise(setImmediate)) appendFileSync(path('log'), 'more');
      await expectCode(moving, 'conflict');
      expect(statSync(path('log')).size).toBeGreaterThan(100_000_000);
      expect(readdirSync(shm)).toEqual([]);
    },
  );

  test('a file that is rewritten while it is copied is a conflict, and a signal ends a copy', async () => {
    writeFileSync(path('big'), Buffer.alloc(100_000_000, 'x'));
    let running = true;
    const copying = copy(path('big'), path('copy')).finally(() => {
      running = false;
    });
    copying.catch(() => undefined);
    for (let time = 1; running; time += 1) {
      utimesSync(path('big'), time, time);
      await new Promise(setImmediate);
    }
    await expectCode(copying, 'conflict');
    const stop = new AbortController();
    // A sparse file that takes long to read.
    truncateSync(path('big'), 100_000_000_000);
    const stopped = copy(path('big'), path('copy'), false, stop.signal);
    await waitFor(() => expect(leftovers()).toHaveLength(2), { interval: 1 });
    const started = performance.now();
    stop.abort(new Error('the caller left'));
    await expect(stopped).rejects.toThrow('the caller left');
    expect(performance.now() - started).toBeLessThan(3_000);
    expect(existsSync(path('copy'))).toBe(false);
    expect(leftovers()).toEqual([]);
  });

  test.skipIf(!mayMount)('a full disk is no_space and leaves nothing (needs mount)', async () => {
    mkdirSync(path('small'));
    disk.mount('-t', 'tmpfs', '-o', 'size=256k', 'tmpfs', path('small'));
    writeFileSync(path('big'), Buffer.alloc(1_000_000));
    writeFileSync(path('small/old'), 'old');
    const noSpace = refused('no_space', { path: path('small/old'), errno: 'ENOSPC' });
    await expect(copy(path('big'), path('small/old'), true)).rejects.toEqual(noSpace);
    await expect(move(path('big'), path('small/old'), true)).rejects.toEqual(noSpace);
    expect(tree(path('small'))).toEqual(['old']);
    expect([text(path('small/old')), statSync(path('big')).size]).toEqual(['old', 1_000_000]);
  });

  test.skipIf(!isRoot)(
    'an agent that is not root owns its copies, drops setuid, and copies read-only trees (needs root)',
    async () => {
      plant(path('dir'));
      chmodSync(path('dir/sub/file'), 0o4755);
      chmodSync(path('dir/sub/empty'), 0o555);
      chmodSync(path('dir'), 0o555);
      mkdirSync(path('theirs'));
      mkdirSync(path('theirs/full/sub'), { recursive: true });
      for (const way of ['theirs', 'theirs/full']) chownSync(path(way), 65_534, 65_534);
      mkdirSync(join(base, 'nobody'));
      chownSync(join(base, 'nobody'), 65_534, 65_534);
      const child = disk.program(
        `const files = await createFiles({ roots: [${JSON.stringify(root)}], home: '/', forbidden: [],
         directory: ${JSON.stringify(join(base, 'nobody'))}, log: createLogger('x', 'silent') });
       const paths = (from, to) => ({ source: Buffer.from(from), destination: Buffer.from(to), overwrite: false });
       const signal = new AbortController().signal;
       await files.copyFile(paths(${JSON.stringify(path('dir'))}, ${JSON.stringify(path('theirs/copy'))}), { signal });
       const taken = { ...paths(${JSON.stringify(path('dir'))}, ${JSON.stringify(path('theirs/full'))}), overwrite: true };
       await files.copyFile(taken, { signal }).catch((error) => console.log(error.code));
       await files.removeFile({ path: Buffer.from(${JSON.stringify(path('dir/sub/file'))}) }, { signal })
         .catch((error) => console.log('code ' + error.code));`,
        65_534,
      );
      await printed(child, 'code permission_denied');
      const { uid, gid, mode } = statSync(path('theirs/copy/sub/file'));
      expect([uid, gid, mode & 0o7777]).toEqual([65_534, 65_534, 0o755]);
      expect(modeOf(path('theirs/copy'))).toBe(0o555);
      expect(leftovers()).toEqual([]);
    },
  );

  test('the answer has the entry, files and bytes; a symlink is followed, and sparse files stay sparse', async () => {
    plant(path('dir'));
    truncateSync(path('dir/sub/file'), 100_000_000);
    symlinkSync('dir', path('link'));
    if (isRoot) chownSync(path('dir/sub/file'), 1234, 4321);
    const image = portrait(path('dir'));
    expect(await copy(path('link'), path('copy'))).toMatchObject({
      entry: { path: Buffer.from(path('copy')), type: 'FILE_TYPE_DIRECTORY' },
      files: 2,
      bytes: 100_000_005,
    });
    expect(portrait(path('copy'))).toEqual(image);
    expect(statSync(path('copy/sub/file')).blocks * 512).toBeLessThan(5_000_000);
    symlinkSync('dir/sub/file', path('one'));
    expect(await copy(path('one'), path('copied'))).toMatchObject({ files: 1, bytes: 100_000_000 });
    expect(lstatSync(path('copied')).isFile()).toBe(true);
  });
});

// ---- Changing

describe('changing mode and owner', () => {
  test('the error lists all unknown users and groups, and nothing is changed', async () => {
    writeFileSync(path('a'), 'x');
    chmodSync(path('a'), 0o640);
    const bad = { mode: 0o777, owner: 'nobody-such', group: '4294967295' };
    const error = await change(path('a'), bad).catch((thrown: unknown) => thrown);
    expect(error).toMatchObject({
      code: 'validation_failed',
      details: { issues: [{ path: 'owner' }, { path: 'group' }] },
    });
    await expectCode(change(path('a'), { mode: 0o10_000 }), 'invalid_request');
    await expectCode(change(path('a/'), { mode: 0 }), 'not_a_directory');
    await expectCode(change(path('missing'), { mode: 0 }), 'file_not_found');
    await expectCode(change(join(outside, 'secret'), { mode: 0 }), 'permission_denied');
    await expectCode(change(join(forbidden, 'key'), { mode: 0 }), 'permission_denied');
    symlinkSync(join(outside, 'secret'), path('out'));
    await expectCode(change(path('out'), { mode: 0 }), 'permission_denied');
    expect([modeOf(path('a')), modeOf(join(outside, 'secret')) & 0o400]).toEqual([0o640, 0o400]);
  });

  test.skipIf(!isRoot)('a user who does not own a file cannot change it (needs root)', async () => {
    writeFileSync(path('a'), 'x');
    mkdirSync(join(base, 'nobody'));
    chownSync(join(base, 'nobody'), 65_534, 65_534);
    const child = disk.program(
      `const files = await createFiles({ roots: [${JSON.stringify(root)}], home: '/', forbidden: [],
         directory: ${JSON.stringify(join(base, 'nobody'))}, log: createLogger('x', 'silent') });
       await files.changeFile({ path: Buffer.from(${JSON.stringify(path('a'))}), mode: 0o777 },
         { signal: new AbortController().signal }).catch((error) => console.log('code ' + error.code));`,
      65_534,
    );
    await printed(child, 'code permission_denied');
  });

  test('mode is set through a symlink, on directories and on pipes', async () => {
    writeFileSync(path('a'), 'x');
    symlinkSync('a', path('link'));
    execFileSync('mkfifo', [path('fifo')]);
    expect((await change(path('link'), { mode: 0o4711 })).entry).toMatchObject({
      mode: 0o4711,
      link_target: Buffer.from('a'),
    });
    await change(path('homes/'), { mode: 0o1777 });
    await change(path('fifo'), { mode: 0o600 });
    expect(['a', 'homes', 'fifo'].map((name) => modeOf(path(name)))).toEqual([0o4711, 0o1777, 0o600]);
  });

  test.skipIf(!isRoot)(
    'owner and group are names or numbers, and setuid survives them (needs root)',
    async () => {
      writeFileSync(path('a'), 'x');
      const { entry } = await change(path('a'), { owner: '1234', group: 'root', mode: 0o4755 });
      expect(entry).toMatchObject({ owner: '1234', group: 'root', mode: 0o4755 });
      await change(path('a'), { group: '4321' });
      expect([statSync(path('a')).uid, statSync(path('a')).gid]).toEqual([1234, 4321]);
      await change(path('a'), { owner: 'root' });
      expect([statSync(path('a')).uid, statSync(path('a')).gid]).toEqual([0, 4321]);
    },
  );
});
