// Finds and kills all processes that a command or terminal has started, including those in the background or in other
// process groups.
import { readdir, readFile, readlink } from 'node:fs/promises';
import { monotonic, sleep } from '../../shared/clock.ts';
import { errnoOf, fromErrno } from '../../shared/errors.ts';
import { killByCgroup, threadsIn } from './cgroup.ts';
import { marker } from './launch-plan.ts';
import { type Leader, type Process, parseStat, statNow } from './proc-pid-stat.ts';

/** A process with its environment mark and its output files, which identify the command that it belongs to. */
interface Seen extends Process {
  /** Value of FARHAND_COMMAND_ID in the process's environment; undefined if absent or unreadable. */
  mark: string | undefined;
  /** The files of standard output and standard error, as linkOf() returns them. */
  links: readonly string[];
}

/** The signal that is sent before SIGKILL. It asks a process to exit. */
export type FirstSignal = 'SIGTERM' | 'SIGHUP';

export interface TreeOptions {
  /**
   * Values of FARHAND_COMMAND_ID in the environment of the processes. For processes of commands and terminals, they are
   * ids of these. For spawners, they are what marksOf() returns.
   */
  marks: readonly string[];
  /** Paths of the output pipes or terminals, as /proc/PID/fd lists them. */
  links?: readonly string[];
  /** The first process of each command, from which its process tree grows. */
  leaders?: readonly Leader[];
  /** Directories of the commands' cgroups. */
  cgroups?: readonly string[];
  /** Pids of spawners. A spawner is in a command's cgroup while it starts the command, but must not be killed with it. */
  spawners?: readonly number[];
}

/**
 * All processes of one or more commands. Includes processes whose parent has ended, and processes that have left their
 * process group.
 */
export class Tree {
  readonly marks: ReadonlySet<string>;
  readonly #links: ReadonlySet<string>;
  readonly #cgroups: readonly string[];
  readonly #spawners: readonly number[];
  readonly #known = new Map<number, string>();
  readonly #sessions = new Map<number, string>();

  constructor({ marks, links = [], leaders = [], cgroups = [], spawners = [] }: TreeOptions) {
    this.marks = new Set(marks.filter((mark) => mark !== ''));
    // Empty links are left out. lookAt() returns empty links for a process whose open files the agent may not read, so
    // an empty link here would match all these processes.
    this.#links = new Set(links.filter((link) => link !== ''));
    this.#cgroups = cgroups;
    this.#spawners = spawners;
    for (const leader of leaders) this.#learn({ ...leader, session: leader.pid });
  }

  /**
   * Returns the live processes of the commands:
   * - the first process of each command
   * - each process that is in a command's cgroup, or has a command's mark in its environment
   * - each process that has a command's pipe or terminal as stdout or stderr
   * - all descendants of these processes, and all members of sessions that one of them leads
   */
  async members(): Promise<Seen[]> {
    const all = await listProcesses();
    const grouped = new Set(this.#grouped());
    const byPid = new Map(all.map((one) => [one.pid, one]));
    for (const [session, start] of this.#sessions) {
      const leader = byPid.get(session);
      if (leader && leader.start !== start) this.#sessions.delete(session);
    }
    this.#spread(all, byPid);
    for (const one of all) if (grouped.has(one.pid) || this.#shows(one)) this.#learn(one);
    this.#spread(all, byPid);
    return all.filter((one) => one.alive && this.#has(one));
  }

  /**
   * True if no process is left. Scans twice, because one scan can miss the child of a process that forks and exits
   * during the scan. Even both scans can miss a chain of such processes, but a cgroup lists every live process.
   */
  async isGone(): Promise<boolean> {
    if (this.#grouped().length > 0) return false;
    return (await this.members()).length === 0 && (await this.members()).length === 0;
  }

  /** Sends a signal to all members. Returns the pids that the agent has no permission to signal. */
  signal(members: Process[], name: FirstSignal | 'SIGCONT' | 'SIGKILL'): number[] {
    const groups = new Set<number>();
    const refused: number[] = [];
    for (const { pid, group, session } of members) {
      // In a session of the command, each process group gets the signal as a whole. So a child that is forked during
      // this loop gets the signal too.
      const whole = this.#sessions.has(session);
      if (whole && groups.has(group)) continue;
      if (whole) groups.add(group);
      if (!send(whole ? -group : pid, name) && !send(pid, name)) refused.push(pid);
    }
    return refused;
  }

  /** Sends SIGKILL to all processes that are in the cgroups now, before one of them can fork and exit. */
  killGrouped(): void {
    for (const pid of this.#grouped()) send(pid, 'SIGKILL');
  }

  /** Ids of the live processes in the commands' cgroups, and of their threads. */
  #grouped(): number[] {
    return this.#cgroups.flatMap(threadsIn).filter((pid) => !this.#spawners.includes(pid));
  }

  #has({ pid, start }: Process): boolean {
    return this.#known.get(pid) === start;
  }

  #learn(one: Pick<Process, 'pid' | 'start' | 'session'>): void {
    this.#known.set(one.pid, one.start);
    if (one.pid === one.session) this.#sessions.set(one.session, one.start);
  }

  /** Adds all descendants of known processes, and all processes in known sessions. */
  #spread(all: readonly Process[], byPid: ReadonlyMap<number, Process>): void {
    for (let grew = true; grew; ) {
      grew = false;
      for (const one of all) {
        if (this.#has(one)) continue;
        const parent = byPid.get(one.parent);
        if (!this.#sessions.has(one.session) && !(parent && this.#has(parent))) continue;
        this.#learn(one);
        grew = true;
      }
    }
  }

  #shows({ mark, links }: Seen): boolean {
    return (mark !== undefined && this.marks.has(mark)) || links.some((link) => this.#links.has(link));
  }
}

/**
 * Sends `first` to the whole tree. After `hurry` has fired, sends SIGKILL again and again. Resolves to the number of
 * processes that have survived SIGKILL for `killForMs` milliseconds.
 */
export async function killTree(
  tree: Tree,
  hurry: AbortSignal,
  killForMs: number,
  first: FirstSignal | 'SIGKILL' = 'SIGTERM',
): Promise<number> {
  let left = await tree.members();
  tree.signal(left, first);
  // A stopped process handles the first signal only after SIGCONT.
  tree.signal(left, 'SIGCONT');
  for (let wait = 10; !hurry.aborted; wait = Math.min(2 * wait, 250)) {
    await sleep(wait, hurry);
    if (await tree.isGone()) return 0;
  }
  for (const until = monotonic() + killForMs; monotonic() < until; await sleep(10)) {
    left = await tree.members();
    if (left.length === 0 && (await tree.isGone())) return 0;
    const refused = tree.signal(left, 'SIGKILL');
    tree.killGrouped();
    if (refused.length > 0) await killByCgroup(`farhand-${[...tree.marks].join('-').slice(0, 100)}`, refused);
  }
  return (await tree.isGone()) ? 0 : Math.max(1, (await tree.members()).length);
}

/**
 * Sends a signal to a command's process group, or to the foreground group of its terminal. Returns false if the group
 * or the command's first process is gone.
 */
export function signalGroup({ pid, start }: Leader, name: NodeJS.Signals, foreground = false): boolean {
  const leader = statNow(pid);
  const group = foreground ? leader?.foreground : pid;
  if (leader?.start !== start || !group || group <= 1) return false;
  try {
    return process.kill(-group, name);
  } catch (error) {
    if (errnoOf(error) === 'ESRCH') return false;
    throw fromErrno(error, `process ${pid}`);
  }
}

/** Sends a signal. Returns true even if the process is gone, and false if the agent has no permission to signal it. */
function send(pid: number, name: NodeJS.Signals): boolean {
  try {
    return process.kill(pid, name);
  } catch (error) {
    return errnoOf(error) === 'ESRCH';
  }
}

let next: Promise<readonly Seen[]> | undefined;
let last: Promise<unknown> = Promise.resolve();

/** Lists all processes except this one and init. Calls made while a scan runs share the next scan. */
function listProcesses(): Promise<readonly Seen[]> {
  // A scan in progress is not shared, because it may already have passed the process that the caller looks for.
  next ??= last.then(() => {
    next = undefined;
    const scanned = scan();
    last = scanned.catch(() => {});
    return scanned;
  });
  return next;
}

async function scan(): Promise<Seen[]> {
  const pids = (await readdir('/proc')).map(Number).filter((pid) => pid > 1 && pid !== process.pid);
  const seen: Seen[] = [];
  // Reads 16 processes at a time, so that a scan of thousands does not fill the thread pool.
  for (let at = 0; at < pids.length; at += 16) {
    const some = await Promise.all(pids.slice(at, at + 16).map(lookAt));
    seen.push(...some.filter((one) => one !== undefined));
  }
  return seen;
}

async function lookAt(pid: number): Promise<Seen | undefined> {
  const textOf = (name: string): Promise<string> =>
    readFile(`/proc/${pid}/${name}`, 'latin1').catch(() => '');
  const found = parseStat(await textOf('stat'));
  if (!found?.alive) return found && { ...found, mark: undefined, links: [] };
  const links = [1, 2].map((fd) => linkOf(pid, fd));
  const variables = (await textOf('environ')).split('\0');
  const mark = variables.find((one) => one.startsWith(`${marker}=`))?.slice(marker.length + 1);
  return { ...found, mark, links: await Promise.all(links) };
}

/**
 * Returns the file that a descriptor of a process leads to; empty if the agent may not read the link. A terminal in
 * another mount namespace counts as unknown: each container can have terminals of its own with the same paths.
 */
async function linkOf(pid: number, descriptor: number): Promise<string> {
  const path = await readlink(`/proc/${pid}/fd/${descriptor}`).catch(() => '');
  if (!path.startsWith('/dev/pts/')) return path;
  const [theirs, ours] = await Promise.all(
    [pid, 'self'].map((one) => readlink(`/proc/${one}/ns/mnt`).catch(() => '')),
  );
  return theirs === ours ? path : '';
}
