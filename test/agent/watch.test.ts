// The agent's watch of files, on a real disk. Tests of what it must never report come first.
import { execFileSync } from 'node:child_process';
import {
  appendFileSync,
  existsSync,
  mkdirSync,
  renameSync,
  rmdirSync,
  rmSync,
  symlinkSync,
  unlinkSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, test } from 'vitest';
import type { Files } from '../../agent/files/index.ts';
import type { WatchFilesResponse } from '../../proto/types/farhand/agent/v1/WatchFilesResponse.ts';
import { nextTurn } from '../../shared/clock.ts';
import { fakeClock } from '../fake-clock.ts';
import { call, Disk, hasFuse, refused } from '../file-operations-fixture.ts';
import { waitFor } from '../wait-for.ts';

let disk: Disk;
let files: Files;
const watches: Watching[] = [];
const path = (...parts: string[]): string => disk.path(...parts);

beforeEach(async () => {
  disk = new Disk();
  files = await disk.open();
});
afterEach(async () => {
  for (const watch of watches.splice(0)) await watch.end();
  await disk.remove();
});

/** A running watch. Its changes are stored in order. */
class Watching {
  readonly received: string[] = [];
  readonly #controller = new AbortController();
  readonly #iterator: AsyncIterator<WatchFilesResponse>;

  constructor(at: string, recursive: boolean, may_be_missing = false) {
    const request = { path: Buffer.from(at), recursive, may_be_missing };
    this.#iterator = files.watchFiles(request, call(this.#controller.signal))[Symbol.asyncIterator]();
    watches.push(this);
  }

  /** Reads one message; false at the end. */
  async next(): Promise<boolean> {
    const { value, done } = await this.#iterator.next();
    if (done) return false;
    for (const { kind, path: changed, type } of value.changes ?? []) {
      const name = Buffer.from(changed ?? '')
        .toString('latin1')
        .slice(disk.root.length + 1);
      this.received.push(`${String(kind).slice(17)} ${name}${type === 'FILE_TYPE_DIRECTORY' ? '/' : ''}`);
    }
    return true;
  }

  async until(change: string): Promise<string[]> {
    while (!this.received.includes(change)) {
      if (!(await this.next()))
        throw new Error(`ended without ${change}, received ${this.received.join(', ')}`);
    }
    return this.received;
  }

  async end(): Promise<void> {
    this.#controller.abort(new Error('over'));
    await this.#iterator.next().catch(() => undefined);
  }
}

async function watch(at: string, recursive = true): Promise<Watching> {
  const watching = new Watching(at, recursive);
  await watching.next();
  expect(watching.received).toEqual([]);
  return watching;
}

/** Makes a change and waits until it is reported. By then all earlier changes have been reported. */
async function mark(watching: Watching, at = disk.root): Promise<string[]> {
  const name = `mark-${watching.received.length}-${watches.length}`;
  writeFileSync(join(at, name), '');
  const received = await watching.until(`ADDED ${join(at, name).slice(disk.root.length + 1)}`);
  return received.filter((change) => !change.includes('mark-'));
}

describe('watchFiles', () => {
  test('refuses missing, outside and forbidden paths', async () => {
    symlinkSync(disk.outside, path('out'));
    for (const [at, code] of [
      [path('missing'), 'file_not_found'],
      [disk.outside, 'permission_denied'],
      [path('out'), 'permission_denied'],
      [disk.forbidden, 'permission_denied'],
    ] as const) {
      for (const recursive of [true, false])
        await expect(new Watching(at, recursive).next()).rejects.toEqual(refused(code));
    }
  });

  test('watches a missing path on request, but not one whose directory is missing or that is outside', async () => {
    for (const [at, code] of [
      [path('none/missing'), 'file_not_found'],
      [join(disk.outside, 'missing'), 'permission_denied'],
    ] as const)
      await expect(new Watching(at, true, true).next()).rejects.toEqual(refused(code));
    for (const recursive of [true, false]) {
      const watching = new Watching(path('later'), recursive, true);
      await watching.next();
      writeFileSync(path('other'), 'x');
      writeFileSync(path('later'), 'x');
      expect(await watching.until('ADDED later')).toEqual(['ADDED later']);
      unlinkSync(path('later'));
      await watching.until('REMOVED later');
      mkdirSync(path('later'));
      await watching.until('ADDED later/');
      rmdirSync(path('later'));
    }
  });

  test('reports nothing about protected paths', async () => {
    const watching = await watch(disk.root);
    writeFileSync(join(disk.forbidden, 'new'), 'x');
    writeFileSync(path('unit'), 'x');
    expect(await mark(watching)).toEqual([]);
    unlinkSync(path('unit'));
    unlinkSync(join(disk.forbidden, 'key'));
    writeFileSync(join(disk.forbidden, 'key'), 'forbidden');
    expect(await mark(watching)).toEqual([]);
  });

  test('never follows a symlink: an existing one, a new one, or one that replaces a directory', async () => {
    symlinkSync(disk.outside, path('before'));
    mkdirSync(path('dir'));
    const watching = await watch(disk.root);
    symlinkSync(disk.outside, path('new'));
    await watching.until('ADDED new');
    renameSync(path('dir'), path('moved'));
    symlinkSync(disk.outside, path('dir'));
    await watching.until('ADDED dir');
    writeFileSync(join(disk.outside, 'file'), 'x');
    writeFileSync(path('moved/file'), 'x');
    await watching.until('ADDED moved/file');
    expect((await mark(watching)).filter((change) => /(before|new|dir)\/./.test(change))).toEqual([]);
  });

  test('a directory that is moved out is no longer watched', async () => {
    mkdirSync(path('dir/sub'), { recursive: true });
    const watching = await watch(disk.root);
    renameSync(path('dir'), join(disk.outside, 'dir'));
    await watching.until('REMOVED dir/');
    writeFileSync(join(disk.outside, 'dir/sub/file'), 'x');
    const received = await mark(watching);
    expect(received).toEqual(['REMOVED dir/sub/', 'REMOVED dir/']);
  });

  test('too many changes at once are reported as one overflow, after which changes are reported again', async () => {
    mkdirSync(path('dir'));
    const watching = await watch(disk.root);
    // These calls are synchronous, so all of these changes wait in the queue.
    for (let index = 0; index < 12_000; index += 1) writeFileSync(path(`dir/f${index}`), '');
    mkdirSync(path('dir/sub'));
    const received = await watching.until('OVERFLOW /');
    expect(received.length).toBeLessThanOrEqual(12_000);
    writeFileSync(path('dir/sub/file'), '');
    await watching.until('ADDED dir/sub/file');
    unlinkSync(path('dir/f11999'));
    await watching.until('REMOVED dir/f11999');
  });

  test('a slow reader gets the result of many changes, not each of them', async () => {
    writeFileSync(path('a'), 'x');
    const watching = await watch(disk.root);
    for (let index = 0; index < 100; index += 1) {
      appendFileSync(path('a'), 'x');
      writeFileSync(path('b'), '');
      unlinkSync(path('b'));
    }
    writeFileSync(path('new'), 'x');
    renameSync(path('new'), path('a'));
    expect(await mark(watching)).toEqual(['CHANGED a']);
  });

  test('reports additions, changes, removals and renames, also in directories below', async () => {
    mkdirSync(path('dir'));
    writeFileSync(path('dir/old'), 'x');
    const watching = await watch(disk.root);
    writeFileSync(path('dir/new'), 'x');
    await watching.until('ADDED dir/new');
    appendFileSync(path('dir/old'), 'x');
    await watching.until('CHANGED dir/old');
    renameSync(path('dir/old'), path('dir/renamed'));
    await watching.until('ADDED dir/renamed');
    expect(watching.received).toContain('REMOVED dir/old');
    rmSync(path('dir'), { recursive: true });
    await watching.until('REMOVED dir/');
    expect(watching.received).toEqual(expect.arrayContaining(['REMOVED dir/new', 'REMOVED dir/renamed']));
  });

  test('all entries of a new directory are reported, however fast they were made', async () => {
    const watching = await watch(disk.root);
    mkdirSync(path('a/b/c'), { recursive: true });
    writeFileSync(path('a/b/c/file'), 'x');
    await watching.until('ADDED a/b/c/file');
    expect(watching.received).toEqual(['ADDED a/', 'ADDED a/b/', 'ADDED a/b/c/', 'ADDED a/b/c/file']);
    writeFileSync(path('a/b/c/later'), 'x');
    await watching.until('ADDED a/b/c/later');
  });

  test('a directory that replaces another is reported anew', async () => {
    mkdirSync(path('dir'));
    mkdirSync(path('other'));
    writeFileSync(path('other/file'), '');
    const watching = await watch(disk.root);
    execFileSync('mv', ['-T', path('other'), path('dir')]);
    await watching.until('ADDED dir/file');
    expect(watching.received).toEqual(
      expect.arrayContaining(['REMOVED dir/', 'ADDED dir/', 'REMOVED other/']),
    );
    writeFileSync(path('dir/later'), '');
    await watching.until('ADDED dir/later');
  });

  test('without recursive, only direct entries are reported', async () => {
    mkdirSync(path('dir'));
    const watching = await watch(disk.root, false);
    writeFileSync(path('dir/file'), 'x');
    writeFileSync(path('file'), 'x');
    expect(await mark(watching)).toEqual(['ADDED file']);
  });

  test('a single file is watched while it is replaced, removed and made again', async () => {
    writeFileSync(path('file'), 'x');
    const watching = await watch(path('file'));
    writeFileSync(path('other'), 'x');
    renameSync(path('other'), path('file'));
    await watching.until('CHANGED file');
    unlinkSync(path('file'));
    await watching.until('REMOVED file');
    writeFileSync(path('file'), 'x');
    await watching.until('ADDED file');
    expect(watching.received.filter((change) => !change.endsWith(' file'))).toEqual([]);
  });

  test.skipIf(!hasFuse)(
    'a mount below whose program has ended does not end the watch (needs FUSE)',
    async () => {
      mkdirSync(path('dead'));
      disk.mountDead(path('dead'));
      expect(await mark(await watch(disk.root))).toEqual([]);
    },
  );

  test('names that are not UTF-8 are reported by their bytes', async () => {
    const watching = await watch(disk.root);
    writeFileSync(Buffer.from(`${disk.root}/caf\xe9`, 'latin1'), 'x');
    await watching.until('ADDED caf\xe9');
  });

  test('the watch ends when its directory is moved away or removed', async () => {
    mkdirSync(path('dir/sub'), { recursive: true });
    const watching = await watch(path('dir'));
    renameSync(path('dir'), path('elsewhere'));
    while (await watching.next());
    expect(watching.received).toEqual(['REMOVED dir/sub/', 'REMOVED dir/']);
    expect(existsSync(path('elsewhere/sub'))).toBe(true);
  });
});

test('a watch ends when its empty directory, or the directory of its file, is removed', async () => {
  const clock = fakeClock(1_800_000_000_000);
  for (const name of ['empty', 'dir', 'above/moved']) mkdirSync(path(name), { recursive: true });
  for (const name of ['dir/file', 'above/moved/file']) writeFileSync(path(name), '');
  const watching = await Promise.all(
    ['empty', 'dir/file', 'above/moved/file'].map((name) => watch(path(name))),
  );
  const ended = Promise.all(
    watching.map(async (one) => {
      while (await one.next());
    }),
  ).then(() => true);
  rmdirSync(path('empty'));
  rmSync(path('dir'), { recursive: true });
  renameSync(path('above'), path('elsewhere'));
  await waitFor(async () => {
    await clock.advance(1_000);
    expect(await Promise.race([ended, nextTurn()])).toBe(true);
  });
  expect(watching.map(({ received }) => received)).toEqual([
    ['REMOVED empty/'],
    ['REMOVED dir/file'],
    ['REMOVED above/moved/file'],
  ]);
});

test('a flood of changes of two files while the agent is stalled is reported as an overflow', async () => {
  const watching = await watch(disk.root, false);
  // While this loop runs, the agent reads no events. The kernel's queue holds 16,384 of them.
  for (let n = 0; n < 20_000; n += 1) appendFileSync(path(n % 2 === 0 ? 'a' : 'b'), 'x');
  await watching.until('OVERFLOW /');
});
