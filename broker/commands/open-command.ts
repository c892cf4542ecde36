// One open command, from its first write to its end, over lost links and broker restarts:
//
//   queued --> dispatched --> running --> ending --> ended
//     ^------------'
//
// queued: no agent has it. dispatched: its agent has it or is about to; one that surely never started is queued again
// if it may wait. running: its agent has reported the start. From each of these states it can end. ending: the outcome
// is being written; ended: that is on disk, as completed, failed, timeout, cancelled, expired or lost.
// It is handed to an agent once (StartProcess); after a lost link or a restart it is only followed (FollowProcess).
import type { ProcessEvent__Output } from '../../proto/types/farhand/agent/v1/ProcessEvent.ts';
import type { Caller } from '../../shared/api/index.ts';
import type { BatchId } from '../../shared/api/route.ts';
import { after, now, sleep } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';
import { killGraceMs } from '../../shared/limits.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Asking } from '../../shared/rpc.ts';
import type { HistoryTransaction } from '../history.ts';
import type { Acknowledgements } from '../link/acknowledge.ts';
import type { Link, Presence } from '../presence/index.ts';
import type { MachineFacts } from '../presence/machine-facts.ts';
import { type Command, type End, endOf, isSound, type Spec } from './command.ts';
import type { Output, OutputDirectory } from './output.ts';
import type { CommandStore, StoreServices } from './store.ts';

/** What commands need of the broker. */
export interface CommandServices extends StoreServices {
  presence: Presence;
  machineFacts: MachineFacts;
  /** Whether the command's key may still run it on its machine. */
  mayRun(command: Command): boolean;
}

/** What all commands share. */
export interface CommandContext extends CommandServices {
  store: CommandStore;
  outputs: OutputDirectory;
  scheduler: OpenCommands;
  acknowledgements: Acknowledgements;
  /** Fires when the broker stops. */
  stopping: AbortSignal;
  log: Logger;
}

/** The scheduler, as an open command sees it. */
interface OpenCommands {
  remove(open: OpenCommand): void;
  /** Lets those that wait have their turn. */
  look(): void;
}

/** Limits and progress of a batch. */
export interface BatchProgress {
  id: BatchId;
  concurrency: number | null;
  max_failures: number | null;
  /** Its end was requested. */
  cancel: boolean;
  /** Members that have not ended. */
  open: number;
  /** Members that hold a slot: an agent has them, or they are about to end without one. */
  running: number;
  /** Members that ended otherwise than completed. */
  failures: number;
}

/** A cancelled command that dies within TERM's grace has ended by then. */
export const cancelWaitMs = killGraceMs + 1_000;
/** A step that failed is tried again after this. */
const retryMs = 1_000;
/** An end that could not be written is tried again after this. */
const rewriteMs = 5_000;
/** A command that ends within this time has its start and its end in one transaction: half the writes. */
const announceMs = 10;

export class OpenCommand {
  record: Command;
  readonly output: Output;
  readonly batch: BatchProgress | undefined;
  /** The command is on disk; before that it is never started or ended. */
  stored = false;
  /** The command was left open by an earlier broker. */
  recovered = false;
  /** Its record from the moment it has ended; on disk a little later. */
  end: Command | undefined;
  /** Its record, once its end is on disk: all of its output is there. */
  ended: Command | undefined;
  /** The last input on its way; never rejects. */
  input: Promise<unknown> = Promise.resolve();
  readonly #context: CommandContext;
  /** Of the request that made it, for the logs of the machine. */
  readonly #requestId: string;
  /** It holds one of the slots of its batch. */
  #inSlot = false;
  /** A call to its agent follows it. */
  #followed = false;
  /** The event command.started is written, or in a transaction. */
  #announced: boolean;
  /** Who requested its end, for the log of the machine. */
  #cancelledBy: Asking | undefined;
  #cancelAnnouncement = (): void => {};

  constructor(
    context: CommandContext,
    record: Command,
    output: Output,
    { batch, requestId = newId('request') }: { batch?: BatchProgress | undefined; requestId?: string } = {},
  ) {
    this.#context = context;
    this.record = record;
    this.output = output;
    this.batch = batch;
    this.#requestId = requestId;
    this.#announced = record.started_at !== null;
  }

  get state(): 'queued' | 'dispatched' | 'running' | 'ending' | 'ended' {
    if (this.end) return this.ended ? 'ended' : 'ending';
    if (this.record.journal_id === '') return 'queued';
    return this.record.status === 'running' ? 'running' : 'dispatched';
  }

  /** Its record with its output so far; `most` bytes of each stream. */
  async current(most?: number): Promise<Command> {
    const { output } = this;
    if (this.ended || output.silent) return this.ended ?? this.record;
    const tails = { stdout: await output.tail('stdout', most), stderr: await output.tail('stderr', most) };
    return this.ended ?? { ...this.record, ...tails, ...output.extent() };
  }

  /** Resolves when the command has started or ended, after `ms`, or when the signal fires. */
  untilStarted(ms: number, signal: AbortSignal): Promise<void> {
    const { output } = this;
    const started = (): boolean => this.record.started_at !== null || this.ended !== undefined;
    return output.changed.until(() => started() || output.stopped, ms, signal);
  }

  /** Resolves when the command has ended durably, after `ms`, or when the signal fires. */
  untilEnded(ms: number, signal?: AbortSignal): Promise<void> {
    const { output } = this;
    return output.changed.until(() => this.ended !== undefined || output.stopped, ms, signal);
  }

  takeSlot(): void {
    if (!this.batch || this.#inSlot) return;
    this.batch.running += 1;
    this.#inSlot = true;
  }

  #leaveSlot(): void {
    if (this.batch && this.#inSlot) this.batch.running -= 1;
    this.#inSlot = false;
  }

  /** Hands a queued command to its agent; first writes that an agent may have it from now on. Never rejects. */
  async dispatch(link: Link): Promise<void> {
    const { store, scheduler, mayRun, log } = this.#context;
    const { id } = this.record;
    try {
      if (!mayRun(this.record)) return await this.finish({ status: 'cancelled', reason: 'key_revoked' });
      const spec = store.specOf(id);
      if (!spec) return await this.finish({ status: 'expired', reason: 'no_spec' });
      // Not followed by another call before the agent has it.
      this.#followed = true;
      this.record = { ...this.record, journal_id: link.journalId };
      this.takeSlot();
      await store.history.write(() => store.update(this.record));
      // Its machine may have been removed meanwhile.
      if (this.end) return;
      if (this.record.cancel) await this.finish({ status: 'cancelled' });
      else await this.follow(link, spec);
    } catch (error) {
      log.error({ err: error, command_id: id }, 'a queued command could not be started; trying again');
      if (!this.end) this.#takeBack();
      after(retryMs, () => scheduler.look());
    }
  }

  #takeBack(): void {
    this.#followed = false;
    this.record = { ...this.record, journal_id: '' };
    this.#leaveSlot();
  }

  /** Queues a command again that its machine never got; false where it may not wait. */
  #requeue(): boolean {
    const { store, scheduler, log } = this.#context;
    const { id, queue_until, cancel, started_at } = this.record;
    const mayWait = queue_until !== null && queue_until > now();
    if (started_at !== null || !mayWait || cancel || !store.specOf(id)) return false;
    this.#takeBack();
    store.history
      .write(() => store.update(this.record))
      .catch((error: unknown) =>
        log.error({ err: error, command_id: id }, 'a command is queued again, but not on disk'),
      )
      .finally(() => after(retryMs, () => scheduler.look()));
    return true;
  }

  /** Hands the command to its agent, or without `spec` follows it from the end of its output on. Never rejects. */
  async follow(link: Link, spec?: Spec): Promise<void> {
    this.#followed = true;
    const unrun = await this.#readReports(link, spec);
    this.#followed = false;
    if (this.end) return;
    if (!unrun) {
      // A newer link may have come while the old one was still ending, or the machine was only slow.
      after(retryMs, () => this.resume());
    } else if (!this.#requeue()) await this.finish(unrun);
  }

  /** Follows a command that its linked agent has, unless a call does already, and passes on a cancel. */
  resume(): void {
    const { presence, stopping } = this.#context;
    const { machine_id, journal_id, cancel } = this.record;
    if (!this.stored || this.#followed || this.end || journal_id === '') return;
    if (stopping.aborted || !presence.online(machine_id)) return;
    void this.follow(presence.get(machine_id));
    if (cancel) this.#kill();
  }

  /** Reads an agent's reports to their end; returns the end of a command that surely never ran. Never rejects. */
  async #readReports(link: Link, spec: Spec | undefined): Promise<End | undefined> {
    const { state, log } = this.#context;
    const { id, requested_by } = this.record;
    const key_name = state.keys.get(requested_by)?.name ?? '';
    const options = {
      request_id: spec ? this.#requestId : newId('request'),
      caller: { key_id: requested_by, key_name },
      ...({ idle_ms: 0, lane: 'process' } as const),
    };
    const { stdout, stderr } = this.output;
    try {
      const reports = spec
        ? link.stub.startProcess({ id, spec: { ...spec, stdin: Buffer.from(spec.stdin) } }, options)
        : link.stub.followProcess({ id, stdout_offset: stdout.end, stderr_offset: stderr.end }, options);
      for await (const { event } of reports) {
        if (this.end) return undefined;
        const unrun = event ? await this.#take(link, event) : undefined;
        if (unrun) return unrun;
      }
      return undefined;
    } catch (error) {
      const why = error instanceof AppError ? error.code : error;
      log.info({ why, command_id: id }, 'following a command was interrupted');
      return this.#takeFailure(error, spec !== undefined);
    }
  }

  /** Takes one report. Returns the end of a command that surely never ran; any other end is written. */
  async #take(link: Link, report: ProcessEvent__Output): Promise<End | undefined> {
    const { started, output, exit } = report;
    if (!isSound(report)) await this.finish({ status: 'lost', reason: 'bad_report' });
    else if (started) this.#start(started.started_at_ms);
    else if (output) {
      const stream = output.stream === 'OUTPUT_STREAM_STDERR' ? 'stderr' : 'stdout';
      await this.output.append(stream, output.offset, output.data);
    } else if (exit) {
      const end = endOf(exit, this.record, link.journalId);
      if (end.status === 'expired') return end;
      // Output that the machine lost at the end becomes a gap.
      const { stdout, stderr } = this.output;
      if (exit.stdout_bytes > stdout.end) await stdout.skip(exit.stdout_bytes);
      if (exit.stderr_bytes > stderr.end) await stderr.skip(exit.stderr_bytes);
      await this.finish(end);
    }
    return undefined;
  }

  /** A machine that refused to start a command has not run it; one that may have run stays open, or is lost. */
  async #takeFailure(error: unknown, starting: boolean): Promise<End | undefined> {
    if (!(error instanceof AppError) || ['machine_offline', 'machine_timeout'].includes(error.code)) return;
    const reason = `${error.code}: ${error.message}`;
    const unstarted = starting && this.record.started_at === null;
    if (unstarted && error.code !== 'machine_error') return { status: 'failed', reason };
    // The agent was too busy, or the reports broke off in the middle: it is followed again.
    if (error.code === 'unavailable' || (starting && !unstarted)) return;
    await this.finish({ status: 'lost', reason });
  }

  /** Requests the end of a command, now or when its machine is back; a queued one never runs. */
  async cancel(by?: Caller): Promise<void> {
    this.#cancelledBy = by && { key_id: by.key_id, key_name: by.key_name };
    if (this.state === 'queued' && this.stored) return this.finish({ status: 'cancelled' });
    this.record = { ...this.record, cancel: true };
    // A command that is not stored yet ends as soon as it is.
    if (!this.stored) return;
    const { presence, store, log } = this.#context;
    const written = store.history.write(() => {
      if (!this.end) store.update(this.record);
    });
    // A full disk must not let it run on.
    await written.catch((error: unknown) => {
      const { id, machine_id } = this.record;
      if (!presence.online(machine_id)) throw error;
      log.error({ err: error, command_id: id }, 'a cancel could not be written');
    });
    this.#kill();
  }

  /** Has the agent end it; resume() does when the agent is offline now. */
  #kill(): void {
    const { presence, stopping, log } = this.#context;
    const { id, machine_id } = this.record;
    if (stopping.aborted || this.end || !presence.online(machine_id)) return;
    // Slow readers must not hold up the end.
    this.output.release();
    const options = { request_id: newId('request'), caller: this.#cancelledBy };
    presence
      .get(machine_id)
      .stub.killProcess({ id, grace_ms: killGraceMs }, options)
      .catch((error: unknown) => {
        // Its start may not have reached the agent yet.
        log.warn({ err: error, command_id: id }, 'could not cancel a command; trying again');
        after(retryMs, () => this.#kill());
      });
  }

  /** Its agent has reported the start. */
  #start(started_at: number): void {
    if (this.record.status !== 'queued') return;
    this.record = { ...this.record, status: 'running', started_at };
    this.output.changed.wake();
    const { store, stopping, log } = this.#context;
    this.#cancelAnnouncement = after(announceMs, () => {
      if (stopping.aborted) return;
      store.history
        .write((transaction) => this.#announce(transaction))
        .catch((error: unknown) => {
          this.#announced = false;
          log.error(
            { err: error, command_id: this.record.id },
            'the start of a command could not be written',
          );
        });
    });
  }

  #announce(transaction: HistoryTransaction): void {
    if (this.#announced || this.record.started_at === null) return;
    this.#announced = true;
    const { store } = this.#context;
    if (!this.end) store.update({ ...this.record, ...this.output.extent() });
    store.announce(this.record, transaction);
  }

  /** Ends the command; the first end counts. Resolves once that is on disk, or the broker stops. Never rejects. */
  async finish(how: End): Promise<void> {
    if (this.end) return;
    this.#cancelAnnouncement();
    this.end = { ...this.record, finished_at: now(), ...how };
    const end = { ...this.end, ...(await this.output.final()) };
    const { store, stopping, log } = this.#context;
    const announced = this.#announced;
    // A write that fails (disk full) is tried again until it succeeds.
    while (!stopping.aborted) {
      try {
        await store.history.write((transaction) => {
          this.record = { ...this.record, started_at: end.started_at };
          this.#announce(transaction);
          store.end(end, transaction);
        });
        return this.#close(end);
      } catch (error) {
        log.error(
          { err: error, command_id: end.id },
          'the end of a command could not be written; trying again',
        );
        this.#announced = announced;
        await sleep(rewriteMs, stopping);
      }
    }
  }

  #close(end: Command): void {
    const { store, scheduler, acknowledgements } = this.#context;
    const { batch } = this;
    this.record = end;
    this.ended = end;
    scheduler.remove(this);
    this.#leaveSlot();
    if (batch) {
      batch.open -= 1;
      if (end.status !== 'completed') batch.failures += 1;
      if (batch.open === 0) store.dropSpec(batch.id);
    }
    store.limitOutput(end.kept_bytes);
    this.output.changed.wake();
    if (end.journal_id !== '') acknowledgements.add(end.machine_id, [end.id]);
    scheduler.look();
  }
}
