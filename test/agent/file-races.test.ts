// File operations that run at the same time, or whose file another program replaces meanwhile: no acknowledged content
// is lost, and a failure leaves nothing behind.
import { execFileSync } from 'node:child_process';
import { once } from 'node:events';
import {
  chmodSync,
  chownSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  statSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test } from 'vitest';
import type { Files } from '../../agent/files/index.ts';
import { call, Disk, isRoot, mayMount, otherDisk, printed, tree } from '../file-operations-fixture.ts';
import { waitFor } from '../wait-for.ts';

let disk: Disk;
let files: Files;

const path = (...parts: string[]): string => disk.path(...parts);
const bytes = (name: string): Buffer => Buffer.from(name);
const json = JSON.stringify;
const stranger = 65_534;

beforeEach(async () => {
  disk = new Disk({ second: true });
  files = await disk.open({ roots: [disk.root, ...(disk.second ? [disk.second] : [])] });
});
afterEach(() => disk.remove());

interface Writing {
  create_parents?: boolean;
  sha256?: string;
  /** The upload is completed only after this. */
  before?: Promise<void>;
  by?: Files;
}

function write(name: string, content: string, more: Writing = {}) {
  const { create_parents = false, before, by = files, ...commit } = more;
  async function* messages() {
    yield { open: { path: bytes(name), create_parents } };
    yield { chunk: bytes(content) };
    await before;
    yield { commit: { overwrite: true, ...commit } };
  }
  return by.writeFile(messages(), call());
}

const move = (source: string, destination: string) =>
  files.moveFile({ source: bytes(source), destination: bytes(destination), overwrite: false }, call());

/** Resolves to `done`, or to the code of the failure. */
const outcome = (work: Promise<unknown>): Promise<string> =>
  work.then(
    () => 'done',
    (error) => error.code,
  );

/** Starts a program that makes one move as another user, and prints how it ended. `before` is run first. */
function moveAs(uid: number, source: string, destination: string, before = '') {
  const data = join(disk.base, 'their-data');
  mkdirSync(data, { recursive: true });
  chmodSync(data, 0o777);
  return disk.program(
    `${before}
    const files = await createFiles({ roots: ${json([disk.root, disk.second || disk.root])}, home: '/', forbidden: [],
      directory: ${json(data)}, log: createLogger('x', 'silent') });
    const request = { source: Buffer.from(${json(source)}), destination: Buffer.from(${json(destination)}), overwrite: false };
    await files.moveFile(request, { signal: new AbortController().signal })
      .then(() => console.log('done'), ({ code }) => console.log(code));`,
    uid,
  );
}

test.runIf(isRoot)('a move that may not remove the source leaves nothing at the destination', async () => {
  mkdirSync(path('from'));
  mkdirSync(path('to'));
  chmodSync(path('to'), 0o777);
  writeFileSync(path('from/file'), 'x');
  chownSync(path('from/file'), stranger, stranger);
  await printed(moveAs(stranger, path('from/file'), path('to/file')), 'permission_denied');
  expect([readdirSync(path('from')), readdirSync(path('to'))]).toEqual([['file'], []]);
});

test.runIf(isRoot && otherDisk)(
  'a file that replaces the source during a move to another file system is not lost',
  async () => {
    const target = mkdtempSync(join(disk.second, 'to-'));
    for (const directory of [disk.second, target]) chmodSync(directory, 0o777);
    mkdirSync(path('from'));
    chmodSync(path('from'), 0o777);
    writeFileSync(path('from/file'), Buffer.alloc(200 * 1024 * 1024, 7));
    chownSync(path('from/file'), stranger, stranger);
    const child = moveAs(stranger, path('from/file'), join(target, 'file'));
    await waitFor(() => expect(tree(target).length).toBeGreaterThan(1), { interval: 1 });
    // A file of root, which an ordinary user may not link.
    writeFileSync(path('from/new'), 'new');
    renameSync(path('from/new'), path('from/file'));
    await printed(child, 'conflict');
    await once(child, 'exit');
    expect([readFileSync(path('from/file'), 'utf8'), readdirSync(target)]).toEqual(['new', []]);
  },
);

test.runIf(otherDisk)(
  'uploads into a directory during its move to another file system are not lost',
  async () => {
    mkdirSync(path('dir'));
    for (let n = 0; n < 3_000; n += 1) writeFileSync(path(`dir/${n}`), '');
    const moving = outcome(move(path('dir'), join(disk.second, 'dir')));
    await waitFor(() => expect(tree(disk.second).length).toBeGreaterThan(100), { interval: 20 });
    await write(path('dir/0'), 'replaced');
    await write(path('dir/new'), 'created');
    const at = (await moving) === 'done' ? disk.second : disk.root;
    expect(['0', 'new'].map((name) => readFileSync(join(at, 'dir', name), 'utf8'))).toEqual([
      'replaced',
      'created',
    ]);
  },
);

test.runIf(otherDisk)(
  'a directory with an unfinished upload is not moved to another file system',
  async () => {
    mkdirSync(path('dir'));
    const { promise: before, resolve: commit } = Promise.withResolvers<void>();
    const uploading = write(path('dir/file'), 'x', { before });
    await waitFor(() => expect(tree(path('dir')).some((name) => name.startsWith('.farhand'))).toBe(true));
    expect(await outcome(move(path('dir'), join(disk.second, 'dir')))).toBe('conflict');
    commit();
    await uploading;
    expect(readFileSync(path('dir/file'), 'utf8')).toBe('x');
    expect(readdirSync(disk.second)).toEqual([]);
  },
);

test.runIf(otherDisk)(
  'a directory that cannot be moved back, because another one has its name by then, stays under another name',
  async () => {
    mkdirSync(path('dir'));
    for (let n = 0; n < 3_000; n += 1) writeFileSync(path(`dir/${n}`), '');
    const { promise: before, resolve: commit } = Promise.withResolvers<void>();
    const uploading = write(path('dir/new'), 'x', { before });
    await waitFor(() => expect(tree(path('dir')).some((name) => name.startsWith('.farhand'))).toBe(true));
    const moving = outcome(move(path('dir'), join(disk.second, 'dir')));
    await waitFor(() => expect(readdirSync(disk.root)).not.toContain('dir'), { interval: 1 });
    await write(path('dir/other'), 'y', { create_parents: true });
    expect(await moving).toBe('conflict');
    commit();
    await uploading;
    const [kept = ''] = readdirSync(disk.root).filter((name) => name.startsWith('farhand-kept-'));
    expect([readdirSync(path('dir')), readdirSync(disk.second)]).toEqual([['other'], []]);
    expect([readdirSync(path(kept)).length, readFileSync(path(kept, 'new'), 'utf8')]).toEqual([3_001, 'x']);
  },
);

test.runIf(isRoot && otherDisk)(
  'a directory that can be moved back to no name is not removed with the temporary directory',
  async () => {
    const target = mkdtempSync(join(disk.second, 'to-'));
    for (const directory of [disk.second, target]) chmodSync(directory, 0o777);
    mkdirSync(path('from/dir'), { recursive: true });
    chmodSync(path('from'), 0o777);
    for (let n = 0; n < 3_000; n += 1) {
      writeFileSync(path(`from/dir/${n}`), '');
      chownSync(path(`from/dir/${n}`), stranger, stranger);
    }
    for (const directory of ['from', 'from/dir']) chownSync(path(directory), stranger, stranger);
    // Once the directory has moved away, no name in its parent can change.
    const lockParent = `const parent = ${json(path('from'))};
    const watcher = fs.watch(parent, { persistent: false }, () => {
      if (fs.existsSync(parent + '/dir')) return;
      watcher.close();
      fs.chmodSync(parent, 0o555);
    });`;
    const child = moveAs(stranger, path('from/dir'), join(target, 'dir'), lockParent);
    const exited = once(child, 'exit');
    await waitFor(() => expect(tree(target).length).toBeGreaterThan(100), { interval: 1 });
    writeFileSync(path('from/dir/new'), 'x');
    await printed(child, 'conflict');
    await exited;
    chmodSync(path('from'), 0o777);
    const [kept = ''] = readdirSync(path('from'));
    expect(readFileSync(path('from', kept, 'content/new'), 'utf8')).toBe('x');
    expect(readdirSync(target)).toEqual([]);
    // The next start of the agent does not remove it either.
    await printed(moveAs(stranger, path('from/none'), join(target, 'none')), 'not_found');
    expect(readdirSync(path('from', kept, 'content')).length).toBe(3_001);
  },
);

test('a change of mode during an upload of the same file takes effect or is refused', async () => {
  const lost: number[] = [];
  for (let n = 0; n < 400; n += 1) {
    writeFileSync(path('file'), 'old');
    chmodSync(path('file'), 0o644);
    const uploading = write(path('file'), 'new');
    // The change comes at another moment of the upload each time.
    await new Promise((resolve) => setTimeout(resolve, (n % 40) / 8));
    const changed = await outcome(files.changeFile({ path: bytes(path('file')), mode: 0o600 }, call()));
    await uploading;
    if (changed === 'done' && (statSync(path('file')).mode & 0o777) !== 0o600) lost.push(n);
  }
  expect(lost).toEqual([]);
});

test('an upload that fails does not fail another one into the same new directory', async () => {
  const failed: string[] = [];
  for (let n = 0; n < 150; n += 1) {
    const wrong = { create_parents: true, sha256: '0'.repeat(64) };
    const failing = outcome(write(path(`dir-${n}/a`), 'x', wrong));
    await new Promise((resolve) => setTimeout(resolve, n % 12));
    const other = await outcome(write(path(`dir-${n}/b`), 'x', { create_parents: true }));
    await failing;
    if (other !== 'done') failed.push(other);
  }
  expect(failed).toEqual([]);
});

test.runIf(mayMount)('failed uploads to a read-only disk leave nothing in the journal', async () => {
  mkdirSync(path('disk'));
  disk.mountTmpfs(path('disk'), '256k');
  execFileSync('mount', ['-o', 'remount,ro', path('disk')]);
  for (let n = 0; n < 20; n += 1)
    expect(await outcome(write(path('disk/file'), 'x'))).toBe('permission_denied');
  expect(readFileSync(join(disk.data, 'temporary.journal'), 'utf8').split('\n')).toHaveLength(1);
});

test.runIf(mayMount)(
  'failed uploads while the disk of the agent is full leave nothing in the journal',
  async () => {
    const data = join(disk.base, 'small');
    mkdirSync(data);
    disk.mountTmpfs(data, '64k');
    const by = await disk.open({ directory: data });
    expect(() => writeFileSync(join(data, 'fill'), Buffer.alloc(1_000_000))).toThrow('ENOSPC');
    for (let n = 0; n < 50; n += 1) await outcome(write(path('file'), 'x', { by }));
    rmSync(join(data, 'fill'));
    await write(path('file'), 'x', { by });
    expect(readFileSync(join(data, 'temporary.journal'), 'utf8')).toBe('');
  },
);
