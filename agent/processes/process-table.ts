// The table of all commands, or of all terminals, of this machine. Each id runs at most once, and its entry
// stays until the broker has acknowledged the result. States: accepted -> running -> over, accepted -> over,
// or accepted -> refused.
import { now } from '../../shared/clock.ts';
import { AppError, type Code, errnoOf, fromErrno } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import { Wake } from '../../shared/output-log.ts';
import {
  killGraceMs,
  openCommands,
  openTerminals,
  outputWindowBytes,
  readerStallMs,
  terminalClients,
  terminalWindowBytes,
} from '../../shared/process-limits.ts';
import type { Cgroups } from './cgroup.ts';
import { unseen } from './crash-recovery.ts';
import type { Exit, Journal, JournalEntry, ProcessKind } from './journal.ts';
import { NotStarted, type Plan } from './launch-plan.ts';
import {
  closeUnused,
  type Ending,
  type Running,
  type RunOptions,
  type Stdio,
  startRunning,
} from './running-process.ts';
import { SpawnerDied, type Spawners } from './spawner/index.ts';

export const defaultLimits = {
  /** Last bytes stored of each output stream of a command. */
  windowBytes: outputWindowBytes,
  /** A follower that has not read for this long no longer slows the command. */
  stallMs: readerStallMs,
  /** Most commands that may run at once. */
  open: openCommands,
  /** Time between SIGTERM and SIGKILL when a command times out. */
  graceMs: killGraceMs,
  /** Time between the first signal and SIGKILL when the agent stops. */
  stopGraceMs: 2_000,
  /** How long background processes may hold the pipes open after the command has exited. */
  drainMs: 2_000,
  /** How long SIGKILL is repeated for processes that survive it. */
  killForMs: 5_000,
  /** A start that takes longer counts as hung; later commands are sent to another spawner. */
  lateMs: 5_000,
  /** How long an id cannot run again after the broker has acknowledged its result. */
  seenMs: 24 * 3_600_000,
  /** Most terminals that may be open at once. */
  terminals: openTerminals,
  /** Most clients of all terminals together, including clients whose connection was lost. */
  clients: terminalClients,
  /** Last bytes stored of a terminal's output. */
  terminalWindowBytes,
  /** Time between SIGHUP and SIGKILL when the terminal's program has exited or its grace period is over. */
  hangupMs: 2_000,
  /** How long a disconnected client may take to return after the link to the broker is back. */
  heldMs: 5_000,
};
export type Limits = typeof defaultLimits;

/** Objects that commands and terminals share. */
export interface Parts {
  journal: Journal;
  limits: Limits;
  log: Logger;
  spawners: Spawners;
  cgroups: Cgroups | undefined;
}

type State =
  /**
   * Not started yet. `cancelled`: the grace period in milliseconds of a kill that was requested meanwhile.
   */
  | { is: 'accepted'; cancelled?: number }
  | { is: 'running'; running: Running }
  | { is: 'over'; exit: Exit }
  /** The journal could not be written. The id may be used again. */
  | { is: 'refused'; failure: AppError };

/** A command or terminal. `changed` wakes its waiters after every change. */
export abstract class Tracked {
  readonly changed = new Wake();
  state: State = { is: 'accepted' };
  started?: { pid: number; at: number };
  /** The broker has acknowledged it: it is removed as soon as it is over. */
  forgotten = false;

  get running(): Running | undefined {
    return this.state.is === 'running' ? this.state.running : undefined;
  }

  get exit(): Exit | undefined {
    return this.state.is === 'over' ? this.state.exit : undefined;
  }

  /** Restores the start and exit that an earlier agent wrote to the journal. */
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

  /** Bytes of output written in all. */
  abstract written(): Pick<Exit, 'stdout_bytes' | 'stderr_bytes'>;
  /** Closes the files of the output, which can still be read. */
  abstract close(): Promise<void>;
  /** Removes the output from the disk. */
  abstract remove(): Promise<void>;
}

/** All that is needed to start a command or terminal. */
export interface Prepared extends Pick<RunOptions, 'first' | 'timeoutMs' | 'leftoversMs'> {
  plan: Plan;
  stdio: Stdio;
}

export interface Kind<T extends Tracked> {
  name: ProcessKind;
  notFound: Code;
  /** Most that may run at once. */
  limit: number;
  create(id: string): T;
}

const outcomes: Record<Ending['cause'], Pick<Exit, 'outcome' | 'reason'>> = {
  exited: { outcome: 'PROCESS_OUTCOME_EXITED', reason: '' },
  timeout: { outcome: 'PROCESS_OUTCOME_TIMEOUT', reason: '' },
  cancelled: { outcome: 'PROCESS_OUTCOME_CANCELLED', reason: '' },
  abandoned: { outcome: 'PROCESS_OUTCOME_CANCELLED', reason: 'grace_period_over' },
  stopped: { outcome: 'PROCESS_OUTCOME_LOST', reason: 'agent_restarted' },
  orphaned: { outcome: 'PROCESS_OUTCOME_LOST', reason: 'spawner_died' },
};
const dropped = { outcome: 'PROCESS_OUTCOME_EXPIRED', reason: 'dropped' } as const;

export class ProcessTable<T extends Tracked> {
  readonly #parts: Parts;
  readonly #kind: Kind<T>;
  readonly #entries: Map<string, T>;
  /** Entries whose files are open. */
  readonly #open = new Set<T>();
  readonly #closed = new Wake();
  #stopping = false;

  /** `entries`: processes of earlier agents, all of them over. */
  constructor(parts: Parts, kind: Kind<T>, entries: Map<string, T>) {
    this.#parts = parts;
    this.#kind = kind;
    this.#entries = entries;
  }

  ids(): string[] {
    return [...this.#entries].filter(([, { forgotten }]) => !forgotten).map(([id]) => id);
  }

  all(): Iterable<T> {
    return this.#entries.values();
  }

  /** The entry of `id`. An unknown id yields an entry that is over with the outcome "expired". */
  find(id: string): T {
    return this.#find(id) ?? this.#over(id, unseen('PROCESS_OUTCOME_EXPIRED', 'unknown_id'));
  }

  /** Waits until the process has started or is over. */
  async begun(id: string, signal: AbortSignal): Promise<T> {
    const one = this.#entries.get(id);
    if (!one) throw this.#parts.journal.wasForgotten(id) ? this.#gone(id) : this.notFound(id);
    await one.begun(signal);
    return one;
  }

  /** Waits until the process has started. Throws `conflict` if it is over. */
  async running(id: string, signal: AbortSignal): Promise<{ one: T; running: Running }> {
    const one = await this.begun(id, signal);
    const { running } = one;
    if (!running) throw this.#gone(id);
    return { one, running };
  }

  /** Kills the process of `id`. Returns false if the table has no such id. */
  kill(id: string, graceMs: number): boolean {
    const one = this.#entries.get(id);
    const state = one?.state;
    if (state?.is === 'running') state.running.kill('cancelled', graceMs);
    if (state?.is === 'accepted') state.cancelled = Math.min(graceMs, state.cancelled ?? graceMs);
    return one !== undefined;
  }

  /** Removes the entry and its output. A running process is only marked, and removed when it is over. */
  async forget(id: string): Promise<void> {
    const one = this.#entries.get(id);
    if (one) one.forgotten = true;
    if (one?.exit) await this.#remove(id, one);
  }

  /** Kills all running processes. Resolves when all are over. */
  async stop(): Promise<void> {
    this.#stopping = true;
    for (const { running } of this.#open) running?.kill('stopped', this.#parts.limits.stopGraceMs);
    const never = new AbortController().signal;
    while (this.#open.size > 0) await this.#closed.wait(never);
  }

  notFound(id: string): AppError {
    const { name, notFound } = this.#kind;
    const what = name === 'command' ? 'process' : name;
    return new AppError(notFound, `no such ${what} on this machine`, { [`${name}_id`]: id });
  }

  /** Starts a process for `id`, or returns the entry if this id was requested before. */
  async start(id: string, signal: AbortSignal, prepare: (one: T) => Promise<Prepared>): Promise<T> {
    const known = this.#find(id);
    // An expired process was dropped before it was spawned, so it surely never ran and may be started again.
    if (known && known.exit?.outcome !== 'PROCESS_OUTCOME_EXPIRED') return known;
    const one = this.#add(id);
    const [accepted, prepared] = await Promise.allSettled([
      this.#parts.journal.accept(id, this.#kind.name),
      prepare(one),
    ]);
    if (accepted.status === 'rejected') {
      if (prepared.status === 'fulfilled') await closeUnused(prepared.value.stdio);
      this.#refuse(id, one, fromErrno(accepted.reason, 'journal'));
    }
    try {
      if (prepared.status === 'rejected') throw prepared.reason;
      await this.#run(id, one, prepared.value, signal);
    } catch (error) {
      await this.#finish(id, one, error instanceof SpawnerDied ? outcomes.orphaned : this.#notStarted(error));
    }
    return one;
  }

  #find(id: string): T | undefined {
    const { journal } = this.#parts;
    const one = this.#entries.get(id);
    if (one) return one;
    // The id belongs to the other kind: a terminal in the table of commands, or the reverse.
    if (journal.entries.has(id)) throw this.notFound(id);
    // The process ran, and its result was removed after the broker acknowledged it.
    return journal.wasForgotten(id) ? this.#over(id, unseen('PROCESS_OUTCOME_LOST', 'forgotten')) : undefined;
  }

  #over(id: string, exit: Exit): T {
    return this.#kind.create(id).restore({ exit });
  }

  #gone(id: string): AppError {
    const { name } = this.#kind;
    return new AppError('conflict', `the ${name} is over`, { [`${name}_id`]: id });
  }

  /** Runs in the same turn of the event loop as the look-up, so an id cannot be added twice. */
  #add(id: string): T {
    const { name, limit } = this.#kind;
    if (!/^[\w-]{1,100}$/.test(id)) throw new AppError('invalid_request', `a ${name} needs an id`);
    if (this.#stopping) throw new AppError('unavailable', 'the agent is stopping');
    if ([...this.#open].filter(({ exit }) => !exit).length >= limit) {
      throw new AppError('unavailable', `${limit} ${name}s run on this machine already`, { limit });
    }
    const one = this.#kind.create(id);
    this.#entries.set(id, one);
    this.#open.add(one);
    return one;
  }

  async #run(id: string, one: T, prepared: Prepared, signal: AbortSignal): Promise<void> {
    const { spawners, cgroups, journal, limits, log } = this.#parts;
    const { plan, stdio, ...how } = prepared;
    const cancelled = (): number | undefined =>
      one.state.is === 'accepted' ? one.state.cancelled : undefined;
    await spawners.ready().catch(async (error: unknown) => {
      await closeUnused(stdio);
      throw error;
    });
    // The link may have been lost or replaced meanwhile. No await stands between this check and the spawn
    // request.
    if (signal.aborted || this.#stopping || cancelled() !== undefined) {
      await closeUnused(stdio);
      return this.#finish(id, one, cancelled() === undefined ? dropped : outcomes.cancelled);
    }
    const running = await startRunning(plan, stdio, spawners, { id, cgroups, log, ...limits, ...how });
    const grace = cancelled();
    one.state = { is: 'running', running };
    one.started = { pid: running.pid, at: running.started_at };
    journal.started(id, running, running.started_at);
    one.changed.wake();
    if (this.#stopping) running.kill('stopped', limits.stopGraceMs);
    else if (grace !== undefined) running.kill('cancelled', grace);
    // Neither promise rejects. stop() waits until #finish has removed the entry from #open.
    void running.ended.then(({ cause, ...ending }) =>
      this.#finish(id, one, cause === 'orphaned' ? outcomes.orphaned : { ...outcomes[cause], ...ending }),
    );
  }

  #notStarted(error: unknown): Pick<Exit, 'outcome' | 'reason'> {
    const outcome = 'PROCESS_OUTCOME_NOT_STARTED';
    if (error instanceof NotStarted || error instanceof AppError) return { outcome, reason: error.message };
    this.#parts.log.error({ err: error }, 'a process could not be started');
    const reason = `the agent could not start it (${errnoOf(error) ?? 'unexpected failure'})`;
    return { outcome, reason };
  }

  async #finish(id: string, one: T, how: Pick<Exit, 'outcome'> & Partial<Exit>): Promise<void> {
    const { journal, log } = this.#parts;
    const times = { started_at_ms: one.started?.at ?? 0, finished_at_ms: now() };
    const exit = { exit_code: 0, signal: '', reason: '', ...times, ...one.written(), ...how };
    one.state = { is: 'over', exit };
    journal.ended(id, exit);
    one.changed.wake();
    try {
      await one.close();
      if (one.forgotten) await this.#remove(id, one);
    } catch (error) {
      log.error({ err: error, id }, `the output of a ${this.#kind.name} could not be closed`);
    }
    this.#open.delete(one);
    this.#closed.wake();
  }

  #refuse(id: string, one: T, failure: AppError): never {
    this.#entries.delete(id);
    this.#open.delete(one);
    one.state = { is: 'refused', failure };
    one.changed.wake();
    this.#closed.wake();
    throw failure;
  }

  async #remove(id: string, one: T): Promise<void> {
    this.#entries.delete(id);
    this.#parts.journal.forget(id);
    await one.remove();
  }
}
