// The agent's side of one spawner, from its start to its end: asks it for processes, and hears of them.
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { after, monotonic } from '../../../shared/clock.ts';
import type { Logger } from '../../../shared/logger.ts';
import { koffi } from '../../libc.ts';
import { unmapperOf } from '../../unmap.ts';
import type { Leader } from '../census.ts';
import { Unkept } from '../journal.ts';
import { marker } from '../plan.ts';
import type { Promises } from '../promises.ts';
import { type Exited, openKernel } from './kernel.ts';
import { program, type Rest, type SpawnReport, type SpawnRequest } from './program.ts';

/** The first process of a command, a child of the spawner. */
export interface Child extends Leader {
  /** Undefined when the spawner died before it. */
  exited: Promise<Exited | undefined>;
}

/** The process surely did not start. */
export class SpawnFailed extends Error {
  override readonly name = 'SpawnFailed';
  readonly errno: string;

  constructor(errno: string) {
    super(errno);
    this.errno = errno;
  }
}

/** Nobody knows whether the process started. */
export class SpawnerDied extends Error {
  override readonly name = 'SpawnerDied';
}

/** Little room for garbage and no threads to collect it: it should be small. */
const flags = ['--max-semi-space-size=1', '--v8-pool-size=0', '--input-type=commonjs'];
const startMs = 30_000;
/** A start that took longer may have waited for a disk, and then others are spared that for so long. */
const slowMs = 50;
const spareMs = 5_000;
/** After its last start it rests. */
const restMs = 15_000;

export interface SpawnerOptions {
  /** It can start as other users, and takes longer for everything. */
  forking: boolean;
  /** A start that takes longer hangs. */
  lateMs: number;
  /** What it keeps before it starts something. */
  promises: Promises | undefined;
  log: Logger;
}

interface Waiting {
  started: PromiseWithResolvers<Child>;
  exited: PromiseWithResolvers<Exited | undefined>;
}

export class SpawnerProcess {
  /** Resolves when it is gone and all its reports were heard: true when we stopped it. */
  readonly ended: Promise<boolean>;
  readonly #child: ChildProcess;
  readonly #log: Logger;
  readonly #ready = Promise.withResolvers<void>();
  readonly #waiting = new Map<string, Waiting>();
  /** Starts that it was asked for and has not told of, and since when (monotonic). */
  readonly #asked = new Map<string, number>();
  readonly #lateMs: number;
  readonly #promises: Promises | undefined;
  /** It can write there. */
  #writes = false;
  /** Until then (monotonic) the disk was too slow: while it waits for that it tells no exits. */
  #spareUntil = 0;
  #stopped = false;
  #stopResting = (): void => {};

  /** `mark`: in its environment; what it starts has it until it becomes the command. */
  constructor(mark: string, { forking, lateMs, promises, log }: SpawnerOptions) {
    this.#promises = promises;
    this.#lateMs = lateMs;
    this.#log = log;
    const given = JSON.stringify({
      addon: koffi(),
      from: import.meta.url,
      forking,
      promises: promises?.path,
    });
    const args = [
      ...flags,
      '-e',
      `(${program.toString()})(${given}, ${unmapperOf.toString()}, ${openKernel.toString()})`,
    ];
    // Node copies its own NODE_V8_COVERAGE when there is none here.
    const env = { [marker]: mark, NODE_V8_COVERAGE: undefined };
    const stdio: ['pipe', 'pipe', 'inherit'] = ['pipe', 'pipe', 'inherit'];
    this.#child = spawn(process.execPath, args, { cwd: '/', env, stdio, detached: true });
    this.ended = once(this.#child, 'close').then(
      () => this.#over(),
      () => this.#over(),
    );
    // Where the agent has no files left it has no pipes either, and only this is told.
    this.#child.on('error', (error) => this.#ready.reject(error));
    const { stdin, stdout } = this.#child;
    // Whether a request arrived shows in what comes back, be it the end.
    stdin?.on('error', () => {});
    // Without it it is of no use, and it must not start anything any more.
    stdout?.on('error', () => {}).once('close', () => this.#child.kill('SIGKILL'));
    let partial = '';
    stdout?.setEncoding('utf8').on('data', (text: string) => {
      const lines = (partial + text).split('\n');
      partial = lines.pop() ?? '';
      for (const line of lines) this.#hearLine(line);
    });
  }

  get pid(): number {
    return this.#child.pid ?? 0;
  }

  /** Whether it can be asked: one that is known to be gone cannot. */
  get connected(): boolean {
    const { stdin, stdout, exitCode, signalCode } = this.#child;
    return stdin?.writable === true && !stdout?.readableEnded && exitCode === null && signalCode === null;
  }

  /** Whether the first of its starts takes too long: it can begin no other meanwhile. */
  get hangs(): boolean {
    const [since = monotonic()] = this.#asked.values();
    return monotonic() - since >= this.#lateMs;
  }

  /** Whether it would keep a promise at once; one at a time, for while it waits for the disk it does nothing else. */
  get keeps(): boolean {
    const able = this.#writes && this.#asked.size === 0 && monotonic() >= this.#spareUntil;
    return able && (this.#promises?.room ?? false);
  }

  /** Rejects when it ends before that. */
  async ready(): Promise<void> {
    const cancel = after(startMs, () => this.#child.kill('SIGKILL'));
    await this.#ready.promise.finally(cancel);
  }

  /** Asks in this very turn; rejects with SpawnFailed, Unkept or SpawnerDied. `promise`: as it keeps one, a line. */
  spawn(request: SpawnRequest, promise?: string): Promise<Child> {
    if (!this.connected) return Promise.reject(new SpawnerDied());
    const promised = promise === undefined ? undefined : this.#promises?.take(promise);
    if (promise !== undefined && !promised) return Promise.reject(new Unkept('this spawner keeps none'));
    const started = Promise.withResolvers<Child>();
    this.#waiting.set(request.id, { started, exited: Promise.withResolvers() });
    this.#asked.set(request.id, monotonic());
    this.#send(promised ? { ...request, promised } : request);
    this.#restLater();
    return started.promise;
  }

  async stop(): Promise<void> {
    this.#stopped = true;
    this.#child.kill('SIGKILL');
    await this.ended;
  }

  #send(message: SpawnRequest | Rest): void {
    this.#child.stdin?.write(`${JSON.stringify(message)}\n`);
  }

  #restLater(): void {
    this.#stopResting();
    this.#stopResting = after(restMs, () => this.#send({ rest: true }));
  }

  #hearLine(line: string): void {
    try {
      // Nobody else has the other end.
      this.#hear(JSON.parse(line) as SpawnReport);
    } catch (error) {
      this.#log.error({ err: error }, 'a spawner speaks nonsense');
      this.#child.kill('SIGKILL');
    }
  }

  #hear(report: SpawnReport): void {
    if ('ready' in report) {
      if (report.slow) this.#log.warn({ reason: report.slow }, 'each command costs more here: it is forked');
      this.#writes = report.writes;
      this.#ready.resolve();
      this.#restLater();
      return;
    }
    const { id } = report;
    const waiting = this.#waiting.get(id);
    const since = this.#asked.get(id);
    if (since !== undefined && monotonic() - since > slowMs) this.#spareUntil = monotonic() + spareMs;
    this.#asked.delete(id);
    if ('pid' in report) {
      waiting?.started.resolve({ pid: report.pid, start: report.start, exited: waiting.exited.promise });
      return;
    }
    this.#waiting.delete(id);
    if ('unkept' in report) {
      // From now on the journal tries, which makes itself a new file.
      this.#writes = false;
      const cause = Object.assign(new Error(report.unkept), { code: report.unkept });
      waiting?.started.reject(new Unkept('the promise could not be written', { cause }));
    } else if ('errno' in report) waiting?.started.reject(new SpawnFailed(report.errno));
    else waiting?.exited.resolve({ code: report.code, signal: report.signal });
  }

  #over(): boolean {
    this.#stopResting();
    this.#ready.reject(new SpawnerDied());
    for (const { started, exited } of this.#waiting.values()) {
      started.reject(new SpawnerDied());
      exited.resolve(undefined);
    }
    this.#waiting.clear();
    return this.#stopped;
  }
}
