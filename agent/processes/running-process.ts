// Starts the process of one command or terminal, and tracks it until its whole process tree has ended.
import { after, endsWithin, monotonic, now } from '../../shared/clock.ts';
import {
  killGraceMs,
  openCommands,
  openTerminals,
  outputWindowBytes,
  readerStallMs,
  terminalClients,
  terminalWindowBytes,
} from '../../shared/command-and-terminal-limits.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Cgroups } from './cgroup.ts';
import { type FirstSignal, killTree, Tree } from './kill-tree.ts';
import { explain, NotStarted, type Plan } from './launch-plan.ts';
import type { Leader } from './proc-pid-stat.ts';
import type { Exit, Journal } from './process-journal.ts';
import type { Exited, SpawnRequest } from './spawner/messages.ts';
import { type Child, type Spawners, SpawnFailed } from './spawner/spawner-pool.ts';

export const defaultLimits = {
  /** Bytes stored of each output stream of a command; earlier bytes are dropped. */
  windowBytes: outputWindowBytes,
  /**
   * If a follower reads none of the output for this many milliseconds, the command no longer waits for that follower.
   */
  stallMs: readerStallMs,
  open: openCommands,
  /** Milliseconds between SIGTERM and SIGKILL when a command times out. */
  graceMs: killGraceMs,
  /** Milliseconds between the first signal and SIGKILL when the agent stops. */
  stopGraceMs: 2_000,
  /** Milliseconds to wait for background processes of an exited command to close its pipes. */
  drainMs: 2_000,
  /** Maximum number of milliseconds for which a kill repeats SIGKILL. Processes that survive are then left running. */
  killForMs: 5_000,
  /**
   * Milliseconds within which a spawner must report the start of a process, and after a kill the end of the process.
   * If a start takes longer, later commands go to another spawner.
   */
  lateMs: 5_000,
  /**
   * Milliseconds for which an accepted id is remembered, even if the broker has acknowledged the result. In that time a
   * second request with the id starts nothing.
   */
  seenMs: 24 * 3_600_000,
  /** Milliseconds between two searches for ended orphans. The agent must remove these if it has pid 1. */
  orphansMs: 10_000,
  terminals: openTerminals,
  /** Maximum number of clients of all terminals together, including clients whose connection was lost. */
  clients: terminalClients,
  /** Bytes stored of a terminal's output; earlier bytes are dropped. */
  terminalWindowBytes,
  /**
   * Milliseconds between SIGHUP and SIGKILL. A terminal's processes get these signals when its program has exited, or
   * when the grace period of the terminal is over.
   */
  hangupMs: 2_000,
  /** Milliseconds to wait for a terminal's client to come back after the link to the broker is restored. */
  heldMs: 5_000,
};
export type Limits = typeof defaultLimits;

export interface Parts {
  journal: Journal;
  limits: Limits;
  log: Logger;
  spawners: Spawners;
  cgroups: Cgroups | undefined;
}

/** The pipes or the terminal of a process, on the agent's side. */
export interface Stdio {
  /** The program that the spawner starts, and the paths of its stdin, stdout and stderr. */
  request: Pick<SpawnRequest, 'file' | 'args' | 'stdin' | 'stdout' | 'stderr'>;
  /** Paths of the pipes or the terminal, as /proc/PID/fd lists them for a process that has them open. */
  links: string[];
  /**
   * Closes the pipe ends and the input file that the agent has opened for the process. Called when the process has them
   * open itself, or will never start.
   */
  handedOver(): Promise<void>;
  /** Reads the remaining output until the pipes have ended, or for about `ms` milliseconds. Never rejects. */
  drain(ms: number): Promise<void>;
  close(): void;
}

export interface Prepared {
  plan: Plan;
  stdio: Stdio;
  first: FirstSignal;
  /** Timeout in milliseconds; 0 for none. */
  timeoutMs: number;
  /** If set, processes that outlive the first process are killed after this grace period in milliseconds. */
  leftoversMs?: number;
}

export type Ending = Pick<Exit, 'outcome' | 'reason'> & Partial<Exit>;

/** Outcome and reason of a process for each cause of its end. */
export const endings = {
  exited: { outcome: 'PROCESS_OUTCOME_EXITED', reason: '' },
  timeout: { outcome: 'PROCESS_OUTCOME_TIMEOUT', reason: '' },
  cancelled: { outcome: 'PROCESS_OUTCOME_CANCELLED', reason: '' },
  /** During the whole grace period of the terminal, no call of the broker kept the terminal alive. */
  abandoned: { outcome: 'PROCESS_OUTCOME_CANCELLED', reason: 'grace_period_over' },
  stopped: { outcome: 'PROCESS_OUTCOME_LOST', reason: 'agent_restarted' },
  orphaned: { outcome: 'PROCESS_OUTCOME_LOST', reason: 'spawner_died' },
} satisfies Record<string, Ending>;
type KillCause = Exclude<keyof typeof endings, 'exited'>;

function treeOf(
  id: string,
  { links }: Stdio,
  { cgroups, spawners }: Parts,
  leaders: readonly Leader[] = [],
): Tree {
  const cgroup = cgroups?.nameOf(id);
  const paths = cgroups && cgroup ? [cgroups.pathOf(cgroup)] : [];
  return new Tree({ marks: [id], links, leaders, cgroups: paths, spawners: spawners.pids });
}

/** Starts the process. Rejects with NotStarted if it certainly did not run, and with SpawnerDied if it may have run. */
export async function startRunning(id: string, prepared: Prepared, parts: Parts): Promise<Running> {
  const { plan, stdio } = prepared;
  const { cwd, env } = plan;
  const startedAt = now();
  const until = prepared.timeoutMs > 0 ? monotonic() + prepared.timeoutMs : Number.POSITIVE_INFINITY;
  // The timeout also ends a start that hangs, for example on a disk that no longer responds.
  const cancelTimeout = callAt(until, () => parts.spawners.cancel(id));
  try {
    const child = await parts.spawners.spawn({
      id,
      cwd,
      env,
      cgroup: parts.cgroups?.nameOf(id),
      ...stdio.request,
    });
    await stdio.handedOver();
    return new Running(id, child, { startedAt, until }, prepared, parts);
  } catch (error) {
    if (error instanceof SpawnFailed) throw new NotStarted(await explain(error.message, plan));
    const { limits, log } = parts;
    const tree = treeOf(id, stdio, parts);
    await killTree(tree, AbortSignal.abort(), limits.killForMs).catch((err: unknown) => {
      log.error(
        { err, id },
        'the spawner (the process that starts commands) died; processes of a command could not be killed and may still run',
      );
    });
    throw error;
  } finally {
    cancelTimeout();
  }
}

/** Calls `run` at a time of the monotonic clock; at once if it is over. Returns a function that cancels the call. */
function callAt(until: number, run: () => void): () => void {
  const ms = until - monotonic();
  if (ms > 0) return ms === Number.POSITIVE_INFINITY ? () => {} : after(ms, run);
  run();
  return () => {};
}

export class Running {
  readonly child: Child;
  /**
   * Resolves when the process has ended and its output is stored. After a kill, resolves only when the whole process
   * tree has ended, or the kill was given up. Never rejects.
   */
  readonly ended: Promise<Ending>;
  readonly startedAt: number;
  readonly #id: string;
  readonly #prepared: Prepared;
  readonly #parts: Parts;
  /** Aborted when the grace period ends and SIGKILL is due. */
  readonly #hurry = new AbortController();
  readonly #timers: (() => void)[] = [];
  /**
   * Resolves if a kill is over but the spawner has reported no exit of the command. The command then counts as ended,
   * even if one of its processes has survived SIGKILL.
   */
  readonly #givenUp = Promise.withResolvers<Exited>();
  #alive = true;
  #cause: KillCause | undefined;
  #killing: Promise<void> | undefined;

  constructor(
    id: string,
    child: Child,
    { startedAt, until }: { startedAt: number; until: number },
    prepared: Prepared,
    parts: Parts,
  ) {
    this.startedAt = startedAt;
    this.#id = id;
    this.child = child;
    this.#prepared = prepared;
    this.#parts = parts;
    this.#timers.push(callAt(until, () => this.kill('timeout', parts.limits.graceMs)));
    this.ended = this.#end();
  }

  /**
   * Sends the first signal to the process tree, and SIGKILL after `graceMs` milliseconds. A second call can only
   * shorten this time.
   */
  kill(cause: KillCause, graceMs: number): void {
    if (!this.#alive && !this.#killing) return;
    if (this.#alive) this.#cause ??= cause;
    this.#killIn(graceMs);
  }

  async #end(): Promise<Ending> {
    const { stdio } = this.#prepared;
    const { code, signal } = await Promise.race([this.#exited(), this.#givenUp.promise]);
    // Waits for a kill in progress: the first process has ended, but the others may still be in their grace period.
    await this.#killing;
    for (const cancel of this.#timers) cancel();
    await stdio.drain(this.#parts.limits.drainMs);
    stdio.close();
    const cause = this.#cause ?? 'exited';
    return cause === 'orphaned' ? endings.orphaned : { ...endings[cause], exit_code: code, signal };
  }

  async #exited(): Promise<Exited> {
    const { leftoversMs } = this.#prepared;
    const exited = await this.child.exited;
    if (!exited) {
      this.kill('orphaned', this.#parts.limits.stopGraceMs);
      return this.#givenUp.promise;
    }
    this.#alive = false;
    if (leftoversMs !== undefined && !this.#killing) this.#killIn(leftoversMs);
    return exited;
  }

  #killIn(graceMs: number): void {
    this.#timers.push(after(graceMs, () => this.#hurry.abort()));
    this.#killing ??= this.#killTree();
  }

  async #killTree(): Promise<void> {
    const { limits, log } = this.#parts;
    const { stdio, first } = this.#prepared;
    const about = { id: this.#id, pid: this.child.pid };
    try {
      const tree = treeOf(this.#id, stdio, this.#parts, [this.child]);
      const left = await killTree(tree, this.#hurry.signal, limits.killForMs, first);
      if (left > 0)
        log.error(
          { ...about, left },
          'processes of a command survived SIGKILL and still run; they may wait for a disk that no longer responds, so check the disks',
        );
      // Waits for the spawner, because only its report says which signal has ended the first process.
      else await endsWithin(limits.lateMs, this.child.exited);
    } catch (err) {
      log.error({ err, ...about }, 'a command could not be killed; its processes may still run');
    }
    if (this.#alive) this.#givenUp.resolve({ code: 128 + 9, signal: 'SIGKILL' });
  }
}
