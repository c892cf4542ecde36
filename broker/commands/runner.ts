// Runs commands: each is handed to its agent once, followed to its end, and ended on request.
import type { ProcessEvent__Output } from '../../proto/types/farhand/agent/v1/ProcessEvent.ts';
import type { Caller } from '../../shared/api/index.ts';
import type { BatchId, MachineId } from '../../shared/api/route.ts';
import { after, every, now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { isId, newId } from '../../shared/ids.ts';
import { killGraceMs } from '../../shared/limits.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Entry, HistoryTransaction } from '../history.ts';
import { acknowledge } from '../link/acknowledge.ts';
import type { Link, Presence } from '../presence/index.ts';
import type { MachineFacts } from '../presence/machine-facts.ts';
import { type Command, type End, endOf, isSound, OpenCommand, type Spec } from './command.ts';
import type { Lifecycle } from './lifecycle.ts';
import type { OutputDirectory } from './output.ts';
import type { Scheduler } from './scheduler.ts';
import type { CommandStore, StoreRooms } from './store.ts';

export interface CommandRooms extends StoreRooms {
  presence: Presence;
  machineFacts: MachineFacts;
  /** Whether a key may still have its command run there. */
  mayRun(command: Command): boolean;
  /** The entry of the audit log for the first machine of a request, for the n-th of them. */
  auditOn(first: Entry, machine: MachineId, n: number): Entry;
}

export interface RunnerRooms extends CommandRooms {
  store: CommandStore;
  outputs: OutputDirectory;
  scheduler: Scheduler;
  lifecycle: Lifecycle;
}

/** A cancelled command that dies within TERM's grace has ended by then. */
export const cancelWaitMs = killGraceMs + 1_000;
/** After this long without its machine, a command's outcome is called unknown. */
const noReportMs = 24 * 3_600_000;
/** So long after the broker's start, machines may still be on their way back. */
const returnMs = 60_000;
/** What did not work is tried again after this. */
const retryMs = 1_000;

export class Runner {
  readonly #rooms: RunnerRooms;
  readonly #log: Logger;
  readonly #lifecycle: Lifecycle;
  readonly #stopped = new AbortController();
  readonly #stops: (() => void)[];
  /** Keys or machines have changed: all that wait are judged. */
  #judging = false;
  #cancelExpiry: () => void = () => {};
  readonly #look = (): void => this.#rooms.scheduler.changed.wake();

  constructor(rooms: RunnerRooms, log: Logger) {
    const { state, events, presence, scheduler } = rooms;
    this.#rooms = rooms;
    this.#lifecycle = rooms.lifecycle;
    this.#log = log;
    this.#stops = [
      presence.watch((machineId, online) => {
        if (online) this.#linked(presence.get(machineId));
        this.#look();
      }),
      state.watch(() => {
        this.#judging = true;
        this.#look();
      }),
      events.listen(({ type, data }) => {
        if (type === 'machine.removed')
          this.#abandon((command) => command.machine_id === data.machine_id, 'machine_removed');
      }),
      every(3_600_000, () => this.#abandon((command) => this.#isSilent(command), 'no_report')),
      after(returnMs, () => {
        scheduler.returning = false;
        this.#look();
      }),
    ];
  }

  /** Takes up what an earlier broker left open; these batches were cancelled. */
  async recover(cancelled: ReadonlySet<BatchId>): Promise<void> {
    const { store, outputs, scheduler } = this.#rooms;
    for (const command of store.open()) {
      const { batch_id } = command;
      const cancel = command.cancel || (batch_id !== null && cancelled.has(batch_id));
      const record = { ...command, cancel };
      const open = new OpenCommand(record, await outputs.reopen(command.id));
      open.stored = true;
      open.recovered = true;
      scheduler.add(open);
      if (open.state !== 'queued') scheduler.takeSlot(open);
    }
    this.#abandonRemoved(scheduler.all());
  }

  /** Persists a command with `also` and starts it, or lets it wait where it may; resolves once it is on disk. */
  async add(command: Command, spec: Spec, requestId: string, also: (journal: HistoryTransaction) => void) {
    const link = this.#rooms.scheduler.placeFor(command);
    const open = this.create({ ...command, journal_id: link?.journalId ?? '' }, requestId);
    // Only what may wait is kept for later: it can hold secrets.
    await this.save([open], also, command.queue_until === null ? undefined : spec).catch((error: unknown) => {
      this.discard([open]);
      throw error;
    });
    if (link && !open.end) void this.#follow(open, link, spec);
    return open;
  }

  /** A command that is not on disk yet, but holds its place. */
  create(command: Command, requestId?: string): OpenCommand {
    const open = new OpenCommand(command, this.#rooms.outputs.fresh(command.id), requestId);
    this.#rooms.scheduler.add(open);
    return open;
  }

  /** Writes new commands together with `also`; those that wait then take their turn. */
  async save(
    added: readonly OpenCommand[],
    also: (transaction: HistoryTransaction) => void,
    spec?: Spec,
  ): Promise<void> {
    const { store, history } = this.#rooms;
    await history.write((transaction) => {
      for (const { record } of added) store.insert(record, spec);
      also(transaction);
    });
    for (const open of added) open.stored = true;
    this.#abandonRemoved(added);
    this.#look();
  }

  /** They could not be stored. */
  discard(added: readonly OpenCommand[]): void {
    for (const open of added) this.#rooms.scheduler.remove(open);
    this.#look();
  }

  /** Requests its end, now or when its machine is back; one that waits never runs. */
  async cancel(open: OpenCommand, by?: Caller): Promise<void> {
    open.cancelledBy = by && { key_id: by.key_id, key_name: by.key_name };
    if (open.state === 'queued' && open.stored) return this.#lifecycle.end(open, { status: 'cancelled' });
    open.record = { ...open.record, cancel: true };
    // It ends as soon as it is stored.
    if (!open.stored) return;
    const { history, presence, store } = this.#rooms;
    const written = history.write(() => {
      if (!open.end) store.update(open.record);
    });
    // A full disk is no reason to let it run on.
    await written.catch((error: unknown) => {
      if (!presence.online(open.record.machine_id)) throw error;
      this.#log.error({ err: error, command_id: open.record.id }, 'a cancel could not be written');
    });
    this.#kill(open);
  }

  /** Lets those that wait take their turn, whenever something has changed, until stop(). Never rejects. */
  async run(): Promise<void> {
    while (!this.#stopped.signal.aborted) {
      try {
        this.#decide();
      } catch (error) {
        this.#log.error({ err: error }, 'queued commands could not take their turn; trying again');
        after(retryMs, this.#look);
      }
      await this.#rooms.scheduler.changed.wait(this.#stopped.signal);
    }
  }

  /** Cancels the members of a batch: first all that wait, so that none of them has its turn meanwhile. */
  async cancelAll(members: readonly OpenCommand[], by: Caller): Promise<void> {
    for (const open of members) if (open.state === 'queued') open.record = { ...open.record, cancel: true };
    this.#look();
    const others = members.filter(({ state }) => state !== 'queued');
    await Promise.all(others.map((open) => this.cancel(open, by)));
  }

  #decide(): void {
    const { scheduler, mayRun } = this.#rooms;
    const decisions = scheduler.decide(this.#judging ? mayRun : undefined);
    let next = decisions.next();
    for (; !next.done; next = decisions.next()) {
      const { open } = next.value;
      if ('end' in next.value) void this.#lifecycle.end(open, next.value.end);
      else
        this.#dispatch(open, next.value.link).catch((error: unknown) => {
          this.#log.error(
            { err: error, command_id: open.record.id },
            'a queued command could not be started',
          );
          after(retryMs, this.#look);
        });
    }
    this.#cancelExpiry();
    if (next.value) {
      setImmediate(this.#look);
      return;
    }
    this.#judging = false;
    const { nextExpiry } = scheduler;
    if (nextExpiry < Number.POSITIVE_INFINITY)
      this.#cancelExpiry = after(Math.max(0, nextExpiry - now()), this.#look);
  }

  /** Writes first that an agent may have it from now on: at most once. */
  async #dispatch(open: OpenCommand, link: Link): Promise<void> {
    const { history, store, scheduler, mayRun } = this.#rooms;
    if (!mayRun(open.record))
      return this.#lifecycle.end(open, { status: 'cancelled', reason: 'key_revoked' });
    const spec = store.specOf(open.record.id);
    if (!spec) return this.#lifecycle.end(open, { status: 'expired', reason: 'no_spec' });
    // No one else is to ask the agent about it before it has it.
    open.followed = true;
    open.record = { ...open.record, journal_id: link.journalId };
    scheduler.takeSlot(open);
    try {
      await history.write(() => store.update(open.record));
    } catch (error) {
      if (!open.end) this.#takeBack(open);
      throw error;
    }
    // Its machine may have been removed meanwhile.
    if (open.end) return;
    if (open.record.cancel) await this.#lifecycle.end(open, { status: 'cancelled' });
    else void this.#follow(open, link, spec);
  }

  #takeBack(open: OpenCommand): void {
    open.followed = false;
    open.record = { ...open.record, journal_id: '' };
    this.#rooms.scheduler.leaveSlot(open);
  }

  /** Whether a command that its machine never heard of is queued again. */
  #requeue(open: OpenCommand): boolean {
    const { history, store } = this.#rooms;
    const { id, queue_until, cancel, started_at } = open.record;
    const mayWait = queue_until !== null && queue_until > now();
    if (started_at !== null || !mayWait || cancel || !store.specOf(id)) return false;
    this.#takeBack(open);
    history
      .write(() => store.update(open.record))
      .catch((error: unknown) =>
        this.#log.error({ err: error }, 'a command is queued again, but not on disk'),
      )
      .finally(() => after(retryMs, this.#look));
    return true;
  }

  /** Hands a command to its agent, or without `spec` goes on where its output ends, until it ends. Never rejects. */
  async #follow(open: OpenCommand, link: Link, spec?: Spec): Promise<void> {
    const { id, machine_id } = open.record;
    open.followed = true;
    try {
      const unrun = await this.#hear(open, link, spec).finally(() => {
        open.followed = false;
      });
      if (open.end) return;
      if (unrun) {
        if (!this.#requeue(open)) await this.#lifecycle.end(open, unrun);
        return;
      }
    } catch (error) {
      this.#log.error({ err: error, command_id: id }, 'a command could not be followed; trying again');
    }
    // A newer link may have come while the old one was still ending, or the machine was only slow.
    after(retryMs, () => {
      const { presence } = this.#rooms;
      if (!this.#stopped.signal.aborted && presence.online(machine_id))
        this.#resume(presence.get(machine_id));
    });
  }

  /** Takes what an agent reports, until that ends; returns the end of one that surely never ran. */
  async #hear(open: OpenCommand, link: Link, spec: Spec | undefined): Promise<End | undefined> {
    const { id, requested_by } = open.record;
    const key_name = this.#rooms.state.keys.get(requested_by)?.name ?? '';
    const options = {
      request_id: spec ? open.requestId : newId('request'),
      caller: { key_id: requested_by, key_name },
      ...({ idle_ms: 0, lane: 'process' } as const),
    };
    const { stdout, stderr } = open.output;
    try {
      const reports = spec
        ? link.stub.startProcess({ id, spec: { ...spec, stdin: Buffer.from(spec.stdin) } }, options)
        : link.stub.followProcess({ id, stdout_offset: stdout.end, stderr_offset: stderr.end }, options);
      for await (const { event } of reports) {
        if (open.end) return undefined;
        const unrun = event ? await this.#take(open, link, event) : undefined;
        if (unrun) return unrun;
      }
      return undefined;
    } catch (error) {
      const why = error instanceof AppError ? error.code : error;
      this.#log.info({ why, command_id: id }, 'lost sight of a command');
      return this.#refused(open, error, spec !== undefined);
    }
  }

  /** The end of one that surely never ran is given back; any other is written. */
  async #take(open: OpenCommand, link: Link, report: ProcessEvent__Output): Promise<End | undefined> {
    const { started, output, exit } = report;
    if (!isSound(report)) await this.#lifecycle.end(open, { status: 'lost', reason: 'bad_report' });
    else if (started) this.#lifecycle.begin(open, started.started_at_ms);
    else if (output) {
      const stream = output.stream === 'OUTPUT_STREAM_STDERR' ? 'stderr' : 'stdout';
      await open.output.append(stream, output.offset, output.data);
    } else if (exit) {
      const end = endOf(exit, open.record, link.journalId);
      if (end.status === 'expired') return end;
      // What the machine lost of the end shows as a gap there.
      const { stdout, stderr } = open.output;
      if (exit.stdout_bytes > stdout.end) await stdout.skip(exit.stdout_bytes);
      if (exit.stderr_bytes > stderr.end) await stderr.skip(exit.stderr_bytes);
      await this.#lifecycle.end(open, end);
    }
    return undefined;
  }

  /** A machine that refused to start it has not run it; whatever may have run stays open, or its end is unknown. */
  async #refused(open: OpenCommand, error: unknown, starting: boolean): Promise<End | undefined> {
    if (!(error instanceof AppError) || ['machine_offline', 'machine_timeout'].includes(error.code)) return;
    const reason = `${error.code}: ${error.message}`;
    const unstarted = starting && open.record.started_at === null;
    if (unstarted && error.code !== 'machine_error') return { status: 'failed', reason };
    // Too busy to report, or in the middle of it: it is asked again.
    if (error.code === 'unavailable' || (starting && !unstarted)) return;
    await this.#lifecycle.end(open, { status: 'lost', reason });
  }

  /** Has its agent end it, now or when that is back. */
  #kill(open: OpenCommand): void {
    const { presence } = this.#rooms;
    const { id, machine_id } = open.record;
    if (this.#stopped.signal.aborted || open.end || !presence.online(machine_id)) return;
    // Its readers have waited long enough for what is still to come.
    open.output.release();
    const options = { request_id: newId('request'), caller: open.cancelledBy };
    presence
      .get(machine_id)
      .stub.killProcess({ id, grace_ms: killGraceMs }, options)
      .catch((error: unknown) => {
        // Its start may still be on the way there.
        this.#log.warn({ err: error, command_id: id }, 'could not cancel; asking again');
        after(retryMs, () => this.#kill(open));
      });
  }

  #linked(link: Link): void {
    this.#resume(link);
    // What ended while the agent was offline, and what is unknown here; terminals belong to sessions.
    const { scheduler, presence } = this.#rooms;
    const settled = link.processIds.filter((id) => !scheduler.get(id) && !isId('session', id));
    acknowledge(presence, link.machineId, settled, this.#log);
  }

  /** Follows every command of a machine that is not followed, and passes on what was requested meanwhile. */
  #resume(link: Link): void {
    for (const open of this.#rooms.scheduler.dispatched(link.machineId)) {
      if (!open.stored || open.followed || open.end) continue;
      void this.#follow(open, link);
      if (open.record.cancel) this.#kill(open);
    }
  }

  #abandonRemoved(among: readonly OpenCommand[]): void {
    const { machines } = this.#rooms.state;
    this.#abandon(({ machine_id }) => !machines.has(machine_id), 'machine_removed', among);
  }

  #abandon(
    test: (command: Command) => boolean,
    reason: string,
    among: readonly OpenCommand[] = this.#rooms.scheduler.all(),
  ): void {
    for (const open of among.filter(({ record, stored }) => stored && test(record)))
      void this.#lifecycle.end(open, { status: open.state === 'queued' ? 'expired' : 'lost', reason });
  }

  #isSilent({ machine_id, created_at, journal_id }: Command): boolean {
    const { presence, machineFacts } = this.#rooms;
    if (journal_id === '' || presence.online(machine_id)) return false;
    return now() - Math.max(created_at, machineFacts.of(machine_id)?.last_seen ?? 0) > noReportMs;
  }

  /** Wakes all who wait; nothing is started any more. */
  stop(): void {
    this.#stopped.abort();
    this.#cancelExpiry();
    for (const stop of this.#stops) stop();
    for (const { cancelTimer, output } of this.#rooms.scheduler.all()) {
      cancelTimer();
      output.stop();
    }
  }
}
