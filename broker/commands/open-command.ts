// One open command, from its first write to its end, across lost links and broker restarts. Its states are:
//
//   queued --> dispatched --> running --> ending --> ended
//     ^------------'
// - queued: no agent has the command.
// - dispatched: an agent may have the command. If the command never started, it can return to queued.
// - running: the agent has reported the start.
// - ending: the outcome is being written. Any of the first three states can change to this one.
// - ended: the outcome is on disk.
// After a lost link or a restart, the broker follows the command (FollowProcess) and does not send it again.
import type { ProcessEvent__Output } from '../../proto/types/farhand/agent/v1/ProcessEvent.ts';
import type { Asking } from '../../shared/agent-rpcs.ts';
import type { Caller } from '../../shared/api/route-table.ts';
import { after, now, sleep } from '../../shared/clock.ts';
import { killGraceMs } from '../../shared/command-and-terminal-limits.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import { ownedElsewhere } from '../history/group-commit.ts';
import type { HistoryTransaction } from '../history/history-database.ts';
import type { Link } from '../presence/index.ts';
import {
  type BatchProgress,
  type Command,
  type End,
  endOf,
  isPlausible,
  type Spec,
} from './command-record.ts';
import { QueueTimeout } from './queue-timeout.ts';
import { type CommandContext, cancelWaitMs } from './shared-by-open-commands.ts';
import type { Output } from './stored-output.ts';

/** Milliseconds before a failed write or call is tried again. */
const retryMs = 1_000;
/** Milliseconds after which a failed write of a command's final record is tried again. */
const rewriteMs = 5_000;
/** Milliseconds until a command's start is written. If the command ends sooner, one write stores start and end. */
const announceMs = 10;

export class OpenCommand {
  record: Command;
  readonly output: Output;
  readonly batch: BatchProgress | undefined;
  readonly queueTimeout: QueueTimeout;
  /** True once the command is on disk. Only a command on disk is started or ended. */
  stored = false;
  /** The final record, set when the command ends and written to disk a little later. */
  end: Command | undefined;
  /** The final record after it was written to disk. The output is complete by then. */
  ended: Command | undefined;
  /** True once another broker owns the machine. This object then writes nothing any more. */
  #isDropped = false;
  /** Settles when the latest input request is done. The next input request waits for that. Never rejects. */
  input: Promise<unknown> = Promise.resolve();
  readonly #context: CommandContext;
  /** Id of the request that created the command, for the machine's audit log. */
  readonly #requestId: string;
  #inSlot = false;
  /** True while a call reads the agent's reports on the command. */
  #followed = false;
  /** True once the event command.started is written or is part of a transaction. */
  #announced: boolean;
  /** The caller that cancelled the command, for the machine's audit log. */
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
    this.queueTimeout = new QueueTimeout(record.queue_until);
    this.#requestId = requestId;
    this.#announced = record.started_at !== null;
  }

  get state(): 'queued' | 'dispatched' | 'running' | 'ending' | 'ended' {
    if (this.end) return this.ended ? 'ended' : 'ending';
    if (this.record.journal_id === '') return 'queued';
    return this.record.status === 'running' ? 'running' : 'dispatched';
  }

  /** Returns the record with the output so far, at most `most` bytes of each stream. */
  async current(most?: number): Promise<Command> {
    const { output } = this;
    if (this.ended || output.silent) return this.ended ?? this.record;
    const tails = { stdout: await output.tail('stdout', most), stderr: await output.tail('stderr', most) };
    return this.ended ?? { ...this.record, ...tails, ...output.extent() };
  }

  /** Waits until the command has started or ended, at most `ms` milliseconds, and only until the signal fires. */
  untilStarted(ms: number, signal: AbortSignal): Promise<void> {
    const { output } = this;
    const started = (): boolean => this.record.started_at !== null || this.ended !== undefined;
    return output.changed.until(() => started() || output.stopped, ms, signal);
  }

  /** Waits until the command's end is on disk, at most `ms` milliseconds, and only until the signal fires. */
  untilEnded(ms: number, signal?: AbortSignal): Promise<void> {
    return this.output.changed.until(() => this.ended !== undefined || this.output.stopped, ms, signal);
  }

  /** Stops all work on the command, because another broker owns its machine, and deletes its output here. */
  drop(): void {
    // If the end is being written, its record may be on disk already, and it refers to the files.
    const isEnding = this.end !== undefined;
    this.#isDropped = true;
    this.#cancelAnnouncement();
    this.end ??= this.record;
    this.#leaveSlot();
    if (this.batch) this.batch.open -= 1;
    this.output.stop();
    void (isEnding ? this.output.close() : this.#context.outputs.drop(this.record.id, this.output));
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

  /** Records in the database that the agent may have the command, and then sends the command. Never rejects. */
  async dispatch(link: Link): Promise<void> {
    const { store, scheduler, mayRun } = this.#context;
    try {
      if (!mayRun(this.record)) return await this.finish({ status: 'cancelled', reason: 'key_revoked' });
      // Set before the first await, so that the scheduler does not send the command twice.
      this.#followed = true;
      this.record = { ...this.record, journal_id: link.journalId };
      this.takeSlot();
      const spec = await store.history.write(async (transaction) => {
        if (this.batch && (await store.batches.isFull(this.batch, transaction))) return 'full';
        store.dispatched(this.record, transaction);
        return store.specOf(this.record.id, transaction);
      });
      // The batch has no free slot, or too many failures at all brokers together. The command stays queued.
      if (spec === 'full') return this.end ? undefined : this.#markUnsent();
      // The command may have ended during the write, e.g. because its machine was removed.
      if (this.end) return;
      if (this.record.cancel) await this.finish({ status: 'cancelled' });
      else await this.follow(link, spec);
    } catch (error) {
      this.#logError(error, 'a queued command could not be sent; trying again in 1 s');
      if (!this.end) this.#markUnsent();
      after(retryMs, () => scheduler.decideSoon());
    }
  }

  #markUnsent(): void {
    this.#followed = false;
    this.record = { ...this.record, journal_id: '' };
    this.#leaveSlot();
  }

  /**
   * Requeues a command that certainly never ran. Returns false if the command may not wait, or its spec is not stored.
   */
  async #requeue(): Promise<boolean> {
    const { store, scheduler } = this.#context;
    if (!this.#mayWait()) return false;
    const spec = await store
      .specOf(this.record.id)
      .catch((error: unknown) =>
        this.#logError(error, 'a command that never ran is not queued again: its spec could not be read'),
      );
    // The command may have been cancelled or have ended while the spec was being read.
    if (!spec || !this.#mayWait()) return false;
    this.#markUnsent();
    this.queueTimeout.awaitReturn();
    const { record } = this; // The write runs later. By then, sending the command again may have replaced this.record.
    store.history
      .write((transaction) => store.update(record, transaction))
      .catch((error: unknown) =>
        this.#logError(error, 'a command that never ran is sent again, but could not be stored as queued'),
      )
      .finally(() => after(retryMs, () => scheduler.decideSoon()));
    return true;
  }

  /** True if a command that never ran may wait for another try. */
  #mayWait(): boolean {
    const { cancel, started_at } = this.record;
    return this.queueTimeout.mayRetry() && !this.end && started_at === null && !cancel;
  }

  /** Sends the command and reads the agent's reports. Without `spec`, only reads further reports. Never rejects. */
  async follow(link: Link, spec?: Spec): Promise<void> {
    this.#followed = true;
    const neverRan = await this.#readReports(link, spec);
    if (neverRan && (await this.#requeue())) return;
    this.#followed = false;
    if (this.end) return;
    if (neverRan) await this.finish(this.record.cancel ? { status: 'cancelled' } : neverRan);
    // The reports ended before the command did, because the machine has a newer link or was slow: they are read again.
    else after(retryMs, () => this.resume());
  }

  /** If a linked agent has the command and no call follows it yet, follows it and sends a pending cancellation. */
  resume(): void {
    const { presence, stopping } = this.#context;
    const { machine_id, journal_id, cancel } = this.record;
    if (!this.stored || this.#followed || this.end || journal_id === '') return;
    const link = presence.find(machine_id);
    if (stopping.aborted || !link) return;
    void this.follow(link);
    if (cancel) this.#kill();
  }

  /** Reads an agent's reports. Returns an End if the command certainly never ran. Never rejects. */
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
        const unrun = event ? await this.#handleReport(link, event) : undefined;
        if (unrun) return unrun;
      }
      return undefined;
    } catch (error) {
      const why = error instanceof AppError ? error.code : error;
      log.info({ why, command_id: id }, 'a call to an agent failed while starting or following a command');
      return this.#handleFailure(error, spec !== undefined);
    }
  }

  /** Handles one report. Stores the end of a command that ran. Returns the end of a command that never ran. */
  async #handleReport(link: Link, report: ProcessEvent__Output): Promise<End | undefined> {
    const { started, output, exit } = report;
    if (!isPlausible(report)) await this.finish({ status: 'lost', reason: 'bad_report' });
    else if (started) this.#start(started.started_at_ms);
    else if (output) {
      const stream = output.stream === 'OUTPUT_STREAM_STDERR' ? 'stderr' : 'stdout';
      await this.output.append(stream, output.offset, output.data);
    } else if (exit) {
      const end = endOf(exit, this.record, link.journalId);
      if (end.status === 'expired') return end; // The command never ran, so it may be queued again.
      // The machine may have lost the last output before the exit. skip() then records a gap, which is sent to readers.
      const { stdout, stderr } = this.output;
      if (exit.stdout_bytes > stdout.end) await stdout.skip(exit.stdout_bytes);
      if (exit.stderr_bytes > stderr.end) await stderr.skip(exit.stderr_bytes);
      await this.finish(end);
    }
    return undefined;
  }

  /**
   * Handles a failed call to the agent. Returns an end if the agent could not take the command now, for example because
   * too many commands run there. The command then never ran, so it may be queued again.
   */
  async #handleFailure(error: unknown, starting: boolean): Promise<End | undefined> {
    if (!(error instanceof AppError) || ['machine_offline', 'machine_timeout'].includes(error.code)) return;
    const reason = `${error.code}: ${error.message}`;
    const unstarted = starting && this.record.started_at === null;
    if (unstarted && error.code === 'unavailable') return { status: 'failed', reason };
    // The agent was busy, or the call failed after the command had started. follow() then reads the reports again.
    if (error.code === 'unavailable' || (starting && !unstarted)) return;
    // The command ends as failed if it certainly never ran, otherwise as lost.
    await this.finish({ status: unstarted && error.code !== 'machine_error' ? 'failed' : 'lost', reason });
  }

  /** Cancels the command now, or when its machine is online again. If it is queued, it never runs. */
  async cancel(by?: Caller): Promise<void> {
    this.#cancelledBy = by && { key_id: by.key_id, key_name: by.key_name };
    if (this.state === 'queued' && this.stored) {
      void this.finish({ status: 'cancelled' });
      await this.untilEnded(cancelWaitMs);
      const details = { command_id: this.record.id };
      if (!this.ended) throw new AppError('unavailable', 'the cancel is not stored yet; try again', details);
      return;
    }
    this.record = { ...this.record, cancel: true };
    // If the command is not stored yet, nothing is written here. The scheduler ends the command once it is stored.
    if (!this.stored) return;
    const { presence, store } = this.#context;
    const written = store.history.write((transaction) => {
      if (!this.end) store.update(this.record, transaction);
    });
    // The kill is sent even if the write fails, so that the command ends even while the disk is full.
    await written.catch((error: unknown) => {
      if (!presence.online(this.record.machine_id)) throw error;
      this.#logError(error, 'a cancellation could not be stored; the command is killed anyway');
    });
    this.#kill();
  }

  /** Sends the agent the request to end the command. If the agent is offline, resume() sends it later. */
  #kill(): void {
    const { presence, stopping, log } = this.#context;
    const { id, machine_id } = this.record;
    const link = presence.find(machine_id);
    if (stopping.aborted || this.end || !link) return;
    // Slow readers of the output must not delay the end.
    this.output.release();
    const options = { request_id: newId('request'), caller: this.#cancelledBy };
    link.stub.killProcess({ id, grace_ms: killGraceMs }, options).catch((error: unknown) => {
      // The agent refuses to kill a command that it does not know yet: the kill may arrive before the command.
      log.warn({ err: error, command_id: id }, 'a command could not be killed yet; trying again in 1 s');
      after(retryMs, () => this.#kill());
    });
  }

  /** Handles the start that the agent reported. */
  #start(started_at: number): void {
    if (this.record.status !== 'queued') return;
    this.record = { ...this.record, status: 'running', started_at };
    this.output.changed.wake();
    const { store, stopping } = this.#context;
    this.#cancelAnnouncement = after(announceMs, () => {
      if (stopping.aborted) return;
      store.history
        .write((transaction) => this.#announce(transaction))
        .catch((error: unknown) => {
          this.#announced = false;
          this.#logError(error, 'could not store the start of a command; trying again when the command ends');
        });
    });
  }

  #announce(transaction: HistoryTransaction): void {
    if (this.#announced || this.record.started_at === null) return;
    this.#announced = true;
    const { store } = this.#context;
    if (!this.end) store.update({ ...this.record, ...this.output.extent() }, transaction);
    store.announce(this.record, transaction);
  }

  /** Ends the command, unless it has ended. Resolves when the end is on disk or the broker stops. Never rejects. */
  async finish(outcome: End): Promise<void> {
    if (this.end) return;
    this.#cancelAnnouncement();
    this.end = { ...this.record, finished_at: now(), ...outcome };
    const end = { ...this.end, ...(await this.output.final()) };
    const { store, ends, stopping } = this.#context;
    await ends.enter();
    const announced = this.#announced;
    // A write that fails (disk full) is tried again until it succeeds.
    while (!stopping.aborted && !this.#isDropped) {
      try {
        await store.history.write((transaction) => {
          if (this.#isDropped) throw ownedElsewhere();
          this.record = { ...this.record, started_at: end.started_at };
          this.#announce(transaction);
          return store.end(end, transaction);
        });
        return this.#close(end);
      } catch (error) {
        if (this.#isDropped) return;
        this.#logError(error, 'the end of a command could not be stored; trying again in 5 s');
        this.#announced = announced;
        await sleep(rewriteMs, stopping);
      }
    }
  }

  #logError(err: unknown, message: string): void {
    this.#context.log.error({ err, command_id: this.record.id }, message);
  }

  #close(end: Command): void {
    const { store, scheduler, acknowledgements, cluster } = this.#context;
    const batch = this.#isDropped ? undefined : this.batch;
    this.record = end;
    this.ended = end;
    scheduler.remove(end.id);
    this.#leaveSlot();
    if (batch) {
      batch.open -= 1;
      if (end.status !== 'completed' && !cluster) batch.failures += 1;
      if (batch.open === 0) store.batches.dropSpec(batch.id);
    }
    store.limitOutput(end.kept_bytes);
    this.output.changed.wake();
    if (end.journal_id !== '') acknowledgements.add(end.machine_id, [end.id]);
    scheduler.decideSoon();
  }
}
