// The registry of all commands of this machine, or of all terminals. Each id runs at most once.
// States of an entry: accepted -> running -> over, accepted -> over, accepted -> refused.
import { now } from '../../shared/clock.ts';
import { AppError, type Code, errnoOf, fromErrno } from '../../shared/errors.ts';
import { Wake } from '../../shared/wait-for-change.ts';
import { unseen } from './crash-recovery.ts';
import { NotStarted } from './launch-plan.ts';
import type { Exit, JournalEntry, ProcessKind } from './process-journal.ts';
import {
  type Ending,
  endings,
  type Parts,
  type Prepared,
  type Running,
  type Stdio,
  startRunning,
} from './running-process.ts';
import { SpawnerDied } from './spawner/spawner-pool.ts';

type State =
  /**
   * The process has not started yet. `cancelled`: if a kill was requested meanwhile, its grace period in milliseconds.
   */
  | { is: 'accepted'; cancelled?: number }
  | { is: 'running'; running: Running }
  | { is: 'over'; exit: Exit }
  /** The journal could not be written, so the id may be used again. */
  | { is: 'refused'; failure: AppError };

/** An entry of the registry. Every change of `state` wakes all waiters of `changed`. */
export abstract class Tracked {
  readonly id: string;
  readonly changed = new Wake();
  state: State = { is: 'accepted' };
  started?: { pid: number; at: number };
  /** True once the broker no longer needs the entry. The entry is removed when its process is over. */
  forgotten = false;

  constructor(id: string) {
    this.id = id;
  }

  get running(): Running | undefined {
    return this.state.is === 'running' ? this.state.running : undefined;
  }

  get exit(): Exit | undefined {
    return this.state.is === 'over' ? this.state.exit : undefined;
  }

  /**
   * Sets the start and exit of a process that is over. They come from the journal, or from unseen() if the journal does
   * not have them.
   */
  restore({ started, exit }: Pick<JournalEntry, 'started' | 'exit'>): this {
    if (started) this.started = started;
    if (exit) this.state = { is: 'over', exit };
    return this;
  }

  /** Waits until the process has started or is over. Throws the failure if the start was refused. */
  async begun(signal: AbortSignal): Promise<void> {
    while (this.state.is === 'accepted' && !signal.aborted) await this.changed.wait(signal);
    if (this.state.is === 'refused') throw this.state.failure;
  }

  /** Number of bytes that the process has written to stdout and to stderr so far. */
  abstract written(): Pick<Exit, 'stdout_bytes' | 'stderr_bytes'>;
  /**
   * Called when the process is over. A command closes its output files, which a later read opens again. A terminal
   * stops its timers and removes the clients whose link was lost.
   */
  abstract close(): Promise<void>;
  abstract remove(): Promise<void>;
}

interface Kind {
  name: ProcessKind;
  notFound: Code;
  limit: number;
}

const dropped = { outcome: 'PROCESS_OUTCOME_EXPIRED', reason: 'dropped' } as const;

/** Closes the pipes or terminal of a process that was not started. */
async function closeUnused(stdio: Stdio): Promise<void> {
  await stdio.handedOver();
  await stdio.drain(0);
  stdio.close();
}

export abstract class ProcessRegistry<T extends Tracked, P extends Parts> {
  protected readonly parts: P;
  readonly #kind: Kind;
  readonly #entries = new Map<string, T>();
  /** Entries whose process is not over, or whose output files are not closed yet. */
  readonly #open = new Set<T>();
  readonly #closed = new Wake();
  #stopping = false;
  /** True if no new process may start, because an upgrade restarts the agent. */
  refusesStarts = false;

  constructor(parts: P, kind: Kind) {
    this.parts = parts;
    this.#kind = kind;
  }

  protected abstract create(id: string): T;

  /** Adds the processes of earlier runs of the agent, which the journal still lists. All of them are over. */
  protected restore(entries: Iterable<T>): void {
    for (const one of entries) this.#entries.set(one.id, one);
  }

  ids(): string[] {
    return [...this.#entries].filter(([, { forgotten }]) => !forgotten).map(([id]) => id);
  }

  get runningCount(): number {
    return [...this.#open].filter(({ exit }) => !exit).length;
  }

  all(): Iterable<T> {
    return this.#entries.values();
  }

  /** Returns the entry of `id`. An unknown id yields an entry that is over, with the outcome "expired". */
  find(id: string): T {
    return this.#find(id) ?? this.#over(id, unseen('PROCESS_OUTCOME_EXPIRED', 'unknown_id'));
  }

  /** Waits until the process has started or is over. */
  async begun(id: string, signal: AbortSignal): Promise<T> {
    const one = this.#entries.get(id);
    if (!one) throw this.parts.journal.wasForgotten(id) ? this.#gone(id) : this.notFound(id);
    await one.begun(signal);
    return one;
  }

  /** Waits until the process has started. Throws `conflict` if the process is over. */
  async running(id: string, signal: AbortSignal): Promise<{ one: T; running: Running }> {
    const one = await this.begun(id, signal);
    const { running } = one;
    if (!running) throw this.#gone(id);
    return { one, running };
  }

  /** Kills the process of `id`. Returns false if the registry has no such id. */
  kill(id: string, graceMs: number): boolean {
    const one = this.#entries.get(id);
    const state = one?.state;
    if (state?.is === 'running') state.running.kill('cancelled', graceMs);
    if (state?.is === 'accepted') {
      state.cancelled = Math.min(graceMs, state.cancelled ?? graceMs);
      this.parts.spawners.cancel(id);
    }
    return one !== undefined;
  }

  /**
   * Removes the entry and its output. While the process runs, only marks the entry, which is then removed when the
   * process is over.
   */
  async forget(id: string): Promise<void> {
    const one = this.#entries.get(id);
    if (one) one.forgotten = true;
    if (one?.exit) await this.#remove(id, one);
  }

  /** Kills all running processes. Resolves when all are over. */
  async stop(): Promise<void> {
    this.#stopping = true;
    for (const { running } of this.#open) running?.kill('stopped', this.parts.limits.stopGraceMs);
    while (this.#open.size > 0) await this.#closed.wait();
  }

  notFound(id: string): AppError {
    const { name, notFound } = this.#kind;
    const what = name === 'command' ? 'process' : name;
    return new AppError(notFound, `the machine has no ${what} with the id ${id}`, { [`${name}_id`]: id });
  }

  /** Starts a process for `id`. Returns the existing entry if this id was requested before. */
  async start(id: string, signal: AbortSignal, prepare: (one: T) => Promise<Prepared>): Promise<T> {
    const known = this.#find(id);
    // "Expired" means that an earlier request was dropped before the process was spawned. The process did not run, so
    // this request may start it.
    if (known && known.exit?.outcome !== 'PROCESS_OUTCOME_EXPIRED') return known;
    const one = this.#add(id);
    const { journal, cgroups } = this.parts;
    const accepting = journal.accept(id, this.#kind.name, cgroups?.take(id));
    // The process is prepared while the journal is flushed to the disk. It starts when both are done.
    const [accepted, prepared] = await Promise.allSettled([accepting, prepare(one)]);
    const ending = accepted.status === 'fulfilled' ? await this.#run(one, prepared, signal) : dropped;
    if (ending && prepared.status === 'fulfilled') await closeUnused(prepared.value.stdio);
    if (accepted.status === 'rejected') this.#refuse(one, fromErrno(accepted.reason, 'journal'));
    if (ending) await this.#finish(one, ending);
    return one;
  }

  #find(id: string): T | undefined {
    const { journal } = this.parts;
    const one = this.#entries.get(id);
    if (one) return one;
    // Commands and terminals have a registry each, but share the journal. An id that is only in the journal belongs to
    // the other registry.
    if (journal.entries.has(id)) throw this.notFound(id);
    // The process is over, and its entry was removed after the broker had acknowledged the result.
    return journal.wasForgotten(id) ? this.#over(id, unseen('PROCESS_OUTCOME_LOST', 'forgotten')) : undefined;
  }

  #over(id: string, exit: Exit): T {
    return this.create(id).restore({ exit });
  }

  #gone(id: string): AppError {
    const { name } = this.#kind;
    return new AppError('conflict', `the ${name} has ended, so it takes no more input, signals or clients`, {
      [`${name}_id`]: id,
    });
  }

  /**
   * Adds an entry. The caller awaits nothing between the look-up of the id and this call, so that no id is added twice.
   */
  #add(id: string): T {
    const { name, limit } = this.#kind;
    if (!/^[\w-]{1,100}$/.test(id))
      throw new AppError(
        'invalid_request',
        `the id of a ${name} must consist of 1 to 100 letters, digits, - or _`,
      );
    if (this.#stopping || this.refusesStarts)
      throw new AppError('unavailable', 'the agent is stopping or is being upgraded; try again later');
    if (this.runningCount >= limit) {
      throw new AppError(
        'unavailable',
        `this machine already runs ${limit} ${name}s, the most allowed; try again later`,
        {
          limit,
        },
      );
    }
    const one = this.create(id);
    this.#entries.set(id, one);
    this.#open.add(one);
    return one;
  }

  /** Starts the process and returns undefined. If the start fails or is cancelled, returns the ending to report. */
  async #run(
    one: T,
    prepared: PromiseSettledResult<Prepared>,
    signal: AbortSignal,
  ): Promise<Ending | undefined> {
    const { spawners, journal, limits, log } = this.parts;
    const cancelled = (): number | undefined =>
      one.state.is === 'accepted' ? one.state.cancelled : undefined;
    try {
      if (prepared.status === 'rejected') throw prepared.reason;
      await spawners.ready();
      // The command may have been cancelled, or the link lost, during the waits above. Nothing is awaited between these
      // checks and the spawn request, so such a command is never spawned.
      if (cancelled() !== undefined) return endings.cancelled;
      if (signal.aborted || this.#stopping) return dropped;
      const running = await startRunning(one.id, prepared.value, this.parts);
      const grace = cancelled();
      one.state = { is: 'running', running };
      one.started = { pid: running.child.pid, at: running.startedAt };
      journal.started(one.id, running.child, running.startedAt);
      one.changed.wake();
      if (this.#stopping) running.kill('stopped', limits.stopGraceMs);
      else if (grace !== undefined) running.kill('cancelled', grace);
      // The promise is not awaited: `ended` and #finish() never reject, and stop() waits until #open is empty.
      void running.ended.then((ending) => this.#finish(one, ending));
      return undefined;
    } catch (error) {
      if (error instanceof SpawnerDied) return endings.orphaned;
      const outcome = 'PROCESS_OUTCOME_NOT_STARTED';
      if (error instanceof NotStarted || error instanceof AppError) return { outcome, reason: error.message };
      log.error(
        { err: error, id: one.id },
        `a ${this.#kind.name} could not be started because of an unexpected error`,
      );
      const reason = `the agent could not start the ${this.#kind.name} (${errnoOf(error) ?? 'unexpected error'}); see the agent's log`;
      return { outcome, reason };
    }
  }

  async #finish(one: T, ending: Ending): Promise<void> {
    const { journal, cgroups, log } = this.parts;
    const { id } = one;
    const times = { started_at_ms: one.started?.at ?? 0, finished_at_ms: now() };
    const exit = { exit_code: 0, signal: '', ...times, ...one.written(), ...ending };
    one.state = { is: 'over', exit };
    journal.ended(id, exit);
    one.changed.wake();
    try {
      await one.close();
      if (one.forgotten) await this.#remove(id, one);
    } catch (error) {
      log.error({ err: error, id }, `the output of a ${this.#kind.name} could not be closed or removed`);
    }
    cgroups?.giveBack(id);
    this.#open.delete(one);
    this.#closed.wake();
  }

  #refuse(one: T, failure: AppError): never {
    this.parts.cgroups?.giveBack(one.id);
    this.#entries.delete(one.id);
    this.#open.delete(one);
    one.state = { is: 'refused', failure };
    one.changed.wake();
    this.#closed.wake();
    throw failure;
  }

  async #remove(id: string, one: T): Promise<void> {
    this.#entries.delete(id);
    this.parts.journal.forget(id);
    await one.remove();
  }
}
