// Kills a command with every process it started, including those in the background or in other process
// groups.
import { monotonic, sleep } from '../../shared/clock.ts';
import { errnoOf, fromErrno } from '../../shared/errors.ts';
import { type Cgroups, killByCgroup } from './cgroup.ts';
import { census, type Leader, type Process, type Seen, statNow } from './process-list.ts';

/** The signal that asks a process to exit, before SIGKILL. */
export type FirstSignal = 'SIGTERM' | 'SIGHUP';

export interface TreeOptions {
  /** Values of the marker in the environment: ids of commands and terminals, or the marks of spawners. */
  marks: readonly string[];
  /** Paths of the output pipes or terminals, as /proc/PID/fd lists them. */
  links?: readonly string[];
  /** The first processes of the commands. */
  leaders?: readonly Leader[];
  /** Contains a cgroup for each command, if the agent may create cgroups. */
  cgroups?: Cgroups | undefined;
}

/** The processes of one or more commands. It remembers every process that once belonged to them. */
export class Tree {
  readonly marks: ReadonlySet<string>;
  readonly #links: ReadonlySet<string>;
  readonly #cgroups: Cgroups | undefined;
  readonly #known = new Map<number, string>();
  readonly #sessions = new Map<number, string>();

  constructor({ marks, links = [], leaders = [], cgroups }: TreeOptions) {
    // An empty mark or link is dropped: it would match every process that has none.
    this.marks = new Set(marks.filter((mark) => mark !== ''));
    this.#links = new Set(links.filter((link) => link !== ''));
    this.#cgroups = cgroups;
    for (const leader of leaders) this.#learn({ ...leader, session: leader.pid });
  }

  /**
   * The live processes of the commands: in their cgroups, with their mark or pipes, or descended from or in
   * the session of a known process. Never contains the agent or init.
   */
  async members(): Promise<Process[]> {
    const all = await census();
    const held = await this.#held();
    const byPid = new Map(all.map((one) => [one.pid, one]));
    for (const [session, start] of this.#sessions) {
      const leader = byPid.get(session);
      if (leader && leader.start !== start) this.#sessions.delete(session);
    }
    this.#spread(all, byPid);
    for (const one of all) if (held.has(one.pid) || this.#shows(one)) this.#learn(one);
    this.#spread(all, byPid);
    return all.filter((one) => one.alive && this.#has(one));
  }

  /**
   * Sends a signal. A process group in a session of the command gets it as a whole, so that no fork escapes.
   * Returns the pids that the agent may not signal.
   */
  signal(members: Process[], name: FirstSignal | 'SIGCONT' | 'SIGKILL'): number[] {
    const groups = new Set<number>();
    const refused: number[] = [];
    for (const { pid, group, session } of members) {
      const whole = this.#sessions.has(session);
      if (whole && groups.has(group)) continue;
      if (whole) groups.add(group);
      if (!send(whole ? -group : pid, name) && !send(pid, name)) refused.push(pid);
    }
    return refused;
  }

  #has({ pid, start }: Process): boolean {
    return this.#known.get(pid) === start;
  }

  #learn(one: Pick<Process, 'pid' | 'start' | 'session'>): void {
    this.#known.set(one.pid, one.start);
    if (one.pid === one.session) this.#sessions.set(one.session, one.start);
  }

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

  async #held(): Promise<Set<number>> {
    const cgroups = this.#cgroups;
    if (!cgroups) return new Set();
    return new Set((await Promise.all([...this.marks].map((mark) => cgroups.members(mark)))).flat());
  }
}

/**
 * Sends `first` to the whole tree. Once `hurry` has fired it sends SIGKILL, repeated until no process is
 * left. Resolves to the number of processes that survived `killForMs` milliseconds of SIGKILL.
 */
export async function killTree(
  tree: Tree,
  hurry: AbortSignal,
  killForMs: number,
  first: FirstSignal | 'SIGKILL' = 'SIGTERM',
): Promise<number> {
  let left = await tree.members();
  tree.signal(left, first);
  // A stopped process handles the signal only after SIGCONT.
  tree.signal(left, 'SIGCONT');
  for (let wait = 10; !hurry.aborted; wait = Math.min(2 * wait, 250)) {
    await sleep(wait, hurry);
    if (await gone(tree)) return 0;
  }
  for (const until = monotonic() + killForMs; monotonic() < until; await sleep(10)) {
    left = await tree.members();
    if (left.length === 0 && (await gone(tree))) return 0;
    const refused = tree.signal(left, 'SIGKILL');
    if (refused.length > 0) await killByCgroup(`farhand-${[...tree.marks].join('-').slice(0, 100)}`, refused);
  }
  return (await tree.members()).length;
}

/**
 * Whether no process is left. Scans twice: one scan misses the child of a process that forks and exits during
 * it.
 */
async function gone(tree: Tree): Promise<boolean> {
  return (await tree.members()).length === 0 && (await tree.members()).length === 0;
}

/** Sends a signal to the process group of a command. False if the first process of the command is gone. */
export function signalGroup(leader: Leader, name: NodeJS.Signals): boolean {
  return toGroup(leader, leader.pid, name);
}

/** Sends a signal to the foreground process group of the terminal of `leader`. False if there is none. */
export function signalForeground(leader: Leader, name: NodeJS.Signals): boolean {
  return toGroup(leader, statNow(leader.pid)?.foreground ?? -1, name);
}

function toGroup({ pid, start }: Leader, group: number, name: NodeJS.Signals): boolean {
  if (group <= 1 || statNow(pid)?.start !== start) return false;
  try {
    return process.kill(-group, name);
  } catch (error) {
    if (errnoOf(error) === 'ESRCH') return false;
    throw fromErrno(error, `process ${pid}`);
  }
}

function send(pid: number, name: NodeJS.Signals): boolean {
  try {
    return process.kill(pid, name);
  } catch (error) {
    return errnoOf(error) === 'ESRCH';
  }
}
