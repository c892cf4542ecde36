// What runs here of one kind, commands or terminals: each at most once per id, kept until the broker forgets it.
import { now } from '../../shared/clock.ts';
import { AppError, type Code, errnoOf, fromErrno } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import { Wake } from '../../shared/output.ts';
import type { AgentCall } from '../../shared/rpc.ts';
import type { Births } from './births.ts';
import { type Exit, type Journal, type ProcessKind, Unkept } from './journal.ts';
import type { KillerOptions } from './killer.ts';
import { NotStarted, type Plan } from './plan.ts';
import { unseen } from './recover.ts';
import { type Ending, type Run, run, type Stdio } from './run.ts';
import type { Spawners } from './spawner/index.ts';
import { SpawnerDied } from './spawner/process.ts';

export interface Limits {
  /** Last bytes kept of each output stream of a command. */
  windowBytes: number;
  /** A follower that has not read for that long no longer holds up a command. */
  stallMs: number;
  /** Commands at once. */
  open: number;
  /** Between TERM and KILL at a timeout. */
  graceMs: number;
  /** The same when the agent stops. */
  stopGraceMs: number;
  /** How long the background may hold the pipes of a command that has exited. */
  drainMs: number;
  /** How long KILL is repeated. */
  killForMs: number;
  /** A start that takes longer holds up its spawner, and others have the next one. */
  lateMs: number;
  /** How long a forgotten id is still refused. */
  seenMs: number;
  /** Terminals at once. */
  terminals: number;
  /** Clients of all terminals, with those whose link was lost. */
  clients: number;
  /** Last bytes kept of a terminal's output. */
  terminalWindowBytes: number;
  /** Between HUP and KILL when a terminal ends by itself or nobody keeps it. */
  hangupMs: number;
  /** How long the place of a client is held that has not come back with the link. */
  heldMs: number;
}

/** What commands and terminals share. */
export interface Parts {
  journal: Journal;
  limits: Limits;
  log: Logger;
  spawners: Spawners;
  births: Births | undefined;
}

/** One of this room; `changed` wakes whoever waits after every change, `exit` is set when it is over. */
export interface Kept {
  readonly changed: Wake;
  started?: { pid: number; at: number };
  exit?: Exit;
  /** It could not even be accepted. */
  failure?: AppError;
  run?: Run;
  /** A kill came before the process, with this grace. */
  cancelled?: number;
  /** It goes as soon as it is over. */
  forgotten?: boolean;
  /** Bytes written in all. */
  written(): Pick<Exit, 'stdout_bytes' | 'stderr_bytes'>;
  /** Lets go of what it has open; it can still be read. */
  close(): Promise<void>;
  /** Nothing is left of it. */
  remove(): Promise<void>;
}

/** All that one needs before it can be started. */
export interface Prepared extends Pick<KillerOptions, 'first' | 'timeoutMs' | 'leftoversMs'> {
  plan: Plan;
  /** Called once, or never. */
  open(): Stdio;
  /** It has started, or will not. */
  done(): Promise<void>;
}

export interface Kind<T extends Kept> {
  name: ProcessKind;
  notFound: Code;
  /** At once. */
  limit: number;
  /** One that has not begun. */
  make(id: string): T;
}

const outcomes: Record<Ending['cause'], Pick<Exit, 'outcome' | 'reason'>> = {
  exited: { outcome: 'PROCESS_OUTCOME_EXITED', reason: '' },
  timeout: { outcome: 'PROCESS_OUTCOME_TIMEOUT', reason: '' },
  cancelled: { outcome: 'PROCESS_OUTCOME_CANCELLED', reason: '' },
  abandoned: { outcome: 'PROCESS_OUTCOME_CANCELLED', reason: 'grace_period_over' },
  stopped: { outcome: 'PROCESS_OUTCOME_LOST', reason: 'agent_restarted' },
  orphaned: { outcome: 'PROCESS_OUTCOME_LOST', reason: 'spawner_died' },
};

export class Room<T extends Kept> {
  readonly #parts: Parts;
  readonly #kind: Kind<T>;
  readonly #kept: Map<string, T>;
  readonly #open = new Set<T>();
  readonly #settled = new Wake();
  #stopping = false;

  /** `left`: what earlier agents kept, all of it over. */
  constructor(parts: Parts, kind: Kind<T>, left: Map<string, T>) {
    this.#parts = parts;
    this.#kind = kind;
    this.#kept = left;
  }

  ids(): string[] {
    return [...this.#kept].filter(([, { forgotten }]) => !forgotten).map(([id]) => id);
  }

  /** All that are kept, also those that are over. */
  all(): Iterable<T> {
    return this.#kept.values();
  }

  /** The one of that id, or what can be said without it. */
  known(id: string): T {
    return this.#known(id) ?? this.#over(id, unseen('PROCESS_OUTCOME_EXPIRED', 'unknown_id'));
  }

  /** Once it has started; throws when it is over. */
  async running(id: string, signal: AbortSignal): Promise<T & { run: Run }> {
    const kept = await this.begun(id, signal);
    if (isRunning(kept)) return kept;
    throw this.#gone(id);
  }

  /** Once it has started, or is over. */
  async begun(id: string, signal: AbortSignal): Promise<T> {
    const kept = this.#kept.get(id);
    if (!kept) throw this.#parts.journal.wasForgotten(id) ? this.#gone(id) : this.notFound(id);
    while (!kept.run && !kept.exit && !kept.failure && !signal.aborted) await kept.changed.wait(signal);
    if (kept.failure) throw kept.failure;
    return kept;
  }

  /** False when there is none. */
  kill(id: string, graceMs: number): boolean {
    const kept = this.#kept.get(id);
    if (kept?.run) kept.run.kill('cancelled', graceMs);
    else if (kept) kept.cancelled = Math.min(graceMs, kept.cancelled ?? graceMs);
    return kept !== undefined;
  }

  /** While it runs it is only marked: its output goes when it is over. */
  async forget(id: string): Promise<void> {
    const kept = this.#kept.get(id);
    if (kept) kept.forgotten = true;
    if (kept?.exit) await this.#remove(id, kept);
  }

  /** Kills what runs; resolves when all is over. */
  async stop(): Promise<void> {
    this.#stopping = true;
    for (const { run } of this.#open) run?.kill('stopped', this.#parts.limits.stopGraceMs);
    const never = new AbortController().signal;
    while (this.#open.size > 0) await this.#settled.wait(never);
  }

  notFound(id: string): AppError {
    const { name, notFound } = this.#kind;
    const what = name === 'command' ? 'process' : name;
    return new AppError(notFound, `no such ${what} on this machine`, { [`${name}_id`]: id });
  }

  /** Starts it unless its id was asked for before. `prepare` goes on while the disk is busy with the promise. */
  async start(id: string, { signal }: AgentCall, prepare: (kept: T) => Promise<Prepared>): Promise<T> {
    const known = this.#known(id);
    // One that was dropped before its spawn surely never ran: it may be asked for again.
    if (known && known.exit?.outcome !== 'PROCESS_OUTCOME_EXPIRED') return known;
    const kept = this.#make(id);
    const { journal, spawners } = this.#parts;
    // First, so that the disk has it while we prepare; a spawner that is free does it itself, which is sooner.
    const theirs = journal.isNew(id) && spawners.keeps(undefined);
    const accepted = theirs ? undefined : journal.accept(id, this.#kind.name);
    const promise = accepted ? undefined : journal.expect(id, this.#kind.name);
    // Its failure is looked at once the promise is kept.
    const prepared = prepare(kept).catch((error: unknown) => asNotStarted(error, this.#parts.log));
    try {
      await accepted;
    } catch (error) {
      const ready = await prepared;
      if (!(ready instanceof NotStarted)) await ready.done();
      this.#refuse(id, kept, fromErrno(error, 'journal'));
    }
    try {
      await this.#spawn(id, kept, await prepared, { promise, signal });
    } catch (error) {
      if (error instanceof Unkept) {
        journal.refuse(id);
        this.#refuse(id, kept, fromErrno(error.cause, 'journal'));
      }
      if (error instanceof SpawnerDied) await this.#finish(id, kept, outcomes.orphaned);
      else await this.#finish(id, kept, notStarted(asNotStarted(error, this.#parts.log)));
    }
    return kept;
  }

  #known(id: string): T | undefined {
    const kept = this.#kept.get(id);
    if (kept) return kept;
    // It is of the other kind.
    if (this.#parts.journal.entries.has(id)) throw this.notFound(id);
    // It ran once; its outcome was handed over and is no longer known here.
    return this.#parts.journal.wasForgotten(id)
      ? this.#over(id, unseen('PROCESS_OUTCOME_LOST', 'forgotten'))
      : undefined;
  }

  #over(id: string, exit: Exit): T {
    return Object.assign(this.#kind.make(id), { exit });
  }

  #gone(id: string): AppError {
    const { name } = this.#kind;
    return new AppError('conflict', `the ${name} is over`, { [`${name}_id`]: id });
  }

  /** In the same turn as the look-up, so that an id cannot be made twice. */
  #make(id: string): T {
    const { name, limit } = this.#kind;
    if (!/^[\w-]{1,100}$/.test(id)) throw new AppError('invalid_request', `a ${name} needs an id`);
    if (this.#stopping) throw new AppError('unavailable', 'the agent is stopping');
    if ([...this.#open].filter(({ exit }) => !exit).length >= limit) {
      throw new AppError('unavailable', `${limit} ${name}s run on this machine already`, { limit });
    }
    const kept = this.#kind.make(id);
    this.#kept.set(id, kept);
    this.#open.add(kept);
    return kept;
  }

  /** `promise`: one that is yet to be kept. */
  async #spawn(
    id: string,
    kept: T,
    prepared: Prepared | NotStarted,
    { promise, signal }: { promise: string | undefined; signal: AbortSignal },
  ): Promise<void> {
    if (prepared instanceof NotStarted) throw prepared;
    const { spawners, births, journal, limits, log } = this.#parts;
    const { plan, open, done, ...how } = prepared;
    try {
      await spawners.ready(plan.ids);
      if (promise !== undefined && !spawners.keeps(plan.ids)) {
        await this.#promise(id);
        promise = undefined;
        await spawners.ready(plan.ids);
      }
      // The link may have gone or been fenced off meanwhile; from here to the request nothing waits.
      if (signal.aborted || this.#stopping || kept.cancelled !== undefined) return await this.#drop(id, kept);
      kept.run = await run(plan, open(), spawners, { id, promise, births, log, ...limits, ...how });
    } finally {
      await done();
    }
    kept.started = { pid: kept.run.pid, at: kept.run.started_at };
    journal.started(id, kept.run, kept.started.at);
    kept.changed.wake();
    // Whoever asked meanwhile had no process to kill.
    if (this.#stopping) kept.run.kill('stopped', limits.stopGraceMs);
    else if (kept.cancelled !== undefined) kept.run.kill('cancelled', kept.cancelled);
    // Never rejects, nor does what follows; stop() waits for it through #open.
    void kept.run.ended.then(({ cause, ...how }) =>
      this.#finish(id, kept, cause === 'orphaned' ? outcomes[cause] : { ...outcomes[cause], ...how }),
    );
  }

  async #promise(id: string): Promise<void> {
    await this.#parts.journal.accept(id, this.#kind.name).catch((cause: unknown) => {
      throw new Unkept('the journal could not be written', { cause });
    });
  }

  #drop(id: string, kept: T): Promise<void> {
    if (kept.cancelled !== undefined) return this.#finish(id, kept, outcomes.cancelled);
    return this.#finish(id, kept, { outcome: 'PROCESS_OUTCOME_EXPIRED', reason: 'dropped' });
  }

  async #finish(id: string, kept: T, how: Pick<Exit, 'outcome'> & Partial<Exit>): Promise<void> {
    const { journal, log } = this.#parts;
    const times = { started_at_ms: kept.started?.at ?? 0, finished_at_ms: now() };
    kept.exit = { exit_code: 0, signal: '', reason: '', ...times, ...kept.written(), ...how };
    journal.ended(id, kept.exit);
    kept.changed.wake();
    try {
      await kept.close();
      if (kept.forgotten) await this.#remove(id, kept);
    } catch (error) {
      log.error({ err: error, id }, `the output of a ${this.#kind.name} could not be closed`);
    }
    this.#open.delete(kept);
    this.#settled.wake();
  }

  /** The promise could not be written: as if it had never been asked. */
  #refuse(id: string, kept: T, failure: AppError): never {
    this.#kept.delete(id);
    this.#open.delete(kept);
    kept.failure = failure;
    kept.changed.wake();
    this.#settled.wake();
    throw failure;
  }

  async #remove(id: string, kept: T): Promise<void> {
    this.#kept.delete(id);
    this.#parts.journal.forget(id);
    await kept.remove();
  }
}

function isRunning<T extends Kept>(kept: T): kept is T & { run: Run } {
  return kept.run !== undefined && !kept.exit;
}

function notStarted({ message }: NotStarted): Pick<Exit, 'outcome' | 'reason'> {
  return { outcome: 'PROCESS_OUTCOME_NOT_STARTED', reason: message };
}

function asNotStarted(error: unknown, log: Logger): NotStarted {
  if (error instanceof NotStarted) return error;
  if (error instanceof AppError) return new NotStarted(error.message);
  log.error({ err: error }, 'a process could not be started');
  return new NotStarted(`the agent could not start it (${errnoOf(error) ?? 'unexpected failure'})`);
}
