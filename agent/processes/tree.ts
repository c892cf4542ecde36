// Kills a command with everything it started, also what left its process group or went to the background.
import { readFileSync } from 'node:fs';
import { readdir, readFile, readlink } from 'node:fs/promises';
import { monotonic, sleep } from '../../shared/clock.ts';
import { errnoOf, fromErrno } from '../../shared/errors.ts';
import { killByCgroup } from './cgroup.ts';
import { marker } from './plan.ts';

// A cgroup per command would be exact, but moving a fresh process into one holds up every fork and exit for
// a kernel grace period: 10 ms a command measured, five times the command. So members are searched when a
// kill is due; one cgroup for all commands tells of those that have cleared every trace of whose they are.

/** One process for ever, since pids come back. */
export interface Leader {
  pid: number;
  /** See proc(5). */
  start: string;
}

/** Tells of processes that show neither mark nor kin whether they belong to what is killed. */
export interface Claim {
  /** Everything that any command has started and that still lives. */
  pids(): Promise<ReadonlySet<number>>;
  /** Asked of these only. */
  mine(one: Pick<Process, 'start' | 'session'>): boolean;
}

interface Process extends Leader {
  parent: number;
  group: number;
  session: number;
  alive: boolean;
}

/** The processes of a command or several, as far as /proc tells; it remembers who belonged to it once. */
export class Tree {
  readonly ids: ReadonlySet<string>;
  readonly #links: ReadonlySet<string>;
  readonly #known = new Map<number, string>();
  readonly #sessions = new Map<number, string>();
  readonly #claim: Claim | undefined;

  /** `leader`: the command's first process. `links`: its output pipes, as /proc shows them. */
  constructor(ids: readonly string[], links: readonly string[], leader?: Leader, claim?: Claim) {
    this.#claim = claim;
    // Processes without a mark or a link must never match: that would be the whole machine.
    this.ids = new Set(ids.filter((id) => id !== ''));
    this.#links = new Set(links.filter((link) => link !== ''));
    if (leader) this.#learn({ ...leader, session: leader.pid });
  }

  /** Who is alive now: marked, or related to a member by birth, session or our pipes. Never we or init. */
  async members(): Promise<Process[]> {
    const all = (await processes()).filter(({ pid }) => pid > 1 && pid !== process.pid);
    const byPid = new Map(all.map((one) => [one.pid, one]));
    for (const [session, start] of this.#sessions) {
      const leader = byPid.get(session);
      if (leader && leader.start !== start) this.#sessions.delete(session);
    }
    this.#spread(all, byPid);
    const strangers = all.filter((one) => !this.#has(one));
    const born = (await this.#claim?.pids()) ?? new Set();
    const marked = await inChunks(strangers, (one) => this.#marked(one, born.has(one.pid)));
    for (const [index, one] of strangers.entries()) if (marked[index]) this.#learn(one);
    this.#spread(all, byPid);
    return all.filter((one) => one.alive && this.#has(one));
  }

  /** Sends to whole groups where they are surely ours (nothing forks past that); returns whom we may not signal. */
  signal(members: Process[], name: 'SIGTERM' | 'SIGCONT' | 'SIGKILL'): number[] {
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

  #spread(all: Process[], byPid: ReadonlyMap<number, Process>): void {
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

  /** `born`: some command has started it. */
  async #marked(one: Process, born: boolean): Promise<boolean> {
    const { pid } = one;
    const mark = await markOf(pid);
    if (mark !== undefined && this.ids.has(mark)) return true;
    const open = await Promise.all([1, 2].map((fd) => readlink(`/proc/${pid}/fd/${fd}`).catch(() => '')));
    if (open.some((link) => this.#links.has(link))) return true;
    // It has cleared or overwritten its environment, left its session and closed its files.
    return born && mark === undefined && this.#claim?.mine(one) === true;
  }
}

/**
 * TERM to the whole tree, KILL once `hurry` has fired, again until nothing is left.
 * Resolves to how many outlived `killForMs` of that.
 */
export async function killTree(tree: Tree, hurry: AbortSignal, killForMs: number): Promise<number> {
  let left = await tree.members();
  tree.signal(left, 'SIGTERM');
  // A stopped process takes its TERM only once it goes on.
  tree.signal(left, 'SIGCONT');
  for (let wait = 10; !hurry.aborted; wait = Math.min(2 * wait, 250)) {
    await sleep(wait, hurry);
    if (await gone(tree)) return 0;
  }
  for (const until = monotonic() + killForMs; monotonic() < until; await sleep(10)) {
    left = await tree.members();
    if (left.length === 0 && (await gone(tree))) return 0;
    const refused = tree.signal(left, 'SIGKILL');
    if (refused.length > 0) await killByCgroup(`farhand-${[...tree.ids].join('-').slice(0, 100)}`, refused);
  }
  return (await tree.members()).length;
}

/** Looks twice: a process that forks and exits between listing and looking shows up only then. */
async function gone(tree: Tree): Promise<boolean> {
  return (await tree.members()).length === 0 && (await tree.members()).length === 0;
}

/** To the process group of a command, also of its stopped and ignorant; false when its first process is gone. */
export function signalGroup({ pid, start }: Leader, name: NodeJS.Signals): boolean {
  if (statNow(pid)?.start !== start) return false;
  try {
    return process.kill(-pid, name);
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

async function processes(): Promise<Process[]> {
  const pids = (await readdir('/proc')).filter((name) => /^\d+$/.test(name));
  const read = await inChunks(pids, (pid) => readFile(`/proc/${pid}/stat`, 'latin1').catch(() => ''));
  return read.map(parseStat).filter((one) => one !== undefined);
}

function statNow(pid: number): Process | undefined {
  try {
    return parseStat(readFileSync(`/proc/${pid}/stat`, 'latin1'));
  } catch {
    return undefined;
  }
}

/** See proc(5); the name in brackets may hold anything, so the fields are counted from its end. */
function parseStat(text: string): Process | undefined {
  const fields = text.slice(text.lastIndexOf(')') + 2).split(' ');
  const [state = '', parent, group, session] = fields;
  const start = fields[19];
  if (!start) return undefined;
  // A zombie whose other threads run on is alive.
  const alive = !/[ZXx]/.test(state) || Number(fields[17]) > 1;
  const pid = Number.parseInt(text, 10);
  return { pid, parent: Number(parent), group: Number(group), session: Number(session), start, alive };
}

async function markOf(pid: number): Promise<string | undefined> {
  const text = await readFile(`/proc/${pid}/environ`, 'latin1').catch(() => '');
  const key = `\0${marker}=`;
  const at = `\0${text}`.indexOf(key);
  return at < 0 ? undefined : text.slice(at + key.length - 1, text.indexOf('\0', at + key.length - 1));
}

/** A few at a time, so that a scan of thousands does not keep the thread pool from everyone else. */
async function inChunks<T, R>(items: readonly T[], run: (item: T) => Promise<R>): Promise<R[]> {
  const results: R[] = [];
  for (let at = 0; at < items.length; at += 16) {
    results.push(...(await Promise.all(items.slice(at, at + 16).map(run))));
  }
  return results;
}
