// Puts each command and terminal into its own cgroup (version 2), so that a kill finds every process it
// started. The agent may create cgroups below its own as root, or in a systemd unit with Delegate=yes.
import { mkdirSync, rmdirSync, writeFileSync } from 'node:fs';
import { readdir, readFile } from 'node:fs/promises';
import { join } from 'node:path';
import { sleep } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';

/** Creates the cgroup `name`, which no other agent uses. Undefined if the agent may not do that. */
export async function openCgroups(name: string, log: Logger): Promise<Cgroups | undefined> {
  const own = await ownCgroup();
  const directory = own && join(own, name);
  if (directory && succeeds(() => mkdirSync(directory, { recursive: true }))) return new Cgroups(directory);
  log.debug(
    'the agent may not create cgroups, so a kill may miss processes that left their session and cleared their environment; run the agent as root, or in a unit with Delegate=yes',
  );
  return undefined;
}

/** Cgroups of commands and terminals. Calls are synchronous: 50 µs each, less than a thread pool takes. */
export class Cgroups {
  /** The cgroup of the spawners, which contains the cgroups of commands and terminals. */
  readonly directory: string;

  /** Only for openCgroups(), which creates the directory. */
  constructor(directory: string) {
    this.directory = directory;
  }

  /**
   * Creates the cgroup of a command or terminal, which a spawner then enters. "Threaded" (cgroups(7)) lets
   * the spawner move only its thread that forks. Without a cgroup a kill finds the processes by their mark.
   */
  create(id: string): void {
    const directory = join(this.directory, id);
    succeeds(() => {
      mkdirSync(directory);
      writeFileSync(join(directory, 'cgroup.type'), 'threaded');
    });
  }

  /** Ids of all live processes that the command or terminal has started, and of their threads. */
  async members(id: string): Promise<number[]> {
    const text = await readFile(join(this.directory, id, 'cgroup.threads'), 'utf8').catch(() => '');
    return text.split('\n').filter(Boolean).map(Number);
  }

  /** Removes the cgroup of a command or terminal. Does nothing while it has live processes. */
  remove(id: string): void {
    succeeds(() => rmdirSync(join(this.directory, id)));
  }

  async removeEmpty(): Promise<void> {
    const entries = await readdir(this.directory, { withFileTypes: true }).catch(() => []);
    for (const entry of entries) if (entry.isDirectory()) this.remove(entry.name);
  }

  async close(): Promise<void> {
    await this.removeEmpty();
    succeeds(() => rmdirSync(this.directory));
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
  const write = (file: string, text: string): boolean =>
    succeeds(() => writeFileSync(join(directory, file), text));
  // Succeeds or not: the directory may be left from an earlier attempt.
  succeeds(() => mkdirSync(directory));
  for (const pid of pids) write('cgroup.procs', String(pid));
  write('cgroup.kill', '1');
  // rmdir(2) fails until the last process is gone.
  for (let tries = 0; tries < 10 && !succeeds(() => rmdirSync(directory)); tries++) await sleep(10);
}

function succeeds(change: () => unknown): boolean {
  try {
    change();
    return true;
  } catch {
    return false;
  }
}

/** The directory of the cgroup that this process is in; undefined without cgroup version 2. */
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
