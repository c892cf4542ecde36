// The scheduler: decides which waiting command starts next, and ends commands that can no longer run. It contains all
// open commands, in the order of their creation.

import type { Caller } from '../../shared/api/route-table.ts';
import { after, every, now } from '../../shared/clock.ts';
import { openCommands, waitingCommands } from '../../shared/command-and-terminal-limits.ts';
import { AppError } from '../../shared/errors.ts';
import { isId } from '../../shared/ids-and-secrets.ts';
import type { HistoryTransaction } from '../history/history-database.ts';
import type { Link } from '../presence/index.ts';
import type { BatchProgress, Command, End, Spec } from './command-record.ts';
import { OpenCommand } from './open-command.ts';
import type { CommandContext } from './shared-by-open-commands.ts';

/**
 * Maximum number of decisions in one turn of the event loop; each decision causes a write, and most decisions also
 * cause a call to an agent.
 */
const mostDecisions = 32;
/** Milliseconds until the scheduler tries again after an error. */
const retryMs = 1_000;
/** A command that was sent to its machine counts as lost if the machine is offline for this many milliseconds. */
const noReportMs = 24 * 3_600_000;
const silenceCheckMs = 3_600_000;

/** The machines or batches whose open commands are loaded. If neither is set, all open commands are loaded. */
interface Selection {
  machineIds?: readonly string[];
  batchIds?: readonly string[];
}

export class Scheduler {
  readonly #context: CommandContext;
  readonly #stops: (() => void)[];
  readonly #open = new Map<string, OpenCommand>();
  readonly #byMachine = new Map<string, Set<OpenCommand>>();
  /** True after a change of keys or machines. The next round then checks the rights of all waiting commands. */
  #checkingRights = false;
  #isDecisionPlanned = false;
  /** Number of calls of #load() that are in progress. */
  #loads = 0;
  /**
   * Ids of commands that ended while open commands were being read from the database. The result of the read may still
   * contain them as open.
   */
  readonly #endedWhileLoading = new Set<string>();
  #cancelExpiry = (): void => {};

  constructor(context: Omit<CommandContext, 'scheduler'>) {
    const { state, events, presence } = context;
    this.#context = { ...context, scheduler: this };
    this.#stops = [
      presence.watch((machineId, online) => {
        if (online) this.#linked(presence.get(machineId));
        else for (const open of this.#on(machineId)) open.queueTimeout.awaitReturn();
        this.decideSoon();
      }),
      state.watch(() => {
        this.#checkingRights = true;
        this.decideSoon();
      }),
      events.listen(['machine.removed'], ({ data }) =>
        this.#abandon('machine_removed', ({ machine_id }) => machine_id === data.machine_id),
      ),
      every(silenceCheckMs, () => this.#abandon('no_report', (command) => this.#isSilent(command))),
    ];
  }

  /** Removes incomplete batches, and loads the commands that had not ended when an earlier broker process stopped. */
  async recover(): Promise<void> {
    await this.#context.store.batches.removeIncomplete();
    await this.#load();
  }

  /** Loads the open commands of machines that this broker owns from now on. */
  adopt(machineIds: readonly string[]): Promise<void> {
    return this.#load({ machineIds });
  }

  /** Loads the open commands of these batches on machines of this broker. Another broker has stored the batches. */
  adoptBatches(batchIds: readonly string[]): Promise<void> {
    return this.#load({ batchIds });
  }

  /** Groups the open commands at this broker by their batch. Each key is the progress of a batch. */
  membersByBatch(): Map<BatchProgress, OpenCommand[]> {
    const members = this.all().filter(({ batch }) => batch !== undefined);
    // The cast is safe: commands without a batch were left out.
    return Map.groupBy(members, ({ batch }) => batch as BatchProgress);
  }

  /** Drops the open commands of a machine that another broker owns now. Writes nothing. */
  drop(machineId: string): void {
    for (const open of this.#on(machineId)) {
      open.drop();
      this.#forget(open);
    }
  }

  async #load(some: Selection = {}): Promise<void> {
    this.#loads += 1;
    try {
      await this.#loadOpen(some);
    } finally {
      this.#loads -= 1;
      if (this.#loads === 0) this.#endedWhileLoading.clear();
    }
  }

  async #loadOpen(some: Selection): Promise<void> {
    const { store, outputs } = this.#context;
    const commands = (await store.open(some)).filter(({ id }) => !this.#open.has(id));
    const batches = commands.some(({ batch_id }) => batch_id !== null) ? await this.#progress() : undefined;
    const loaded: OpenCommand[] = [];
    for (const command of commands) {
      const output = await outputs.reopen(command.id);
      // Meanwhile another broker may have taken over the machine, or this broker may have added or ended the command.
      const isKnown = this.#open.has(command.id) || this.#endedWhileLoading.has(command.id);
      if (isKnown || !store.history.owns(command.machine_id)) continue;
      const batch = command.batch_id === null ? undefined : batches?.get(command.batch_id);
      // A command that no agent has (no journal_id) must not start while another broker is still writing its batch to
      // the database. adoptBatches() loads the command once the batch is complete.
      if (batch?.isComplete === false && command.journal_id === '') continue;
      const record = { ...command, cancel: command.cancel || (batch?.cancel ?? false) };
      const open = new OpenCommand(this.#context, record, output, { batch });
      if (!some.batchIds) open.queueTimeout.awaitReturn();
      this.#add(open);
      if (batch) batch.open += 1;
      if (open.state !== 'queued') open.takeSlot();
      loaded.push(open);
    }
    this.#release(loaded);
    this.decideSoon();
  }

  /** Returns the progress of each open batch, from memory if it is there, otherwise from the database. */
  async #progress(): Promise<Map<string, BatchProgress>> {
    const stored = await this.#context.store.batches.open();
    const inMemory = this.all().flatMap(({ batch }) => batch ?? []);
    return new Map([...stored, ...inMemory].map((batch) => [batch.id, batch]));
  }

  /**
   * Stores a command in one transaction with the writes of `also`. Then starts the command or queues it.
   * Resolves when the command is on disk.
   */
  async accept(
    command: Command,
    spec: Spec,
    requestId: string,
    also: (transaction: HistoryTransaction) => void,
  ): Promise<OpenCommand> {
    const { store } = this.#context;
    const link = this.#linkFor(command);
    const open = this.create({ ...command, journal_id: link?.journalId ?? '' }, requestId);
    const write = (transaction: HistoryTransaction): void => {
      // The spec can contain secrets. It is stored only for a command that waits in the queue now, or may wait there
      // later.
      store.insert(open.record, link && command.queue_until === null ? undefined : spec, transaction);
      also(transaction);
    };
    await this.store([open], () => store.history.write(write));
    if (link && !open.end) void open.follow(link, spec);
    return open;
  }

  /** Registers a command that is not on disk yet. It counts toward the machine's limits at once. */
  create(command: Command, requestId: string, batch?: BatchProgress): OpenCommand {
    const output = this.#context.outputs.fresh(command.id);
    const open = new OpenCommand(this.#context, command, output, { requestId, batch });
    this.#add(open);
    return open;
  }

  /**
   * Runs `write`, which stores these commands. Afterwards the scheduler may start them. If `write` fails, the scheduler
   * removes them.
   */
  async store(added: readonly OpenCommand[], write: () => Promise<void>): Promise<void> {
    try {
      await write();
      this.#release(added);
    } catch (error) {
      for (const { record } of added) this.remove(record.id);
      throw error;
    } finally {
      this.decideSoon();
    }
  }

  /** Lets the scheduler start these commands. If the machine of one of them was removed, ends that command. */
  #release(added: readonly OpenCommand[]): void {
    const { machines } = this.#context.state;
    for (const open of added) open.stored = true;
    this.#abandon('machine_removed', ({ machine_id }) => !machines.has(machine_id), added);
  }

  /** Removes a command that has ended, or was not stored. */
  remove(id: string): void {
    const open = this.#open.get(id);
    if (!open) return;
    if (this.#loads > 0) this.#endedWhileLoading.add(id);
    this.#forget(open);
  }

  #forget(open: OpenCommand): void {
    const { id, machine_id } = open.record;
    this.#open.delete(id);
    const ofMachine = this.#byMachine.get(machine_id);
    ofMachine?.delete(open);
    if (ofMachine?.size === 0) this.#byMachine.delete(machine_id);
  }

  get(id: string): OpenCommand | undefined {
    return this.#open.get(id);
  }

  all(): OpenCommand[] {
    return [...this.#open.values()];
  }

  /** Returns the commands that wait for this machine. */
  waiting(machineId: string): OpenCommand[] {
    return this.#on(machineId).filter(({ state }) => state === 'queued');
  }

  /** Throws unavailable when too many commands wait for this machine already. */
  refuseLongQueue(machineId: string): undefined {
    if (this.waiting(machineId).length < waitingCommands) return undefined;
    throw longQueue(machineId);
  }

  /**
   * Cancels commands of a batch. The batch is marked first, so that none of its waiting commands starts meanwhile, not
   * even one that is added later because the batch is still being stored.
   */
  async cancelAll(members: readonly OpenCommand[], by?: Caller): Promise<void> {
    for (const { batch } of members) if (batch) batch.cancel = true;
    this.decideSoon();
    await Promise.all(members.filter(({ state }) => state !== 'queued').map((open) => open.cancel(by)));
  }

  /** Schedules a round of decisions on the waiting commands; does nothing once the broker stops. */
  decideSoon(): void {
    const { stopping, log } = this.#context;
    if (this.#isDecisionPlanned || stopping.aborted) return;
    this.#isDecisionPlanned = true;
    setImmediate(() => {
      this.#isDecisionPlanned = false;
      try {
        if (!stopping.aborted) this.#decide();
      } catch (error) {
        log.error({ err: error }, 'the scheduler of queued commands failed; trying again in 1 s');
        after(retryMs, () => this.decideSoon());
      }
    });
  }

  /** Starts no more commands, and wakes the readers that wait for output of open commands. */
  stop(): void {
    for (const stop of this.#stops) stop();
    for (const { output } of this.all()) output.stop();
  }

  #add(open: OpenCommand): void {
    const { id, machine_id } = open.record;
    this.#open.set(id, open);
    const there = this.#byMachine.get(machine_id) ?? new Set();
    this.#byMachine.set(machine_id, there.add(open));
  }

  #on(machineId: string): OpenCommand[] {
    return [...(this.#byMachine.get(machineId) ?? [])];
  }

  /** Returns the number of further commands that the agent of this machine may get. */
  #freeOn(machineId: string): number {
    return openCommands - this.#on(machineId).filter(({ record }) => record.journal_id !== '').length;
  }

  /**
   * Returns the link on which a new command starts; undefined if the command has to wait. Throws
   * machine_offline or unavailable.
   */
  #linkFor({ machine_id, queue_until }: Command): Link | undefined {
    const { presence } = this.#context;
    const link = queue_until === null ? presence.get(machine_id) : presence.find(machine_id);
    // A new command must not start before a command that already waits for the machine. A waiting command does not
    // count if its batch has no free slot.
    const isNext = (): boolean => !this.waiting(machine_id).some(({ batch }) => hasSlot(batch));
    return link && this.#freeOn(machine_id) > 0 && isNext() ? link : this.refuseLongQueue(machine_id);
  }

  #decide(): void {
    const freeByMachine = new Map<string, number>();
    let left = mostDecisions;
    let nextExpiryMs = Number.POSITIVE_INFINITY;
    for (const open of this.#open.values()) {
      if (!open.stored || open.state !== 'queued') continue;
      if (left === 0) {
        this.decideSoon();
        return;
      }
      const end = this.#endOf(open);
      const link = end ? undefined : this.#freeLink(open, freeByMachine);
      if (end) void open.finish(end);
      else if (link) void open.dispatch(link);
      else {
        const waitMs = open.queueTimeout.offlineMs();
        if (waitMs > 0) nextExpiryMs = Math.min(nextExpiryMs, waitMs);
        continue;
      }
      left -= 1;
    }
    this.#checkingRights = false;
    this.#cancelExpiry();
    if (nextExpiryMs < Number.POSITIVE_INFINITY)
      this.#cancelExpiry = after(nextExpiryMs, () => this.decideSoon());
  }

  /** Returns the end of a waiting command that will not run; undefined while it may still run. */
  #endOf(open: OpenCommand): End | undefined {
    const { presence, mayRun } = this.#context;
    const { record, batch } = open;
    const { cancel, queue_until, machine_id } = record;
    if (cancel || batch?.cancel) return { status: 'cancelled' };
    if (queue_until !== null && queue_until <= now()) return { status: 'expired', reason: 'queue_expired' };
    if (this.#checkingRights && !mayRun(record)) return { status: 'cancelled', reason: 'key_revoked' };
    if (batch && batch.max_failures !== null && batch.failures > batch.max_failures)
      return { status: 'expired', reason: 'max_failures' };
    if (presence.online(machine_id) || open.queueTimeout.offlineMs() > 0 || !hasSlot(batch)) return undefined;
    // The command occupies a slot of its batch until its failure is counted. Otherwise the next command could start,
    // although this failure is one more than max_failures allows.
    open.takeSlot();
    return { status: 'expired', reason: 'machine_offline' };
  }

  /**
   * Returns the machine's link if the machine may have one more command and the command's batch has a free
   * slot.
   */
  #freeLink({ record: { machine_id }, batch }: OpenCommand, places: Map<string, number>): Link | undefined {
    const link = this.#context.presence.find(machine_id);
    if (!link || !hasSlot(batch)) return undefined;
    const left = places.get(machine_id) ?? this.#freeOn(machine_id);
    places.set(machine_id, left - 1);
    return left > 0 ? link : undefined;
  }

  #linked({ machineId, processIds }: Link): void {
    for (const open of this.#on(machineId)) open.resume();
    // The agent still stores these commands, but they are not open here: their ends are stored, or this broker does not
    // know them. The agent may delete them.
    const settled = processIds.filter((id) => isId('command', id) && !this.#open.has(id));
    this.#context.acknowledgements.add(machineId, settled);
  }

  #abandon(
    reason: string,
    test: (command: Command) => boolean,
    among: readonly OpenCommand[] = this.all(),
  ): void {
    for (const open of among.filter(({ record, stored }) => stored && test(record)))
      void open.finish({ status: open.state === 'queued' ? 'expired' : 'lost', reason });
  }

  #isSilent({ machine_id, created_at, journal_id }: Command): boolean {
    const { presence, machineFacts } = this.#context;
    if (journal_id === '' || presence.online(machine_id)) return false;
    return now() - Math.max(created_at, machineFacts.of(machine_id)?.last_seen ?? 0) > noReportMs;
  }
}

/** Returns the error for a machine for which too many commands wait. */
export function longQueue(machine_id: string): AppError {
  const message = `${waitingCommands} commands already wait for machine ${machine_id}, and no more may wait; try again later`;
  return new AppError('unavailable', message, { machine_id, limit: waitingCommands });
}

function hasSlot(batch: BatchProgress | undefined): boolean {
  return !batch || batch.concurrency === null || batch.running + batch.elsewhere < batch.concurrency;
}
