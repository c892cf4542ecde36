// Makes folders for each test of the agent's file operations: a root, a folder outside of it, and a protected folder.
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import {
  accessSync,
  chmodSync,
  closeSync,
  constants,
  existsSync,
  mkdirSync,
  mkdtempSync,
  openSync,
  readdirSync,
  readlinkSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { expect } from 'vitest';
import { createFiles, type Files, type FilesOptions } from '../agent/files/index.ts';
import type { AgentCall } from '../shared/agent-rpcs.ts';
import { createLogger } from '../shared/logger.ts';
import { diskFolder, onOtherDisk } from './find-file-systems.ts';
import { waitFor } from './wait-for.ts';

/** A writable directory on a second file system; undefined if there is none. */
export const otherDisk = onOtherDisk(diskFolder);

export class Disk {
  readonly base = mkdtempSync(join(diskFolder, 'farhand-disk-'));
  readonly root = join(this.base, 'root');
  readonly outside = join(this.base, 'outside');
  readonly forbidden: string;
  readonly data = join(this.base, 'data');
  /** A directory on another file system; empty if there is none, or if none was requested. */
  readonly second: string;
  readonly #mounts: string[] = [];
  readonly #children: ChildProcess[] = [];

  constructor({ forbidden = 'root/forbidden', second = false } = {}) {
    this.forbidden = join(this.base, forbidden);
    this.second = second && otherDisk ? mkdtempSync(join(otherDisk, 'farhand-disk-')) : '';
    chmodSync(this.base, 0o755);
    for (const directory of [this.root, this.outside, this.forbidden]) mkdirSync(directory);
    writeFileSync(join(this.outside, 'secret'), 'outside');
    writeFileSync(join(this.forbidden, 'key'), 'forbidden');
  }

  path(...parts: string[]): string {
    return join(this.root, ...parts);
  }

  open(options: Partial<FilesOptions> = {}): Promise<Files> {
    const log = createLogger('test', 'silent');
    const forbidden = [this.forbidden, this.path('unit')];
    return createFiles({
      ...{ roots: [this.root], home: this.root, forbidden, directory: this.data, log },
      ...options,
    });
  }

  mountTmpfs(at: string, size: string): void {
    this.mount('-t', 'tmpfs', '-o', `size=${size}`, 'tmpfs', at);
  }

  /** Mounts a FUSE file system whose program has ended, as a killed sshfs leaves it: every access is ENOTCONN. */
  mountDead(at: string): void {
    const fuse = openSync('/dev/fuse', 'r+');
    const options = 'fd=3,rootmode=40000,user_id=0,group_id=0';
    this.mountWith([fuse], '-i', '-t', 'fuse', '-o', options, 'dead', at);
    closeSync(fuse);
  }

  /** Runs mount(8) with these arguments. The last one is the mount point. */
  mount(...args: string[]): void {
    this.mountWith([], ...args);
  }

  /** Runs mount(8) with open files, which get the numbers from 3. */
  mountWith(open: number[], ...args: string[]): void {
    execFileSync('mount', args, { stdio: ['ignore', 'ignore', 'ignore', ...open] });
    this.#mounts.push(args.at(-1) ?? '');
  }

  /** Starts a Node program that can import the agent's modules. The test reads its output. */
  program(source: string, uid?: number): ChildProcess {
    const from = (file: string): string => JSON.stringify(join(import.meta.dirname, '..', file));
    const imports = `import { createFiles } from ${from('agent/files/index.ts')}; import fs from 'node:fs';
      import { walk } from ${from('agent/files/confine/walk-tree.ts')};
      import { createLogger } from ${from('shared/logger.ts')};`;
    const child = spawn(process.execPath, ['--input-type=module', '-e', `${imports}\n${source}`], {
      stdio: ['pipe', 'pipe', 'inherit'],
      ...(uid !== undefined && { uid, gid: uid }),
    });
    return this.owns(child);
  }

  /** Kills a child process when the folders of the test are removed. */
  owns<Child extends ChildProcess>(child: Child): Child {
    this.#children.push(child);
    return child;
  }

  /** Removes the folders. Expects that every call has closed its handles. */
  async remove(): Promise<void> {
    for (const child of this.#children) {
      child.kill('SIGKILL');
      if (child.exitCode === null && child.signalCode === null) await once(child, 'exit');
    }
    try {
      await waitFor(() => expect(this.openHandles()).toEqual([]));
    } finally {
      for (const mount of this.#mounts) execFileSync('umount', ['-l', mount]);
      for (const at of [this.base, this.second]) if (at) removeTree(at);
    }
  }

  openHandles(): string[] {
    const targets = readdirSync('/proc/self/fd').map((fd) => {
      try {
        return readlinkSync(`/proc/self/fd/${fd}`);
      } catch {
        return '';
      }
    });
    const places = [this.base, this.second].filter((place) => place !== '');
    return targets.filter((target) => places.some((place) => target.startsWith(place)));
  }
}

export async function printed(child: ChildProcess, text: string): Promise<void> {
  for await (const chunk of child.stdout ?? []) if (String(chunk).includes(text)) return;
  throw new Error(`the program ended without printing ${text}`);
}

/** Runs `work`. Returns false if it throws. */
export function tries(work: () => void): boolean {
  try {
    work();
    return true;
  } catch {
    return false;
  }
}

function mountable(): boolean {
  const disk = new Disk();
  try {
    disk.mountTmpfs(disk.outside, '64k');
    execFileSync('umount', [disk.outside]);
    return true;
  } catch {
    return false;
  } finally {
    rmSync(disk.base, { recursive: true });
  }
}

export const isRoot = process.geteuid?.() === 0;
export const mayMount = isRoot && mountable();
export const hasFuse = mayMount && tries(() => accessSync('/dev/fuse', constants.W_OK));

export const call = (signal: AbortSignal = new AbortController().signal): AgentCall => ({
  signal,
});

/** Matches an error with this code, whose details contain the given ones. */
export const refused = (code: string, details: object = {}): unknown =>
  expect.objectContaining({ code, details: expect.objectContaining(details) });

/** Returns all paths below a directory. Unlike Node's recursive readdir, does not follow symlinks. */
export const tree = (directory: string): string[] => namesBelow(directory, '').sort();

function namesBelow(directory: string, prefix: string): string[] {
  return readdirSync(join(directory, prefix), { withFileTypes: true }).flatMap((entry) => {
    const name = join(prefix, entry.name);
    return entry.isDirectory() ? [name, ...namesBelow(directory, name)] : [name];
  });
}

/** Removes a tree of any depth and with any modes, but nothing that is mounted in it. */
function removeTree(at: string): void {
  if (!existsSync(at)) return;
  // An ordinary user cannot empty a directory without write permission. The program `rm` is used, because Node cannot
  // remove a very deep tree.
  if (!isRoot) execFileSync('chmod', ['-R', 'u+rwx', at]);
  execFileSync('rm', ['-rf', '--one-file-system', at]);
}
