// REST handlers for batches: one command on many machines, with a concurrency limit and a failure limit.
import { batches as routes } from '../../shared/api/batches.ts';
import type { Api, Caller, Handlers, Input, Reply } from '../../shared/api/route-table.ts';
import type { BatchId, MachineId, ScheduleId } from '../../shared/api/shared-schemas.ts';
import { monotonic, now, pausesInLongWork } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import type { Peer } from '../cluster/peers/owner-interfaces.ts';
import { found } from '../find-or-not-found.ts';
import type { HistoryTransaction } from '../history/history-database.ts';
import { allOf, type Condition, filtersOf, pageOfRows, reachableOnly } from '../list-pages-and-filters.ts';
import { machinesNamedOrTagged } from '../machines/machines-by-id-or-tag.ts';
import { mergeStreams } from '../merge-streams.ts';
import { batchColumns, batchFromRow } from './batch-store.ts';
import { longQueue, type Scheduler } from './command-dispatcher.ts';
import {
  type Batch,
  type Command,
  type CommandParams,
  commandOf,
  specOf,
  type Tally,
} from './command-record.ts';
import { listedBytes, serializeBatch, serializeFor, serializeListed } from './command-to-json.ts';
import { assertFollowable, FollowLimit, followMembers, type Sent } from './follow-batch-output.ts';
import type { OpenCommand } from './open-command.ts';
import { sourceOf } from './read-output.ts';
import { commandWith } from './saved-command-parameters.ts';
import { type CommandContext, cancelWaitMs } from './shared-by-open-commands.ts';

type BatchContext = CommandContext & { scheduler: Scheduler };
type CreateParams = Input<Api['batches']['create']>;

type Result = Reply<Api['batches']['get']>['results'][number];

/** The command that runs on each machine of a batch, and the limits of the batch. */
type BatchParams = Omit<CommandParams, 'queue_for'> &
  Partial<Pick<CreateParams, 'queue_for' | 'concurrency' | 'max_failures'>> & { schedule_id?: ScheduleId };

/** Data that the caller of start() stores together with a batch. */
interface BatchHooks {
  /**
   * Ids of objects that are created with the batch, for the audit log. The first id is also stored with the idempotency
   * key, so that a repeated request is answered with this object.
   */
  made?: Readonly<Record<string, string>>;
  /** Adds writes to the transaction that completes the batch. */
  complete?(transaction: HistoryTransaction, members: readonly Command[]): void;
}

interface NewBatch {
  batch: Batch;
  /** The commands that have been created so far. */
  members: OpenCommand[];
  params: BatchParams;
  machines: readonly MachineId[];
  caller: Caller;
  hooks: BatchHooks;
}

/** Maximum number of members of a batch that are written, or read, in one turn of the event loop. */
const sliceSize = 100;
/** Maximum number of bytes of output in all results of one batch together. */
const mostOutput = 2 * 1000 * listedBytes;

export class Batches {
  readonly handlers: Handlers['batches'] = {
    create: (params, caller) => this.#run(params, caller),
    runSaved: ({ saved_command_id, parameters = {}, timeout, ...params }, caller) => {
      const { state } = this.#context;
      const run = commandWith(found(state.saved_commands, 'saved_command', saved_command_id), parameters);
      return this.#run({ ...params, ...run, ...(timeout !== undefined && { timeout }) }, caller);
    },
    list: async (input, caller) => {
      const { store } = this.#context;
      const reachable = caller.reachable();
      const page = await pageOfRows(
        store.history,
        { table: 'batches', columns: batchColumns },
        [
          reachable && hasMember(reachableOnly(reachable)),
          input.machine_id && hasMember(['machine_id = ?', input.machine_id]),
          ...filtersOf(routes.list, input, { status: statusIs(input.status, reachable) }),
        ],
        input,
      );
      const items = page.items.map(async (row) => {
        const batch = batchFromRow(row);
        return serializeBatch(batch, await store.batches.tally(batch.id, reachable));
      });
      return { items: await Promise.all(items), total: page.total };
    },
    get: ({ batch_id }, caller) => this.#detail(batch_id, caller),
    stream: async ({ batch_id: id, tail }, caller) => {
      assertFollowable(id, (await this.#reachable(id, caller)).length);
      const members: Command[] = [];
      for await (const command of this.#members(id, caller)) members.push(command);
      this.#followed.take(caller, members);
      const { here, elsewhere } = this.#byBroker(members, caller);
      const { scheduler, cluster } = this.#context;
      // If another broker stored the batch a moment ago, this broker has not loaded the batch's commands yet.
      if (cluster && here.some((one) => one.finished_at === null && !scheduler.get(one.id)))
        await scheduler.adoptBatches([id]);
      const events = followMembers(here, (one) => sourceOf(this.#context, one), tail, caller);
      const path = `/api/v1/batches/${id}/stream?tail=${tail}`;
      const all = [events, ...elsewhere.map(({ events }) => withoutEnd(events(path)))];
      return this.#withEnd(id, mergeStreams(all, caller.signal), caller);
    },
    cancel: async ({ batch_id: id }, caller) => {
      const { store, scheduler } = this.#context;
      await store.batches.get(id);
      if (!(await this.machinesOf(id)).every((machine) => caller.reaches(machine))) {
        const message = `batch ${id} has machines that this key is not allowed to use: to cancel it, use a key that may use all of them`;
        throw new AppError('forbidden', message, { batch_id: id });
      }
      const open = scheduler.all().filter(({ record }) => record.batch_id === id);
      if (open.length > 0 || this.#context.cluster) {
        await store.batches.cancel(id);
        await scheduler.cancelAll(open, caller);
        await this.#untilEnded(id, open, cancelWaitMs);
      }
      return this.#detail(id, caller);
    },
  };
  readonly #context: BatchContext;
  readonly #followed = new FollowLimit();

  constructor(context: BatchContext) {
    this.#context = context;
  }

  /** Starts a batch, waits at most `wait` milliseconds for the ends of its commands, and returns the batch. */
  async #run(
    params: BatchParams & Pick<CreateParams, 'machine_ids' | 'tags' | 'wait'>,
    caller: Caller,
  ): Promise<Reply<Api['batches']['get']>> {
    const waitUntil = monotonic() + params.wait;
    const machines = machinesNamedOrTagged(params, caller, this.#context.state);
    const { id, members } = await this.start(params, machines, caller);
    await this.#untilEnded(id, members, waitUntil - monotonic(), caller.signal);
    return this.#detail(id, caller);
  }

  /**
   * Stores a batch in one or more transactions, then starts its commands in their order. No command runs before the
   * last transaction has succeeded.
   */
  async start(
    params: BatchParams,
    machines: readonly MachineId[],
    caller: Caller,
    hooks: BatchHooks = {},
  ): Promise<{ id: BatchId; members: readonly OpenCommand[]; first: Command | undefined }> {
    const { command, args = null, cwd = null, user = null, concurrency = null, max_failures = null } = params;
    const id = newId('batch') as BatchId;
    const origin = { created_at: now(), requested_by: caller.key_id, cancel: false };
    const batch = { id, command, args, cwd, user, concurrency, max_failures, ...origin };
    const members: OpenCommand[] = [];
    let first: Command | undefined;
    const store = async (): Promise<void> => {
      [first] = await this.#store({ batch, members, params, machines, caller, hooks });
    };
    await this.#context.scheduler.store(members, store);
    return { id, members, first };
  }

  /** Returns the machines of a batch; none if the batch does not exist. */
  machinesOf(id: string): Promise<MachineId[]> {
    return this.#context.store.batches.machines(id);
  }

  async *#withEnd(id: string, events: AsyncGenerator<Sent>, caller: Caller): AsyncGenerator<Sent> {
    yield* events;
    yield { event: 'end', data: await this.summary(id, caller.reachable()) };
  }

  /** Returns a batch with the counts of its commands on these machines, or on all. */
  async summary(id: string, reachable: readonly MachineId[] | undefined) {
    const { store } = this.#context;
    return serializeBatch(await store.batches.get(id), await store.batches.tally(id, reachable));
  }

  /**
   * Stores a batch in slices and adds its commands to `members`. If this fails, removes the incomplete batch. If the
   * broker crashes, a broker that starts later removes the incomplete batch.
   */
  async #store({ batch, members, params, machines, caller, hooks }: NewBatch): Promise<Command[]> {
    const { scheduler, store, log } = this.#context;
    const { id: batch_id, created_at } = batch;
    const { key_id, request_id } = caller;
    const elsewhere = machines.filter((id) => !store.history.owns(id));
    const [full] = elsewhere.length > 0 ? await store.withLongQueue(elsewhere) : [];
    if (full !== undefined) throw longQueue(full);
    const origin = { key_id, batch_id, ...(params.schedule_id && { schedule_id: params.schedule_id }) };
    const counts = { open: machines.length - elsewhere.length, running: 0, elsewhere: 0, failures: 0 };
    const progress = { ...batch, ...counts, isComplete: false };
    const isElsewhere = new Set(elsewhere);
    // All queues are checked before the first slice is stored, because its audit entries say that the batch was
    // started.
    for (const id of machines) if (!isElsewhere.has(id)) scheduler.refuseLongQueue(id);
    const all: Command[] = [];
    try {
      for (let from = 0; from < machines.length; from += sliceSize) {
        const slice = machines.slice(from, from + sliceSize);
        const added = slice.map((machine_id) => {
          const member = commandOf(params, { machine_id, ...origin }, created_at);
          if (isElsewhere.has(machine_id)) return { member };
          const open = scheduler.create(member, request_id, progress);
          members.push(open);
          return { member, open };
        });
        all.push(...added.map(({ member }) => member));
        const more = from + sliceSize < machines.length;
        await store.history.write((transaction) => {
          if (from === 0) store.batches.insert(batch, transaction);
          for (const { member, open } of added)
            if (open) store.insert(open.record, undefined, transaction);
            else store.insertElsewhere(member, transaction);
          if (!more) store.batches.complete(batch_id, specOf(params), transaction);
          if (!more) hooks.complete?.(transaction, all);
          caller.commit(transaction, { ...hooks.made, batch_id }, slice, more);
        });
      }
      progress.isComplete = true;
      return all;
    } catch (error) {
      await store.batches.remove(batch_id).catch((err: unknown) => {
        log.warn(
          { err, batch_id },
          'only a part of a batch could be stored, and that part could not be removed; the next broker that starts will remove it',
        );
      });
      throw error;
    }
  }

  /** Returns a batch with its results on machines that the caller may use, in the order of the batch. */
  async #detail(id: BatchId, caller: Caller): Promise<Reply<Api['batches']['get']>> {
    const { store, scheduler } = this.#context;
    const batch = await store.batches.get(id);
    const count = (await this.#reachable(id, caller)).length;
    const most = Math.min(listedBytes, Math.floor(mostOutput / Math.max(1, count) / 2));
    const members: Command[] = [];
    for await (const command of this.#members(id, caller))
      members.push((await scheduler.get(command.id)?.current(most)) ?? command);
    const open = members.filter(({ finished_at }) => finished_at === null);
    const reported = await this.#reportedElsewhere(id, open, caller);
    const results: Result[] = [];
    const pause = pausesInLongWork();
    for (let from = 0; from < members.length; from += sliceSize) {
      await pause();
      const newest = await this.#newest(members.slice(from, from + sliceSize), reported);
      for (const one of newest)
        results.push(reported.get(one.id) ?? serializeFor(caller, serializeListed(one, most)));
    }
    return { ...serializeBatch(batch, results.map(tallyOf)), results };
  }

  /** Returns the newest records of these commands. Reads a command again if it may have ended since the first read. */
  async #newest(commands: readonly Command[], reported: ReadonlyMap<string, Result>): Promise<Command[]> {
    const { store, scheduler } = this.#context;
    // The record was read while the command was open. If no broker reports the command now, the command may have ended.
    const isOutdated = ({ id, finished_at }: Command): boolean =>
      finished_at === null && !scheduler.get(id) && !reported.has(id);
    const ended = commands.filter(isOutdated).map(({ id }) => id);
    if (ended.length === 0) return [...commands];
    const newest = new Map((await store.some(ended)).map((one) => [one.id, one]));
    return commands.map((one) => newest.get(one.id) ?? one);
  }

  /**
   * Asks the brokers that own the machines of these commands for results. Returns the results by command id. Leaves out
   * brokers that do not answer.
   */
  async #reportedElsewhere(id: BatchId, open: readonly Command[], caller: Caller) {
    const { elsewhere } = this.#byBroker(open, caller);
    const answers = elsewhere.map(({ get }) => get(`/api/v1/batches/${id}`).catch(() => undefined));
    // The cast is safe: the answers come from this same route of other brokers.
    const batches = (await Promise.all(answers)) as (Reply<Api['batches']['get']> | undefined)[];
    return new Map(batches.flatMap((batch) => batch?.results ?? []).map((one) => [one.id, one]));
  }

  /** Separates the commands on this broker's machines from the commands on machines of other brokers. */
  #byBroker(members: readonly Command[], caller: Caller) {
    const { others } = this.#context;
    if (!others || caller.isForwarded) return { here: members, elsewhere: [] };
    const peers = new Map<string, Peer>();
    const here: Command[] = [];
    for (const member of members) {
      const peer = others.ownerElsewhere(member.machine_id);
      if (peer) peers.set(peer.brokerId, peer);
      else here.push(member);
    }
    const elsewhere = [...peers.values()].map((peer) => ({
      get: (path: string) => others.get(peer, path, caller),
      events: (path: string) => others.events(peer, path, caller),
    }));
    return { here, elsewhere };
  }

  /** Waits until the ends of all commands are on disk, at most `ms` milliseconds, and only until the signal fires. */
  async #untilEnded(id: string, members: readonly OpenCommand[], ms: number, signal?: AbortSignal) {
    const until = monotonic() + ms;
    for (const open of members) await open.untilEnded(until - monotonic(), signal);
    const { cluster, store } = this.#context;
    if (cluster) await store.batches.untilEnded(id, until - monotonic(), signal);
  }

  /**
   * Returns the machines of a batch that the caller may use. The caller must not learn how many other machines the
   * batch has.
   */
  async #reachable(id: string, caller: Caller): Promise<MachineId[]> {
    return (await this.machinesOf(id)).filter((machine) => caller.reaches(machine));
  }

  /** The commands of a batch on machines that the caller is allowed to use, in the order of the batch. */
  async *#members(id: BatchId, caller: Caller): AsyncGenerator<Command> {
    const { store } = this.#context;
    const pause = pausesInLongWork();
    for (let from: number | undefined = 0; from !== undefined; ) {
      const rows = await store.ofBatch(id, from, sliceSize);
      for (const { command } of rows) {
        // A request that another broker has forwarded asks only for commands on machines that this broker owns.
        const isAsked = !caller.isForwarded || store.history.owns(command.machine_id);
        if (isAsked && caller.reaches(command.machine_id)) yield command;
      }
      from = rows.length < sliceSize ? undefined : rows.at(-1)?.next;
      await pause();
    }
  }
}

/** Converts one result to a tally for serializeBatch(). */
function tallyOf({ status, finished_at }: Result): Tally {
  return { status, finished_at: finished_at === null ? null : Date.parse(finished_at), n: 1 };
}

/** Yields the events of another broker, except the event `end` of the batch. */
async function* withoutEnd(events: AsyncIterable<{ event: string; data: unknown }>): AsyncGenerator<Sent> {
  // The cast is safe: the events come from this same route of another broker.
  for await (const sent of events) if (sent.event !== 'end') yield sent as Sent;
}

/** SQL condition: the batch has at least one member that meets the condition `such`. */
function hasMember(such: Condition): Condition {
  const [where, values] = allOf([['batch_id = batches.id'], such]);
  return [`EXISTS (SELECT 1 FROM commands WHERE ${where})`, ...values];
}

/**
 * SQL condition: the batch has this status. The SQL computes the status in the same way as serializeBatch(). If
 * `machines` is given, only the commands on these machines count.
 */
function statusIs(status: string | undefined, machines: readonly string[] | undefined): Condition {
  const [where, values] = allOf([['batch_id = batches.id'], reachableOnly(machines)]);
  const of = `(SELECT CASE WHEN count(*) FILTER (WHERE status IN ('queued', 'running')) > 0 THEN 'running'
      WHEN count(*) FILTER (WHERE status <> 'completed') = 0 THEN 'completed'
      WHEN batches.cancel <> 0 THEN 'cancelled' ELSE 'failed' END FROM commands WHERE ${where})`;
  return status === undefined ? undefined : [`${of} = ?`, ...values, status];
}
