// Batches: one command on many machines, so many at once, until too many have failed.
import { mostMachines, batches as routes } from '../../shared/api/batches.ts';
import type { Api, Caller, Handlers, Input, Journal, Reply } from '../../shared/api/index.ts';
import type { BatchId, MachineId } from '../../shared/api/route.ts';
import { monotonic, now, sleep } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Entry } from '../history.ts';
import { allOf, type Condition, filtersOf, pageOfRows, reachableOnly } from '../paging.ts';
import { type Batch, type Command, commandOf, OpenCommand, type Tally } from './command.ts';
import { cancelWaitMs, type Runner, type RunnerRooms } from './runner.ts';
import { listedBytes, serializeBatch, serializeFor, serializeListed } from './serialize.ts';
import { batchColumns, batchFromRow } from './store.ts';

type BatchRooms = RunnerRooms & { runner: Runner };

/** Members that are worked on in one turn of the event loop, and stored in one transaction. */
const sliceSize = 250;
/** Output that the results of one batch have in all. */
const mostOutput = 2 * 1000 * listedBytes;
/** Members that could not be stored are tried again after this. */
const retryMs = 5_000;

export class Batches {
  readonly handlers: Handlers['batches'] = {
    create: (input, caller) => this.#create(input, caller),
    list: (input, caller) => this.#list(input, caller),
    get: ({ batch_id }, caller) => this.#detail(batch_id, caller),
    cancel: ({ batch_id }, caller) => this.#cancel(batch_id, caller),
  };
  readonly #rooms: BatchRooms;
  readonly #log: Logger;
  readonly #stopped = new AbortController();
  /** Of batches that are being stored: the members that had no row of their own at first. */
  readonly #unstored = new Map<string, OpenCommand[]>();

  constructor(rooms: BatchRooms, log: Logger) {
    this.#rooms = rooms;
    this.#log = log;
  }

  /** Takes up what an earlier broker left: open commands, with the slots of their batches, and members without a row. */
  async recover(): Promise<void> {
    const { store, scheduler, runner } = this.#rooms;
    const batches = store.openBatches().map((batch) => {
      const members = store.membersOf(batch.id);
      const tally = store.tally(batch.id);
      const count = (statuses: string[]): number =>
        tally.reduce((sum, { status, n }) => sum + (statuses.includes(status) ? n : 0), 0);
      const [open, completed] = [count(['queued', 'running']), count(['completed'])];
      const stored = tally.reduce((sum, { n }) => sum + n, 0);
      const ids = members?.ids.slice(stored) ?? [];
      const failures = stored - open - completed;
      scheduler.addBatch(batch.id, { ...batch, open: open + ids.length, running: 0, failures });
      return { batch, members, ids, stored };
    });
    const cancelled = batches.filter(({ batch }) => batch.cancel).map(({ batch }) => batch.id);
    await runner.recover(new Set(cancelled));
    for (const { batch, members, ids, stored } of batches) {
      const { command, args, cwd, user, created_at, cancel, requested_by: key_id } = batch;
      const rest = ids.map(([id, machine_id]) => {
        const member = commandOf({ command }, { machine_id, key_id, batch_id: batch.id }, created_at);
        const queue_until = members?.queue_until ?? null;
        const open = runner.create({ ...member, id, args, cwd, user, cancel, queue_until });
        open.recovered = true;
        return open;
      });
      if (members) void this.#storeRest(batch.id, rest, stored, members.audit);
    }
  }

  /** The machines of a batch; none when there is no such batch. */
  machinesOf(id: string): MachineId[] {
    return [
      ...this.#rooms.store.machinesOfBatch(id),
      ...this.#without(id).map(({ record }) => record.machine_id),
    ];
  }

  stop(): void {
    this.#stopped.abort();
  }

  /** The members that have no row of their own yet. */
  #without(id: string): OpenCommand[] {
    return (this.#unstored.get(id) ?? []).filter(({ stored }) => !stored);
  }

  async #create(input: Input<Api['batches']['create']>, caller: Caller) {
    const { scheduler } = this.#rooms;
    const { command, args = null, cwd = null, user = null, concurrency = null, max_failures = null } = input;
    const origin = { created_at: now(), requested_by: caller.key_id, cancel: false };
    const id = newId('batch') as BatchId;
    const batch = { id, command, args, cwd, user, concurrency, max_failures, ...origin };
    const machines = this.#machinesFor(input, caller);
    scheduler.addBatch(id, { concurrency, max_failures, open: machines.length, running: 0, failures: 0 });
    const members = await this.#store(batch, machines, input, caller);
    await this.#ended(members, input.wait, caller.signal);
    return this.#detail(id, caller);
  }

  /** Resolves once the batch is on disk with the list of its machines; each has a row of its own soon after. */
  async #store(
    batch: Batch,
    machines: readonly MachineId[],
    input: Input<Api['batches']['create']>,
    caller: Caller,
  ): Promise<OpenCommand[]> {
    const { store, scheduler, runner } = this.#rooms;
    const { id } = batch;
    const members: OpenCommand[] = [];
    let audit: Entry | undefined;
    try {
      for (const machine_id of machines) {
        scheduler.refuseLongQueue(machine_id);
        const member = commandOf(
          input,
          { machine_id, key_id: caller.key_id, batch_id: id },
          batch.created_at,
        );
        members.push(runner.create(member, caller.request_id));
        if (members.length % sliceSize === 0) await turn();
      }
      const first = members.slice(0, sliceSize);
      const ids = members.map(({ record }) => [record.id, record.machine_id] as const);
      await runner.save(first, (transaction) => {
        const append: Journal['append'] = (entry) => {
          if (entry.kind === 'audit') audit ??= entry;
          transaction.append(entry);
        };
        caller.commit({ append }, { batch_id: id }, machines.slice(0, sliceSize));
        const queue_until = members[0]?.record.queue_until ?? null;
        const isWhole = members.length === first.length;
        store.insertBatch(batch, input, isWhole ? undefined : { ids, queue_until, audit });
      });
    } catch (error) {
      runner.discard(members);
      scheduler.removeBatch(id);
      throw error;
    }
    if (members.length > sliceSize) void this.#storeRest(id, members.slice(sliceSize), sliceSize, audit);
    return members;
  }

  /** Gives members rows of their own, slice by slice; what fails is tried again. Never rejects. */
  async #storeRest(id: BatchId, rest: OpenCommand[], offset: number, audit?: Entry): Promise<void> {
    const { store, runner, auditOn } = this.#rooms;
    this.#unstored.set(id, rest);
    for (let at = 0; at < rest.length && !this.#stopped.signal.aborted; ) {
      const slice = rest.slice(at, at + sliceSize);
      try {
        await runner.save(slice, (transaction) => {
          for (const [n, { record }] of slice.entries())
            if (audit) transaction.append(auditOn(audit, record.machine_id, offset + at + n));
          if (at + slice.length === rest.length) store.setBatch(id, 'members = NULL');
        });
        at += slice.length;
        await turn();
      } catch (error) {
        this.#log.error({ err: error, batch_id: id }, 'members of a batch could not be stored; trying again');
        await sleep(retryMs, this.#stopped.signal);
      }
    }
    this.#unstored.delete(id);
  }

  /** Resolves when all have ended durably, after `ms`, or when the signal fires. */
  async #ended(members: readonly OpenCommand[], ms: number, signal?: AbortSignal): Promise<void> {
    const until = monotonic() + ms;
    for (const open of members) await this.#rooms.lifecycle.ended(open, until - monotonic(), signal);
  }

  #list(input: Input<Api['batches']['list']>, caller: Caller): Reply<Api['batches']['list']> {
    const { store } = this.#rooms;
    const reachable = caller.reachable();
    const page = pageOfRows(
      store.history,
      { table: 'batches', columns: batchColumns },
      [
        reachable && hasMember(reachableOnly(reachable)),
        input.machine_id && hasMember(['machine_id = ?', input.machine_id]),
        ...filtersOf(routes.list, input, { status: statusIs(input.status, reachable) }),
      ],
      input,
    );
    const items = page.items.map((row) => {
      const batch = batchFromRow(row);
      const n = this.#without(batch.id).filter(({ record }) => caller.reaches(record.machine_id)).length;
      return serializeBatch(batch, [
        ...store.tally(batch.id, reachable),
        ...(n > 0 ? [{ status: 'queued' as const, n, finished_at: null }] : []),
      ]);
    });
    return { items, total: page.total };
  }

  async #detail(id: BatchId, caller: Caller): Promise<Reply<Api['batches']['get']>> {
    const batch = this.#rooms.store.batch(id);
    const size = this.machinesOf(id).length;
    const most = Math.min(listedBytes, Math.floor(mostOutput / size / 2));
    const results: Reply<Api['batches']['get']>['results'] = [];
    const tally: Tally[] = [];
    for await (const members of this.#slicesOf(id, most)) {
      for (const member of members.filter(({ machine_id }) => caller.reaches(machine_id))) {
        results.push(serializeFor(caller, serializeListed(member, most)));
        tally.push({ status: member.status, finished_at: member.finished_at, n: 1 });
      }
    }
    return { ...serializeBatch(batch, tally), results };
  }

  /** Its commands as they are now, with the last `most` bytes of their output, in the order of its machines. */
  async *#slicesOf(id: BatchId, most: number): AsyncGenerator<Command[]> {
    const { store, scheduler } = this.#rooms;
    const unstored = this.#without(id);
    const seen = new Set<string>();
    const current = (members: (OpenCommand | Command)[]): Promise<Command[]> =>
      Promise.all(members.map(async (one) => (one instanceof OpenCommand ? one.current(most) : one)));
    for (let from = 0; ; ) {
      const rows = store.ofBatch(id, from, sliceSize, most);
      for (const { command } of rows) seen.add(command.id);
      yield await current(rows.map(({ command }) => scheduler.get(command.id) ?? command));
      from = rows.at(-1)?.next ?? from;
      if (rows.length < sliceSize) break;
      await turn();
    }
    const rest = unstored.filter(({ record }) => !seen.has(record.id));
    for (let at = 0; at < rest.length; at += sliceSize) {
      yield await current(rest.slice(at, at + sliceSize));
      await turn();
    }
  }

  async #cancel(id: BatchId, caller: Caller): Promise<Reply<Api['batches']['cancel']>> {
    const { store, scheduler, runner } = this.#rooms;
    store.batch(id);
    if (!this.machinesOf(id).every((machine) => caller.reaches(machine))) {
      const message = 'this key does not reach every machine of this batch';
      throw new AppError('forbidden', message, { batch_id: id });
    }
    const open = scheduler.all().filter(({ record }) => record.batch_id === id);
    if (open.length > 0) {
      await store.history.write(() => store.setBatch(id, 'cancel = 1'));
      await runner.cancelAll(open, caller);
      await this.#ended(open, cancelWaitMs);
    }
    return this.#detail(id, caller);
  }

  /** Those named, or all that have every tag and that the caller reaches. */
  #machinesFor({ machine_ids, tags }: Input<Api['batches']['create']>, caller: Caller): MachineId[] {
    if (machine_ids) return [...new Set(machine_ids)];
    // Every machine has all of no tags: that would be too much for a slip.
    const named = tags && tags.length > 0;
    const matching = [...this.#rooms.state.machines.values()].filter(
      (machine) => named && caller.reaches(machine.id) && tags.every((tag) => machine.tags.includes(tag)),
    );
    if (matching.length === 0 || matching.length > mostMachines) {
      const some =
        matching.length === 0 ? 'no machine has them all' : `more than ${mostMachines} machines have them`;
      const message = named ? some : 'name at least one';
      const issues = [{ path: 'tags', message }];
      throw new AppError('validation_failed', `body: tags: ${message}`, { issues });
    }
    return matching.map((machine) => machine.id);
  }
}

/** Lets the event loop do what else there is. */
function turn(): Promise<void> {
  return new Promise((resolve) => setImmediate(resolve));
}

/** The condition that a batch has such a command. */
function hasMember(such: Condition): Condition {
  const [where, values] = allOf([['batch_id = batches.id'], such]);
  return [`EXISTS (SELECT 1 FROM commands WHERE ${where})`, ...values];
}

/** The status as serializeBatch() makes it, of the commands on these machines or on all. */
function statusIs(status: string | undefined, machines: readonly string[] | undefined): Condition {
  const [where, values] = allOf([['batch_id = batches.id'], reachableOnly(machines)]);
  const of = `(SELECT CASE WHEN total(status IN ('queued', 'running')) > 0 OR batches.members NOT NULL THEN 'running'
      WHEN total(status <> 'completed') = 0 THEN 'completed'
      WHEN batches.cancel THEN 'cancelled' ELSE 'failed' END FROM commands WHERE ${where})`;
  return status === undefined ? undefined : [`${of} = ?`, ...values, status];
}
