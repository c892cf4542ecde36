// Accepts commands, takes up what an earlier broker left open, and ends what can run no more.
import type { Caller } from '../../shared/api/index.ts';
import type { BatchId } from '../../shared/api/route.ts';
import { every, now } from '../../shared/clock.ts';
import { isId } from '../../shared/ids.ts';
import type { HistoryTransaction } from '../history.ts';
import type { Link } from '../presence/index.ts';
import type { Command, Spec } from './command.ts';
import { type BatchProgress, type CommandContext, OpenCommand } from './open-command.ts';
import type { Scheduler } from './scheduler.ts';

/** After this long without its machine, a command's outcome is called unknown. */
const noReportMs = 24 * 3_600_000;
const silenceCheckMs = 3_600_000;

export interface RunnerContext extends CommandContext {
  scheduler: Scheduler;
}

export class Runner {
  readonly #context: RunnerContext;
  readonly #stops: (() => void)[];

  constructor(context: RunnerContext) {
    const { state, events, presence, scheduler } = context;
    this.#context = context;
    this.#stops = [
      presence.watch((machineId, online) => {
        if (online) this.#linked(presence.get(machineId));
        scheduler.look();
      }),
      state.watch(() => scheduler.checkRights()),
      events.listen(({ type, data }) => {
        if (type === 'machine.removed')
          this.#abandon('machine_removed', ({ machine_id }) => machine_id === data.machine_id);
      }),
      every(silenceCheckMs, () => this.#abandon('no_report', (command) => this.#isSilent(command))),
    ];
  }

  /** Takes up what an earlier broker left open, with the batches of it. */
  async recover(batches: ReadonlyMap<BatchId, BatchProgress>): Promise<void> {
    const { store, outputs, scheduler } = this.#context;
    for (const command of store.open()) {
      const batch = command.batch_id === null ? undefined : batches.get(command.batch_id);
      const record = { ...command, cancel: command.cancel || (batch?.cancel ?? false) };
      const open = new OpenCommand(this.#context, record, await outputs.reopen(command.id), { batch });
      open.stored = true;
      open.recovered = true;
      scheduler.add(open);
      if (open.state !== 'queued') open.takeSlot();
    }
    this.#abandonRemoved(scheduler.all());
    scheduler.look();
  }

  /** Persists a command with `also` and starts it, or lets it wait where it may; resolves once it is on disk. */
  async add(
    command: Command,
    spec: Spec,
    requestId: string,
    also: (transaction: HistoryTransaction) => void,
  ): Promise<OpenCommand> {
    const { scheduler, store } = this.#context;
    const link = scheduler.linkFor(command);
    const open = this.create({ ...command, journal_id: link?.journalId ?? '' }, requestId);
    try {
      await store.history.write((transaction) => {
        // Only what may wait is stored with its spec: it can hold secrets.
        store.insert(open.record, command.queue_until === null ? undefined : spec);
        also(transaction);
      });
    } catch (error) {
      this.discard([open]);
      throw error;
    }
    this.stored([open]);
    if (link && !open.end) void open.follow(link, spec);
    return open;
  }

  /** A command that is not on disk yet, but holds its place. */
  create(command: Command, requestId: string, batch?: BatchProgress): OpenCommand {
    const output = this.#context.outputs.fresh(command.id);
    const open = new OpenCommand(this.#context, command, output, { requestId, batch });
    this.#context.scheduler.add(open);
    return open;
  }

  /** They are on disk: those that wait then have their turn. */
  stored(added: readonly OpenCommand[]): void {
    for (const open of added) open.stored = true;
    this.#abandonRemoved(added);
    this.#context.scheduler.look();
  }

  /** They could not be stored. */
  discard(added: readonly OpenCommand[]): void {
    for (const open of added) this.#context.scheduler.remove(open);
    this.#context.scheduler.look();
  }

  /** Cancels the members of a batch: first all that wait, so that none of them has its turn meanwhile. */
  async cancelAll(members: readonly OpenCommand[], by: Caller): Promise<void> {
    for (const open of members) if (open.state === 'queued') open.record = { ...open.record, cancel: true };
    this.#context.scheduler.look();
    await Promise.all(members.filter(({ state }) => state !== 'queued').map((open) => open.cancel(by)));
  }

  /** Nothing is started any more. */
  stop(): void {
    for (const stop of this.#stops) stop();
    for (const open of this.#context.scheduler.all()) open.stop();
  }

  #linked({ machineId, processIds }: Link): void {
    const { scheduler, acknowledgements } = this.#context;
    for (const open of scheduler.on(machineId)) open.resume();
    // What ended while the agent was offline, and what is unknown here; terminals belong to sessions.
    const settled = processIds.filter((id) => !scheduler.get(id) && !isId('session', id));
    acknowledgements.add(machineId, settled);
  }

  #abandonRemoved(among: readonly OpenCommand[]): void {
    const { machines } = this.#context.state;
    this.#abandon('machine_removed', ({ machine_id }) => !machines.has(machine_id), among);
  }

  #abandon(
    reason: string,
    test: (command: Command) => boolean,
    among: readonly OpenCommand[] = this.#context.scheduler.all(),
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
