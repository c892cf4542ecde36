// One running process, from the request to the spawner to its end.
import { closeSync } from 'node:fs';
import type { FileHandle } from 'node:fs/promises';
import { constants } from 'node:os';
import { now } from '../../shared/clock.ts';
import type { OutputLog } from '../../shared/output.ts';
import type { Leader } from './census.ts';
import { Input } from './input.ts';
import { type KillCause, type Killer, type KillerOptions, makeKiller } from './killer.ts';
import type { OpenPipes, Pipes } from './pipes.ts';
import { explain, NotStarted, type Plan } from './plan.ts';
import { drain, type Pump, pump } from './pump.ts';
import { type Child, type Living, SpawnFailed } from './spawner/index.ts';
import type { SpawnRequest } from './spawner/program.ts';
import { killTree, signalGroup, Tree } from './tree.ts';

export interface RunOptions extends KillerOptions {
  /** Its whole input, or none. */
  stdin: FileHandle | undefined;
  /** The begin of an input that stays open. */
  input: Uint8Array | undefined;
  stdout: OutputLog;
  stderr: OutputLog;
  drainMs: number;
}

export interface Ending {
  cause: 'exited' | KillCause;
  exit_code: number;
  /** Empty where none. */
  signal: string;
}

export interface Run extends Leader {
  started_at: number;
  /** Only where it was started with one. */
  input: Input | undefined;
  /** To its process group; false when the process has exited. */
  signal(name: NodeJS.Signals): boolean;
  /** Everything it wrote is in the logs by then, and after a kill its tree is gone. Never rejects. */
  ended: Promise<Ending>;
  /** Nothing happens when it has exited; a second call can only shorten the grace. */
  kill(cause: KillCause, graceMs: number): void;
}

/**
 * Asks for it in this very turn; rejects with NotStarted, or with SpawnerDied when nobody knows.
 * The pipes are its own from now on.
 */
export async function run(plan: Plan, pipes: Pipes, spawner: Living, options: RunOptions): Promise<Run> {
  const { id, stdout, stderr, log } = options;
  const started_at = now();
  const { ours, theirs, input: inputs } = open(plan, pipes);
  const asked = spawner.spawn(requestOf(plan, pipes, options));
  // While it starts: the pipes have no end before the child's ends, which we hold too, are closed.
  const pumps = [pump(ours[0], stdout, id, log), pump(ours[1], stderr, id, log)];
  const input = inputs && new Input(inputs.ours, options.input ?? Buffer.alloc(0));
  const held = { pipes, pumps, input };
  const child = await asked
    .catch((error: unknown) => abandon(error, plan, held, options))
    .finally(() => {
      for (const fd of theirs) closeSync(fd);
      if (inputs) closeSync(inputs.theirs);
    });
  options.births?.began(id, child.start);
  const killer = makeKiller(child, pipes.paths, options);
  const ended = end(child, killer, plan, held, options);
  const signal = (name: NodeJS.Signals): boolean => signalGroup(child, name);
  return { pid: child.pid, start: child.start, started_at, input, signal, ended, kill: killer.kill };
}

/** What belongs to a process on our side. */
interface Held {
  pipes: Pipes;
  pumps: Pump[];
  input: Input | undefined;
}

/** It did not start, or nobody knows: then whatever it has become is killed. */
async function abandon(error: unknown, plan: Plan, held: Held, options: RunOptions): Promise<never> {
  const { id, killForMs, log } = options;
  const failed = error instanceof SpawnFailed;
  if (!failed) {
    // It shows the mark or the pipes.
    await killTree(new Tree([id], held.pipes.paths), AbortSignal.abort(), killForMs).catch((err: unknown) => {
      log.error({ err, id }, 'what a spawner left of a command could not be killed');
    });
  }
  for (const output of [options.stdout, options.stderr]) output.release();
  for (const { cut } of held.pumps) cut();
  await Promise.all(held.pumps.map(({ done }) => done));
  held.input?.close();
  held.pipes.giveBack(false);
  throw failed ? new NotStarted(await explain(error.errno, plan)) : error;
}

async function end(
  child: Child,
  killer: Killer,
  plan: Plan,
  held: Held,
  options: RunOptions,
): Promise<Ending> {
  const { code, signal } = (await Promise.race([child.exited, killer.givenUp])) ?? (await killer.givenUp);
  // What is still in its pipes is small.
  for (const output of [options.stdout, options.stderr]) output.release();
  await killer.finished();
  const drained = await drain(held.pumps, options.drainMs);
  options.births?.ended(options.id);
  held.input?.close();
  // What another user had open is not used again: it might still write there by its name in /proc.
  held.pipes.giveBack(drained && !plan.foreign);
  const cause = killer.cause() ?? 'exited';
  if (cause === 'orphaned') return { cause, exit_code: 0, signal: '' };
  const exit_code = signal ? 128 + constants.signals[signal] : (code ?? 0);
  return { cause, exit_code, signal: signal ?? '' };
}

function requestOf(plan: Plan, pipes: Pipes, { id, stdin }: RunOptions): SpawnRequest {
  const [stdout = '', stderr = ''] = pipes.paths;
  const { file, args, cwd, env, ids } = plan;
  // A file without a name is found through us.
  const whole = stdin && `/proc/${process.pid}/fd/${stdin.fd}`;
  return { id, file, args, cwd, env, ids, stdin: whole ?? pipes.inputPath, stdout, stderr };
}

function open(plan: Plan, pipes: Pipes): OpenPipes {
  try {
    return pipes.open(plan.foreign);
  } catch (error) {
    pipes.giveBack(false);
    throw error;
  }
}
