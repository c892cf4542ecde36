// Batches: one command on many machines, so many at once, until too many have failed.

import { mostMachines, batches as routes } from '../../shared/api/batches.ts';
import type { Api, Caller, Handlers, Input, Reply } from '../../shared/api/index.ts';
import type { BatchId, KeyId, MachineId } from '../../shared/api/route.ts';
import { iso, now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';
import type { Logger } from '../../shared/logger.ts';
import { type History, jsonIn, type Row } from '../history.ts';
import { allOf, type Condition, filtersOf, pageOfRows, reachableOnly } from '../paging.ts';
import { commandOf, specOf, type Wish } from './draft.ts';
import { type Command, listedBytes, type Records, type Status, type Tally } from './records.ts';
import { current } from './run.ts';
import type { Rooms, Runs } from './runs.ts';
import { listed, shownTo } from './shown.ts';
import { cancelWaitMs } from './supervision.ts';
import type { Turns } from './turns.ts';

export interface Batches {
  handlers: Handlers['batches'];
  /** None of its commands is open any more. */
  over(id: BatchId): void;
  /** Those that a batch runs on; none when there is no such batch. */
  machinesOf(id: string): MachineId[];
}

interface Batch {
  id: BatchId;
  command: string;
  args: string[] | null;
  cwd: string | null;
  user: string | null;
  concurrency: number | null;
  max_failures: number | null;
  created_at: number;
  requested_by: KeyId;
  /** Somebody asked to end it. */
  cancel: boolean;
}

const tables = [
  `CREATE TABLE batches (
    id TEXT NOT NULL UNIQUE, command TEXT NOT NULL, args TEXT, cwd TEXT, user TEXT, concurrency INTEGER,
    max_failures INTEGER, created_at INTEGER NOT NULL, requested_by TEXT NOT NULL, cancel INTEGER NOT NULL, spec TEXT
  );
  CREATE INDEX batches_by_time ON batches (created_at)`,
];
const memberless = 'NOT EXISTS (SELECT 1 FROM commands WHERE batch_id = batches.id)';
const noneByStatus: Record<Status, number> = {
  queued: 0,
  running: 0,
  completed: 0,
  failed: 0,
  timeout: 0,
  cancelled: 0,
  expired: 0,
  lost: 0,
};

/** Opens the batches and gives those with open members their turns back. `runs` is asked only later. */
export function openBatches(
  rooms: Rooms & { records: Records; turns: Turns },
  keepMs: number,
  runs: () => Runs,
  log: Logger,
): Batches {
  const { history, records, turns, state } = rooms;
  history.migrate('batches', tables);
  history.retain({ table: 'batches', column: 'created_at', keepMs, where: memberless });
  for (const batch of unfinished(history)) {
    const members = records.ofBatch(batch.id);
    turns.add(batch.id, { ...batch, ...progressOf(members) });
  }

  function find(id: string): Batch {
    const row = history.sql('SELECT * FROM batches WHERE id = ?').get(id);
    if (row) return fromRow(row);
    throw new AppError('batch_not_found', 'no such batch', { batch_id: id });
  }

  /** Its commands as they are now. */
  async function membersOf(id: BatchId): Promise<Command[]> {
    return Promise.all(
      records.ofBatch(id).map(async (command) => {
        const run = runs().get(command.id);
        return run ? await current(run, listedBytes) : command;
      }),
    );
  }

  async function detail(id: BatchId, caller: Caller): Promise<Reply<Api['batches']['get']>> {
    const batch = find(id);
    const members = await membersOf(id);
    const reached = members.filter(({ machine_id }) => caller.reaches(machine_id));
    return {
      ...shown(
        batch,
        reached.map(({ status, finished_at }) => ({ status, finished_at, n: 1 })),
      ),
      results: reached.map((command) => shownTo(caller, listed(command))),
    };
  }

  /** Those named, or all that have every tag and that the caller reaches. */
  function machinesOf({ machine_ids, tags }: Input<Api['batches']['create']>, caller: Caller): MachineId[] {
    if (machine_ids) return [...new Set(machine_ids)];
    // Every machine has all of no tags: nobody means that.
    const named = tags && tags.length > 0;
    const matching = [...state.machines.values()].filter(
      (machine) => named && caller.reaches(machine.id) && tags.every((tag) => machine.tags.includes(tag)),
    );
    if (matching.length === 0 || matching.length > mostMachines) {
      const some =
        matching.length === 0 ? 'no machine has them all' : `more than ${mostMachines} machines have them`;
      const message = named ? some : 'name at least one';
      throw new AppError('validation_failed', `body: tags: ${message}`, {
        issues: [{ path: 'tags', message }],
      });
    }
    return matching.map((machine) => machine.id);
  }

  return {
    machinesOf: (id) => records.machinesOfBatch(id),
    over(id) {
      // It can hold secrets, and nothing will be started any more.
      history
        .write(() => history.sql('UPDATE batches SET spec = NULL WHERE id = ?').run(id))
        .catch((error: unknown) =>
          log.warn({ err: error, batch_id: id }, 'what a batch ran was not dropped'),
        );
    },
    handlers: {
      async create(input, caller) {
        const id = newId('batch') as BatchId;
        const commands = machinesOf(input, caller).map((machine_id) =>
          commandOf({ ...input, machine_id }, caller, { batch_id: id }),
        );
        const { concurrency = null, max_failures = null } = input;
        const open = commands.length;
        turns.add(id, { concurrency, max_failures, open, running: 0, failures: 0 });
        const members = await runs()
          .addAll(commands, caller.request_id, (journal) => {
            insert(history, { ...input, id, concurrency, max_failures }, caller);
            const machines = commands.map(({ machine_id }) => machine_id);
            caller.commit(journal, { batch_id: id }, machines);
          })
          .catch((error: unknown) => {
            turns.remove(id);
            throw error;
          });
        await Promise.all(members.map((run) => runs().ended(run, input.wait, caller.signal)));
        return detail(id, caller);
      },
      list(input, caller) {
        const reachable = caller.reachable();
        const page = pageOfRows(
          history,
          { table: 'batches', columns: '*' },
          [
            reachable && hasMember(reachableOnly(reachable)),
            input.machine_id && hasMember(['machine_id = ?', input.machine_id]),
            ...filtersOf(routes.list, input, { status: statusIs(input.status, reachable) }),
          ],
          input,
        );
        const items = page.items.map((row) => {
          const batch = fromRow(row);
          return shown(batch, records.tally(batch.id, reachable));
        });
        return { items, total: page.total };
      },
      get: (input, caller) => detail(input.batch_id, caller),
      async cancel({ batch_id }, caller) {
        await detail(batch_id, caller);
        const members = records.ofBatch(batch_id);
        const beyond = members.find(({ machine_id }) => !caller.reaches(machine_id));
        if (beyond) {
          throw new AppError('forbidden', 'this key does not reach every machine of this batch', {
            batch_id,
          });
        }
        const open = members.map(({ id }) => runs().get(id)).filter((run) => run !== undefined);
        if (open.length > 0) {
          await history.write(() => history.sql('UPDATE batches SET cancel = 1 WHERE id = ?').run(batch_id));
        }
        await Promise.all(open.map((run) => runs().cancel(run, caller)));
        await Promise.all(open.map((run) => runs().ended(run, cancelWaitMs)));
        return detail(batch_id, caller);
      },
    },
  };
}

/** The condition that a batch has such a command. */
function hasMember(such: Condition): Condition {
  const [where, values] = allOf([['batch_id = batches.id'], such]);
  return [`EXISTS (SELECT 1 FROM commands WHERE ${where})`, ...values];
}

/** The status as shown() makes it, of the commands on these machines or on all. */
function statusIs(status: string | undefined, machines: readonly string[] | undefined): Condition {
  const [where, values] = allOf([['batch_id = batches.id'], reachableOnly(machines)]);
  const of = `(SELECT CASE WHEN total(status IN ('queued', 'running')) > 0 THEN 'running'
      WHEN total(status <> 'completed') = 0 THEN 'completed'
      WHEN batches.cancel THEN 'cancelled' ELSE 'failed' END FROM commands WHERE ${where})`;
  return status === undefined ? undefined : [`${of} = ?`, ...values, status];
}

function unfinished(history: History): Batch[] {
  const open = 'SELECT batch_id FROM commands WHERE finished_at IS NULL AND batch_id IS NOT NULL';
  return history.sql(`SELECT * FROM batches WHERE id IN (${open})`).all().map(fromRow);
}

function progressOf(members: readonly Command[]) {
  const open = members.filter(({ finished_at }) => finished_at === null);
  return {
    open: open.length,
    running: open.filter(({ journal_id }) => journal_id !== '').length,
    failures: members.filter(({ finished_at, status }) => finished_at !== null && status !== 'completed')
      .length,
  };
}

function insert(
  history: History,
  batch: Wish & Pick<Batch, 'id' | 'concurrency' | 'max_failures'>,
  caller: Caller,
): void {
  const { id, command, args, cwd = null, user = null, concurrency, max_failures } = batch;
  history
    .sql('INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?)')
    .run(
      ...[id, command, args ? JSON.stringify(args) : null, cwd, user, concurrency, max_failures],
      ...[now(), caller.key_id, JSON.stringify(specOf(batch))],
    );
}

function fromRow(row: Row): Batch {
  return {
    // The columns are those that insert() wrote.
    ...(row as unknown as Batch),
    args: row.args === null ? null : (jsonIn(row, 'args') as string[]),
    cancel: row.cancel === 1,
  };
}

/** `members`: how many of them are so, and when the last of these ended. */
function shown({ cancel, created_at, ...batch }: Batch, members: readonly Tally[]) {
  const counts = { ...noneByStatus };
  for (const { status, n } of members) counts[status] += n;
  const total = members.reduce((sum, { n }) => sum + n, 0);
  const open = counts.queued + counts.running > 0;
  const done = counts.completed === total ? 'completed' : cancel ? 'cancelled' : 'failed';
  const status: Reply<Api['batches']['get']>['status'] = open ? 'running' : done;
  const last = Math.max(created_at, ...members.map(({ finished_at }) => finished_at ?? 0));
  return {
    ...batch,
    status,
    total,
    counts,
    created_at: iso(created_at),
    finished_at: open ? null : iso(last),
  };
}
