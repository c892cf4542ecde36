// Runs the spawners, small processes that start programs for the agent. Replaces a spawner that dies, and starts
// another while a spawner hangs.
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { after, monotonic } from '../../../shared/clock.ts';
import { AppError } from '../../../shared/errors.ts';
import type { Logger } from '../../../shared/logger.ts';
import { compileCache, spawnerProgram } from '../../../shared/paths-in-checkout-or-package.ts';
import { killTree, Tree } from '../kill-tree.ts';
import { marker } from '../launch-plan.ts';
import type { Leader } from '../proc-pid-stat.ts';
import { readExit } from './exit-status.ts';
import type { Exited, SpawnReport, SpawnRequest } from './messages.ts';

/** The first process of a command or terminal, a child of the spawner. */
export interface Child extends Leader {
  /** Resolves to undefined if the spawner died before the child. */
  exited: Promise<Exited | undefined>;
}

/** Thrown if the process did not start. The message is the name of the error, such as ENOENT. */
export class SpawnFailed extends Error {}

/** Thrown if the spawner died. The process may have started. */
export class SpawnerDied extends Error {}

export interface SpawnersOptions {
  /** Milliseconds after which a start counts as hung. */
  lateMs: number;
  /** Directory of the spawners' cgroup, which contains the cgroups of commands; undefined without cgroups. */
  cgroup: string | undefined;
  log: Logger;
}

/** Maximum number of spawners. If a program on a hung disk blocks one of them, another starts the later programs. */
const most = 3;
/** Options of Node for a spawner: a small heap and no garbage collector threads. */
const flags = ['--max-semi-space-size=1', '--v8-pool-size=0', '--disable-warning=ExperimentalWarning'];
const startMs = 30_000;
/**
 * Milliseconds for which SIGKILL is repeated after a spawner has died. It kills the processes that the spawner was
 * starting.
 */
const killForMs = 5_000;

/**
 * Returns the values of the marker variable (FARHAND_COMMAND_ID) in the environments of the spawners. A child that a
 * spawner forks also has that spawner's value, until it executes its program.
 */
export function marksOf(journalId: string): string[] {
  return Array.from({ length: most }, (_, nth) => `spawner:${journalId}:${nth}`);
}

export class Spawners {
  readonly #marks: string[];
  readonly #options: SpawnersOptions;
  /**
   * The spawners by their values of the marker variable (see marksOf). A dead spawner is removed after the processes
   * that it was starting have been killed.
   */
  readonly #spawners = new Map<string, SpawnerProcess>();
  #starting: Promise<void> | undefined;

  /**
   * The marker values of the spawners contain `journalId`, so that a restarted agent finds its own old spawners, and
   * not those of other agents.
   */
  constructor(journalId: string, options: SpawnersOptions) {
    this.#marks = marksOf(journalId);
    this.#options = options;
  }

  get pids(): number[] {
    return [...this.#spawners.values()].flatMap(({ pid }) => pid ?? []);
  }

  /** Resolves when a spawner can start a process. Rejects with `unavailable` if none could be started. */
  async ready(): Promise<void> {
    if (this.#prompt()) return;
    this.#starting ??= this.#start().finally(() => {
      this.#starting = undefined;
    });
    await this.#starting;
  }

  /** Starts a program. The request is sent before the method returns. Rejects with SpawnFailed or SpawnerDied. */
  spawn(request: SpawnRequest): Promise<Child> {
    const spawner = this.#prompt() ?? this.#connected()[0];
    return spawner ? spawner.spawn(request) : Promise.reject(new SpawnerDied());
  }

  /** Ends the start of `id` if it hangs. The process then counts as started, and as killed by SIGKILL. */
  cancel(id: string): void {
    for (const spawner of this.#spawners.values()) spawner.cancel(id);
  }

  async stop(): Promise<void> {
    await this.#starting?.catch(() => undefined);
    await Promise.all([...this.#spawners.values()].map((spawner) => spawner.stop()));
  }

  #connected(): SpawnerProcess[] {
    return [...this.#spawners.values()].filter(({ connected }) => connected);
  }

  #prompt(): SpawnerProcess | undefined {
    return this.#connected().find(({ hangs }) => !hangs);
  }

  async #start(): Promise<void> {
    const mark = this.#marks.find((one) => !this.#spawners.has(one));
    if (mark === undefined) {
      // All connected spawners hang, and no further spawner may be started. The next command waits at one of them.
      if (this.#connected().length > 0) return;
      await Promise.race([...this.#spawners.values()].map(({ ended }) => ended));
      return this.#start();
    }
    try {
      const spawner = new SpawnerProcess(mark, this.#options);
      this.#spawners.set(mark, spawner);
      void spawner.ended.then(() => this.#spawners.delete(mark));
      await spawner.ready();
    } catch (cause) {
      // This spawner could not be started. Another connected spawner gets the next command, even if it hangs and the
      // command must wait.
      if (this.#connected().length > 0) return;
      throw new AppError(
        'unavailable',
        'the spawner (the process that starts commands) could not be started',
        {},
        { cause },
      );
    }
  }
}

interface Requested {
  /** Time of the request, in ms of the monotonic clock. */
  since: number;
  /** Undefined until the process has started. */
  child?: Leader;
  cancelled?: true;
  started: PromiseWithResolvers<Child>;
  exited: PromiseWithResolvers<Exited | undefined>;
}

class SpawnerProcess {
  /**
   * Resolves when the spawner has ended, its reports are read, and half-started processes are killed. Never rejects.
   */
  readonly ended: Promise<void>;
  readonly #mark: string;
  readonly #child: ChildProcess;
  readonly #options: SpawnersOptions;
  readonly #ready = Promise.withResolvers<void>();
  /** Requests whose processes have not exited yet, by the id of the command or terminal; the oldest first. */
  readonly #requested = new Map<string, Requested>();
  #isReady = false;
  /** Cancels the timer of #checkForHang(); undefined if no timer runs. */
  #cancelCheck: (() => void) | undefined;
  #stopped = false;

  constructor(mark: string, options: SpawnersOptions) {
    this.#mark = mark;
    this.#options = options;
    // Node passes its own NODE_V8_COVERAGE on to a child unless `env` has that key.
    const env = { [marker]: mark, NODE_V8_COVERAGE: undefined, NODE_COMPILE_CACHE: compileCache };
    // A spawner gets the agent's flag --no-addons, which forbids native addons.
    const noAddons = process.execArgv.filter((flag) => flag === '--no-addons');
    this.#child = spawn(process.execPath, [...flags, ...noAddons, spawnerProgram, options.cgroup ?? ''], {
      cwd: '/',
      env,
      stdio: ['ignore', 'ignore', 'inherit', 'ipc'],
      detached: true,
    });
    const over = (): Promise<void> => this.#over();
    this.ended = once(this.#child, 'close').then(over, over);
    this.#child.on('error', (error) => this.#ready.reject(error));
    // A spawner that has lost its channel to the agent must not start anything.
    this.#child.once('disconnect', () => this.#child.kill('SIGKILL'));
    // Messages are not checked, because only the spawner can send over this channel.
    this.#child.on('message', (report) => this.#take(report as SpawnReport));
  }

  get pid(): number | undefined {
    return this.#child.pid;
  }

  get connected(): boolean {
    const { connected, exitCode, signalCode } = this.#child;
    return this.#isReady && connected && exitCode === null && signalCode === null;
  }

  /** The oldest request whose process has not started yet. */
  get #pending(): Requested | undefined {
    return [...this.#requested.values()].find(({ child }) => !child);
  }

  /** True if the oldest start takes too long. The spawner cannot begin another start before this one ends. */
  get hangs(): boolean {
    return monotonic() - (this.#pending?.since ?? monotonic()) >= this.#options.lateMs;
  }

  /** Resolves when the spawner is ready. Rejects if it ends before that. */
  async ready(): Promise<void> {
    const cancel = after(startMs, () => this.#child.kill('SIGKILL'));
    await this.#ready.promise.finally(cancel);
  }

  spawn(request: SpawnRequest): Promise<Child> {
    const started = Promise.withResolvers<Child>();
    const exited = Promise.withResolvers<Exited | undefined>();
    this.#requested.set(request.id, { since: monotonic(), started, exited });
    this.#cancelCheck ??= after(this.#options.lateMs, () => this.#checkForHang());
    // An error of send() is ignored: if the request did not arrive, the spawner is dead, and its exit rejects the
    // request.
    this.#child.send(request, () => {});
    return started.promise;
  }

  cancel(id: string): void {
    const requested = this.#requested.get(id);
    if (requested) requested.cancelled = true;
  }

  async stop(): Promise<void> {
    this.#stopped = true;
    this.#child.kill('SIGKILL');
    await this.ended;
  }

  #take(report: SpawnReport): void {
    if ('ready' in report) {
      this.#isReady = true;
      this.#ready.resolve();
      return;
    }
    const requested = this.#requested.get(report.id);
    if (!requested) return;
    if ('pid' in report) {
      const { pid, start } = report;
      requested.child = { pid, start };
      requested.started.resolve({ pid, start, exited: requested.exited.promise });
      return;
    }
    this.#requested.delete(report.id);
    if ('errno' in report) requested.started.reject(new SpawnFailed(report.errno));
    else requested.exited.resolve({ code: report.code, signal: report.signal });
  }

  /**
   * Does what the spawner cannot do while it hangs: reads the exits of its processes from /proc, and kills the process
   * that it starts if that command is cancelled. Called as long as starts are pending.
   */
  #checkForHang(): void {
    this.#cancelCheck = undefined;
    const pending = this.#pending;
    if (!pending) return;
    if (this.hangs) {
      for (const [id, { child }] of [...this.#requested]) {
        const exited = child && readExit(child);
        if (exited) this.#take({ id, ...exited });
      }
      if (pending.cancelled) void this.#killHalfStarted(pending);
    }
    const { lateMs } = this.#options;
    this.#cancelCheck = after(this.hangs ? lateMs / 10 : lateMs, () => this.#checkForHang());
  }

  /**
   * Kills the process that the spawner has forked for this request. The process has the spawner's mark until it executes
   * its program. Never rejects.
   */
  async #killHalfStarted(pending: Requested): Promise<void> {
    try {
      const tree = new Tree({ marks: [this.#mark] });
      // The other children of the spawner are in the tree too. They are running commands, with marks of their own.
      const forked = (await tree.members()).filter(
        ({ pid, mark }) => mark === this.#mark && pid !== this.pid,
      );
      // Any process of the list belongs to this request, if the request is still the pending one after the scan.
      if (this.#pending === pending) tree.signal(forked, 'SIGKILL');
    } catch (err) {
      this.#options.log.error({ err }, 'the start of a cancelled command hangs, and could not be ended');
    }
  }

  async #over(): Promise<void> {
    this.#cancelCheck?.();
    this.#ready.reject(new SpawnerDied());
    for (const { started, exited } of this.#requested.values()) {
      started.reject(new SpawnerDied());
      exited.resolve(undefined);
    }
    this.#requested.clear();
    if (this.#stopped) return;
    const { log } = this.#options;
    log.error(
      'a spawner (the process that starts commands) died; its commands and terminals are killed and count as lost',
    );
    // A forked child has the spawner's mark only until it executes its program, so only half-started children are
    // killed here.
    await killTree(new Tree({ marks: [this.#mark] }), AbortSignal.abort(), killForMs).catch(
      (error: unknown) =>
        log.error(
          { err: error },
          'the spawner ended while it started a process; that process could not be killed and may still run',
        ),
    );
  }
}
