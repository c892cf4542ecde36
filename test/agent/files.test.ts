// The agent's file operations, called as the link calls them, on real files. Tests of refusals and attacks come first.
import { execFileSync, spawn } from 'node:child_process';
import { createHash, randomBytes } from 'node:crypto';
import { once } from 'node:events';
import {
  appendFileSync,
  chmodSync,
  chownSync,
  existsSync,
  linkSync,
  lstatSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  statSync,
  symlinkSync,
  truncateSync,
  unlinkSync,
  utimesSync,
  writeFileSync,
} from 'node:fs';
import { createServer } from 'node:net';
import { join } from 'node:path';
import { inspect } from 'node:util';
import { afterEach, beforeEach, describe, expect, onTestFinished, test } from 'vitest';
import { createFiles, type Files } from '../../agent/files/index.ts';
import { createUsers } from '../../agent/files/users-groups.ts';
import type { FileEntry } from '../../proto/types/farhand/agent/v1/FileEntry.ts';
import type { ListFilesHead } from '../../proto/types/farhand/agent/v1/ListFilesHead.ts';
import type { ListFilesRequest__Output } from '../../proto/types/farhand/agent/v1/ListFilesRequest.ts';
import type { ReadFileHead } from '../../proto/types/farhand/agent/v1/ReadFileHead.ts';
import type { ReadFileRequest__Output } from '../../proto/types/farhand/agent/v1/ReadFileRequest.ts';
import type { WriteFileCommit__Output } from '../../proto/types/farhand/agent/v1/WriteFileCommit.ts';
import type { WriteFileOpen__Output } from '../../proto/types/farhand/agent/v1/WriteFileOpen.ts';
import type { WriteFileRequest__Output } from '../../proto/types/farhand/agent/v1/WriteFileRequest.ts';
import type { WriteFileResponse } from '../../proto/types/farhand/agent/v1/WriteFileResponse.ts';
import { AppError } from '../../shared/errors.ts';
import { createLogger } from '../../shared/logger.ts';
import {
  call,
  Disk,
  hasFuse,
  isRoot,
  mayMount,
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
/** The only allowed root in most tests. The directory `outside` is beside it. */
let root: string;
let outside: string;
let forbidden: string;
let files: Files;

const path = (...parts: string[]): string => join(root, ...parts);
const open = (roots = [root], more: { forbidden?: string[]; home?: string } = {}): Promise<Files> =>
  disk.open({ roots, forbidden: [forbidden], ...more });

beforeEach(async () => {
  disk = new Disk({ forbidden: 'forbidden' });
  ({ base, root, outside, forbidden } = disk);
  files = await open();
});

afterEach(() => disk.remove());

// ---- Calls

interface ReadResult {
  head: ReadFileHead;
  body: Buffer;
}

const readRequest = (
  target: string | Buffer,
  more: Partial<ReadFileRequest__Output>,
): ReadFileRequest__Output => ({
  path: Buffer.from(target),
  offset: 0,
  max_bytes: 0,
  digest: false,
  ...more,
});

async function read(
  target: string | Buffer,
  more: Partial<ReadFileRequest__Output> & { between?: (chunk: number) => void; by?: Files } = {},
): Promise<ReadResult> {
  const { between, by = files, ...rest } = more;
  const chunks: Buffer[] = [];
  let head: ReadFileHead | undefined;
  for await (const part of by.readFile(readRequest(target, rest), call())) {
    if (part.head) head = part.head;
    if (part.chunk) chunks.push(Buffer.from(part.chunk));
    between?.(chunks.length);
  }
  return { head: head!, body: Buffer.concat(chunks) };
}

interface ListResult {
  head: ListFilesHead;
  entries: FileEntry[];
  names: string[];
  batches: number[];
}

async function list(
  target: string | Buffer,
  more: Partial<ListFilesRequest__Output> & { between?: () => void; by?: Files } = {},
): Promise<ListResult> {
  const { between, by = files, ...rest } = more;
  const result: ListResult = { head: {}, entries: [], names: [], batches: [] };
  const request = { path: Buffer.from(target), hidden: true, offset: 0, limit: 0, ...rest };
  for await (const part of by.listFiles(request, call())) {
    if (part.head) result.head = part.head;
    result.entries.push(...(part.batch?.entries ?? []));
    if (part.batch) result.batches.push(part.batch.entries?.length ?? 0);
    between?.();
  }
  result.names = result.entries.map(({ name }) => name!.toString());
  return result;
}

interface WriteOptions
  extends Partial<WriteFileCommit__Output>,
    Partial<Omit<WriteFileOpen__Output, 'path'>> {
  by?: Files;
  signal?: AbortSignal;
}

async function* parts(...messages: WriteFileRequest__Output[]): AsyncGenerator<WriteFileRequest__Output> {
  yield* messages;
}

const opening = (target: string | Buffer, create_parents = false): WriteFileRequest__Output => ({
  open: { path: Buffer.from(target), create_parents },
});

function write(
  target: string | Buffer,
  content: string | Buffer,
  options: WriteOptions = {},
): Promise<WriteFileResponse> {
  const { create_parents = false, if_match, by = files, signal, ...commit } = options;
  const open = { path: Buffer.from(target), create_parents, ...(if_match !== undefined && { if_match }) };
  const messages = [{ open }, { chunk: Buffer.from(content) }, { commit: { overwrite: true, ...commit } }];
  return by.writeFile(parts(...messages), call(signal));
}

const expectCode = (work: Promise<unknown>, code: string): Promise<void> =>
  expect(work).rejects.toEqual(refused(code));
const codeOf = (error: unknown): string => (error instanceof AppError ? error.code : inspect(error));
const codesOf = (results: PromiseSettledResult<unknown>[]): string[] =>
  results.flatMap((result) => (result.status === 'rejected' ? [codeOf(result.reason)] : []));

// ---- Confinement

describe('confinement', () => {
  test('a root that does not exist, is no directory or is relative fails at once, with its name in the error', async () => {
    await expect(open([path('missing')])).rejects.toThrow(/root .*missing: .*create it or choose another/);
    await expect(open([join(outside, 'secret')])).rejects.toEqual(refused('not_a_directory'));
    await expect(open(['relative'])).rejects.toEqual(refused('invalid_path'));
    await expect(open([root], { forbidden: ['relative'] })).rejects.toEqual(refused('invalid_path'));
  });

  test('a NUL byte is an invalid path for every operation', async () => {
    const bad = Buffer.from(`${root}/a\0b`);
    await expectCode(read(bad), 'invalid_path');
    await expectCode(list(bad), 'invalid_path');
    await expectCode(write(bad, 'x'), 'invalid_path');
    await expectCode(read(Buffer.from(`${outside}/a\0b`)), 'invalid_path');
  });

  test('a name of 5,000 characters is an invalid path for every operation', async () => {
    const long = path('x'.repeat(5_000));
    await expectCode(read(long), 'invalid_path');
    await expectCode(list(long), 'invalid_path');
    await expectCode(write(long, 'x'), 'invalid_path');
    await expectCode(write(path('y'.repeat(5_000), 'z'), 'x', { create_parents: true }), 'invalid_path');
  });

  test('dots never lead out of a root', async () => {
    for (const way of [path('../outside'), '../outside', path('a/../../outside'), `${root}//..//outside`]) {
      await expectCode(read(`${way}/secret`), 'permission_denied');
      await expectCode(list(way), 'permission_denied');
      await expectCode(write(`${way}/new`, 'x'), 'permission_denied');
      await expectCode(write(`${way}/new/deep`, 'x', { create_parents: true }), 'permission_denied');
    }
    expect(readdirSync(outside)).toEqual(['secret']);
  });

  test('the error for a path outside the roots does not depend on whether it exists', async () => {
    for (const name of ['secret', 'missing', 'missing/deep', 'secret/deep', 'x'.repeat(5_000)]) {
      await expectCode(read(join(outside, name)), 'permission_denied');
      await expectCode(list(join(outside, name)), 'permission_denied');
      await expectCode(write(join(outside, name), 'x'), 'permission_denied');
    }
  });

  test('a root whose name only starts like an allowed one is outside', async () => {
    mkdirSync(`${root}-more`);
    writeFileSync(`${root}-more/secret`, 'x');
    await expectCode(read(`${root}-more/secret`), 'permission_denied');
    await expectCode(read(`${root}-more/missing/deep`), 'permission_denied');
  });

  test('symlinks never lead out of a root, be they files, directories or chains', async () => {
    symlinkSync(join(outside, 'secret'), path('file'));
    symlinkSync('../outside/secret', path('relative'));
    symlinkSync(outside, path('folder'));
    symlinkSync('folder/.', path('dots'));
    symlinkSync('relative', path('chain'));
    symlinkSync(join(outside, 'new'), path('dangling'));
    for (const name of ['file', 'relative', 'chain', 'folder/secret', 'dots/secret']) {
      await expectCode(read(path(name)), 'permission_denied');
      await expectCode(write(path(name), 'x'), 'permission_denied');
    }
    await expectCode(list(path('folder')), 'permission_denied');
    await expectCode(list(path('dots')), 'permission_denied');
    await expectCode(read(path('dots')), 'permission_denied');
    await expectCode(write(path('dangling'), 'x'), 'permission_denied');
    await expectCode(write(path('folder/a/b'), 'x', { create_parents: true }), 'permission_denied');
    expect(tree(outside)).toEqual(['secret']);
    expect(readFileSync(join(outside, 'secret'), 'utf8')).toBe('outside');
  });

  test('a listing reveals nothing about the target of a symlink out of the root', async () => {
    symlinkSync(outside, path('folder'));
    symlinkSync(join(outside, 'secret'), path('file'));
    const { entries } = await list(root);
    for (const entry of entries) {
      expect(entry).toMatchObject({ type: 'FILE_TYPE_FILE', size: lstatSync(path(String(entry.name))).size });
    }
  });

  test('a symlink that lies outside may lead into a root', async () => {
    writeFileSync(path('a'), 'inside');
    symlinkSync(root, join(outside, 'in'));
    expect((await read(join(outside, 'in/a'))).body.toString()).toBe('inside');
  });

  test('a loop of symlinks is an invalid path', async () => {
    symlinkSync('b', path('a'));
    symlinkSync('a', path('b'));
    await expectCode(read(path('a')), 'invalid_path');
    await expectCode(write(path('a'), 'x'), 'invalid_path');
    await expectCode(read(path('a/b')), 'invalid_path');
  });

  test('protected paths are refused whatever the roots, also through a symlink', async () => {
    const all = await open(['/']);
    symlinkSync(forbidden, path('way'));
    for (const way of [forbidden, path('way'), `/proc/self/root${forbidden}`]) {
      await expectCode(list(way, { by: all }), 'permission_denied');
      await expectCode(read(join(way, 'key'), { by: all }), 'permission_denied');
      await expectCode(write(join(way, 'key'), 'x', { by: all }), 'permission_denied');
      await expectCode(write(join(way, 'new'), 'x', { by: all }), 'permission_denied');
      await expectCode(write(join(way, 'a/b'), 'x', { by: all, create_parents: true }), 'permission_denied');
    }
    await expectCode(read(join(base, 'data/temporary.journal'), { by: all }), 'permission_denied');
    expect(tree(forbidden)).toEqual(['key']);
  });

  test('a forbidden file is refused under every name: its own, a hard link, and after it was replaced', async () => {
    const unit = path('agent.service');
    writeFileSync(unit, 'unit');
    const all = await open(['/'], { forbidden: [unit] });
    linkSync(unit, path('alias'));
    await expectCode(read(path('alias'), { by: all }), 'permission_denied');
    await expectCode(write(path('alias'), 'x', { by: all }), 'permission_denied');
    writeFileSync(path('next'), 'newer unit');
    renameSync(path('next'), unit);
    await expectCode(read(unit, { by: all }), 'permission_denied');
    await expectCode(write(unit, 'x', { by: all }), 'permission_denied');
    expect(readFileSync(unit, 'utf8')).toBe('newer unit');
  });

  test('a file with several hard links is refused while the agent cannot list all of a forbidden directory', async () => {
    writeFileSync(path('plain'), 'plain');
    linkSync(path('plain'), path('alias'));
    const all = await open(['/'], { forbidden: [forbidden] });
    expect((await read(path('alias'), { by: all })).body.toString()).toBe('plain');
    // The path of the innermost directory is longer than Linux allows, so the agent cannot list that directory.
    const name = 'd'.repeat(250);
    const script = `for (let n = 0; n < 20; n++) { fs.mkdirSync('${name}'); process.chdir('${name}'); }`;
    execFileSync(process.execPath, ['-e', script], { cwd: forbidden });
    onTestFinished(() => void execFileSync('rm', ['-rf', join(forbidden, name)]));
    const again = await open(['/'], { forbidden: [forbidden] });
    await expectCode(read(path('alias'), { by: again }), 'invalid_path');
  });

  test('a forbidden path that does not exist cannot be made, nor the directory that would hold it', async () => {
    const all = await open(['/'], { forbidden: [path('unit'), path('var/lib/agent')] });
    await expectCode(write(path('unit'), 'x', { by: all }), 'permission_denied');
    await expectCode(write(path('var/x'), 'x', { by: all, create_parents: true }), 'permission_denied');
    mkdirSync(path('var'));
    await write(path('var/x'), 'x', { by: all });
    await expectCode(write(path('var/lib'), 'x', { by: all }), 'permission_denied');
    symlinkSync('var/elsewhere', path('unit'));
    await expectCode(write(path('unit'), 'x', { by: all }), 'permission_denied');
    expect(tree(root)).toEqual(['unit', 'var', 'var/x']);
  });

  test.skipIf(!mayMount)(
    'a bind mount does not open a forbidden directory (needs the right to mount)',
    async () => {
      mkdirSync(path('alias'));
      disk.mount('--bind', forbidden, path('alias'));
      await expectCode(read(path('alias/key')), 'permission_denied');
      await expectCode(list(path('alias')), 'permission_denied');
      await expectCode(write(path('alias/new'), 'x'), 'permission_denied');
    },
  );

  test.skipIf(!mayMount)(
    'a path of the same name in another mount namespace is outside (needs unshare)',
    async () => {
      const script = `mount -t tmpfs tmpfs ${root} && echo other > ${root}/secret && echo ready && exec sleep 60`;
      const child = spawn('unshare', ['-m', 'sh', '-c', script], { stdio: ['ignore', 'pipe', 'ignore'] });
      disk.owns(child);
      await printed(child, 'ready');
      symlinkSync(`/proc/${child.pid}/root${root}`, path('door'));
      await expectCode(read(path('door/secret')), 'permission_denied');
      await expectCode(list(path('door')), 'permission_denied');
      await expectCode(write(path('door/new'), 'x'), 'permission_denied');
    },
  );

  test('nothing outside is reached through a directory and a file that a loop swaps with symlinks', async () => {
    mkdirSync(path('sub'));
    writeFileSync(path('sub/secret'), 'inside');
    writeFileSync(path('leaf'), 'inside');
    const swapping = disk.program(`
      // Removes what the tested operation created while the name was free, and tries again.
      const insist = (to, work) => {
        for (;;) try { return work(); } catch { try { fs.rmSync(to, { recursive: true, force: true }); } catch {} }
      };
      const swap = (name, target) => {
        insist(name + '.real', () => fs.renameSync(name, name + '.real'));
        insist(name, () => fs.symlinkSync(target, name));
        insist(name, () => fs.renameSync(name + '.real', name));
      };
      process.chdir(${JSON.stringify(root)});
      console.log('ready');
      for (const end = Date.now() + 1000; Date.now() < end; ) { swap('sub', '../outside'); swap('leaf', '../outside/secret'); }
    `);
    await printed(swapping, 'ready');
    const ended = once(swapping, 'exit');
    let running = true;
    void ended.then(() => {
      running = false;
    });
    const codes = new Map<string, number>();
    const count = async (name: string, work: Promise<unknown>): Promise<void> => {
      const result = await work.then(() => 'done', codeOf);
      codes.set(`${name} ${result}`, (codes.get(`${name} ${result}`) ?? 0) + 1);
    };
    const reading = async (name: string): Promise<void> => {
      while (running) {
        await count(
          'read',
          read(path(name)).then(({ body }) => expect(body.toString()).toBe('inside')),
        );
      }
    };
    const listing = async (): Promise<void> => {
      while (running)
        await count(
          'list',
          list(path('sub')).then(({ names }) => expect(names).not.toContain('bait')),
        );
    };
    const writing = async (name: string, content: string, create_parents = false): Promise<void> => {
      while (running) await count('write', write(path(name), content, { create_parents }));
    };
    writeFileSync(join(outside, 'bait'), '');
    await Promise.all([
      reading('sub/secret'),
      reading('leaf'),
      listing(),
      writing('sub/new', 'new'),
      writing('leaf', 'inside'),
      writing('sub/made/deep', 'x', true),
    ]);
    expect(tree(outside)).toEqual(['bait', 'secret']);
    expect(readFileSync(join(outside, 'secret'), 'utf8')).toBe('outside');
    // Each kind of operation met the real directory at least once, and the symlink at least once. No operation failed
    // with an error that the swap cannot cause.
    for (const operation of ['read', 'list', 'write']) {
      expect(codes.get(`${operation} done`)).toBeGreaterThan(0);
      expect(codes.get(`${operation} permission_denied`)).toBeGreaterThan(0);
    }
    const known = /^\w+ (done|permission_denied|file_not_found|conflict|not_a_directory)$/;
    expect([...codes.keys()].filter((key) => !known.test(key))).toEqual([]);
    expect(tree(root).filter((name) => name.includes('.farhand-'))).toEqual([]);
  });
});

// ---- Reading

describe('reading', () => {
  test('a path that is missing, a directory or below a file is refused with that reason', async () => {
    writeFileSync(path('file'), 'x');
    mkdirSync(path('folder'));
    await expectCode(read(path('missing')), 'file_not_found');
    await expectCode(read(path('missing/deep')), 'file_not_found');
    await expectCode(read(root), 'is_a_directory');
    await expectCode(read(path('folder')), 'is_a_directory');
    await expectCode(read(path('folder/')), 'is_a_directory');
    await expectCode(read(path('file/')), 'not_a_directory');
    await expectCode(read(path('file/x')), 'not_a_directory');
    symlinkSync('missing', path('dangling'));
    await expectCode(read(path('dangling')), 'file_not_found');
  });

  test('pipes, sockets and devices are refused at once, also with many requests', async () => {
    execFileSync('mkfifo', [path('fifo')]);
    symlinkSync('fifo', path('link'));
    const server = createServer().listen(path('socket'));
    await once(server, 'listening');
    // This test makes its own device, because a faulty agent might replace a device of the machine.
    const device = tries(() => execFileSync('mknod', [path('zero'), 'c', '1', '5'], { stdio: 'ignore' }))
      ? path('zero')
      : path('fifo');
    const all = await open(['/']);
    const started = performance.now();
    const calls = Array.from({ length: 8 }, () => [
      expectCode(read(path('fifo')), 'unsupported_file'),
      expectCode(read(path('link')), 'unsupported_file'),
      expectCode(read(path('socket')), 'unsupported_file'),
      expectCode(read('/dev/zero', { by: all }), 'unsupported_file'),
      expectCode(write(path('fifo'), 'x'), 'unsupported_file'),
      expectCode(write(path('link'), 'x'), 'unsupported_file'),
      expectCode(write(path('socket'), 'x'), 'unsupported_file'),
      expectCode(write(device, 'x'), 'unsupported_file'),
      expectCode(list(path('fifo')), 'not_a_directory'),
    ]);
    await Promise.all(calls.flat());
    expect(performance.now() - started).toBeLessThan(2_000);
    server.close();
    await once(server, 'close');
  });

  test("the memory of processes and the agent's own environment cannot be read as files", async () => {
    const all = await open(['/']);
    await expectCode(read(`/proc/${process.ppid}/mem`, { by: all }), 'unsupported_file');
    await expectCode(read('/proc/self/mem', { by: all }), 'permission_denied');
    await expectCode(read('/proc/self/environ', { by: all }), 'permission_denied');
    await expectCode(read(`/proc/thread-self/environ`, { by: all }), 'permission_denied');
    const other = spawn('sleep', ['60'], { env: { MARK: 'here' } });
    disk.owns(other);
    await once(other, 'spawn');
    expect((await read(`/proc/${other.pid}/environ`, { by: all })).body.toString()).toContain('MARK=here');
  });

  test('a range that starts beyond the end is not satisfiable and reports the size', async () => {
    writeFileSync(path('ten'), '0123456789');
    const error = await read(path('ten'), { offset: 11 }).catch((thrown: unknown) => thrown);
    expect(error).toMatchObject({ code: 'range_not_satisfiable', details: { size: 10 } });
  });

  test('a sparse file of 5 GB is refused by max_bytes before it is read, but a range of it is not', async () => {
    writeFileSync(path('sparse'), '');
    truncateSync(path('sparse'), 5_000_000_000);
    const error = await read(path('sparse'), { max_bytes: 1_000 }).catch((thrown: unknown) => thrown);
    expect(error).toMatchObject({ code: 'file_too_large', details: { size: 5_000_000_000, max: 1_000 } });
    const { head, body } = await read(path('sparse'), { max_bytes: 1_000, offset: -1_000 });
    expect(head).toMatchObject({ offset: 4_999_999_000, length: 1_000 });
    expect(body.length).toBe(1_000);
  });

  test('a file of /proc is stopped by max_bytes as well', async () => {
    const status = `/proc/${process.ppid}/status`;
    await expectCode(read(status, { by: await open(['/']), max_bytes: 100 }), 'file_too_large');
  });

  test('a file that shrinks while it is read ends with conflict, not with a short body', async () => {
    writeFileSync(path('big'), Buffer.alloc(2_000_000, 'x'));
    const shrink = (chunk: number) => chunk === 1 && truncateSync(path('big'), 700_000);
    await expectCode(read(path('big'), { between: shrink }), 'conflict');
    // The new content also differs in bytes that were already read.
    writeFileSync(path('big'), Buffer.alloc(600_000, 'x'));
    const cut = (chunk: number) => chunk === 2 && truncateSync(path('big'), 10);
    await expectCode(read(path('big'), { between: cut }), 'conflict');
  });

  test('a file that is rewritten in place while it is read ends with conflict', async () => {
    writeFileSync(path('big'), Buffer.alloc(2_000_000, 'x'));
    utimesSync(path('big'), 1, 1);
    const rewrite = (chunk: number) =>
      chunk === 1 && writeFileSync(path('big'), Buffer.alloc(2_000_000, 'y'));
    await expectCode(read(path('big'), { between: rewrite }), 'conflict');
  });

  test('a file that grows while it is read yields exactly the length announced', async () => {
    writeFileSync(path('big'), Buffer.alloc(2_000_000, 'x'));
    const grow = (chunk: number) => chunk > 0 && appendFileSync(path('big'), 'y'.repeat(300_000));
    const { head, body } = await read(path('big'), { between: grow });
    expect(head.length).toBe(2_000_000);
    expect(body.equals(Buffer.alloc(2_000_000, 'x'))).toBe(true);
  });

  test('a file that is replaced while it is read yields the old content whole', async () => {
    writeFileSync(path('big'), Buffer.alloc(2_000_000, 'x'));
    writeFileSync(path('next'), 'short');
    const replace = (chunk: number) =>
      existsSync(path('next')) && chunk === 1 && renameSync(path('next'), path('big'));
    const { body } = await read(path('big'), { between: replace });
    expect(body.equals(Buffer.alloc(2_000_000, 'x'))).toBe(true);
  });

  test('a signal ends a read between two chunks, and before it began', async () => {
    writeFileSync(path('big'), Buffer.alloc(2_000_000, 'x'));
    const stop = new AbortController();
    const reading = files.readFile(readRequest(path('big'), {}), call(stop.signal))[Symbol.asyncIterator]();
    await reading.next();
    await reading.next();
    stop.abort(new Error('the caller left'));
    await expect(reading.next()).rejects.toThrow('the caller left');
    await expect(
      files
        .readFile(readRequest(path('big'), {}), call(stop.signal))
        [Symbol.asyncIterator]()
        .next(),
    ).rejects.toThrow('the caller left');
  });

  test('a reader who stops early leaves no handle behind', async () => {
    writeFileSync(path('big'), Buffer.alloc(2_000_000, 'x'));
    for await (const part of files.readFile(readRequest(path('big'), {}), call())) if (part.chunk) break;
    await waitFor(() => expect(disk.openHandles()).toEqual([]));
  });

  test('/proc/PID/status is read whole although its size is 0, without a length', async () => {
    const { head, body } = await read(`/proc/${process.ppid}/status`, { by: await open(['/']) });
    expect(head.entry?.size).toBe(0);
    expect(head).not.toHaveProperty('length');
    expect(body.toString()).toMatch(/^Name:.*nonvoluntary_ctxt_switches:\t\d+\n$/s);
  });

  const huge = '/sys/kernel/mm/transparent_hugepage/enabled';
  test.skipIf(!existsSync(huge))(
    'a file of /sys is read whole although its size is larger than its content (needs /sys)',
    async () => {
      const { body } = await read(huge, { by: await open(['/']) });
      expect(body.equals(readFileSync(huge))).toBe(true);
    },
  );

  test('a range is returned with its head and bytes, counted from the start or the end', async () => {
    writeFileSync(path('ten'), '0123456789', { mode: 0o640 });
    const whole = await read(path('ten'));
    expect(whole.head).toMatchObject({
      entry: { type: 'FILE_TYPE_FILE', size: 10, mode: 0o640, special: '' },
      offset: 0,
      length: 10,
    });
    expect(String(whole.head.entry?.path)).toBe(path('ten'));
    expect(String(whole.head.entry?.name)).toBe('ten');
    const range = async (offset: number, length?: number): Promise<unknown[]> => {
      const { head, body } = await read(path('ten'), { offset, ...(length !== undefined && { length }) });
      return [head.offset, head.length, body.toString()];
    };
    expect(await range(3, 4)).toEqual([3, 4, '3456']);
    expect(await range(8, 100)).toEqual([8, 2, '89']);
    expect(await range(-3)).toEqual([7, 3, '789']);
    expect(await range(-100, 2)).toEqual([0, 2, '01']);
    expect(await range(10)).toEqual([10, 0, '']);
    expect(await range(0, 0)).toEqual([0, 0, '']);
  });

  test('an empty file has length 0 and no chunk', async () => {
    writeFileSync(path('empty'), '');
    expect(await read(path('empty'))).toMatchObject({
      head: { offset: 0, length: 0 },
      body: Buffer.alloc(0),
    });
  });

  test('a large file arrives whole, and each chunk is unchanged until the next is requested', async () => {
    const content = randomBytes(3_000_001);
    writeFileSync(path('big'), content);
    const kept: Buffer[] = [];
    for await (const { chunk } of files.readFile(readRequest(path('big'), {}), call())) {
      if (Buffer.isBuffer(chunk)) kept.push(Buffer.from(chunk));
    }
    expect(kept.length).toBeGreaterThan(1);
    expect(Buffer.concat(kept).equals(content)).toBe(true);
  });

  test('the etag is strong, the same for the same bytes, and changes with any change', async () => {
    const etag = async (): Promise<string | undefined> => (await read(path('a'))).head.etag;
    writeFileSync(path('a'), 'one');
    utimesSync(path('a'), 1, 1);
    const first = await etag();
    expect(first).toMatch(/^"[\w-]+"$/);
    expect(await etag()).toBe(first);
    writeFileSync(path('a'), 'two');
    utimesSync(path('a'), 1, 1);
    expect(await etag()).not.toBe(first);
  });

  test('a symlink inside the root is followed, and the head names its target', async () => {
    mkdirSync(path('d'));
    writeFileSync(path('d/target'), 'there');
    symlinkSync('d/target', path('link'));
    symlinkSync('d/../d/', path('up'));
    const { head, body } = await read(path('link'));
    expect(body.toString()).toBe('there');
    expect(String(head.entry?.link_target)).toBe('d/target');
    expect(String(head.entry?.path)).toBe(path('link'));
    expect((await read(path('up/target'))).body.toString()).toBe('there');
    await expectCode(read(path('up')), 'is_a_directory');
  });

  test('relative paths, "~" and the empty path start at home', async () => {
    writeFileSync(path('a'), 'home');
    for (const way of ['a', '~/a', './a', 'x/../a']) expect((await read(way)).body.toString()).toBe('home');
    for (const way of ['', '~', '.', '~/']) expect(String((await list(way)).head.path)).toBe(root);
    await expectCode(read('~a'), 'file_not_found');
  });
});

// ---- Listing

describe('listing', () => {
  test('a path that is missing or a file is refused with that reason', async () => {
    writeFileSync(path('file'), 'x');
    await expectCode(list(path('missing')), 'file_not_found');
    await expectCode(list(path('file')), 'not_a_directory');
  });

  test('an entry that vanishes while it is listed is left out', async () => {
    for (let index = 0; index < 600; index += 1) writeFileSync(path(String(index).padStart(3, '0')), '');
    const between = (): void => rmSync(path('599'), { force: true });
    const { head, names } = await list(root, { between });
    expect(head.total).toBe(600);
    expect(names.length).toBe(599);
    expect(names).not.toContain('599');
  });

  test.skipIf(!hasFuse)('a mount whose program has ended hides no other entry (needs FUSE)', async () => {
    mkdirSync(path('dead'));
    writeFileSync(path('file'), '');
    disk.mountDead(path('dead'));
    const { head, names, entries } = await list(root);
    expect([head.total, names]).toEqual([2, ['dead', 'file']]);
    expect(entries[0]).toMatchObject({ type: 'FILE_TYPE_DIRECTORY', mode: 0, owner: '?', group: '?' });
    await expectCode(list(path('dead')), 'io_error');
  });

  test('a signal ends a listing between two batches', async () => {
    for (let index = 0; index < 300; index += 1) writeFileSync(path(`f${index}`), '');
    const stop = new AbortController();
    const request = { path: Buffer.from(root), hidden: false, offset: 0, limit: 0 };
    const listing = files.listFiles(request, call(stop.signal))[Symbol.asyncIterator]();
    await listing.next();
    await listing.next();
    stop.abort(new Error('the caller left'));
    await expect(listing.next()).rejects.toThrow('the caller left');
  });

  test('directories come first, then names by their bytes; dot names only where asked', async () => {
    for (const name of ['b', 'B', 'a', '.h', 'ä']) writeFileSync(path(name), '');
    for (const name of ['z', 'Z', '.d']) mkdirSync(path(name));
    symlinkSync('z', path('m'));
    expect((await list(root)).names).toEqual(['.d', 'Z', 'm', 'z', '.h', 'B', 'a', 'b', 'ä']);
    const printed = await list(root, { hidden: false });
    expect(printed.names).toEqual(['Z', 'm', 'z', 'B', 'a', 'b', 'ä']);
    expect(printed.head.total).toBe(7);
  });

  test('offset and limit select a page, and total counts all entries', async () => {
    for (const name of ['a', 'b', 'c', 'd']) writeFileSync(path(name), '');
    const page = async (offset: number, limit: number): Promise<unknown[]> => {
      const { head, names } = await list(root, { offset, limit });
      return [head.total, ...names];
    };
    expect(await page(1, 2)).toEqual([4, 'b', 'c']);
    expect(await page(3, 5)).toEqual([4, 'd']);
    expect(await page(9, 5)).toEqual([4]);
    expect(await page(2, 0)).toEqual([4, 'c', 'd']);
  });

  test('entries have type, size, mode, owner, time, and whether they are symlinks', async () => {
    mkdirSync(path('folder'), { mode: 0o750 });
    writeFileSync(path('file'), 'content');
    if (isRoot) chownSync(path('file'), 54_321, 0);
    chmodSync(path('file'), 0o4711);
    utimesSync(path('file'), 1_000, 1_234.5);
    execFileSync('mkfifo', [path('fifo')]);
    symlinkSync('file', path('good'));
    symlinkSync('nowhere', path('broken'));
    symlinkSync('fifo', path('tofifo'));
    const { entries } = await list(root);
    const of = (name: string): FileEntry => entries.find((entry) => String(entry.name) === name)!;
    expect(of('folder')).toMatchObject({ type: 'FILE_TYPE_DIRECTORY', mode: 0o750 });
    expect(of('file')).toMatchObject({
      path: Buffer.from(path('file')),
      type: 'FILE_TYPE_FILE',
      size: 7,
      mode: 0o4711,
      modified_at_ms: 1_234_500,
      special: '',
    });
    expect(of('file')).not.toHaveProperty('link_target');
    if (isRoot) expect(of('file')).toMatchObject({ owner: '54321', group: 'root' });
    expect(of('fifo')).toMatchObject({ type: 'FILE_TYPE_FILE', special: 'fifo' });
    expect(of('good')).toMatchObject({ size: 7, mode: 0o4711, link_target: Buffer.from('file') });
    expect(of('broken')).toMatchObject({ type: 'FILE_TYPE_FILE', link_target: Buffer.from('nowhere') });
    expect(of('tofifo')).toMatchObject({ special: 'fifo', link_target: Buffer.from('fifo') });
  });

  test('a name that is not UTF-8 is listed, read and written by its bytes', async () => {
    const name = Buffer.from([0x66, 0xff, 0xfe, 0x2e, 0x74]);
    const target = Buffer.concat([Buffer.from(`${root}/`), name]);
    expect((await write(target, 'bytes')).path).toEqual(target);
    const { entries } = await list(root);
    expect(entries).toMatchObject([{ name, path: target }]);
    expect((await read(target)).body.toString()).toBe('bytes');
    symlinkSync(name, path('link'));
    expect((await read(path('link'))).head.entry?.link_target).toEqual(name);
  });

  test('a long listing comes in batches', async () => {
    for (let index = 0; index < 1_000; index += 1) writeFileSync(path(`file-${index}`), '');
    const { names, batches } = await list(root);
    expect(new Set(names).size).toBe(1_000);
    expect(Math.max(...batches)).toBeLessThanOrEqual(256);
  });

  test('names of owners follow changes of /etc/passwd', async () => {
    const passwd = path('passwd');
    writeFileSync(passwd, 'ada:x:7:7::/:/bin/sh\nbob:x:8\n');
    const users = createUsers(passwd, path('missing'));
    expect((await users()).users.nameOf(7)).toBe('ada');
    expect((await users()).groups.nameOf(7)).toBe('7');
    writeFileSync(passwd, 'eve:x:7:7::/:/bin/sh\nother:x:7:7\n# comment\n\n');
    const { users: later } = await users();
    expect([later.nameOf(7), later.nameOf(8)]).toEqual(['eve', '8']);
  });
});

test('names of users that could not be read for lack of file descriptors are read again', async () => {
  const users = JSON.stringify(join(import.meta.dirname, '../../agent/files/users-groups.ts'));
  const program = disk.program(`import { execFileSync } from 'node:child_process';
    const { createUsers } = await import(${users});
    const users = createUsers();
    execFileSync('prlimit', ['--pid', process.pid, '--nofile=64:']);
    const open = [];
    try { for (;;) open.push(fs.openSync('/dev/null')); } catch {}
    const before = (await users()).users.nameOf(0);
    for (const fd of open) fs.closeSync(fd);
    console.log([before, (await users()).users.nameOf(0)]);`);
  await printed(program, "[ '0', 'root' ]");
});

// ---- Writing

describe('writing', () => {
  test('a request out of order is invalid and changes nothing', async () => {
    writeFileSync(path('a'), 'old');
    const commit = { commit: { overwrite: true } };
    const chunk = { chunk: Buffer.from('new') };
    const orders = [
      [],
      [chunk],
      [commit],
      [opening(path('a'))],
      [opening(path('a')), chunk],
      [opening(path('a')), opening(path('a')), commit],
      [opening(path('a')), commit, chunk],
      [opening(path('a')), commit, commit],
      [opening(path('a')), {}],
    ];
    for (const order of orders) await expectCode(files.writeFile(parts(...order), call()), 'invalid_request');
    await expectCode(write(path('a'), 'x', { mode: 0o10_000 }), 'invalid_request');
    expect(tree(root)).toEqual(['a']);
    expect(readFileSync(path('a'), 'utf8')).toBe('old');
  });

  test('an interrupted upload leaves nothing behind, not even the directories made for it', async () => {
    writeFileSync(path('a'), 'old');
    async function* cut(): AsyncGenerator<WriteFileRequest__Output> {
      yield opening(path('made/deep/a'), true);
      yield { chunk: Buffer.alloc(100_000) };
      expect(tree(root)).toHaveLength(4);
      throw new Error('cut off');
    }
    await expectCode(files.writeFile(cut(), call()), 'internal_error');
    expect(tree(root)).toEqual(['a']);
  });

  test('a signal ends an upload that waits for more messages, also between its commit and its end', async () => {
    for (const last of [{ chunk: Buffer.from('x') }, { commit: { overwrite: true } }]) {
      const stop = new AbortController();
      async function* stalled(): AsyncGenerator<WriteFileRequest__Output> {
        yield opening(path('made/a'), true);
        yield last;
        stop.abort(new Error('the caller left'));
        await new Promise(() => undefined);
      }
      await expect(files.writeFile(stalled(), call(stop.signal))).rejects.toThrow('the caller left');
      expect(tree(root)).toEqual([]);
    }
  });

  test('a directory, a path with a slash at its end and a missing parent are refused', async () => {
    mkdirSync(path('folder'));
    writeFileSync(path('file'), 'x');
    await expectCode(write(path('folder'), 'x'), 'is_a_directory');
    await expectCode(write(path('new/'), 'x'), 'is_a_directory');
    await expectCode(write(root, 'x'), 'is_a_directory');
    await expectCode(write(path('missing/a'), 'x'), 'file_not_found');
    await expectCode(write(path('file/a'), 'x'), 'not_a_directory');
    await expectCode(write(path('file/a'), 'x', { create_parents: true }), 'not_a_directory');
    symlinkSync('nowhere', path('dangling'));
    await expectCode(write(path('dangling/a'), 'x', { create_parents: true }), 'file_not_found');
  });

  test('a wrong sha256 changes nothing, and the error has the sha256 of the bytes that arrived', async () => {
    writeFileSync(path('a'), 'old');
    const sha256 = createHash('sha256').update('new').digest('hex');
    const error = await write(path('a'), 'new', { sha256: 'f'.repeat(64) }).catch(
      (thrown: unknown) => thrown,
    );
    expect(error).toMatchObject({ code: 'validation_failed', details: { sha256 } });
    expect(readFileSync(path('a'), 'utf8')).toBe('old');
    expect(await write(path('a'), 'new', { sha256: sha256.toUpperCase() })).toMatchObject({ sha256 });
  });

  test('if_match admits only the writer that has seen the present file', async () => {
    await expectCode(write(path('a'), 'x', { if_match: '*' }), 'precondition_failed');
    await expectCode(write(path('a'), 'x', { if_match: '"none"' }), 'precondition_failed');
    const first = await write(path('a'), 'one');
    const second = await write(path('a'), 'two', { if_match: first.etag! });
    await expectCode(write(path('a'), 'three', { if_match: first.etag! }), 'precondition_failed');
    expect(second.etag).toBe((await read(path('a'))).head.etag);
    await write(path('a'), 'four', { if_match: `"other", ${second.etag}` });
    await write(path('a'), 'five', { if_match: '*' });
    expect(readFileSync(path('a'), 'utf8')).toBe('five');
  });

  test('if_match is checked again at the end', async () => {
    const { etag } = await write(path('a'), 'one');
    async function* late(): AsyncGenerator<WriteFileRequest__Output> {
      yield { open: { path: Buffer.from(path('a')), create_parents: false, if_match: etag! } };
      writeFileSync(path('a'), 'somebody else');
      yield { commit: { overwrite: true } };
    }
    await expectCode(files.writeFile(late(), call()), 'precondition_failed');
    expect(readFileSync(path('a'), 'utf8')).toBe('somebody else');
  });

  test('of many writers with the same if_match exactly one wins', async () => {
    const { etag } = await write(path('a'), 'old');
    const writers = Array.from({ length: 8 }, (_, n) => write(path('a'), `${n}`, { if_match: etag! }));
    const results = await Promise.allSettled(writers);
    expect(codesOf(results)).toEqual(Array(7).fill('precondition_failed'));
  });

  test('without overwrite an existing path is refused, and of many writers at once one wins', async () => {
    writeFileSync(path('old'), 'old');
    mkdirSync(path('folder'));
    await expectCode(write(path('old'), 'new', { overwrite: false }), 'already_exists');
    expect(readFileSync(path('old'), 'utf8')).toBe('old');
    const writers = Array.from({ length: 8 }, async (_, n) =>
      write(path('a'), `${n}`, { overwrite: false, by: await open() }),
    );
    const results = await Promise.allSettled(writers);
    const winner = results.findIndex(({ status }) => status === 'fulfilled');
    expect(codesOf(results)).toEqual(Array(7).fill('already_exists'));
    expect(readFileSync(path('a'), 'utf8')).toBe(`${winner}`);
    expect(lstatSync(path('a')).nlink).toBe(1);
    expect(tree(root)).toEqual(['a', 'folder', 'old']);
  });

  test('two writers at once leave one whole content', async () => {
    const content = [Buffer.alloc(3_000_000, 'a'), Buffer.alloc(3_000_000, 'b')];
    async function* slices(of: Buffer): AsyncGenerator<WriteFileRequest__Output> {
      yield opening(path('a'));
      for (let at = 0; at < of.length; at += 65_536) yield { chunk: of.subarray(at, at + 65_536) };
      yield { commit: { overwrite: true } };
    }
    await Promise.all(content.map((of) => files.writeFile(slices(of), call())));
    expect(content.some((of) => of.equals(readFileSync(path('a'))))).toBe(true);
    expect(tree(root)).toEqual(['a']);
  });

  test('a target that becomes a symlink or directory during the upload is not touched', async () => {
    for (const [become, code] of [
      [() => symlinkSync(join(outside, 'secret'), path('a')), 'conflict'],
      [() => mkdirSync(path('a')), 'is_a_directory'],
    ] as const) {
      async function* turned(): AsyncGenerator<WriteFileRequest__Output> {
        yield opening(path('a'));
        become();
        yield { commit: { overwrite: true } };
      }
      await expectCode(files.writeFile(turned(), call()), code);
      expect(readFileSync(join(outside, 'secret'), 'utf8')).toBe('outside');
      expect(tree(root)).toEqual(['a']);
      rmSync(path('a'), { recursive: true });
    }
  });

  test('a directory that is moved out of the root during the upload is not written to', async () => {
    mkdirSync(path('d'));
    async function* moved(): AsyncGenerator<WriteFileRequest__Output> {
      yield opening(path('d/a'));
      renameSync(path('d'), join(outside, 'd'));
      yield { commit: { overwrite: true } };
    }
    await expectCode(files.writeFile(moved(), call()), 'permission_denied');
    expect(tree(outside)).toEqual(['d', 'secret']);
  });

  test.skipIf(!isRoot)(
    'an agent without the right to preserve the owner of a file does not replace it (needs root)',
    async () => {
      writeFileSync(path('a'), 'old');
      chmodSync(root, 0o777);
      mkdirSync(join(base, 'nobody'), { mode: 0o777 });
      chmodSync(join(base, 'nobody'), 0o777);
      const child = disk.program(
        `const files = await createFiles({ roots: [${JSON.stringify(root)}], home: '/', forbidden: [],
         directory: ${JSON.stringify(join(base, 'nobody'))}, log: createLogger('x', 'silent') });
       const stream = async function* () {
         yield { open: { path: Buffer.from(${JSON.stringify(path('a'))}), create_parents: false } };
         console.log('sent', fs.readdirSync(${JSON.stringify(root)}).length);
       };
       await files.writeFile(stream(), { signal: new AbortController().signal })
         .catch((error) => console.log('code ' + error.code));`,
        65_534,
      );
      await printed(child, 'code permission_denied');
      expect(tree(root)).toEqual(['a']);
      expect(statSync(path('a')).uid).toBe(0);
    },
  );

  test.skipIf(!mayMount)(
    'a full disk is no_space and leaves the old content (needs the right to mount)',
    async () => {
      mkdirSync(path('small'));
      disk.mountTmpfs(path('small'), '256k');
      await write(path('small/a'), 'old');
      await expectCode(write(path('small/a'), Buffer.alloc(1_000_000)), 'no_space');
      expect(tree(path('small'))).toEqual(['a']);
      expect(readFileSync(path('small/a'), 'utf8')).toBe('old');
      await expectCode(write(path('small'), 'x'), 'is_a_directory');
    },
  );

  test('an upload succeeds also if another program takes the new file away at once', async () => {
    let taken = 0;
    let hasEnded = false;
    onTestFinished(() => {
      hasEnded = true;
    });
    const takeAway = (): void => {
      if (hasEnded) return;
      for (const name of readdirSync(root).filter((entry) => entry.startsWith('new'))) {
        rmSync(path(name));
        taken += 1;
      }
      setImmediate(takeAway);
    };
    takeAway();
    for (let n = 0; n < 50; n += 1) await write(path(`new${n}`), 'x', { overwrite: false });
    await expect.poll(() => taken).toBe(50);
    expect(tree(root)).toEqual([]);
  });

  test('temporary files of a killed agent are removed at the next start', async () => {
    const data = join(base, 'killed');
    const child = disk.program(`
      const files = await createFiles({ roots: ['/'], home: '/', forbidden: [],
        directory: ${JSON.stringify(data)}, log: createLogger('x', 'silent') });
      const stream = async function* () {
        yield { open: { path: Buffer.from(${JSON.stringify(path('new\ndeep', 'a'))}), create_parents: true } };
        yield { chunk: Buffer.from('half') };
        console.log('written');
        await new Promise((resolve) => setTimeout(resolve, 60_000));
      };
      await files.writeFile(stream(), { signal: new AbortController().signal });
    `);
    await printed(child, 'written');
    const [left] = readdirSync(path('new\ndeep'));
    expect(left).toMatch(/^\.farhand-/);
    expect(statSync(path('new\ndeep', left!)).mode & 0o777).toBe(0o600);
    child.kill('SIGKILL');
    await once(child, 'exit');
    await createFiles({ roots: ['/'], home: root, forbidden: [], directory: data, log });
    expect(readdirSync(path('new\ndeep'))).toEqual([]);
  });

  test('an agent that is stopped soon after its start exits without delay', async () => {
    const data = join(base, 'new');
    const child = disk.program(`
      await createFiles({ roots: ['/'], home: '/', forbidden: [],
        directory: ${JSON.stringify(data)}, log: createLogger('x', 'silent') });
      console.log(process.getActiveResourcesInfo().includes('Timeout') ? 'a timer' : 'no timer');
    `);
    await printed(child, 'no timer');
  });

  test('only regular files with the agent’s names and marked directories are removed, also after a torn journal line', async () => {
    const data = join(base, 'journal');
    mkdirSync(data);
    writeFileSync(path('important'), 'x');
    writeFileSync(path('.farhand-real'), 'x');
    writeFileSync(path('.farhand-done'), 'x');
    writeFileSync(path('.farhand-torn'), 'x');
    mkdirSync(path('.farhand-folder'));
    writeFileSync(path('.farhand-folder/kept'), 'x');
    mkdirSync(path('.farhand-empty'));
    symlinkSync('important', path('.farhand-link'));
    // An upload that replaces another user's file gives its temporary file to that user.
    writeFileSync(path('.farhand-given'), 'x');
    if (isRoot) chownSync(path('.farhand-given'), 54_321, 0);
    const lines = [
      'important',
      '.farhand-real',
      '.farhand-folder',
      '.farhand-empty',
      '.farhand-link',
      '.farhand-given',
      '.farhand-gone',
    ]
      .map((name) => `+${Buffer.from(path(name)).toString('base64url')}\n`)
      .join('');
    const done = Buffer.from(path('.farhand-done')).toString('base64url');
    const torn = `+${Buffer.from(path('.farhand-torn')).toString('base64url')}`;
    writeFileSync(join(data, 'temporary.journal'), `${lines}+${done}\n-${done}\n\n?garbage\n${torn}`);
    await createFiles({ roots: ['/'], home: root, forbidden: [], directory: data, log });
    const rest = [
      '.farhand-done',
      '.farhand-folder',
      '.farhand-folder/kept',
      '.farhand-link',
      '.farhand-torn',
      'important',
    ];
    expect(tree(root)).toEqual(rest);
    expect(readFileSync(join(data, 'temporary.journal'), 'utf8')).toBe('');
  });

  test('a temporary file that a start cannot remove is removed by the next start', async () => {
    const data = join(base, 'journal');
    mkdirSync(data);
    mkdirSync(path('disk'));
    writeFileSync(path('disk/.farhand-left'), 'x');
    const left = Buffer.from(path('disk/.farhand-left')).toString('base64url');
    writeFileSync(join(data, 'temporary.journal'), `+${left}\n`);
    const start = () => createFiles({ roots: ['/'], home: root, forbidden: [], directory: data, log });
    // A symlink replaces the parent directory, and a starting agent must not follow it. So the first start below cannot
    // remove the file.
    renameSync(path('disk'), path('away'));
    symlinkSync('away', path('disk'));
    await start();
    expect(readdirSync(path('away'))).toEqual(['.farhand-left']);
    rmSync(path('disk'));
    renameSync(path('away'), path('disk'));
    await start();
    expect(readdirSync(path('disk'))).toEqual([]);
    expect(readFileSync(join(data, 'temporary.journal'), 'utf8')).toBe('');
  });

  test('the journal of temporary files is empty without writes, and stays small with constant writes', async () => {
    const journal = join(base, 'data', 'temporary.journal');
    const stop = new AbortController();
    async function* endless(): AsyncGenerator<WriteFileRequest__Output> {
      yield opening(path('endless'));
      await new Promise(() => undefined);
    }
    const one = files.writeFile(endless(), call(stop.signal)).catch(() => 'aborted');
    await waitFor(() => expect(readFileSync(journal, 'utf8')).toMatch(/^\+/));
    const first = readFileSync(journal, 'utf8');
    const deep = path('d'.repeat(250), 'd'.repeat(250), 'd'.repeat(250));
    mkdirSync(deep, { recursive: true });
    for (let index = 0; index < 150; index += 1) await write(join(deep, 'a'), 'x');
    expect(statSync(journal).size).toBeLessThan(300_000);
    expect(readFileSync(journal, 'utf8').startsWith(first)).toBe(true);
    stop.abort();
    expect(await one).toBe('aborted');
    expect(readFileSync(journal, 'utf8')).toBe('');
  });

  test.skipIf(!mayMount)(
    'an agent whose disk is full of its temporary files starts, and removes them (needs the right to mount)',
    async () => {
      const data = join(base, 'small');
      mkdirSync(data);
      disk.mountTmpfs(data, '64k');
      const left = ['.farhand-a', '.farhand-b'].map((name) => join(data, name));
      const lines = left.map((file) => `+${Buffer.from(file).toString('base64url')}\n`);
      writeFileSync(join(data, 'temporary.journal'), lines.join(''));
      for (const file of left) writeFileSync(file, '');
      expect(() => writeFileSync(left[1]!, Buffer.alloc(1_000_000))).toThrow('ENOSPC');
      await createFiles({ roots: ['/'], home: root, forbidden: [], directory: data, log });
      expect(readdirSync(data)).toEqual(['temporary.journal']);
      expect(readFileSync(join(data, 'temporary.journal'), 'utf8')).toBe('');
    },
  );

  test.skipIf(!mayMount)(
    'a line of the journal that a full disk has cut off does not damage the next line (needs the right to mount)',
    async () => {
      const data = join(base, 'small');
      const journal = join(data, 'temporary.journal');
      mkdirSync(data);
      disk.mountTmpfs(data, '64k');
      const lineOf = (name: string): string => `+${Buffer.from(name).toString('base64url')}`;
      // The name of this file is too long for the agent to remove the file, so the line stays in the journal. It fills
      // the journal's first page of 4,096 bytes except for 20 bytes.
      writeFileSync(journal, `${lineOf(`/${'x'.repeat(3_040)}/.farhand-left`)}\n`);
      const own = await createFiles({ roots: ['/'], home: root, forbidden: [], directory: data, log });
      expect(() => writeFileSync(join(data, 'fill'), Buffer.alloc(1_000_000))).toThrow('ENOSPC');
      const stop = new AbortController();
      async function* endless(): AsyncGenerator<WriteFileRequest__Output> {
        yield opening(path('a'));
        await new Promise(() => undefined);
      }
      await expectCode(own.writeFile(endless(), call(stop.signal)), 'no_space');
      expect(statSync(journal).size).toBe(4096);
      rmSync(join(data, 'fill'));
      const one = own.writeFile(endless(), call(stop.signal)).catch(() => 'aborted');
      await waitFor(() => expect(tree(root)).toHaveLength(1));
      const [name = ''] = tree(root);
      expect(readFileSync(journal, 'utf8').split('\n')).toContain(lineOf(path(name)));
      stop.abort();
      expect(await one).toBe('aborted');
    },
  );

  test('a new file has mode 0644 and new directories 0755, whatever the umask', async () => {
    const before = process.umask(0o077);
    try {
      await write(path('x/y/a'), 'new', { create_parents: true });
      await write(path('b'), 'new', { mode: 0o666 });
    } finally {
      process.umask(before);
    }
    const mode = (name: string): number => statSync(path(name)).mode & 0o7777;
    expect(['x', 'x/y', 'x/y/a', 'b'].map(mode)).toEqual([0o755, 0o755, 0o644, 0o666]);
  });

  test('mode and owner of a replaced file are preserved, and a requested mode is set', async () => {
    writeFileSync(path('a'), 'old');
    if (isRoot) chownSync(path('a'), 1234, 4321);
    chmodSync(path('a'), 0o6750);
    const kept = (): unknown[] => {
      const { mode, uid, gid } = statSync(path('a'));
      return [mode & 0o7777, uid, gid];
    };
    const [, uid, gid] = kept();
    await write(path('a'), 'new');
    expect(kept()).toEqual([0o6750, uid, gid]);
    await write(path('a'), 'newer', { mode: 0o600 });
    expect(kept()).toEqual([0o600, uid, gid]);
    expect(readFileSync(path('a'), 'utf8')).toBe('newer');
  });

  test('an upload that replaces a file created meanwhile preserves the mode of that file', async () => {
    async function* late(): AsyncGenerator<WriteFileRequest__Output> {
      yield opening(path('a'));
      writeFileSync(path('a'), 'somebody');
      chmodSync(path('a'), 0o601);
      yield { commit: { overwrite: true } };
    }
    expect(await files.writeFile(late(), call())).toMatchObject({ created: false });
    expect(statSync(path('a')).mode & 0o7777).toBe(0o601);
    async function* gone(): AsyncGenerator<WriteFileRequest__Output> {
      yield opening(path('a'));
      unlinkSync(path('a'));
      yield { commit: { overwrite: true } };
    }
    expect(await files.writeFile(gone(), call())).toMatchObject({ created: true });
    expect(statSync(path('a')).mode & 0o7777).toBe(0o644);
  });

  test('a write follows a symlink, and creates the target of a dangling one', async () => {
    mkdirSync(path('d'));
    writeFileSync(path('d/target'), 'old');
    symlinkSync('d/target', path('one'));
    symlinkSync('one', path('two'));
    symlinkSync('d/new', path('dangling'));
    expect(await write(path('two'), 'through')).toMatchObject({
      created: false,
      path: Buffer.from(path('two')),
    });
    expect(readFileSync(path('d/target'), 'utf8')).toBe('through');
    expect(await write(path('dangling'), 'made')).toMatchObject({ created: true });
    expect(readFileSync(path('d/new'), 'utf8')).toBe('made');
    for (const link of ['one', 'two', 'dangling']) expect(lstatSync(path(link)).isSymbolicLink()).toBe(true);
  });

  test('an existing path is refused before a byte is sent if overwrite is false', async () => {
    writeFileSync(path('file'), 'old');
    async function* opened(name: string): AsyncGenerator<WriteFileRequest__Output> {
      yield { open: { path: Buffer.from(path(name)), create_parents: false, overwrite: false } };
      if (name === 'file') throw new Error('asked for bytes');
      yield { chunk: Buffer.from('new') };
      yield { commit: { overwrite: false } };
    }
    await expectCode(files.writeFile(opened('file'), call()), 'already_exists');
    await expectCode(files.writeFile(opened('.'), call()), 'is_a_directory');
    expect(await files.writeFile(opened('other'), call())).toMatchObject({ created: true });
    expect(readFileSync(path('file'), 'utf8')).toBe('old');
  });

  test('the answer has path, size, sha256, etag and the entry; an empty file can be written', async () => {
    const answer = await write('new', 'content');
    expect(answer).toEqual({
      path: Buffer.from(path('new')),
      size: 7,
      created: true,
      sha256: createHash('sha256').update('content').digest('hex'),
      etag: (await read(path('new'))).head.etag,
      entry: (await files.statFile({ path: Buffer.from('new'), sha256: false }, call())).entry,
    });
    symlinkSync('new', path('link'));
    const through = await write('link', 'more', { mode: 0o600 });
    expect(through.entry).toMatchObject({ size: 4, mode: 0o600, link_target: Buffer.from('new') });
    const empty = parts(opening(path('empty')), { commit: { overwrite: false } });
    expect((await files.writeFile(empty, call())).etag).toBe((await read(path('empty'))).head.etag);
    expect(readFileSync(path('empty'), 'utf8')).toBe('');
  });
});
