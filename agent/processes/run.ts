// One running process, from the request to a spawner to its end.
import { constants } from 'node:os';
import { now } from '../../shared/clock.ts';
import type { Leader } from './census.ts';
import { Unkept } from './journal.ts';
import { type KillCause, type Killer, type KillerOptions, makeKiller } from './killer.ts';
import { explain, NotStarted, type Plan } from './plan.ts';
import type { Spawners } from './spawner/index.ts';
import { type Child, SpawnFailed } from './spawner/process.ts';
import type { SpawnRequest } from './spawner/program.ts';
import { killTree, Tree } from './tree.ts';

/** What a process reads and writes: pipes or a terminal, open on our side. */
export interface Stdio {
  /** What a spawner opens for it. */
  request: Pick<SpawnRequest, 'file' | 'args' | 'stdin' | 'stdout' | 'stderr'>;
  /** As /proc/PID/fd of whoever has them open shows them. */
  links: string[];
  /** The process has its own ends, or never will. */
  handedOver(): void;
  /** Nobody can start it, or hold it up, any more: takes in the rest. False when it was cut. Never rejects. */
  drain(ms: number): Promise<boolean>;
  /** `clean`: nobody has the other ends. */
  close(clean: boolean): void;
}

/** In glibc, which keeps the two before it for itself. */
const firstForRealTime = 34;

export interface RunOptions extends KillerOptions {
  drainMs: number;
  /** A line that the spawner is to keep first. */
  promise: string | undefined;
}

export interface Ending {
  cause: 'exited' | KillCause;
  exit_code: number;
  /** Empty where none. */
  signal: string;
}

export interface Run extends Leader {
  started_at: number;
  /** Everything it wrote is in the logs by then, and after a kill its tree is gone. Never rejects. */
  ended: Promise<Ending>;
  /** Nothing happens when it is over; a second call can only shorten the grace. */
  kill(cause: KillCause, graceMs: number): void;
}

/**
 * Asks for it in this very turn; rejects with NotStarted or Unkept, or with SpawnerDied when nobody knows.
 * `stdio` is its own from now on.
 */
export async function run(plan: Plan, stdio: Stdio, spawners: Spawners, options: RunOptions): Promise<Run> {
  const { id, births } = options;
  const { cwd, env, ids } = plan;
  const started_at = now();
  const child = await spawners
    .spawn({ id, cwd, env, ids, ...stdio.request }, options.promise)
    .catch((error: unknown) => abandon(error, plan, stdio, options))
    .finally(() => stdio.handedOver());
  births?.began(id, child.start);
  const killer = makeKiller(child, stdio.links, options);
  const ended = end(child, killer, stdio, options);
  return { pid: child.pid, start: child.start, started_at, ended, kill: killer.kill };
}

/** It did not start, or nobody knows: then whatever it has become is killed. */
async function abandon(error: unknown, plan: Plan, stdio: Stdio, options: RunOptions): Promise<never> {
  const { id, killForMs, log } = options;
  const failed = error instanceof SpawnFailed;
  if (!failed && !(error instanceof Unkept)) {
    // It shows the mark or what it writes to.
    await killTree(new Tree([id], stdio.links), AbortSignal.abort(), killForMs).catch((err: unknown) => {
      log.error({ err, id }, 'what a spawner left of a command could not be killed');
    });
  }
  await stdio.drain(0);
  stdio.close(false);
  throw failed ? new NotStarted(await explain(error.errno, plan)) : error;
}

async function end(child: Child, killer: Killer, stdio: Stdio, options: RunOptions): Promise<Ending> {
  const { code, signal } = (await Promise.race([child.exited, killer.givenUp])) ?? (await killer.givenUp);
  await killer.finished();
  const drained = await stdio.drain(options.drainMs);
  // Once its end is told: nobody waits for this.
  setImmediate(() => {
    options.births?.ended(options.id);
    stdio.close(drained);
  });
  const cause = killer.cause() ?? 'exited';
  if (cause === 'orphaned') return { cause, exit_code: 0, signal: '' };
  return { cause, exit_code: signal ? 128 + signal : code, signal: signal ? nameOf(signal) : '' };
}

function nameOf(signal: number): string {
  const [known] = Object.entries(constants.signals).find(([, number]) => number === signal) ?? [];
  if (known) return known;
  // Those for real time are counted from the first that a program may use (signal(7)).
  const nth = signal - firstForRealTime;
  if (nth < 0) return `SIG${signal}`;
  return nth === 0 ? 'SIGRTMIN' : `SIGRTMIN+${nth}`;
}
