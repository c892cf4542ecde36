// Archives that the agent packs and unpacks, tested on real files and against GNU tar. Tests of refusals and attacks
// come first.
import { execFileSync, spawn, spawnSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { once } from 'node:events';
import {
  appendFileSync,
  chmodSync,
  chownSync,
  existsSync,
  lchownSync,
  linkSync,
  lstatSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  renameSync,
  rmSync,
  statSync,
  symlinkSync,
  truncateSync,
  unlinkSync,
  utimesSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import { gzipSync } from 'node:zlib';
import { type Pack, pack } from 'tar-stream';
import { afterEach, beforeEach, describe, expect, test } from 'vitest';
import type { Files } from '../../agent/files/index.ts';
import type { ArchiveSummary } from '../../proto/types/farhand/agent/v1/ArchiveSummary.ts';
import type { WriteArchiveOpen__Output } from '../../proto/types/farhand/agent/v1/WriteArchiveOpen.ts';
import type { WriteArchiveRequest__Output } from '../../proto/types/farhand/agent/v1/WriteArchiveRequest.ts';
import type { WriteArchiveResponse } from '../../proto/types/farhand/agent/v1/WriteArchiveResponse.ts';
import { call, Disk, isRoot, mayMount, printed, refused, tree } from '../file-operations-fixture.ts';
import { waitFor } from '../wait-for.ts';

let disk: Disk;
let files: Files;
const path = (...parts: string[]): string => disk.path(...parts);

beforeEach(async () => {
  disk = new Disk();
  files = await disk.open();
});
afterEach(() => disk.remove());

// ---- Calls

interface Archive {
  tar: Buffer;
  tail: ArchiveSummary | undefined;
}

async function read(
  target: string,
  more: { gzip?: boolean; between?: (chunk: number) => void; signal?: AbortSignal } = {},
): Promise<Archive> {
  const chunks: Buffer[] = [];
  let tail: ArchiveSummary | undefined;
  const request = { path: Buffer.from(target), gzip: more.gzip ?? false };
  for await (const part of files.readArchive(request, call(more.signal))) {
    if (part.chunk) chunks.push(Buffer.from(part.chunk));
    if (part.tail) tail = part.tail;
    if (part.chunk) more.between?.(chunks.length);
  }
  return { tar: Buffer.concat(chunks), tail };
}

interface WriteOptions extends Partial<Omit<WriteArchiveOpen__Output, 'path'>> {
  sha256?: string;
  chunk?: number;
  signal?: AbortSignal;
  before?: () => void;
  /** Messages that the upload sends last, in place of the commit. */
  ending?: () => AsyncGenerator<WriteArchiveRequest__Output>;
}

async function* upload(
  target: string,
  tar: Buffer,
  options: WriteOptions,
): AsyncGenerator<WriteArchiveRequest__Output> {
  const { whole = false, overwrite = false, create_parents = false, chunk = 64 * 1024, sha256 } = options;
  yield { open: { path: Buffer.from(target), whole, overwrite, create_parents } };
  for (let at = 0; at < tar.length; at += chunk) yield { chunk: tar.subarray(at, at + chunk) };
  options.before?.();
  if (options.ending) yield* options.ending();
  else yield { commit: sha256 === undefined ? {} : { sha256 } };
}

const write = (target: string, tar: Buffer, options: WriteOptions = {}): Promise<WriteArchiveResponse> =>
  files.writeArchive(upload(target, tar, options), call(options.signal));

type Entry = Parameters<Pack['entry']>[0] & { content?: string | Buffer };

/** Returns a tar made by another program. */
async function tarOf(...entries: Entry[]): Promise<Buffer> {
  const stream = pack();
  for (const { content, ...header } of entries) {
    if (content === undefined) stream.entry({ type: 'file', ...header });
    else stream.entry(header, content);
  }
  stream.finalize();
  const chunks: Buffer[] = [];
  for await (const chunk of stream) chunks.push(chunk as Buffer);
  return Buffer.concat(chunks);
}

const gnuTar = (directory: string, ...options: string[]): Buffer =>
  execFileSync('tar', ['-C', directory, ...options, '-cf', '-', '.'], { maxBuffer: 1e9 });
const journal = (): string => readFileSync(join(disk.data, 'temporary.journal'), 'utf8');
const raw = (text: string): Buffer => Buffer.from(text, 'latin1');

/** Checks that an upload left no temporary files. */
function expectNothingElse(): void {
  expect(tree(disk.base).filter((name) => name.includes('.farhand-'))).toEqual([]);
  expect(journal()).toBe('');
  expect(tree(disk.outside)).toEqual(['secret']);
  expect(readFileSync(join(disk.outside, 'secret'), 'utf8')).toBe('outside');
  expect(tree(disk.forbidden)).toEqual(['key']);
}

// ---- Packing

describe('readArchive', () => {
  test('refuses files, paths that are missing, outside or forbidden, and file systems of the kernel', async () => {
    writeFileSync(path('file'), 'x');
    await expect(read(path('file'))).rejects.toEqual(refused('not_a_directory'));
    await expect(read(path('missing'))).rejects.toEqual(refused('file_not_found'));
    await expect(read(disk.outside)).rejects.toEqual(refused('permission_denied'));
    await expect(read(disk.forbidden)).rejects.toEqual(refused('permission_denied'));
    symlinkSync(disk.outside, path('out'));
    await expect(read(path('out'))).rejects.toEqual(refused('permission_denied'));
  });

  test.each<[string, (file: string) => void]>([
    ['shrinks', (file) => truncateSync(file, 300_000)],
    ['is rewritten', (file) => writeFileSync(file, Buffer.alloc(2_000_000, 'y'))],
  ])('a file that %s while it is read fails the archive with conflict and is named', async (_, change) => {
    mkdirSync(path('dir'));
    writeFileSync(path('dir/big'), Buffer.alloc(2_000_000, 'x'));
    const old = new Date(1_600_000_000_000);
    utimesSync(path('dir/big'), old, old);
    const reading = read(path('dir'), { between: (chunk) => chunk === 1 && change(path('dir/big')) });
    await expect(reading).rejects.toEqual(refused('conflict', { path: path('dir/big') }));
  });

  test('a file that grows while it is read is archived with its size at the start', async () => {
    mkdirSync(path('dir'));
    writeFileSync(path('dir/log'), Buffer.alloc(2_000_000, 'x'));
    writeFileSync(path('dir/next'), 'y');
    const between = (): void => appendFileSync(path('dir/log'), 'more'.repeat(1_000));
    const { tar, tail } = await read(path('dir'), { between });
    expect(tail).toMatchObject({ files: 2, bytes: 2_000_001 });
    await write(path('copy'), tar);
    expect(readFileSync(path('copy/log')).equals(Buffer.alloc(2_000_000, 'x'))).toBe(true);
  });

  test('a file that is deleted before it is read is left out, and the archive is complete', async () => {
    mkdirSync(path('dir'));
    writeFileSync(path('dir/a'), Buffer.alloc(1_000_000));
    writeFileSync(path('dir/b'), 'gone');
    writeFileSync(path('dir/c'), 'here');
    const between = (chunk: number): void => {
      if (chunk === 1) unlinkSync(path('dir/b'));
    };
    const { tar, tail } = await read(path('dir'), { between });
    expect(tail).toMatchObject({ files: 2, bytes: 1_000_004 });
    expect(String(execFileSync('tar', ['-tf', '-'], { input: tar }))).toBe('./\na\nc\n');
  });

  test.skipIf(!isRoot)(
    'a file that the agent has no permission to read fails the archive and is named (needs root)',
    async () => {
      mkdirSync(path('dir'));
      writeFileSync(path('dir/closed'), 'x', { mode: 0o600 });
      chmodSync(disk.root, 0o777);
      const child = disk.program(
        `const [root, directory] = ${JSON.stringify([disk.root, join(disk.root, 'data')])};
        const files = await createFiles({ roots: [root], home: root, forbidden: [], directory, log: createLogger('test', 'silent') });
        const request = { path: Buffer.from(root + '/dir'), gzip: false };
        try { for await (const part of files.readArchive(request, { signal: new AbortController().signal })); }
        catch (error) { console.log(error.code, error.details.path); }`,
        65_534,
      );
      await printed(child, `permission_denied ${path('dir/closed')}\n`);
    },
  );

  test('protected paths are not in the archive', async () => {
    writeFileSync(path('a'), 'x');
    const { tar } = await read(disk.root);
    expect(String(execFileSync('tar', ['-tf', '-'], { input: tar }))).toBe('./\na\n');
  });

  test('symlinks are archived as symlinks, and fifos and sockets are left out without blocking', async () => {
    mkdirSync(path('dir/empty'), { recursive: true });
    symlinkSync(disk.outside, path('dir/out'));
    symlinkSync('nowhere', path('dir/dangling'));
    execFileSync('mkfifo', [path('dir/fifo')]);
    const { tar, tail } = await read(path('dir'));
    const listing = String(execFileSync('tar', ['-tvf', '-'], { input: tar }));
    expect(listing).toContain(`out -> ${disk.outside}`);
    expect(listing).toContain('dangling -> nowhere');
    expect(listing).toContain('empty/');
    expect(listing).not.toContain('fifo');
    expect(tail).toMatchObject({ files: 0, bytes: 0 });
  });

  test.each([false, true])('GNU tar unpacks the archive to the same tree, gzip %s', async (gzip) => {
    makeTree(path('dir'));
    const { tar, tail } = await read(path('dir'), { gzip });
    expect(tail?.sha256).toBe(createHash('sha256').update(tar).digest('hex'));
    mkdirSync(path('copy'));
    const result = spawnSync('tar', ['-C', path('copy'), gzip ? '-xpzf' : '-xpf', '-'], { input: tar });
    expect(String(result.stderr)).toBe('');
    expectSameTree(path('dir'), path('copy'));
  });

  test('a file of more than 8 GiB has its size in a pax header', async () => {
    mkdirSync(path('dir'));
    writeFileSync(path('dir/huge'), '');
    truncateSync(path('dir/huge'), 9 * 2 ** 30);
    for await (const part of files.readArchive({ path: raw(path('dir')), gzip: false }, call())) {
      if (!part.chunk) continue;
      const { stdout } = spawnSync('tar', ['-tvf', '-'], { input: Buffer.from(part.chunk) });
      expect(String(stdout)).toContain(` ${9 * 2 ** 30} `);
      break;
    }
  });

  test.each([false, true])(
    'packing ends at once if the reader leaves or the call is cancelled, gzip %s',
    async (gzip) => {
      mkdirSync(path('dir'));
      writeFileSync(path('dir/big'), Buffer.alloc(5_000_000, 'x'));
      const request = { path: raw(path('dir')), gzip };
      for await (const part of files.readArchive(request, call())) if (part.chunk) break;
      const controller = new AbortController();
      const reading = (async () => {
        for await (const part of files.readArchive(request, call(controller.signal))) {
          if (part.chunk ?? part.head) controller.abort(new Error('left'));
        }
      })();
      await expect(reading).rejects.toThrow('left');
    },
  );
});

/** Makes a tree with unusual names, modes, times and types. */
function makeTree(at: string): void {
  mkdirSync(join(at, 'sub/empty'), { recursive: true });
  mkdirSync(join(at, `${'long'.repeat(50)}/${'deep'.repeat(40)}`), { recursive: true });
  writeFileSync(join(at, `${'long'.repeat(50)}/${'deep'.repeat(40)}/${'n'.repeat(200)}`), 'long');
  writeFileSync(Buffer.concat([raw(`${at}/caf\xe9 \xff\n`)]), 'not UTF-8');
  writeFileSync(Buffer.concat([raw(`${at}/${'\xe9'.repeat(200)}`)]), 'long and not UTF-8');
  writeFileSync(join(at, 'żółw 🐢'), 'UTF-8');
  writeFileSync(join(at, 'sub/file'), Buffer.alloc(700_001, 'x'), { mode: 0o640 });
  writeFileSync(join(at, 'nothing'), '');
  // Only root can read a file that has no permissions.
  chmodSync(join(at, 'nothing'), isRoot ? 0 : 0o400);
  chmodSync(join(at, 'sub/empty'), 0o700);
  symlinkSync('../nothing', join(at, 'sub/link'));
  symlinkSync('x'.repeat(150), join(at, 'sub/long-link'));
  const old = new Date(1_000_000_000_123);
  utimesSync(join(at, 'sub/file'), old, old);
  utimesSync(join(at, 'sub/empty'), old, old);
  utimesSync(join(at, 'sub'), old, old);
}

function listTree(at: string, digits = 3): string[] {
  const found = spawnSync('find', ['.', '-printf', '%P %y %s %m %l %T@\\0'], { cwd: at, encoding: 'latin1' });
  // Removes what differs between file systems: sizes of directories, and fractions of a second after `digits` places.
  const tidy = (line: string): string =>
    line.replace(/ d \d+ /, ' d ').replace(/\.\d*$/, (fraction) => fraction.slice(0, 1 + digits));
  return found.stdout.split('\0').filter(Boolean).map(tidy).sort();
}

const expectSameTree = (one: string, other: string, digits?: number): void => {
  expect(listTree(other, digits)).toEqual(listTree(one, digits));
  execFileSync('diff', ['-r', '--no-dereference', one, other]);
};

// ---- Unpacking

const evil: [string, string, Entry][] = [
  ['a name with dots', 'invalid_path', { name: '../outside/new', content: 'x' }],
  ['dots further in', 'invalid_path', { name: 'a/../../outside/new', content: 'x' }],
  ['dots at the end', 'invalid_path', { name: 'a/..', type: 'directory' }],
  ['an absolute name', 'invalid_path', { name: '/etc/farhand-test', content: 'x' }],
  ['a NUL byte in its name', 'invalid_path', { name: 'x', pax: { path: 'a\0b' }, content: 'x' }],
  ['no name', 'invalid_path', { name: '', content: 'x' }],
  ['a name that is only dots', 'invalid_path', { name: './', type: 'symlink', linkname: 'x' }],
  ['a name of 5,000 characters', 'invalid_path', { name: 'x'.repeat(5_000), content: 'x' }],
  ['a component of 256 characters', 'invalid_path', { name: `${'x'.repeat(256)}/y`, content: 'x' }],
  ['256 directories above it', 'invalid_path', { name: `${'d/'.repeat(256)}x`, content: 'x' }],
  ['a symlink to nowhere', 'invalid_path', { name: 'a', type: 'symlink', pax: { linkpath: 'a\0' } }],
  ['a hard link that leads out', 'invalid_path', { name: 'a', type: 'link', linkname: '../outside/secret' }],
  ['an absolute hard link', 'invalid_path', { name: 'a', type: 'link', linkname: '/etc/passwd' }],
  ['a hard link to what is not there', 'invalid_path', { name: 'a', type: 'link', linkname: 'missing' }],
  ['a fifo', 'unsupported_file', { name: 'a', type: 'fifo' }],
  [
    'a character device',
    'unsupported_file',
    { name: 'a', type: 'character-device', devmajor: 1, devminor: 3 },
  ],
  ['a block device', 'unsupported_file', { name: 'a', type: 'block-device', devmajor: 7 }],
  ['a sparse file', 'unsupported_file', { name: 'a', pax: { 'GNU.sparse.major': '1' }, content: 'x' }],
];

/** Symlinks whose target is, or could be, outside the directory. */
const wayward: Entry[] = [
  { name: 'a', type: 'symlink', linkname: '../outside' },
  { name: 'd/a', type: 'symlink', linkname: '../../o' },
  { name: 'a', type: 'symlink', linkname: '/etc' },
  { name: 'd/a', type: 'symlink', linkname: 'b/../../x' },
];

/** A pax global header, whose records apply to all later entries. */
async function globalHeader(records: Record<string, string>): Promise<Buffer> {
  const tar = await tarOf({ name: 'a', pax: records, content: '' });
  // Cuts off the entry itself and the end of the archive.
  const header = tar.subarray(0, tar.length - 1536);
  header[156] = 0x67;
  header.fill(0x20, 148, 156);
  const sum = header.subarray(0, 512).reduce((total, byte) => total + byte, 0);
  header.write(`${sum.toString(8).padStart(6, '0')}\0 `, 148, 'latin1');
  return header;
}

/** Bytes in use on the heap after a garbage collection. */
function heapUsed(): number {
  setFlagsFromString('--expose-gc');
  (runInNewContext('gc') as () => void)();
  return process.memoryUsage().heapUsed;
}

describe('writeArchive', () => {
  test.each(evil)('%s is refused with %s and its name, and nothing is extracted', async (_, code, entry) => {
    const tar = await tarOf(entry);
    for (const whole of [true, false]) {
      const work = write(path('target'), tar, { whole });
      await expect(work).rejects.toEqual(refused(code, { entry: expect.any(String) }));
      expect(existsSync(path('target'))).toBe(false);
    }
    expect(existsSync('/etc/farhand-test')).toBe(false);
    expectNothingElse();
  });

  test('a hard link to a symlink is refused with a message that names the symlink', async () => {
    const tar = await tarOf(
      { name: 'a', type: 'symlink', linkname: 'x' },
      { name: 'd/b', type: 'link', linkname: 'a' },
    );
    const message = expect.stringMatching(/entry d\/b: is a hard link to a symlink; .* --hard-dereference/);
    await expect(write(path('target'), tar)).rejects.toMatchObject({ code: 'invalid_path', message });
    expect(readdirSync(path('target', 'd'))).toEqual([]);
  });

  test.each(wayward)('a symlink at $name to $linkname is refused when it is extracted', async (entry) => {
    const work = write(path('target'), await tarOf(entry));
    await expect(work).rejects.toEqual(refused('invalid_path', { entry: entry.name }));
    expect(existsSync(path('target'))).toBe(false);
    expectNothingElse();
  });

  test.each(wayward)('a symlink at $name to $linkname stays as it is in a whole copy', async (entry) => {
    await write(path('target'), await tarOf(entry), { whole: true });
    expect(readlinkSync(path('target', entry.name))).toBe(entry.linkname);
    expectNothingElse();
  });

  test('a copy of a tree neither writes nor reads through a symlink in it', async () => {
    const out: Entry = { name: 'out', type: 'symlink', linkname: disk.outside };
    const secret: Entry = { name: 's', type: 'symlink', linkname: join(disk.outside, 'secret') };
    for (const [code, ...entries] of [
      ['not_a_directory', out, { name: 'out/new', content: 'x' }],
      ['not_a_directory', out, { name: 'out/new/', type: 'directory' }],
      ['not_a_directory', out, { name: 'out', type: 'directory' }],
      ['not_a_directory', out, { name: 'a', type: 'link', linkname: 'out/secret' }],
      ['invalid_path', secret, { name: 'a', type: 'link', linkname: 's' }],
    ] as [string, ...Entry[]][]) {
      const work = write(path('target'), await tarOf(...entries), { whole: true, overwrite: true });
      await expect(work).rejects.toEqual(refused(code));
      expect(existsSync(path('target'))).toBe(false);
    }
    await write(path('target'), await tarOf(secret, { name: 's', content: 'mine' }), {
      ...{ whole: true, overwrite: true },
    });
    expect(readFileSync(path('target/s'), 'utf8')).toBe('mine');
    expectNothingElse();
  });

  test('extraction follows no symlink, neither an extracted nor an existing one', async () => {
    const own = await tarOf(
      { name: 'd/', type: 'directory' },
      { name: 'l', type: 'symlink', linkname: 'd' },
      { name: 'l/file', content: 'x' },
    );
    await expect(write(path('target'), own)).rejects.toEqual(refused('not_a_directory', { entry: 'l' }));
    expect(readdirSync(path('target/d'))).toEqual([]);
    symlinkSync(disk.outside, path('target/out'));
    for (const entry of [
      { name: 'out/new', content: 'x' },
      { name: 'out/new/', type: 'directory' as const },
      { name: 'a', type: 'link' as const, linkname: 'out/secret' },
    ]) {
      const work = write(path('target'), await tarOf(entry), { overwrite: true });
      await expect(work).rejects.toEqual(refused('not_a_directory'));
    }
    expectNothingElse();
  });

  test('nothing is extracted outside the root through a directory that a loop swaps with a symlink', async () => {
    mkdirSync(path('target/dir'), { recursive: true });
    const entries = Array.from({ length: 50 }, (_, index) => ({ name: `dir/f${index}`, content: 'x' }));
    const tar = await tarOf(...entries);
    const swapper = `import fs from 'node:fs'; process.chdir(${JSON.stringify(path('target'))});
      console.log('ready');
      for (;;) { try { fs.renameSync('dir', 'aside'); fs.symlinkSync(${JSON.stringify(disk.outside)}, 'dir'); fs.unlinkSync('dir'); fs.renameSync('aside', 'dir'); }
        // The archive may have created the directory again while it was renamed away.
        catch { fs.rmSync('aside', { recursive: true, force: true }); } }`;
    const child = spawn(process.execPath, ['--input-type=module', '-e', swapper], {
      stdio: ['ignore', 'pipe', 'inherit'],
    });
    const codes = new Set<string>();
    try {
      await once(child.stdout, 'data');
      const started = performance.now();
      // Repeats the upload for at least 2 s, and for up to 20 s if no entry has met the symlink before. Without such an
      // entry the test would prove nothing.
      const enough = (): boolean =>
        performance.now() - started > (codes.has('not_a_directory') ? 2_000 : 20_000);
      while (!enough()) {
        const work = write(path('target'), tar, { overwrite: true, chunk: 1536 });
        await work.then(
          () => codes.add('done'),
          (error: { code: string }) => codes.add(error.code),
        );
      }
    } finally {
      child.kill('SIGKILL');
      await once(child, 'exit');
    }
    // An entry that meets the symlink is refused with this code.
    expect(codes).toContain('not_a_directory');
    expect(codes).not.toContain('internal_error');
    expectNothingElse();
  });

  test('protected paths are neither entered, replaced, linked to nor created', async () => {
    for (const entry of [
      { name: 'forbidden/key', content: 'x' },
      { name: 'forbidden/new', content: 'x' },
      { name: 'forbidden/', type: 'directory' as const },
      { name: 'a', type: 'link' as const, linkname: 'forbidden/key' },
      { name: 'unit', content: 'x' },
      { name: 'unit/', type: 'directory' as const },
      { name: 'unit', type: 'symlink' as const, linkname: 'x' },
    ]) {
      const work = write(disk.root, await tarOf(entry), { overwrite: true });
      await expect(work).rejects.toEqual(refused('permission_denied'));
    }
    await expect(write(path('unit'), await tarOf())).rejects.toEqual(refused('permission_denied'));
    await expect(write(disk.outside, await tarOf())).rejects.toEqual(refused('permission_denied'));
    expect(readFileSync(join(disk.forbidden, 'key'), 'utf8')).toBe('forbidden');
    expect(readdirSync(disk.root)).toEqual(['forbidden']);
    expectNothingElse();
  });

  test('existing names are refused with already_exists, and a file never replaces a directory', async () => {
    mkdirSync(path('target/dir'), { recursive: true });
    writeFileSync(path('target/file'), 'old');
    for (const type of ['file', 'symlink'] as const) {
      const tar = await tarOf({ name: 'file', type, linkname: 'x', content: '' });
      await expect(write(path('target'), tar)).rejects.toEqual(refused('already_exists', { entry: 'file' }));
    }
    const overDirectory = await tarOf({ name: 'dir', content: 'x' });
    for (const overwrite of [true, false]) {
      const work = write(path('target'), overDirectory, { overwrite });
      await expect(work).rejects.toEqual(refused('is_a_directory', { entry: 'dir' }));
    }
    const below = await tarOf({ name: 'file/x', content: 'x' });
    await expect(write(path('target'), below)).rejects.toEqual(refused('not_a_directory', { entry: 'file' }));
    await expect(write(path('target/file'), below)).rejects.toEqual(refused('not_a_directory'));
    expect(readFileSync(path('target/file'), 'utf8')).toBe('old');
    expectNothingElse();
  });

  test('overwrite replaces files and symlinks themselves, and fills directories', async () => {
    mkdirSync(path('target/dir'), { recursive: true });
    writeFileSync(path('target/dir/file'), 'old', { mode: 0o777 });
    writeFileSync(path('target/dir/other'), 'stays');
    symlinkSync(join(disk.outside, 'secret'), path('target/link'));
    const tar = await tarOf(
      { name: 'dir/', type: 'directory' },
      { name: 'dir/file', content: 'new', mode: 0o600 },
      { name: 'link', content: 'mine' },
    );
    await write(path('target'), tar, { overwrite: true });
    expect(readFileSync(path('target/dir/file'), 'utf8')).toBe('new');
    expect(statSync(path('target/dir/file')).mode & 0o7777).toBe(0o600);
    expect(lstatSync(path('target/link')).isFile()).toBe(true);
    expect(readdirSync(path('target/dir')).sort()).toEqual(['file', 'other']);
    expectNothingElse();
  });

  test.skipIf(!isRoot)(
    'a replaced file gives its owner and group to the new one, but no mode bits (needs root)',
    async () => {
      mkdirSync(path('target'));
      for (const [name, mode] of [
        ['small', 0o6755],
        ['big', 0o600],
      ] as const) {
        writeFileSync(path('target', name), 'old');
        chownSync(path('target', name), 1234, 4321);
        chmodSync(path('target', name), mode);
      }
      symlinkSync('small', path('target/link'));
      lchownSync(path('target/link'), 1234, 4321);
      const tar = await tarOf(
        { name: 'small', content: 'new', mode: 0o4640 },
        { name: 'big', content: Buffer.alloc(300_000), mode: 0o755 },
        { name: 'link', content: 'new' },
        { name: 'other', content: 'new' },
      );
      await write(path('target'), tar, { overwrite: true });
      const of = (name: string): unknown[] => {
        const { uid, gid, mode, size } = lstatSync(path('target', name));
        return [uid, gid, mode & 0o7777, size];
      };
      expect(of('small')).toEqual([1234, 4321, 0o640, 3]);
      expect(of('big')).toEqual([1234, 4321, 0o755, 300_000]);
      expect([of('link'), of('other')]).toEqual([
        [0, 0, 0o644, 3],
        [0, 0, 0o644, 3],
      ]);
      expectNothingElse();
    },
  );

  test.skipIf(!isRoot)('a file whose owner the agent may not set is not replaced (needs root)', async () => {
    mkdirSync(path('target'));
    writeFileSync(path('target/file'), 'old');
    for (const name of ['', 'target']) chmodSync(path(name), 0o777);
    const tar = await tarOf({ name: 'new', content: 'x' }, { name: 'file', content: 'x' });
    writeFileSync(join(disk.base, 'file.tar'), tar);
    const child = disk.program(
      `const [root, tar] = ${JSON.stringify([disk.root, join(disk.base, 'file.tar')])};
        const files = await createFiles({ roots: [root], home: root, forbidden: [], directory: root + '/data', log: createLogger('test', 'silent') });
        async function* upload() {
          yield { open: { path: Buffer.from(root + '/target'), whole: false, overwrite: true, create_parents: false } };
          yield { chunk: fs.readFileSync(tar) };
          yield { commit: {} };
        }
        await files.writeArchive(upload(), { signal: new AbortController().signal }).catch((error) =>
          console.log(error.code, error.details.path));`,
      65_534,
    );
    await printed(child, `permission_denied ${path('target/file')}`);
    const { uid, size } = statSync(path('target/file'));
    expect([uid, size, statSync(path('target/new')).uid]).toEqual([0, 3, 65_534]);
    expectNothingElse();
  });

  test('a tar that is cut off or damaged, and a file that is no tar, are refused with invalid_request', async () => {
    const tar = await tarOf(
      { name: 'a', content: 'x'.repeat(1000) },
      { name: `b/${'y'.repeat(200)}`, content: 'x'.repeat(300_000) },
    );
    const headless = Buffer.from(tar);
    headless[148] = 0x39;
    const zip = gzipSync(tar);
    const cuts = [0, 100, 512, 1000, 1536, 2000, 4096, tar.length - 1024].map((end) => tar.subarray(0, end));
    const zipDamaged = Buffer.from(zip);
    zipDamaged.fill(0xff, 300, 320);
    const zipCuts = [2, 20, zip.length - 4].map((end) => zip.subarray(0, end));
    const oversized = Buffer.from(tar);
    oversized.write('7'.repeat(11), 124);
    const followed = Buffer.concat([zip, Buffer.from('junk')]);
    const bad = [
      ...cuts,
      followed,
      headless,
      zipDamaged,
      ...zipCuts,
      oversized,
      Buffer.from('garbage'.repeat(500)),
    ];
    for (const input of bad) {
      await expect(write(path('target'), input, { whole: true })).rejects.toEqual(refused('invalid_request'));
      expect(existsSync(path('target'))).toBe(false);
    }
    expectNothingElse();
  });

  test('a header uses at most a megabyte of memory, and a long series of headers is refused', async () => {
    const big = await tarOf({ name: 'a', pax: { comment: 'x'.repeat(1_100_000) }, content: 'x' });
    await expect(write(path('target'), big)).rejects.toEqual(refused('invalid_request'));
    const one = (await tarOf({ name: 'a', pax: { comment: 'x' }, content: 'x' })).subarray(0, 1024);
    const many = Buffer.concat(Array.from({ length: 50 }, () => one));
    await expect(write(path('target'), many)).rejects.toEqual(refused('invalid_request'));
  });

  test('global headers apply to all later entries, and many of them do not accumulate in memory', async () => {
    const entry = (await tarOf({ name: 'a', content: '' })).subarray(0, 512);
    const chunks: Buffer[] = [await globalHeader({ mtime: '1234567890.5' })];
    for (let index = 0; index < 150; index += 1) {
      chunks.push(await globalHeader({ [`k${index}`]: 'x'.repeat(1_000_000) }));
      if (index % 5 === 4) chunks.push(entry);
    }
    const before = heapUsed();
    let growth = 0;
    const options = { overwrite: true, before: () => (growth = heapUsed() - before) };
    const all = Buffer.concat([...chunks, entry, Buffer.alloc(1024)]);
    await write(path('target'), all, options);
    expect(growth).toBeLessThan(20_000_000);
    expect(statSync(path('target/a')).mtimeMs).toBe(1_234_567_890_500);
    const sparse = [await globalHeader({ 'GNU.sparse.major': '1' }), entry, Buffer.alloc(1024)];
    await expect(write(path('target'), Buffer.concat(sparse))).rejects.toEqual(refused('unsupported_file'));
    const row = Buffer.concat(Array.from({ length: 50 }, () => chunks[0] as Buffer));
    await expect(write(path('target'), row)).rejects.toEqual(refused('invalid_request'));
  });

  test('a wrong digest is refused with validation_failed, and a whole copy then leaves nothing', async () => {
    const tar = await tarOf({ name: 'a', content: 'x' });
    const wrong = { sha256: '0'.repeat(64) };
    await expect(write(path('target'), tar, { ...wrong, whole: true })).rejects.toEqual(
      refused('validation_failed'),
    );
    expect(existsSync(path('target'))).toBe(false);
    await expect(write(path('target'), tar, wrong)).rejects.toEqual(refused('validation_failed'));
    const sha256 = createHash('sha256').update(tar).digest('hex').toUpperCase();
    await expect(write(path('right'), tar, { sha256, whole: true })).resolves.toMatchObject({
      summary: { files: 1 },
    });
    expectNothingElse();
  });

  test.each([true, false])(
    'an upload without its commit leaves no temporary files, whole %s',
    async (whole) => {
      const tar = await tarOf({ name: 'a', content: 'x' }, { name: 'big', content: Buffer.alloc(1_000_000) });
      async function* nothing(): AsyncGenerator<never> {}
      async function* cut(): AsyncGenerator<WriteArchiveRequest__Output> {
        yield { commit: {} };
        throw new Error('cut');
      }
      async function* more(): AsyncGenerator<WriteArchiveRequest__Output> {
        yield { commit: {} };
        yield { chunk: Buffer.from('x') };
      }
      for (const [ending, input] of [
        [nothing, tar],
        [cut, tar],
        [more, tar],
        [nothing, tar.subarray(0, 500_000)],
      ] as const) {
        rmSync(path('target'), { recursive: true, force: true });
        await expect(write(path('target'), input, { whole, ending })).rejects.toThrow();
        // Without `whole`, files that were extracted before the failure remain.
        expect(existsSync(path('target/a'))).toBe(!whole);
        expectNothingElse();
      }
    },
  );

  test.each([true, false])('a cancelled call leaves no temporary files, whole %s', async (whole) => {
    const tar = await tarOf({ name: 'big', content: Buffer.alloc(1_000_000) });
    const controller = new AbortController();
    async function* hangs(): AsyncGenerator<WriteArchiveRequest__Output> {
      controller.abort(new Error('left'));
      yield await new Promise<never>(() => undefined);
    }
    const options = { whole, ending: hangs, signal: controller.signal };
    await expect(write(path('target'), tar.subarray(0, 500_000), options)).rejects.toThrow('left');
    expect(existsSync(path('target'))).toBe(false);
    expectNothingElse();
  });

  test('an archive that a killed agent was unpacking is removed at its next start', async () => {
    const tar = await tarOf(
      { name: 'dir/a', content: 'x' },
      { name: 'big', content: Buffer.alloc(1_000_000) },
    );
    writeFileSync(join(disk.base, 'part.tar'), tar.subarray(0, 500_000));
    const child = disk.program(`
      const [root, directory] = ${JSON.stringify([disk.root, disk.data])};
      const files = await createFiles({ roots: [root], home: root, forbidden: [], directory, log: createLogger('test', 'silent') });
      async function* upload(whole) {
        yield { open: { path: Buffer.from(root + '/target' + whole), whole, overwrite: false, create_parents: false } };
        yield { chunk: fs.readFileSync(${JSON.stringify(join(disk.base, 'part.tar'))}) };
        console.log('sent');
        await new Promise((resolve) => setTimeout(resolve, 60_000));
      }
      const call = { signal: new AbortController().signal };
      await Promise.all([true, false].map((whole) => files.writeArchive(upload(whole), call)));`);
    let sent = '';
    for await (const chunk of child.stdout ?? []) {
      sent += String(chunk);
      if (sent.split('sent').length === 3) break;
    }
    await waitFor(() => expect(existsSync(path('targetfalse/dir/a'))).toBe(true));
    child.kill('SIGKILL');
    await once(child, 'exit');
    expect(tree(disk.root).filter((name) => name.includes('.farhand-')).length).toBeGreaterThan(0);
    await disk.open();
    expect(existsSync(path('targettrue'))).toBe(false);
    expect(tree(path('targetfalse'))).toEqual(['dir', 'dir/a']);
    expect(['', 'dir'].map((name) => statSync(path('targetfalse', name)).mode & 0o7777)).toEqual([
      0o755, 0o755,
    ]);
    expectNothingElse();
  });

  test('a whole copy gets its name at the commit, and replaces nothing', async () => {
    const tar = await tarOf({ name: 'a', content: 'x' });
    const before = (): void => expect(existsSync(path('target'))).toBe(false);
    await write(path('target'), tar, { whole: true, before });
    expect(tree(path('target'))).toEqual(['a']);
    mkdirSync(path('empty'));
    writeFileSync(path('file'), 'x');
    for (const name of ['target', 'empty', 'file']) {
      await expect(write(path(name), tar, { whole: true })).rejects.toEqual(refused('already_exists'));
    }
    const late = (): void => mkdirSync(path('late'));
    await expect(write(path('late'), tar, { whole: true, before: late })).rejects.toEqual(
      refused('already_exists'),
    );
    expect(readdirSync(path('late'))).toEqual([]);
    const over = { whole: true, overwrite: true };
    await expect(write(path('target'), tar, over)).rejects.toEqual(refused('directory_not_empty'));
    await expect(write(path('file'), tar, over)).rejects.toEqual(refused('already_exists'));
    await expect(write(path('p/q/r'), tar, { whole: true })).rejects.toEqual(refused('file_not_found'));
    mkdirSync(path('own'));
    const narrow = await disk.open({ roots: [path('own')] });
    const replacing = narrow.writeArchive(upload(path('own'), tar, over), call());
    await expect(replacing).rejects.toEqual(refused('permission_denied'));
    await write(path('empty'), tar, over);
    await write(path('p/q/r'), tar, { whole: true, create_parents: true });
    expect([tree(path('empty')), tree(path('p'))]).toEqual([['a'], ['q', 'q/r', 'q/r/a']]);
    expectNothingElse();
  });

  test('a whole copy of a directory without write permission needs no root', async () => {
    const tar = await tarOf({ name: './', type: 'directory', mode: 0o555 }, { name: 'a', content: 'x' });
    for (const directory of [path('theirs'), disk.data]) {
      mkdirSync(directory, { recursive: true });
      chmodSync(directory, 0o777);
    }
    writeFileSync(path('tar'), tar);
    rmSync(join(disk.data, 'temporary.journal'));
    const opening = { whole: true, overwrite: false, create_parents: false };
    const program = disk.program(
      `const files = await createFiles({ roots: ['/'], home: '/', forbidden: [], directory: ${JSON.stringify(disk.data)},
        log: createLogger('x', 'silent') });
      const upload = async function* () {
        yield { open: { path: Buffer.from(${JSON.stringify(path('theirs/copy'))}), ...${JSON.stringify(opening)} } };
        yield { chunk: fs.readFileSync(${JSON.stringify(path('tar'))}) };
        yield { commit: {} };
      };
      const answer = await files.writeArchive(upload(), { signal: new AbortController().signal }).catch((error) => error);
      console.log(answer.code ?? 'done');`,
      isRoot ? 65_534 : undefined,
    );
    await printed(program, 'done');
    expect(statSync(path('theirs/copy')).mode & 0o7777).toBe(0o555);
    expect(tree(path('theirs'))).toEqual(['copy', 'copy/a']);
  });

  test.skipIf(!mayMount)(
    'a full disk is no_space and leaves no half-written file (needs mounts)',
    async () => {
      mkdirSync(path('small'));
      disk.mountTmpfs(path('small'), '600k');
      const tar = await tarOf({ name: 'a', content: 'x' }, { name: 'big', content: Buffer.alloc(1_000_000) });
      const many = await tarOf(
        ...Array.from({ length: 20 }, (_, index) => ({ name: `f${index}`, content: Buffer.alloc(100_000) })),
      );
      await expect(write(path('small/whole'), many, { whole: true })).rejects.toEqual(refused('no_space'));
      await expect(write(path('small/whole'), tar, { whole: true })).rejects.toEqual(refused('no_space'));
      expect(readdirSync(path('small'))).toEqual([]);
      await expect(write(path('small'), tar)).rejects.toEqual(refused('no_space', { entry: 'big' }));
      expect(readdirSync(path('small'))).toEqual(['a']);
      expectNothingElse();
    },
  );

  test.skipIf(!mayMount)('unpacks across a mount in the directory (needs mounts)', async () => {
    mkdirSync(path('target/mounted/sub'), { recursive: true });
    disk.mountTmpfs(path('target/mounted'), '600k');
    await write(
      path('target'),
      await tarOf({ name: 'a', content: 'a' }, { name: 'mounted/sub/b', content: 'b' }),
    );
    expect(readFileSync(path('target/mounted/sub/b'), 'utf8')).toBe('b');
    expectNothingElse();
  });

  test('setuid and setgid bits are removed; other mode bits and times are preserved whatever the umask', async () => {
    const mtime = new Date(1_234_567_890_000);
    const tar = await tarOf(
      { name: './', type: 'directory', mode: 0o711, mtime },
      { name: 'dir/', type: 'directory', mode: 0o555, mtime },
      { name: 'dir/suid', content: 'x', mode: 0o6777, mtime },
      { name: 'dir/link', type: 'symlink', linkname: '../dir/suid', mtime },
      { name: 'made/here', content: 'x' },
    );
    const mask = process.umask(0o077);
    try {
      for (const whole of [true, false]) {
        const target = path(`target-${whole}`);
        const { entry } = await write(target, tar, { whole });
        expect(entry).toMatchObject({ type: 'FILE_TYPE_DIRECTORY', mode: 0o711, path: raw(target) });
        const modeOf = (name: string): number => lstatSync(join(target, name)).mode & 0o7777;
        expect([modeOf('dir'), modeOf('dir/suid'), modeOf('made')]).toEqual([0o555, 0o777, 0o755]);
        for (const name of ['.', 'dir', 'dir/suid', 'dir/link']) {
          expect(lstatSync(join(target, name)).mtimeMs).toBe(mtime.getTime());
        }
      }
    } finally {
      process.umask(mask);
    }
    chmodSync(path('target-false'), 0o700);
    await write(path('target-false'), await tarOf({ name: './', type: 'directory', mode: 0o777 }));
    expect(statSync(path('target-false')).mode & 0o7777).toBe(0o700);
    expectNothingElse();
  });

  test('directories of a failed extraction have the modes of a complete one, whatever the umask', async () => {
    const modes = (): [string, number][] =>
      ['', 'private', 'no-entry', 'group', 'late'].map((name) => [
        name,
        statSync(path('target', name)).mode & 0o7777,
      ]);
    const entries: Entry[] = [
      { name: 'private/', type: 'directory', mode: 0o700 },
      { name: 'private/f', content: 'x' },
      { name: 'no-entry/f', content: 'x' },
      { name: 'group/', type: 'directory', mode: 0o770 },
      { name: 'late/f', content: 'x' },
      { name: 'late/', type: 'directory', mode: 0o700 },
    ];
    const expected = [
      ['', 0o755],
      ['private', 0o700],
      ['no-entry', 0o755],
      ['group', 0o770],
      ['late', 0o700],
    ];
    const failing = await tarOf(...entries, { name: 'fifo', type: 'fifo' });
    const mask = process.umask(0o077);
    try {
      await expect(write(path('target'), failing)).rejects.toEqual(refused('unsupported_file'));
      expect(modes()).toEqual(expected);
      await write(path('target'), await tarOf(...entries), { overwrite: true });
      expect(modes()).toEqual(expected);
    } finally {
      process.umask(mask);
    }
    expectNothingElse();
  });

  test('a new top directory is private until its own entry, and after a failure has the mode of it', async () => {
    for (const [mode, left] of [
      [0o700, 0o700],
      [0o775, 0o775],
      [0o555, 0o755],
    ] as const) {
      const target = path(`target-${left.toString(8)}`);
      const top: Entry = { name: './', type: 'directory', mode };
      const tar = await tarOf(top, { name: 'f', content: 'x' }, { name: 'fifo', type: 'fifo' });
      const modeOf = (): number => statSync(target).mode & 0o7777;
      const seen: number[] = [];
      async function* parts(): AsyncGenerator<WriteArchiveRequest__Output> {
        yield { open: { path: raw(target), whole: false, overwrite: false, create_parents: false } };
        seen.push(modeOf());
        for (let at = 0; at < tar.length; at += 512) {
          yield { chunk: tar.subarray(at, at + 512) };
          seen.push(modeOf());
        }
      }
      await expect(files.writeArchive(parts(), call())).rejects.toEqual(refused('unsupported_file'));
      expect([...new Set(seen), modeOf()]).toEqual([...new Set([0o700, left]), left]);
    }
    expectNothingElse();
  });

  test.skipIf(!isRoot)(
    'directories inherit the group of a setgid directory also if the agent is not in this group (needs root)',
    async () => {
      mkdirSync(path('target'));
      chmodSync(disk.root, 0o777);
      chownSync(path('target'), 0, 4321);
      chmodSync(path('target'), 0o2777);
      const entries = ['a/', 'a/b/', 'a/b/c/'].map((name) => ({
        name,
        type: 'directory' as const,
        mode: 0o755,
      }));
      writeFileSync(join(disk.base, 'file.tar'), await tarOf(...entries));
      const child = disk.program(
        `const [root, tar] = ${JSON.stringify([disk.root, join(disk.base, 'file.tar')])};
        process.umask(0o022);
        const files = await createFiles({ roots: [root], home: root, forbidden: [], directory: root + '/data', log: createLogger('test', 'silent') });
        async function* upload() {
          yield { open: { path: Buffer.from(root + '/target'), whole: false, overwrite: false, create_parents: false } };
          yield { chunk: fs.readFileSync(tar) };
          yield { commit: {} };
        }
        await files.writeArchive(upload(), { signal: new AbortController().signal });
        console.log('unpacked');`,
        65_534,
      );
      await printed(child, 'unpacked');
      const groups = entries.map(({ name }) => statSync(path('target', name)).gid);
      expect(groups).toEqual([4321, 4321, 4321]);
    },
  );

  test.skipIf(!isRoot).each([
    ['plain', 'shared'],
    ['shared', 'plain'],
  ])('each file gets the group that its own directory gives, %s before %s (needs root)', async (...names) => {
    for (const target of ['target/plain', 'target/shared']) mkdirSync(path(target), { recursive: true });
    chownSync(path('target/shared'), 0, 4321);
    chmodSync(path('target/shared'), 0o2775);
    const entries = names.flatMap((name) => [
      { name: `${name}/small`, content: 'x' },
      { name: `${name}/big`, content: Buffer.alloc(300_000) },
      { name: `${name}/new/link`, type: 'symlink' as const, linkname: '../small' },
      { name: `${name}/new/small`, content: 'x' },
    ]);
    await write(path('target'), await tarOf(...entries));
    const own = process.getegid?.();
    for (const { name } of entries)
      expect([name, lstatSync(path('target', name)).gid]).toEqual([
        name,
        name.startsWith('shared') ? 4321 : own,
      ]);
    expectNothingElse();
  });

  test('a hundred existing directories are filled with at most 64 temporary directories at once', async () => {
    const names = Array.from({ length: 100 }, (_, index) => `d${index}`);
    for (const name of names) mkdirSync(path('target', name), { recursive: true });
    const temporary = (): number => tree(disk.root).filter((name) => /\.farhand-[^/]*$/.test(name)).length;
    let most = 0;
    await write(path('target'), await tarOf(...names.map((name) => ({ name: `${name}/f`, content: name }))), {
      chunk: 1024,
      before: () => (most = temporary()),
    });
    expect(most).toBeGreaterThan(1);
    expect(most).toBeLessThanOrEqual(64);
    expect(names.map((name) => readFileSync(path('target', name, 'f'), 'utf8'))).toEqual(names);
    expectNothingElse();
  });

  test('hard links are extracted as one file, and a later entry with one of their names as a new file', async () => {
    const tar = await tarOf(
      { name: 'a', content: 'first' },
      { name: 'd/b', type: 'link', linkname: './a' },
      { name: 'a', content: 'second' },
      { name: 'c', type: 'link', linkname: 'a' },
      { name: 'c', type: 'link', linkname: 'a' },
    );
    await write(path('target'), tar, { overwrite: true });
    expect(readFileSync(path('target/d/b'), 'utf8')).toBe('first');
    expect(readFileSync(path('target/a'), 'utf8')).toBe('second');
    expect(lstatSync(path('target/c')).ino).toBe(lstatSync(path('target/a')).ino);
    expectNothingElse();
  });

  test.each(['--format=pax', '--format=gnu'])('unpacks what GNU tar makes with %s', async (format) => {
    makeTree(path('dir'));
    linkSync(path('dir/sub/file'), path('dir/again'));
    const tar = gnuTar(path('dir'), format);
    for (const [name, input] of [
      ['plain', tar],
      ['zipped', gzipSync(tar)],
      ['followed', Buffer.concat([tar, Buffer.alloc(300_000, 'junk')])],
      ['zip-followed', Buffer.concat([gzipSync(tar), Buffer.alloc(300_000)])],
    ] as const) {
      const { summary } = await write(path(name), input, { whole: true, chunk: 1000 });
      expectSameTree(path('dir'), path(name), format === '--format=gnu' ? 0 : 3);
      expect(summary).toMatchObject({ sha256: createHash('sha256').update(input).digest('hex'), files: 6 });
    }
    expectNothingElse();
  });

  test.each(['--format=v7', '--format=ustar'])('unpacks the old format %s', async (format) => {
    mkdirSync(path('dir/sub'), { recursive: true });
    writeFileSync(path('dir/sub/file'), 'x');
    await write(path('copy'), gnuTar(path('dir'), format));
    expect(readFileSync(path('copy/sub/file'), 'utf8')).toBe('x');
  });

  test('unpacks an empty archive, and one that arrives byte by byte', async () => {
    await write(path('empty'), await tarOf());
    expect(readdirSync(path('empty'))).toEqual([]);
    const tar = await tarOf({ name: 'a', content: 'x'.repeat(1000) });
    for (const [name, input] of [
      ['a', tar],
      ['b', gzipSync(tar)],
    ] as const) {
      await write(path(name), input, { chunk: 1 });
      expect(statSync(path(name, 'a')).size).toBe(1000);
    }
  });

  test('a tree that the agent has packed is unpacked to the same tree', async () => {
    makeTree(path('dir'));
    const { tar, tail } = await read(path('dir'), { gzip: true });
    const { summary } = await write(path('copy'), tar, { whole: true, sha256: tail?.sha256 ?? '' });
    expectSameTree(path('dir'), path('copy'));
    expect(summary).toEqual(tail);
    renameSync(path('copy'), path('moved'));
    expect(readlinkSync(path('moved/sub/link'))).toBe('../nothing');
  });
});
