// Puts each command and terminal into its own cgroup (version 2), so that a kill finds every process it
// started. The agent may create cgroups below its own as root, or in a systemd unit with Delegate=yes.
import { mkdir, readdir, readFile, rmdir, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { sleep } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';

/** `name`: a name that no other agent uses. Undefined if the agent may not create cgroups. */
export async function openCgroups(name: string, log: Logger): Promise<Cgroups | undefined> {
  const own = await ownCgroup();
  const directory = own && join(own, name);
  if (directory && (await succeeds(mkdir(directory, { recursive: true })))) return new Cgroups(directory);
  log.debug('no cgroup may be made here: a command that clears its environment can hide from a kill');
  return undefined;
}

export class Cgroups {
  /** The cgroup of the spawners, which create the cgroups of commands and terminals below it. */
  readonly directory: string;

  /** Created by openCgroups. */
  constructor(directory: string) {
    this.directory = directory;
  }

  /** Pids of all live processes that the command or terminal has started, and the ids of their threads. */
  async members(id: string): Promise<number[]> {
    const text = await readFile(join(this.directory, id, 'cgroup.threads'), 'utf8').catch(() => '');
    return text.split('\n').filter(Boolean).map(Number);
  }

  /** Removes the cgroup of a command or terminal. Does nothing while it has live processes. */
  async remove(id: string): Promise<void> {
    await succeeds(rmdir(join(this.directory, id)));
  }

  async removeEmpty(): Promise<void> {
    const entries = await readdir(this.directory, { withFileTypes: true }).catch(() => []);
    for (const entry of entries) if (entry.isDirectory()) await this.remove(entry.name);
  }

  async close(): Promise<void> {
    await this.removeEmpty();
    await succeeds(rmdir(this.directory));
  }
}

/**
 * Kills processes that the agent may not signal, by moving them into a new cgroup called `name`.
 * Does nothing if the agent may not create cgroups.
 */
export async function killByCgroup(name: string, pids: readonly number[]): Promise<void> {
  const own = await ownCgroup();
  if (!own) return;
  const directory = join(own, name);
  // The directory may be left from an earlier attempt.
  await succeeds(mkdir(directory));
  for (const pid of pids) await succeeds(writeFile(join(directory, 'cgroup.procs'), String(pid)));
  await succeeds(writeFile(join(directory, 'cgroup.kill'), '1'));
  // rmdir(2) fails until the last process is gone.
  for (let tries = 0; tries < 10 && !(await succeeds(rmdir(directory))); tries++) await sleep(10);
}

function succeeds(change: Promise<unknown>): Promise<boolean> {
  return change.then(
    () => true,
    () => false,
  );
}

/** The directory of the cgroup that this process is in. */
async function ownCgroup(): Promise<string | undefined> {
  const [mounts = '', groups = ''] = await Promise.all(
    ['mountinfo', 'cgroup'].map((name) => readFile(`/proc/self/${name}`, 'utf8').catch(() => '')),
  );
  const mount = mounts.split('\n').find((line) => line.includes(' - cgroup2 '));
  const path = /^0::(.*)$/m.exec(groups)?.[1];
  const [, , , root, point] = mount?.split(' ') ?? [];
  if (!root || !point || !path?.startsWith(root)) return undefined;
  return join(point, path.slice(root.length));
}
