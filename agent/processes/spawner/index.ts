// The agent's side of the spawner: starts it, asks it for processes, and starts another one after its death.
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { after } from '../../../shared/clock.ts';
import { AppError } from '../../../shared/errors.ts';
import type { Logger } from '../../../shared/logger.ts';
import type { Births } from '../births.ts';
import type { Leader } from '../census.ts';
import { marker } from '../plan.ts';
import { killTree, Tree } from '../tree.ts';
import { program, type SpawnReport, type SpawnRequest } from './program.ts';

export interface Exited {
  code: number | null;
  signal: NodeJS.Signals | null;
}

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

/** A spawner that was ready once. */
export interface Living {
  /** Asks in this very turn; rejects with SpawnFailed or SpawnerDied. */
  spawn(request: SpawnRequest): Promise<Child>;
}

/** Little room for garbage and no threads to collect it: each command is a fork of this. */
const flags = ['--max-semi-space-size=1', '--v8-pool-size=0', '--input-type=commonjs'];
const startMs = 30_000;
/** How long KILL is repeated for what a dead one left half started. */
const killForMs = 5_000;

export class Spawner {
  /** In the environment of spawners; what they fork has it until it becomes the command. */
  readonly mark: string;
  readonly #log: Logger;
  #living: Promise<Process> | undefined;
  #died = false;
  #pid: number | undefined;

  readonly #births: Births | undefined;

  /** `name`: the same for all agents of a data directory, and for nobody else. */
  constructor(name: string, births: Births | undefined, log: Logger) {
    this.#births = births;
    // No id of a command has a colon.
    this.mark = `spawner:${name}`;
    this.#log = log;
  }

  /** Of the living one. */
  get pid(): number | undefined {
    return this.#pid;
  }

  /** The living one, or a new one after its death. */
  ready(): Promise<Living> {
    this.#living ??= this.#start();
    return this.#living;
  }

  async stop(): Promise<void> {
    const living = await this.#living?.catch(() => undefined);
    await living?.stop();
  }

  async #start(): Promise<Process> {
    try {
      // What the dead one forked may not have become its command yet.
      if (this.#died) await killTree(new Tree([this.mark], []), AbortSignal.abort(), killForMs);
      const started = new Process(this.mark);
      this.#pid = started.pid;
      await started.ready();
      await this.#births?.enter(started.pid);
      void started.ended.then((asked) => {
        this.#living = undefined;
        this.#died = true;
        if (!asked) this.#log.error('the spawner died; commands that ran are lost');
      });
      return started;
    } catch (cause) {
      this.#living = undefined;
      throw new AppError('unavailable', 'the spawner of commands could not be started', {}, { cause });
    }
  }
}

interface Waiting {
  started: PromiseWithResolvers<Child>;
  exited: PromiseWithResolvers<Exited | undefined>;
}

/** One spawner from its start to its end. */
class Process implements Living {
  /** Resolves when it is gone and all its reports were heard: true when we stopped it. */
  readonly ended: Promise<boolean>;
  readonly #child: ChildProcess;
  readonly #ready = Promise.withResolvers<void>();
  readonly #waiting = new Map<string, Waiting>();
  #asked = false;

  constructor(mark: string) {
    const args = [...flags, '-e', `(${program.toString()})()`];
    // Node copies its own NODE_V8_COVERAGE when there is none here.
    const env = { [marker]: mark, NODE_V8_COVERAGE: undefined };
    const stdio = ['ignore', 'ignore', 'inherit', 'ipc'] as const;
    this.#child = spawn(process.execPath, args, { cwd: '/', env, stdio: [...stdio], detached: true });
    this.#child.on('message', (message) => {
      // Nobody else has the other end of the channel.
      this.#hear(message as SpawnReport);
    });
    // Without its channel it is of no use, and it must not start anything any more.
    this.#child.once('disconnect', () => this.#child.kill('SIGKILL'));
    this.#child.on('error', (error) => this.#ready.reject(error));
    this.ended = Promise.all([once(this.#child, 'exit'), once(this.#child, 'disconnect')]).then(
      () => this.#over(),
      () => this.#over(),
    );
  }

  get pid(): number {
    return this.#child.pid ?? 0;
  }

  async ready(): Promise<void> {
    const cancel = after(startMs, () => this.#child.kill('SIGKILL'));
    await this.#ready.promise.finally(cancel);
  }

  spawn(request: SpawnRequest): Promise<Child> {
    if (!this.#child.connected) return Promise.reject(new SpawnerDied());
    const started = Promise.withResolvers<Child>();
    this.#waiting.set(request.id, { started, exited: Promise.withResolvers() });
    // Whether it arrived shows in what comes back, be it the end.
    this.#child.send(request, () => {});
    return started.promise;
  }

  async stop(): Promise<void> {
    this.#asked = true;
    this.#child.kill('SIGKILL');
    await this.ended;
  }

  #hear(report: SpawnReport): void {
    if ('ready' in report) {
      this.#ready.resolve();
      return;
    }
    const { id } = report;
    const waiting = this.#waiting.get(id);
    if ('pid' in report) {
      waiting?.started.resolve({ pid: report.pid, start: report.start, exited: waiting.exited.promise });
      return;
    }
    this.#waiting.delete(id);
    if ('errno' in report) waiting?.started.reject(new SpawnFailed(report.errno));
    else waiting?.exited.resolve({ code: report.code, signal: report.signal });
  }

  #over(): boolean {
    this.#ready.reject(new SpawnerDied());
    for (const { started, exited } of this.#waiting.values()) {
      started.reject(new SpawnerDied());
      exited.resolve(undefined);
    }
    this.#waiting.clear();
    return this.#asked;
  }
}
