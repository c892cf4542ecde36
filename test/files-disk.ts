// A disk of its own for each test of the agent's files room: a root, a place outside it and one that is forbidden.
import { execFileSync } from 'node:child_process';
import {
  chmodSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readlinkSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, vi } from 'vitest';
import { type Files, type FilesOptions, openFiles } from '../agent/files/index.ts';
import { createLogger } from '../shared/logger.ts';
import type { AgentCall } from '../shared/rpc.ts';

export class Disk {
  readonly base = mkdtempSync(join(tmpdir(), 'farhand-disk-'));
  readonly root = join(this.base, 'root');
  readonly outside = join(this.base, 'outside');
  readonly forbidden = join(this.root, 'forbidden');
  readonly data = join(this.base, 'data');
  readonly #mounts: string[] = [];

  constructor() {
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
    return openFiles({
      ...{ roots: [this.root], home: this.root, forbidden, directory: this.data, log },
      ...options,
    });
  }

  mountTmpfs(at: string, size: string): void {
    execFileSync('mount', ['-t', 'tmpfs', '-o', `size=${size}`, 'tmpfs', at], { stdio: 'ignore' });
    this.#mounts.push(at);
  }

  /** Every handle of the room is closed at the end of its call, whichever way that ended. */
  async remove(): Promise<void> {
    try {
      await vi.waitFor(() => expect(this.#openHandles()).toEqual([]), 10_000);
    } finally {
      for (const mount of this.#mounts) execFileSync('umount', ['-l', mount]);
      removeTree(this.base);
    }
  }

  #openHandles(): string[] {
    const targets = readdirSync('/proc/self/fd').map((fd) => {
      try {
        return readlinkSync(`/proc/self/fd/${fd}`);
      } catch {
        return '';
      }
    });
    return targets.filter((target) => target.startsWith(this.base));
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

export const call = (signal: AbortSignal = new AbortController().signal): AgentCall => ({
  call_id: 'call_test',
  request_id: 'req_test',
  signal,
});

/** A refusal with a code of the table, and what its details must hold. */
export const refused = (code: string, details: object = {}): unknown =>
  expect.objectContaining({ code, details: expect.objectContaining(details) });

/** Every name below a directory. Node's recursive readdir would walk into symlinked directories. */
export const tree = (directory: string): string[] => namesBelow(directory, '').sort();

function namesBelow(directory: string, prefix: string): string[] {
  return readdirSync(join(directory, prefix), { withFileTypes: true }).flatMap((entry) => {
    const name = join(prefix, entry.name);
    return entry.isDirectory() ? [name, ...namesBelow(directory, name)] : [name];
  });
}

/** Removes a tree of any depth and any modes, without what is mounted in it. */
export function removeTree(at: string): void {
  if (!existsSync(at)) return;
  // An ordinary user cannot empty a directory without its write bit, nor Node remove a very deep tree.
  if (!isRoot) execFileSync('chmod', ['-R', 'u+rwx', at]);
  execFileSync('rm', ['-rf', '--one-file-system', at]);
}
