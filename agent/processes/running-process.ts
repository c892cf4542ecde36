// Runs the process of one command or terminal, from its start until its whole process tree has ended.
import { after, now } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Cgroups } from './cgroup.ts';
import { type FirstSignal, killTree, Tree } from './kill-tree.ts';
import { explain, NotStarted, type Plan } from './launch-plan.ts';
import type { Leader } from './process-list.ts';
import { type Child, type Spawners, SpawnFailed } from './spawner/index.ts';
import type { Exited, SpawnRequest } from './spawner/messages.ts';

/** The pipes or the terminal that a process reads and writes, open on the agent's side. */
export interface Stdio {
  /** The paths that the spawner opens for the process, and the program that uses them. */
  request: Pick<SpawnRequest, 'file' | 'args' | 'stdin' | 'stdout' | 'stderr'>;
  /** Paths of the pipes or the terminal, as /proc/PID/fd lists them for a process that has them open. */
  links: string[];
  /** Closes the process's ends. Called once the process has opened its own, or never will. */
  handedOver(): Promise<void>;
  /** Reads the remaining output for about `ms`. Never rejects. */
  drain(ms: number): Promise<void>;
  close(): void;
}

/** Closes the pipes or terminal of a process that is not started. */
export async function closeUnused(stdio: Stdio): Promise<void> {
  await stdio.handedOver();
  await stdio.drain(0);
  stdio.close();
}

/**
 * Why the agent ended a process. abandoned: the terminal's grace period is over; orphaned: its spawner died.
 */
export type KillCause = 'timeout' | 'cancelled' | 'abandoned' | 'stopped' | 'orphaned';

export interface RunOptions {
  id: string;
  /** 0: no timeout. */
  timeoutMs: number;
  /** Time between the first signal and SIGKILL when the process times out. */
  graceMs: number;
  stopGraceMs: number;
  killForMs: number;
  drainMs: number;
  first: FirstSignal;
  /** If set, processes left behind at the process's own exit are killed too, with this grace period. */
  leftoversMs?: number | undefined;
  cgroups: Cgroups | undefined;
  log: Logger;
}

export interface Ending {
  cause: 'exited' | KillCause;
  exit_code: number;
  /** Name of the signal that killed the process; empty if none. */
  signal: string;
}

/**
 * Starts the process. Rejects with NotStarted, or with SpawnerDied if the process may have run.
 * `stdio` is closed at the end, also after a failure.
 */
export async function startRunning(
  plan: Plan,
  stdio: Stdio,
  spawners: Spawners,
  options: RunOptions,
): Promise<Running> {
  const { id, killForMs, cgroups, log } = options;
  const { cwd, env, ids } = plan;
  const started_at = now();
  try {
    const child = await spawners.spawn({ id, cwd, env, ids, ...stdio.request });
    await stdio.handedOver();
    return new Running(child, started_at, stdio, options);
  } catch (error) {
    const failed = error instanceof SpawnFailed;
    if (!failed) {
      const tree = new Tree({ marks: [id], links: stdio.links, cgroups });
      await killTree(tree, AbortSignal.abort(), killForMs).catch((err: unknown) => {
        log.error({ err, id }, 'what a spawner left of a command could not be killed');
      });
    }
    await closeUnused(stdio);
    await cgroups?.remove(id);
    throw failed ? new NotStarted(await explain(error.errno, plan)) : error;
  }
}

export class Running implements Leader {
  readonly pid: number;
  readonly start: string;
  readonly started_at: number;
  /**
   * Resolves when all output is in the logs and, after a kill, the whole process tree is gone or the kill was
   * given up. Never rejects.
   */
  readonly ended: Promise<Ending>;
  readonly #child: Child;
  readonly #stdio: Stdio;
  readonly #options: RunOptions;
  /** Fires when the grace period is over and SIGKILL is due. */
  readonly #hurry = new AbortController();
  readonly #timers: (() => void)[] = [];
  /** Resolves at the end of a kill, so that a process that survives it does not block the command's end. */
  readonly #givenUp = Promise.withResolvers<Exited>();
  #alive = true;
  #cause: KillCause | undefined;
  #killing: Promise<void> | undefined;

  constructor(child: Child, started_at: number, stdio: Stdio, options: RunOptions) {
    this.pid = child.pid;
    this.start = child.start;
    this.started_at = started_at;
    this.#child = child;
    this.#stdio = stdio;
    this.#options = options;
    const { timeoutMs, graceMs } = options;
    if (timeoutMs > 0) this.#timers.push(after(timeoutMs, () => this.kill('timeout', graceMs)));
    this.ended = this.#end();
  }

  /**
   * Kills the process tree. Does nothing once the process is over. A second call can only shorten the grace
   * period.
   */
  kill(cause: KillCause, graceMs: number): void {
    if (!this.#alive && !this.#killing) return;
    if (this.#alive) this.#cause ??= cause;
    this.#killIn(graceMs);
  }

  async #end(): Promise<Ending> {
    const { id, drainMs, cgroups } = this.#options;
    const { code, signal } = await Promise.race([this.#exited(), this.#givenUp.promise]);
    // During a kill the rest of the tree still has its grace period.
    await this.#killing;
    for (const cancel of this.#timers) cancel();
    await this.#stdio.drain(drainMs);
    this.#stdio.close();
    void cgroups?.remove(id);
    const cause = this.#cause ?? 'exited';
    if (cause === 'orphaned') return { cause, exit_code: 0, signal: '' };
    return { cause, exit_code: code, signal };
  }

  async #exited(): Promise<Exited> {
    const { stopGraceMs, leftoversMs } = this.#options;
    const exited = await this.#child.exited;
    if (!exited) {
      this.kill('orphaned', stopGraceMs);
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
    const { id, killForMs, first, cgroups, log } = this.#options;
    const { pid } = this;
    try {
      const tree = new Tree({ marks: [id], links: this.#stdio.links, leaders: [this.#child], cgroups });
      const left = await killTree(tree, this.#hurry.signal, killForMs, first);
      if (left > 0) log.error({ id, pid, left }, 'processes of a command could not be killed');
    } catch (error) {
      log.error({ err: error, id, pid }, 'the kill of a command failed');
    }
    this.#givenUp.resolve({ code: 128 + 9, signal: 'SIGKILL' });
  }
}
