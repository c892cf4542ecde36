// One running process: its pipes into its logs, its time limit, its kill and its end.
import { closeSync } from 'node:fs';
import type { FileHandle } from 'node:fs/promises';
import { Socket } from 'node:net';
import { constants } from 'node:os';
import { after, monotonic, now, sleep } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { OutputLog } from '../../shared/output.ts';
import { Input } from './input.ts';
import type { OpenPipes, Pipes } from './pipes.ts';
import { explain, NotStarted, type Plan } from './plan.ts';
import { type Child, type Exited, type Living, SpawnFailed } from './spawner/index.ts';
import type { SpawnRequest } from './spawner/program.ts';
import { killTree, signalGroup, Tree } from './tree.ts';

/** What a pipe holds. */
const pipeBytes = 64 * 1024;

/** Why a process was ended by us; orphaned: its spawner died. */
export type KillCause = 'timeout' | 'cancelled' | 'stopped' | 'orphaned';

export interface RunOptions {
  id: string;
  /** Its whole input, or none. */
  stdin: FileHandle | undefined;
  /** The begin of an input that stays open. */
  input: Uint8Array | undefined;
  /** 0: none. */
  timeoutMs: number;
  stdout: OutputLog;
  stderr: OutputLog;
  graceMs: number;
  stopGraceMs: number;
  drainMs: number;
  killForMs: number;
  log: Logger;
}

export interface Ending {
  cause: 'exited' | KillCause;
  exit_code: number;
  /** Empty where none. */
  signal: string;
}

export interface Run {
  pid: number;
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
  const started_at = now();
  const { ours, theirs, input: inputs } = open(plan, pipes);
  const asked = spawner.spawn(requestOf(plan, pipes, options));
  // While it starts: the pipes have no end before the child's ends, which we hold too, are closed.
  const pumps = [pump(ours[0], options.stdout, options), pump(ours[1], options.stderr, options)];
  const input = inputs && new Input(inputs.ours, options.input ?? Buffer.alloc(0));
  const child = await asked
    .catch(async (error: unknown) => {
      const failed = error instanceof SpawnFailed;
      // Whatever it became shows the mark or the pipes.
      const tree = new Tree([options.id], pipes.paths);
      if (!failed) await killTree(tree, AbortSignal.abort(), options.killForMs);
      for (const log of [options.stdout, options.stderr]) log.release();
      for (const { cut } of pumps) cut();
      await Promise.all(pumps.map(({ done }) => done));
      input?.close();
      pipes.giveBack(false);
      throw failed ? new NotStarted(await explain(error.errno, plan)) : error;
    })
    .finally(() => {
      for (const fd of theirs) closeSync(fd);
      if (inputs) closeSync(inputs.theirs);
    });
  const killer = makeKiller(child, pipes.paths, options);
  async function end(): Promise<Ending> {
    const { code, signal } = (await Promise.race([child.exited, killer.givenUp])) ?? (await killer.givenUp);
    for (const log of [options.stdout, options.stderr]) log.release();
    await killer.finished();
    const drained = await drain(pumps, options.drainMs);
    input?.close();
    // What another user had open is not used again: it might still write there by its name in /proc.
    pipes.giveBack(drained && !plan.foreign);
    const cause = killer.cause() ?? 'exited';
    if (cause === 'orphaned') return { cause, exit_code: 0, signal: '' };
    const exit_code = signal ? 128 + constants.signals[signal] : (code ?? 0);
    return { cause, exit_code, signal: signal ?? '' };
  }
  return {
    pid: child.pid,
    started_at,
    input,
    signal: (name) => signalGroup(child, name),
    ended: end(),
    kill: killer.kill,
  };
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

interface Killer {
  kill(cause: KillCause, graceMs: number): void;
  /** Resolves when the tree is gone or given up; at once when nobody killed. */
  finished(): Promise<void>;
  /** Resolves when a kill was given up and the process is still there. */
  givenUp: Promise<Exited>;
  cause(): KillCause | undefined;
}

function makeKiller(child: Child, links: string[], options: RunOptions): Killer {
  const { id, timeoutMs, graceMs, stopGraceMs, killForMs, log } = options;
  const { pid } = child;
  const hurry = new AbortController();
  const timers: (() => void)[] = [];
  const givenUp = Promise.withResolvers<Exited>();
  let alive = true;
  let cause: KillCause | undefined;
  let killing: Promise<void> | undefined;

  async function killAll(): Promise<void> {
    try {
      const left = await killTree(new Tree([id], links, child), hurry.signal, killForMs);
      if (left > 0) log.error({ id, pid, left }, 'processes of a command could not be killed');
    } catch (error) {
      log.error({ err: error, id, pid }, 'the kill of a command failed');
    }
    givenUp.resolve({ code: null, signal: 'SIGKILL' });
  }
  function kill(why: KillCause, grace: number): void {
    if (!alive) return;
    cause ??= why;
    timers.push(after(grace, () => hurry.abort()));
    killing ??= killAll();
  }

  if (timeoutMs > 0) timers.push(after(timeoutMs, () => kill('timeout', graceMs)));
  void child.exited.then((how) => {
    if (!how) return kill('orphaned', stopGraceMs);
    alive = false;
    // During a kill the grace goes on for the rest of the tree.
    if (!killing) for (const cancel of timers) cancel();
  });
  return {
    kill,
    givenUp: givenUp.promise,
    cause: () => cause,
    async finished() {
      await killing;
      for (const cancel of timers) cancel();
    },
  };
}

/** Waits for the end of both pipes, but not long for something in the background that holds them. */
async function drain(pumps: Pump[], drainMs: number): Promise<boolean> {
  const all = Promise.all(pumps.map(({ done }) => done));
  // Most have ended before their exit was heard of.
  if (pumps.some(({ ended }) => !ended())) await atEnd(pumps, all, drainMs);
  for (const { cut } of pumps) cut();
  return (await all).every((whole) => whole);
}

async function atEnd(pumps: Pump[], all: Promise<unknown>, drainMs: number): Promise<void> {
  const over = new AbortController();
  void all.finally(() => over.abort());
  do await sleep(drainMs, over.signal);
  while (
    // A disk that hangs is no reason to lose what the process wrote.
    !over.signal.aborted &&
    pumps.some(({ stalled }) => stalled(drainMs / 2))
  );
}

interface Pump {
  /** True when the pipe came to its end, false when it was cut. */
  done: Promise<boolean>;
  /** Whether the pipe came to its end; the disk may still have work. */
  ended(): boolean;
  cut(): void;
  /** Whether the disk has kept it waiting for that long. */
  stalled(ms: number): boolean;
}

/**
 * Reads a pipe into a log through one buffer, and no further before the disk took it: a runaway writer costs
 * itself speed and us no memory.
 */
function pump(fd: number, output: OutputLog, { id, log }: RunOptions): Pump {
  const buffer = Buffer.allocUnsafe(pipeBytes);
  let busySince = Number.POSITIVE_INFINITY;
  let written = Promise.resolve();
  let complained = false;
  async function keep(bytes: number): Promise<void> {
    busySince = monotonic();
    await output.append(buffer.subarray(0, bytes)).catch((error: unknown) => {
      if (!complained) log.error({ err: error, id }, 'output of a command could not be kept');
      complained = true;
    });
    busySince = Number.POSITIVE_INFINITY;
    pipe.resume();
  }
  const callback = (bytes: number): boolean => {
    written = keep(bytes);
    return false;
  };
  const pipe = new Socket({ fd, readable: true, writable: false, onread: { buffer, callback } });
  let ended = false;
  pipe.once('end', () => {
    ended = true;
  });
  const done = new Promise<boolean>((resolve) => {
    pipe.once('close', () => void written.then(() => resolve(ended)));
  });
  // Its close says enough.
  pipe.on('error', () => {});
  pipe.resume();
  return {
    done,
    ended: () => ended,
    cut: () => pipe.destroy(),
    stalled: (ms) => monotonic() - busySince >= ms,
  };
}
