// The process table of one kind, commands or terminals: each runs at most once per id, and stays until the broker has
// acknowledged its result. accepted -> running -> over, or accepted -> over, or refused.
import { now } from '../../shared/clock.ts';
import { AppError, type Code, errnoOf, fromErrno } from '../../shared/errors.ts';
import {
  killGraceMs,
  openCommands,
  openTerminals,
  outputWindowBytes,
  readerStallMs,
  terminalClients,
  terminalWindowBytes,
} from '../../shared/limits.ts';
import type { Logger } from '../../shared/logger.ts';
import { Wake } from '../../shared/output.ts';
import type { Cgroups } from './cgroup.ts';
import type { Exit, Journal, JournalEntry, ProcessKind } from './journal.ts';
import { NotStarted, type Plan } from './plan.ts';
import { unseen } from './recover.ts';
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
  /** A follower that has not read for that long no longer holds up a command. */
  stallMs: readerStallMs,
  /** Commands at once. */
  open: openCommands,
  /** Between TERM and KILL at a timeout. */
  graceMs: killGraceMs,
  /** The same when the agent stops. */
  stopGraceMs: 2_000,
  /** How long the background may hold the pipes of a command that has exited. */
  drainMs: 2_000,
  /** How long KILL is repeated. */
  killForMs: 5_000,
  /** A start that takes longer holds up its spawner, and others have the next one. */
  lateMs: 5_000,
  /** How long a forgotten id is still refused. */
  seenMs: 24 * 3_600_000,
  /** Terminals at once. */
  terminals: openTerminals,
  /** Clients of all terminals, with those whose link was lost. */
  clients: terminalClients,
  /** Last bytes stored of a terminal's output. */
  terminalWindowBytes,
  /** Between HUP and KILL when a terminal ends by itself or no client keeps it. */
  hangupMs: 2_000,
  /** How long the place of a client is held that has not come back with the link. */
  heldMs: 5_000,
};
export type Limits = typeof defaultLimits;

/** What commands and terminals share. */
export interface Parts {
  journal: Journal;
  limits: Limits;
  log: Logger;
  spawners: Spawners;
  cgroups: Cgroups | undefined;
}

type State =
  /** The journal and the program are prepared. `cancelled`: the grace of a kill that came meanwhile. */
  | { is: 'accepted'; cancelled?: number }
  | { is: 'running'; running: Running }
  | { is: 'over'; exit: Exit }
  /** The journal could not be written: as if it had never been asked for. */
  | { is: 'refused'; failure: AppError };

/** A command or terminal; `changed` wakes who waits after every change. */
export abstract class Tracked {
  readonly changed = new Wake();
  state: State = { is: 'accepted' };
  started?: { pid: number; at: number };
  /** It is removed as soon as it is over. */
  forgotten = false;

  get running(): Running | undefined {
    return this.state.is === 'running' ? this.state.running : undefined;
  }

  get exit(): Exit | undefined {
    return this.state.is === 'over' ? this.state.exit : undefined;
  }

  /** As the journal of an earlier agent has it. */
  restore({ started, exit }: Pick<JournalEntry, 'started' | 'exit'>): this {
    if (started) this.started = started;
    if (exit) this.state = { is: 'over', exit };
    return this;
  }

  /** Waits until it has started or is over; throws what refused it. */
  async begun(signal: AbortSignal): Promise<void> {
    while (this.state.is === 'accepted' && !signal.aborted) await this.changed.wait(signal);
    if (this.state.is === 'refused') throw this.state.failure;
  }

  /** Bytes written in all. */
  abstract written(): Pick<Exit, 'stdout_bytes' | 'stderr_bytes'>;
  /** Closes its files; it can still be read. */
  abstract close(): Promise<void>;
  /** Nothing is left of it on the disk. */
  abstract remove(): Promise<void>;
}

/** All that is needed to start one. */
export interface Prepared extends Pick<RunOptions, 'first' | 'timeoutMs' | 'leftoversMs'> {
  plan: Plan;
  stdio: Stdio;
}

export interface Kind<T extends Tracked> {
  name: ProcessKind;
  notFound: Code;
  /** At once. */
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
  /** Those whose files are open. */
  readonly #open = new Set<T>();
  readonly #closed = new Wake();
  #stopping = false;

  /** `entries`: of earlier agents, all of them over. */
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

  /** The one of that id; an unknown one has expired. */
  find(id: string): T {
    return this.#find(id) ?? this.#over(id, unseen('PROCESS_OUTCOME_EXPIRED', 'unknown_id'));
  }

  /** Waits until it has started or is over. */
  async begun(id: string, signal: AbortSignal): Promise<T> {
    const one = this.#entries.get(id);
    if (!one) throw this.#parts.journal.wasForgotten(id) ? this.#gone(id) : this.notFound(id);
    await one.begun(signal);
    return one;
  }

  /** Waits until it has started; throws when it is over. */
  async running(id: string, signal: AbortSignal): Promise<{ one: T; running: Running }> {
    const one = await this.begun(id, signal);
    const { running } = one;
    if (!running) throw this.#gone(id);
    return { one, running };
  }

  /** False when there is none. */
  kill(id: string, graceMs: number): boolean {
    const one = this.#entries.get(id);
    const state = one?.state;
    if (state?.is === 'running') state.running.kill('cancelled', graceMs);
    if (state?.is === 'accepted') state.cancelled = Math.min(graceMs, state.cancelled ?? graceMs);
    return one !== undefined;
  }

  /** One that runs is only marked: its output goes when it is over. */
  async forget(id: string): Promise<void> {
    const one = this.#entries.get(id);
    if (one) one.forgotten = true;
    if (one?.exit) await this.#remove(id, one);
  }

  /** Kills what runs; resolves when all is over. */
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

  /** Starts it unless its id was asked for before. */
  async start(id: string, signal: AbortSignal, prepare: (one: T) => Promise<Prepared>): Promise<T> {
    const known = this.#find(id);
    // One that was dropped before its spawn surely never ran: it may be asked for again.
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
    // It is of the other kind.
    if (journal.entries.has(id)) throw this.notFound(id);
    // It ran once; its outcome was handed over and is no longer known here.
    return journal.wasForgotten(id) ? this.#over(id, unseen('PROCESS_OUTCOME_LOST', 'forgotten')) : undefined;
  }

  #over(id: string, exit: Exit): T {
    return this.#kind.create(id).restore({ exit });
  }

  #gone(id: string): AppError {
    const { name } = this.#kind;
    return new AppError('conflict', `the ${name} is over`, { [`${name}_id`]: id });
  }

  /** In the same turn as the look-up, so that an id cannot be added twice. */
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
    // The link may be lost or fenced off by now; from here to the request nothing waits.
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
    // Neither rejects; stop() waits for it through #open.
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
