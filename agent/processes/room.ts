// The processes of one agent and what can be asked about them: start, follow, kill, forget.
import { join } from 'node:path';
import type { FollowProcessRequest__Output } from '../../proto/types/farhand/agent/v1/FollowProcessRequest.ts';
import type { ForgetProcessesRequest__Output } from '../../proto/types/farhand/agent/v1/ForgetProcessesRequest.ts';
import type { KillProcessRequest__Output } from '../../proto/types/farhand/agent/v1/KillProcessRequest.ts';
import type { ProcessSpec__Output } from '../../proto/types/farhand/agent/v1/ProcessSpec.ts';
import type { SignalProcessRequest__Output } from '../../proto/types/farhand/agent/v1/SignalProcessRequest.ts';
import type { StartProcessRequest__Output } from '../../proto/types/farhand/agent/v1/StartProcessRequest.ts';
import type { WriteInputRequest__Output } from '../../proto/types/farhand/agent/v1/WriteInputRequest.ts';
import { now } from '../../shared/clock.ts';
import { AppError, errnoOf, fromErrno } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import { newOutput, Wake } from '../../shared/output.ts';
import type { AgentCall } from '../../shared/rpc.ts';
import { isSignal } from '../../shared/signals.ts';
import type { Births } from './births.ts';
import { type Answer, type Followed, follow } from './follow.ts';
import type { Exit, Journal } from './journal.ts';
import { openInput, type PipeSupply } from './pipes.ts';
import { NotStarted, type Plan, plan } from './plan.ts';
import { outputNames, unseen } from './recover.ts';
import { type Ending, type Run, run } from './run.ts';
import { type Spawner, SpawnerDied } from './spawner/index.ts';

export interface Limits {
  /** Last bytes kept of each output stream. */
  windowBytes: number;
  /** A follower that has not read for that long no longer holds up a process. */
  stallMs: number;
  /** Processes at once. */
  open: number;
  /** Between TERM and KILL at a timeout. */
  graceMs: number;
  /** The same when the agent stops. */
  stopGraceMs: number;
  /** How long the background may hold the pipes of a command that has exited. */
  drainMs: number;
  /** How long KILL is repeated. */
  killForMs: number;
  /** How long a forgotten id is still refused. */
  seenMs: number;
}

interface Parts {
  journal: Journal;
  outputs: string;
  limits: Limits;
  log: Logger;
  pipes: PipeSupply;
  spawner: Spawner;
  births: Births | undefined;
  mayRunAs: boolean;
}

/** A process of this room; `exit` is set when it is over. */
interface Kept extends Followed {
  run?: Run;
  /** A kill came before the process, with this grace. */
  cancelled?: number;
  /** It goes as soon as it is over. */
  forgotten?: boolean;
}

const outcomes: Record<Ending['cause'], Exit['outcome']> = {
  exited: 'PROCESS_OUTCOME_EXITED',
  timeout: 'PROCESS_OUTCOME_TIMEOUT',
  cancelled: 'PROCESS_OUTCOME_CANCELLED',
  stopped: 'PROCESS_OUTCOME_LOST',
  orphaned: 'PROCESS_OUTCOME_LOST',
};
const orphaned = { outcome: outcomes.orphaned, reason: 'spawner_died' } as const;
const fromStart = { stdout: 0, stderr: 0 };

export class Room {
  readonly #parts: Parts;
  readonly #kept: Map<string, Kept>;
  readonly #open = new Set<Kept>();
  readonly #settled = new Wake();
  #stopping = false;

  /** `left`: what earlier agents kept, all of it over. */
  constructor(parts: Parts, left: Map<string, Kept>) {
    this.#parts = parts;
    this.#kept = left;
  }

  ids(): string[] {
    return [...this.#kept].filter(([, { forgotten }]) => !forgotten).map(([id]) => id);
  }

  start(request: StartProcessRequest__Output, call: AgentCall): AsyncIterable<Answer> {
    return follow(() => this.#startOnce(request, call), fromStart, call.signal);
  }

  follow(request: FollowProcessRequest__Output, call: AgentCall): AsyncIterable<Answer> {
    const offsets = { stdout: request.stdout_offset, stderr: request.stderr_offset };
    return follow(async () => this.#known(request.id) ?? this.#over(unknownId()), offsets, call.signal);
  }

  async kill({ id, grace_ms }: KillProcessRequest__Output): Promise<object> {
    const kept = this.#kept.get(id);
    if (!kept) {
      if (this.#parts.journal.wasForgotten(id)) return {};
      throw notFound(id);
    }
    if (kept.run) kept.run.kill('cancelled', grace_ms);
    else kept.cancelled = Math.min(grace_ms, kept.cancelled ?? grace_ms);
    return {};
  }

  /** Waits for the start; bytes go in the order of the calls. */
  async input(
    { id, data, offset, end }: WriteInputRequest__Output,
    call: AgentCall,
  ): Promise<{ taken: number }> {
    const { input } = await this.#running(id, call.signal);
    if (!input) throw new AppError('conflict', 'the command was not started with input');
    return { taken: input.write(data, offset, end) };
  }

  async signal({ id, signal }: SignalProcessRequest__Output, call: AgentCall): Promise<object> {
    if (!isSignal(signal)) throw new AppError('invalid_request', `no signal that may be sent: ${signal}`);
    const run = await this.#running(id, call.signal);
    if (!run.signal(signal)) throw over(id);
    return {};
  }

  /** Once it has started. */
  async #running(id: string, signal: AbortSignal): Promise<Run> {
    const kept = this.#kept.get(id);
    if (!kept) throw this.#parts.journal.wasForgotten(id) ? over(id) : notFound(id);
    while (!kept.run && !kept.exit && !kept.failure && !signal.aborted) await kept.changed.wait(signal);
    if (kept.failure) throw kept.failure;
    if (kept.run && !kept.exit) return kept.run;
    throw over(id);
  }

  /** While a process runs it is only marked: its output goes when it is over. */
  async forget({ ids }: ForgetProcessesRequest__Output): Promise<object> {
    for (const id of ids) {
      const kept = this.#kept.get(id);
      if (kept) kept.forgotten = true;
      if (kept?.exit) await this.#remove(id, kept);
    }
    return {};
  }

  async stop(): Promise<void> {
    this.#stopping = true;
    for (const { run } of this.#open) run?.kill('stopped', this.#parts.limits.stopGraceMs);
    const never = new AbortController().signal;
    while (this.#open.size > 0) await this.#settled.wait(never);
    await this.#parts.spawner.stop();
    await this.#parts.births?.close();
    await this.#parts.pipes.close();
    await this.#parts.journal.close();
  }

  #known(id: string): Followed | undefined {
    const kept = this.#kept.get(id);
    if (kept || !this.#parts.journal.wasForgotten(id)) return kept;
    // It ran once; its outcome was handed over and is no longer known here.
    return this.#over(unseen('PROCESS_OUTCOME_LOST', 'forgotten'));
  }

  #over(exit: Exit): Followed {
    return { changed: new Wake(), stdout: newOutput(''), stderr: newOutput(''), exit };
  }

  async #startOnce({ id, spec }: StartProcessRequest__Output, call: AgentCall): Promise<Followed> {
    const known = this.#known(id);
    // One that was dropped before its spawn surely never ran: it may be asked for again.
    if (known && known.exit?.outcome !== 'PROCESS_OUTCOME_EXPIRED') return known;
    if (!/^[\w-]{1,100}$/.test(id) || !spec)
      throw new AppError('invalid_request', 'a process needs an id and a spec');
    const { open } = this.#parts.limits;
    if (this.#stopping) throw new AppError('unavailable', 'the agent is stopping');
    if ([...this.#open].filter(({ exit }) => !exit).length >= open) {
      throw new AppError('unavailable', `${open} commands run on this machine already`, { limit: open });
    }
    const kept = this.#make(id);
    await this.#begin(id, kept, spec, call);
    return kept;
  }

  /** In the same turn as the look-up, so that an id cannot be made twice. */
  #make(id: string): Kept {
    const { outputs, limits } = this.#parts;
    const changed = new Wake();
    const options = { windowBytes: limits.windowBytes, stallMs: limits.stallMs, changed };
    const { stdout, stderr } = outputNames(id);
    const kept: Kept = {
      changed,
      stdout: newOutput(join(outputs, stdout), options),
      stderr: newOutput(join(outputs, stderr), options),
    };
    this.#kept.set(id, kept);
    this.#open.add(kept);
    return kept;
  }

  async #begin(id: string, kept: Kept, spec: ProcessSpec__Output, call: AgentCall): Promise<void> {
    const { journal, log, mayRunAs } = this.#parts;
    // Looked up while the disk is busy with the promise.
    const planned = plan(id, spec, mayRunAs).catch((error: unknown) => asNotStarted(error, log));
    try {
      await journal.accept(id);
    } catch (error) {
      this.#refuse(id, kept, fromErrno(error, 'journal'));
    }
    try {
      await this.#spawn(id, kept, spec, await planned, call);
    } catch (error) {
      if (error instanceof SpawnerDied) return this.#finish(id, kept, orphaned);
      const { message } = asNotStarted(error, log);
      await this.#finish(id, kept, { outcome: 'PROCESS_OUTCOME_NOT_STARTED', reason: message });
    }
  }

  async #spawn(
    id: string,
    kept: Kept,
    spec: ProcessSpec__Output,
    planned: Plan | NotStarted,
    { signal }: AgentCall,
  ): Promise<void> {
    if (planned instanceof NotStarted) throw planned;
    const { pipes, spawner, births, journal, limits, log, outputs } = this.#parts;
    const fixed = spec.stdin.length > 0 && !spec.input;
    const stdin = fixed ? await openInput(spec.stdin, outputs) : undefined;
    try {
      const living = await spawner.ready();
      const own = await pipes.take(spec.input);
      // The link may have gone or been fenced off meanwhile; from here to the request nothing waits.
      if (signal.aborted || this.#stopping || kept.cancelled !== undefined) {
        own.giveBack(true);
        return await this.#drop(id, kept);
      }
      const { stdout, stderr } = kept;
      const input = spec.input ? spec.stdin : undefined;
      const options = {
        id,
        stdin,
        input,
        timeoutMs: spec.timeout_ms,
        stdout,
        stderr,
        births,
        log,
        ...limits,
      };
      kept.run = await run(planned, own, living, options);
    } finally {
      await stdin?.close();
    }
    kept.started = { pid: kept.run.pid, at: kept.run.started_at };
    journal.started(id, kept.run, kept.started.at);
    kept.changed.wake();
    // Whoever asked meanwhile had no process to kill.
    if (this.#stopping) kept.run.kill('stopped', limits.stopGraceMs);
    else if (kept.cancelled !== undefined) kept.run.kill('cancelled', kept.cancelled);
    // Never rejects, nor does what follows; stop() waits for it through #open.
    void kept.run.ended.then((ending) => this.#settle(id, kept, ending));
  }

  async #drop(id: string, kept: Kept): Promise<void> {
    const outcome = kept.cancelled !== undefined ? 'PROCESS_OUTCOME_CANCELLED' : 'PROCESS_OUTCOME_EXPIRED';
    const reason = kept.cancelled !== undefined ? '' : 'dropped';
    await this.#finish(id, kept, { outcome, reason });
  }

  async #settle(id: string, kept: Kept, { cause, exit_code, signal }: Ending): Promise<void> {
    if (cause === 'orphaned') return this.#finish(id, kept, orphaned);
    const reason = cause === 'stopped' ? 'agent_restarted' : '';
    await this.#finish(id, kept, { outcome: outcomes[cause], exit_code, signal, reason });
  }

  async #finish(id: string, kept: Kept, how: Pick<Exit, 'outcome'> & Partial<Exit>): Promise<void> {
    const { journal, log } = this.#parts;
    const times = { started_at_ms: kept.started?.at ?? 0, finished_at_ms: now() };
    const bytes = { stdout_bytes: kept.stdout.end, stderr_bytes: kept.stderr.end };
    kept.exit = { exit_code: 0, signal: '', reason: '', ...times, ...bytes, ...how };
    journal.ended(id, kept.exit);
    kept.changed.wake();
    try {
      await Promise.all([kept.stdout.close(), kept.stderr.close()]);
      if (kept.forgotten) await this.#remove(id, kept);
    } catch (error) {
      log.error({ err: error, id }, 'the output of a command could not be closed');
    }
    this.#open.delete(kept);
    this.#settled.wake();
  }

  /** The promise could not be written: as if it had never been asked. */
  #refuse(id: string, kept: Kept, failure: AppError): never {
    this.#kept.delete(id);
    this.#open.delete(kept);
    kept.failure = failure;
    kept.changed.wake();
    this.#settled.wake();
    throw failure;
  }

  async #remove(id: string, { stdout, stderr }: Kept): Promise<void> {
    this.#kept.delete(id);
    this.#parts.journal.forget(id);
    await Promise.all([stdout.remove(), stderr.remove()]);
  }
}

function notFound(id: string): AppError {
  return new AppError('command_not_found', 'no such process on this machine', { command_id: id });
}

function over(id: string): AppError {
  return new AppError('conflict', 'the command is over', { command_id: id });
}

function unknownId(): Exit {
  return unseen('PROCESS_OUTCOME_EXPIRED', 'unknown_id');
}

function asNotStarted(error: unknown, log: Logger): NotStarted {
  if (error instanceof NotStarted) return error;
  if (error instanceof AppError) return new NotStarted(error.message);
  log.error({ err: error }, 'a process could not be started');
  return new NotStarted(`the agent could not start it (${errnoOf(error) ?? 'unexpected failure'})`);
}
