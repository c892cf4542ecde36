// Puts each command and terminal into a cgroup (version 2) of its own, so that a kill finds all its processes.
import { randomBytes } from 'node:crypto';
import { existsSync, mkdirSync, readFileSync, rmdirSync, writeFileSync } from 'node:fs';
import { readdir, readFile } from 'node:fs/promises';
import { join } from 'node:path';
import { sleep } from '../../shared/clock.ts';
import { isErrno } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';

/** Maximum number of empty cgroups that wait for later commands. Further empty cgroups are removed. */
const mostFree = 32;

/** Creates the cgroup `name`, which no other agent uses. Returns undefined if the agent cannot create cgroups. */
export async function createCgroups(name: string, log: Logger): Promise<Cgroups | undefined> {
  const own = await ownCgroup();
  const directory = own && join(own, name);
  if (directory && succeeds(() => mkdirSync(directory, { recursive: true }))) return new Cgroups(directory);
  log.debug(
    'the agent cannot create cgroups, so a kill may miss processes that started a new session and cleared their environment; run the agent as root, or with Delegate=yes',
  );
  return undefined;
}

/**
 * The cgroups of commands and terminals. They are created and removed by synchronous calls. Asynchronous calls would
 * take longer, because they go through the thread pool.
 */
export class Cgroups {
  /** The cgroup of the spawners (which start commands). It contains the cgroups of commands and terminals. */
  readonly directory: string;
  /**
   * Prefix of the names of cgroups. It differs at each start of the agent, because the cgroups of an earlier run may
   * still have processes.
   */
  readonly #prefix = randomBytes(8).toString('hex');
  /** Names of cgroups by the id of the command or terminal. */
  readonly #names = new Map<string, string>();
  readonly #free: string[] = [];
  /** Names of cgroups whose command is over, but which still contained a process of it. */
  readonly #occupied: string[] = [];
  #made = 0;

  /** Called only by createCgroups(), which has created the directory. */
  constructor(directory: string) {
    this.directory = directory;
  }

  /**
   * Returns the name of a cgroup for a command or terminal. The cgroup itself is missing if the agent could not create
   * it.
   */
  take(id: string): string {
    const name = this.#free.pop() ?? this.#create();
    this.#names.set(id, name);
    return name;
  }

  nameOf(id: string): string | undefined {
    return this.#names.get(id);
  }

  pathOf(name: string): string {
    return join(this.directory, name);
  }

  /**
   * Called when the command or terminal is over. A cgroup that still contains a process is released later. To find it
   * then, each call also looks at the two that have waited longest.
   */
  giveBack(id: string): void {
    const name = this.#names.get(id);
    if (name === undefined) return;
    this.#names.delete(id);
    for (const one of [name, ...this.#occupied.splice(0, 2)])
      if (!this.#release(one)) this.#occupied.push(one);
  }

  /** Keeps an empty cgroup for a later command, or removes it. Returns false if the cgroup contains a process. */
  #release(name: string): boolean {
    // Empty cgroups are reused: creating and removing a cgroup takes a fifth of the time of a short command.
    if (this.#free.length >= mostFree || !this.#isEmpty(name)) return this.#remove(name);
    this.#free.push(name);
    return true;
  }

  #create(): string {
    const name = `${this.#prefix}-${this.#made++}`;
    // A failure is ignored: without a cgroup, a kill finds processes by the marker variable in their environment.
    succeeds(() => {
      mkdirSync(this.pathOf(name));
      // The type "threaded" lets a spawner (a process that starts commands) move one of its threads into the cgroup,
      // without the whole process (cgroups(7)).
      writeFileSync(join(this.pathOf(name), 'cgroup.type'), 'threaded');
    });
    return name;
  }

  #isEmpty(name: string): boolean {
    try {
      return readFileSync(join(this.pathOf(name), 'cgroup.threads'), 'latin1') === '';
    } catch {
      return false;
    }
  }

  /** Removes a cgroup. Returns false if it still exists, because it contains live processes. */
  #remove(name: string): boolean {
    return succeeds(() => rmdirSync(this.pathOf(name))) || !existsSync(this.pathOf(name));
  }

  async removeEmpty(): Promise<void> {
    const entries = await readdir(this.directory, { withFileTypes: true }).catch(() => []);
    for (const entry of entries) if (entry.isDirectory()) this.#remove(entry.name);
  }

  async close(): Promise<void> {
    await this.removeEmpty();
    succeeds(() => rmdirSync(this.directory));
  }
}

/** Ids of all live processes in a cgroup, and of their threads. There are none if the cgroup does not exist. */
export function threadsIn(directory: string): number[] {
  try {
    const text = readFileSync(join(directory, 'cgroup.threads'), 'latin1');
    return text.split('\n').filter(Boolean).map(Number);
  } catch (error) {
    // ENODEV: the cgroup was removed after the file had been opened.
    if (isErrno(error, 'ENOENT', 'ENODEV')) return [];
    throw error;
  }
}

/**
 * Kills processes to which the agent has no permission to send signals: moves them into a new cgroup `name`, and makes
 * the kernel kill that cgroup. Does nothing if the agent cannot create cgroups.
 */
export async function killByCgroup(name: string, pids: readonly number[]): Promise<void> {
  const own = await ownCgroup();
  if (!own) return;
  const directory = join(own, name);
  const write = (file: string, text: string): boolean =>
    succeeds(() => writeFileSync(join(directory, file), text));
  // A failure is ignored, because the directory may exist from an earlier attempt.
  succeeds(() => mkdirSync(directory));
  for (const pid of pids) write('cgroup.procs', String(pid));
  // The kernel now kills all processes in the cgroup.
  write('cgroup.kill', '1');
  // rmdir(2) fails until the last process has ended.
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

/** Returns the directory of this process's cgroup; undefined on a machine without cgroup version 2. */
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
