// Tree operations of the agent's files room, called as the link calls them, on real files: what must never happen
// comes first.
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import {
  chmodSync,
  closeSync,
  mkdirSync,
  mkdtempSync,
  openSync,
  readdirSync,
  readlinkSync,
  renameSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { inspect } from 'node:util';
import { afterEach, beforeEach, describe, expect, test, vi } from 'vitest';
import { Beneath, type Directory } from '../agent/files/beneath.ts';
import { Boundary } from '../agent/files/boundary.ts';
import { fromText } from '../agent/files/path.ts';
import { type Step, type WalkOptions, walk } from '../agent/files/walk.ts';
import { AppError } from '../shared/errors.ts';

// ---- A disk of its own for each test

const mounts: string[] = [];
const isRoot = process.geteuid?.() === 0;
const mayMount = isRoot && tries(probeMount);

let base: string;
/** The only allowed root in most tests, and not the home; `outside` lies beside it. */
let root: string;
let outside: string;
let forbidden: string;
const children: ChildProcess[] = [];

const path = (...parts: string[]): string => join(root, ...parts);

beforeEach(() => {
  base = mkdtempSync(join(tmpdir(), 'farhand-tree-'));
  chmodSync(base, 0o755);
  [root, outside, forbidden] = [join(base, 'root'), join(base, 'outside'), join(base, 'root/forbidden')];
  for (const directory of [root, outside, forbidden]) mkdirSync(directory);
  writeFileSync(join(outside, 'secret'), 'outside');
  writeFileSync(join(forbidden, 'key'), 'forbidden');
});

afterEach(async () => {
  for (const child of children.splice(0)) {
    child.kill('SIGKILL');
    if (child.exitCode === null && child.signalCode === null) await once(child, 'exit');
  }
  try {
    // Every handle of the room is closed at the end of its call, whichever way that ended.
    await vi.waitFor(() => expect(openHandles()).toEqual([]), 10_000);
  } finally {
    for (const mount of mounts.splice(0)) execFileSync('umount', ['-l', mount]);
    // Node's own removal cannot reach the bottom of a very deep tree.
    execFileSync('rm', ['-rf', '--one-file-system', base]);
  }
});

function tries(work: () => void): boolean {
  try {
    work();
    return true;
  } catch {
    return false;
  }
}

function mount(...args: string[]): void {
  execFileSync('mount', args, { stdio: 'ignore' });
  mounts.push(args.at(-1)!);
}

function probeMount(): void {
  const at = mkdtempSync(join(tmpdir(), 'farhand-mount-'));
  try {
    mount('-t', 'tmpfs', '-o', 'size=64k', 'tmpfs', at);
    execFileSync('umount', [at]);
    mounts.pop();
  } finally {
    rmSync(at, { recursive: true });
  }
}

function openHandles(): string[] {
  const targets = readdirSync('/proc/self/fd').map((fd) => {
    let target = '';
    tries(() => {
      target = readlinkSync(`/proc/self/fd/${fd}`);
    });
    return target;
  });
  return targets.filter((target) => target.startsWith(base));
}

/** Directories inside each other, deeper than any path can name; the last holds a file. */
function makeDeep(at: string, levels: number): void {
  mkdirSync(at);
  let above = openSync(at, 'r');
  for (let level = 0; level < levels; level += 1) {
    mkdirSync(`/proc/self/fd/${above}/d`);
    const below = openSync(`/proc/self/fd/${above}/d`, 'r');
    closeSync(above);
    above = below;
  }
  writeFileSync(`/proc/self/fd/${above}/bottom`, 'x');
  closeSync(above);
}

/** A Node program that may import the room; prints what the test waits for. */
function program(source: string, uid?: number): ChildProcess {
  const from = (file: string): string => JSON.stringify(join(import.meta.dirname, '..', file));
  const imports = `import { openFiles } from ${from('agent/files/index.ts')}; import fs from 'node:fs';
    import { walk } from ${from('agent/files/walk.ts')};
    import { createLogger } from ${from('shared/logger.ts')};`;
  const child = spawn(process.execPath, ['--input-type=module', '-e', `${imports}\n${source}`], {
    stdio: ['pipe', 'pipe', 'inherit'],
    ...(uid !== undefined && { uid, gid: uid }),
  });
  children.push(child);
  return child;
}

async function printed(child: ChildProcess, text: string): Promise<void> {
  for await (const chunk of child.stdout!) if (String(chunk).includes(text)) return;
  throw new Error(`the program ended without printing ${text}`);
}

/** Swaps a directory against a symlink for two seconds, without a pause. */
function swap(name: string, target: string): ChildProcess {
  return program(`
    const [name, target] = ${JSON.stringify([name, target])};
    // Calls under way may have made or removed something in the gap.
    const tried = (work) => { try { work(); } catch {} };
    console.log('ready');
    for (const end = Date.now() + 2000; Date.now() < end; ) {
      tried(() => fs.renameSync(name, name + '.real'));
      tried(() => fs.symlinkSync(target, name));
      tried(() => fs.renameSync(name, name + '.link'));
      tried(() => fs.renameSync(name + '.real', name));
      tried(() => fs.unlinkSync(name + '.link'));
    }
  `);
}

const codeOf = (error: unknown): string => (error instanceof AppError ? error.code : inspect(error));
const refused = (code: string): unknown => expect.objectContaining({ code, details: expect.any(Object) });

// ---- Walking

describe('walking', () => {
  let beneath: Beneath;
  const opened: Directory[] = [];
  const all = new AbortController().signal;

  beforeEach(async () => {
    beneath = new Beneath(await Boundary.open([root], [forbidden, path('sub/config')]));
  });
  afterEach(() => {
    for (const directory of opened.splice(0)) directory.close();
  });

  async function* walking(from = root, options: Partial<WalkOptions> = {}): AsyncGenerator<Step, void, void> {
    const directory = await beneath.directory(fromText(from));
    opened.push(directory);
    yield* walk(directory.at, beneath.boundary, { path: fromText(from), signal: all, ...options });
  }

  async function told(options: Partial<WalkOptions> = {}, from = root): Promise<string[]> {
    const steps: string[] = [];
    for await (const { path: way, left } of walking(from, { sorted: true, ...options })) {
      steps.push(left ? `${way}/` : way);
    }
    return steps;
  }

  test('a forbidden place fails the walk, or is told of and left out, be it a directory or a file', async () => {
    mkdirSync(path('sub'));
    writeFileSync(path('sub/config'), 'secret');
    writeFileSync(path('sub/other'), '');
    await expect(told()).rejects.toEqual(refused('permission_denied'));
    const skipped: string[] = [];
    const skip = (way: string, error: unknown): void => {
      skipped.push(`${way} ${codeOf(error)}`);
    };
    expect(await told({ skip })).toEqual(['sub', 'sub/other']);
    expect(skipped).toEqual([`${forbidden} permission_denied`, `${path('sub/config')} permission_denied`]);
  });

  test('a forbidden file is left out under the name it is replaced by during the walk', async () => {
    mkdirSync(path('sub'));
    writeFileSync(path('sub/config'), 'secret');
    const steps: string[] = [];
    for await (const { path: way } of walking(root, { sorted: true, skip: () => undefined })) {
      steps.push(way);
      if (way !== 'sub') continue;
      writeFileSync(path('sub/next'), 'newer secret');
      renameSync(path('sub/next'), path('sub/config'));
    }
    expect(steps).toEqual(['sub']);
  });

  test('symlinks are told of and never followed', async () => {
    mkdirSync(path('sub'));
    symlinkSync(outside, path('sub/way'));
    symlinkSync('.', path('sub/loop'));
    expect(await told({}, path('sub'))).toEqual(['loop', 'way']);
  });

  test('a directory swapped against a symlink in a tight loop never leads the walk out', async () => {
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
      for (const directory of opened.splice(0)) directory.close();
    }
    // Both were met, so the race was real.
    expect([...seen].sort()).toContain('sub/inside');
    expect([...seen].filter((way) => way.includes('secret'))).toEqual([]);
    expect(links).toBeGreaterThan(0);
  });

  test.skipIf(!isRoot)('what cannot be read is told of, or fails the walk (needs root)', async () => {
    mkdirSync(path('closed'), { mode: 0o700 });
    mkdirSync(path('open'));
    rmSync(forbidden, { recursive: true });
    const child = program(
      `const at = '/proc/self/fd/' + fs.openSync(${JSON.stringify(root)});
       const options = { path: '/start', signal: new AbortController().signal, sorted: true };
       const seen = [];
       const skip = (way, error) => seen.push(way + ' ' + error.code);
       for await (const step of walk(at, undefined, { ...options, skip })) seen.push(step.path);
       try { for await (const step of walk(at, undefined, options)); } catch (error) { seen.push(error.code); }
       console.log(JSON.stringify(seen));`,
      65_534,
    );
    await printed(child, '["closed","/start/closed EACCES","open","permission_denied"]');
  });

  test('a directory that is moved elsewhere while the walk is far below ends in conflict', async () => {
    makeDeep(path('deep'), 100);
    mkdirSync(path('other'));
    const moved = async (): Promise<void> => {
      for await (const { path: way } of walking(path('deep'))) {
        if (way.endsWith('bottom')) renameSync(path('deep/d/d'), path('other/d'));
      }
    };
    await expect(moved()).rejects.toEqual(refused('conflict'));
  });

  test.skipIf(!mayMount)(
    'what is mounted below is not entered where one mount is asked for, a bind mount neither (needs mount)',
    async () => {
      for (const name of ['in/bind', 'in/tmpfs', 'in/plain']) mkdirSync(path(name), { recursive: true });
      mount('--bind', outside, path('in/bind'));
      mount('-t', 'tmpfs', 'tmpfs', path('in/tmpfs'));
      writeFileSync(path('in/tmpfs/a'), '');
      await expect(told({ oneMount: true }, path('in'))).rejects.toEqual(refused('file_busy'));
      const skipped: string[] = [];
      const skip = (way: string): void => {
        skipped.push(way);
      };
      expect(await told({ oneMount: true, skip }, path('in'))).toEqual(['plain']);
      expect(skipped).toEqual([path('in/bind'), path('in/tmpfs')]);
      expect(await told({}, path('in'))).toEqual(['bind', 'bind/secret', 'plain', 'tmpfs', 'tmpfs/a']);
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

  test('who stops early, or fails, leaves no handle behind', async () => {
    makeDeep(path('deep'), 50);
    for (const directories of ['before', 'after'] as const) {
      for await (const { path: way } of walking(path('deep'), { directories })) {
        if (way.split('/').length > 40) break;
      }
      const failing = async (): Promise<void> => {
        for await (const { path: way } of walking(path('deep'), { directories })) {
          if (way.split('/').length > 40) throw new Error('enough');
        }
      };
      await expect(failing()).rejects.toThrow('enough');
    }
    for (const directory of opened.splice(0)) directory.close();
    await vi.waitFor(() => expect(openHandles()).toEqual([]), 10_000);
  });

  test('3,000 levels are walked down and up with few handles', async () => {
    makeDeep(path('deep'), 3_000);
    let [entered, left, most, length] = [0, 0, 0, 0];
    for await (const step of walking(path('deep'), { directories: 'both' })) {
      if (step.left) left += 1;
      else entered += 1;
      if (!step.left && entered % 100 === 0) most = Math.max(most, openHandles().length);
      length = Math.max(length, step.path.length);
    }
    expect([entered, left, length]).toEqual([3_001, 3_000, 3_000 * 2 + 'bottom'.length]);
    expect(most).toBeLessThan(50);
  });

  test('directories are told before, after, or both, and their content only where it is entered', async () => {
    for (const name of ['b/c', 'a', '.h/i']) mkdirSync(path('t', name), { recursive: true });
    for (const name of ['b/file', 'B', 'ä', 'b/c/x', '.h/j']) writeFileSync(path('t', name), '');
    const from = path('t');
    const before = ['.h', '.h/i', '.h/j', 'B', 'a', 'b', 'b/c', 'b/c/x', 'b/file', 'Ã¤'];
    expect(await told({}, from)).toEqual(before);
    const after = ['.h/i/', '.h/j', '.h/', 'B', 'a/', 'b/c/x', 'b/c/', 'b/file', 'b/', 'Ã¤'];
    expect(await told({ directories: 'after' }, from)).toEqual(after);
    expect(new Set(await told({ directories: 'both' }, from))).toEqual(new Set([...before, ...after]));
    expect(new Set(await told({ sorted: false }, from))).toEqual(new Set(before));
    const enter = ({ name }: Step): boolean => !name.startsWith('.');
    expect(await told({ enter }, from)).toEqual(before.filter((way) => !way.startsWith('.h/')));
  });

  test('each step tells its pinned directory, its name by bytes and what it is', async () => {
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
