// A running process of a command or terminal, from its start to the end of its whole tree.
import { after, now } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Leader } from './census.ts';
import type { Cgroups } from './cgroup.ts';
import { explain, NotStarted, type Plan } from './plan.ts';
import { type Child, type Spawners, SpawnFailed } from './spawner/index.ts';
import type { Exited, SpawnRequest } from './spawner/messages.ts';
import { type FirstSignal, killTree, Tree } from './tree.ts';

/** What a process reads and writes: pipes or a terminal, open on the agent's side. */
export interface Stdio {
  /** The paths that the spawner opens for it, and the program that uses them. */
  request: Pick<SpawnRequest, 'file' | 'args' | 'stdin' | 'stdout' | 'stderr'>;
  /** As /proc/PID/fd of a process that has them open shows them. */
  links: string[];
  /** The process has its own ends, or never will. */
  handedOver(): Promise<void>;
  /** Reads what is left, `ms` at most. Never rejects. */
  drain(ms: number): Promise<void>;
  close(): void;
}

/** For a process that is not started. */
export async function closeUnused(stdio: Stdio): Promise<void> {
  await stdio.handedOver();
  await stdio.drain(0);
  stdio.close();
}

/** Why the agent ended a process; abandoned: no client keeps it; orphaned: its spawner died. */
export type KillCause = 'timeout' | 'cancelled' | 'abandoned' | 'stopped' | 'orphaned';

export interface RunOptions {
  id: string;
  /** 0: none. */
  timeoutMs: number;
  /** Between the first signal and KILL at a timeout. */
  graceMs: number;
  stopGraceMs: number;
  killForMs: number;
  drainMs: number;
  first: FirstSignal;
  /** What it leaves behind at its own end is ended as well, with this grace. */
  leftoversMs?: number | undefined;
  cgroups: Cgroups | undefined;
  log: Logger;
}

export interface Ending {
  cause: 'exited' | KillCause;
  exit_code: number;
  /** Empty where none. */
  signal: string;
}

/** Rejects with NotStarted, or with SpawnerDied when it may have run. `stdio` belongs to the process from now on. */
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
  /** Everything that it wrote is in the logs by then, and after a kill its tree is gone. Never rejects. */
  readonly ended: Promise<Ending>;
  readonly #child: Child;
  readonly #stdio: Stdio;
  readonly #options: RunOptions;
  /** Fires when the grace is over. */
  readonly #hurry = new AbortController();
  readonly #timers: (() => void)[] = [];
  /** Resolves when a kill has failed and the process is still there. */
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

  /** Does nothing once it is over; a second call can only shorten the grace. */
  kill(cause: KillCause, graceMs: number): void {
    if (!this.#alive && !this.#killing) return;
    if (this.#alive) this.#cause ??= cause;
    this.#killIn(graceMs);
  }

  async #end(): Promise<Ending> {
    const { id, drainMs, cgroups } = this.#options;
    const { code, signal } = await Promise.race([this.#exited(), this.#givenUp.promise]);
    // During a kill the grace goes on for the rest of the tree.
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
