// The agent's side of one spawner, from its start to its end: asks it for processes, and hears of them.
import { type ChildProcessByStdio, spawn } from 'node:child_process';
import { once } from 'node:events';
import type { Readable, Writable } from 'node:stream';
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
  readonly #child: ChildProcessByStdio<Writable, Readable, null>;
  readonly #log: Logger;
  readonly #ready = Promise.withResolvers<void>();
  readonly #waiting = new Map<string, Waiting>();
  /** Starts that it was asked for and has not told of, and since when (monotonic). */
  readonly #asked = new Map<string, number>();
  readonly #lateMs: number;
  readonly #promises: Promises | undefined;
  /** It can write there. */
  #writes = false;
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
    const { stdin, stdout } = this.#child;
    // Whether a request arrived shows in what comes back, be it the end.
    stdin.on('error', () => {});
    let partial = '';
    stdout.setEncoding('utf8').on('data', (text: string) => {
      const lines = (partial + text).split('\n');
      partial = lines.pop() ?? '';
      // Nobody else has the other end.
      for (const line of lines) this.#hear(JSON.parse(line) as SpawnReport);
    });
    // Without it it is of no use, and it must not start anything any more.
    stdout.once('close', () => this.#child.kill('SIGKILL'));
    this.#child.on('error', (error) => this.#ready.reject(error));
    this.ended = once(this.#child, 'close').then(
      () => this.#over(),
      () => this.#over(),
    );
  }

  get pid(): number {
    return this.#child.pid ?? 0;
  }

  /** Whether it can be asked: a dying one no longer reads. */
  get connected(): boolean {
    const { stdin, stdout, exitCode, signalCode } = this.#child;
    return stdin.writable && !stdout.readableEnded && exitCode === null && signalCode === null;
  }

  /** Whether the first of its starts takes too long: it can begin no other meanwhile. */
  get hangs(): boolean {
    const [since = monotonic()] = this.#asked.values();
    return monotonic() - since >= this.#lateMs;
  }

  /** Whether it would keep a promise at once; one at a time, for while it waits for the disk it does nothing else. */
  get keeps(): boolean {
    return this.#writes && this.#asked.size === 0 && (this.#promises?.room ?? false);
  }

  /** Rejects when it ends before that. */
  async ready(): Promise<void> {
    const cancel = after(startMs, () => this.#child.kill('SIGKILL'));
    await this.#ready.promise.finally(cancel);
  }

  /** Asks in this very turn; rejects with SpawnFailed, Unkept or SpawnerDied. `promise`: as it keeps one, a line. */
  spawn(request: SpawnRequest, promise?: string): Promise<Child> {
    if (!this.connected) return Promise.reject(new SpawnerDied());
    const started = Promise.withResolvers<Child>();
    this.#waiting.set(request.id, { started, exited: Promise.withResolvers() });
    this.#asked.set(request.id, monotonic());
    this.#send(promise === undefined ? request : { ...request, promised: this.#promises?.take(promise) });
    this.#restLater();
    return started.promise;
  }

  async stop(): Promise<void> {
    this.#stopped = true;
    this.#child.kill('SIGKILL');
    await this.ended;
  }

  #send(message: SpawnRequest | Rest): void {
    this.#child.stdin.write(`${JSON.stringify(message)}\n`);
  }

  #restLater(): void {
    this.#stopResting();
    this.#stopResting = after(restMs, () => this.#send({ rest: true }));
  }

  #hear(report: SpawnReport): void {
    if ('ready' in report) {
      if (report.slow)
        this.#log.warn({ reason: report.slow }, 'each command costs more here: no addon for libc');
      this.#writes = report.writes;
      this.#ready.resolve();
      this.#restLater();
      return;
    }
    const { id } = report;
    const waiting = this.#waiting.get(id);
    this.#asked.delete(id);
    if ('pid' in report) {
      waiting?.started.resolve({ pid: report.pid, start: report.start, exited: waiting.exited.promise });
      return;
    }
    this.#waiting.delete(id);
    if ('unkept' in report) {
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
