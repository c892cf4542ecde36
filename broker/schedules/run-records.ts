// Stores the runs of schedules in the history: a row for each due time and each manual run, and a progress mark (the
// last handled due time) for each schedule on each machine.

import type { Api, Input, Page, Reply } from '../../shared/api/route-table.ts';
import { schedules as routes } from '../../shared/api/schedules.ts';
import type { MachineId, RunId } from '../../shared/api/shared-schemas.ts';
import { latestInstant, now } from '../../shared/clock.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import type { Command } from '../commands/command-record.ts';
import type { Events } from '../event-log.ts';
import {
  type History,
  type HistoryTransaction,
  type Row,
  type RowReader,
  textIn,
} from '../history/history-database.ts';
import {
  allOf,
  among,
  type Condition,
  filtersOf,
  pageOfRows,
  reachableOnly,
} from '../list-pages-and-filters.ts';
import type { Schedule, State } from '../state/index.ts';
import { counted, type Mark, tables } from './run-tables.ts';

type Served = Reply<Api['schedules']['getRun']>;
type Status = Served['status'];
type Times = 'scheduled_for' | 'started_at' | 'finished_at';

/** A run as stored in the history. Times are in milliseconds since 1970. */
export interface ScheduleRun extends Omit<Served, Times | 'stdout' | 'stderr'> {
  id: RunId;
  machine_id: MachineId;
  /** Due time of the run; null for a run that a user or a changed file started. */
  scheduled_for: number | null;
  started_at: number;
  finished_at: number | null;
  /** Time of the broker's clock at which the run was begun or settled. Runs are sorted by it. */
  decided_at: number;
}

/** A schedule on one of its machines. */
export interface OnMachine {
  schedule: Schedule;
  machine_id: MachineId;
}

/** Due times at which a run took place, by schedule. */
export type RanTimes = ReadonlyMap<string, ReadonlySet<number>>;

/**
 * Maximum number of future due times per schedule that `next_run` leaves out, because they ran while the clock was
 * ahead.
 */
export const mostRan = 1000;

/** The machines that a caller may use; undefined for all machines, including removed ones. */
export type Reach = readonly string[] | undefined;

/** SQL condition for runs that have sent no command to the machine. */
const neverRan =
  "(status IN ('missed', 'skipped') OR status = 'failed' AND (command_id IS NULL OR coalesce(reason, '') = 'machine_offline'))";
/** Sorts ended runs, the worst status first. `lost` is the worst, because the effects of a lost run are unknown. */
const worstFirst =
  "CASE status WHEN 'lost' THEN 0 WHEN 'failed' THEN 1 WHEN 'timeout' THEN 2 WHEN 'cancelled' THEN 3 ELSE 4 END";
/** Maximum number of marks that one transaction stores. */
const marksAtOnce = 500;
const columns =
  'id, schedule_id, machine_id, command_id, batch_id, status, trigger, scheduled_for, started_at, finished_at, exit_code, duration, reason, decided_at';

interface RecordContext {
  state: State;
  history: History;
  events: Events;
}

export class ScheduleRecords {
  readonly #context: RecordContext;
  readonly #history: History;
  readonly #watchers = new Set<(run: ScheduleRun) => void>();

  private constructor(context: RecordContext) {
    this.#context = context;
    this.#history = context.history;
  }

  /** Opens the tables. Ended runs are deleted `keepMs` milliseconds after their time `decided_at`. */
  static async open(context: RecordContext, keepMs: number): Promise<ScheduleRecords> {
    const { history } = context;
    // Version 0.1.0 created these tables in two steps. Now one step creates them, and its number is therefore 2.
    await history.migrate('schedules', tables, 2);
    history.count(counted);
    const where = 'finished_at IS NOT NULL';
    history.retain({ table: 'schedule_runs', column: 'decided_at', keepMs, where });
    return new ScheduleRecords(context);
  }

  /** Stores a run. If the run has a command, the same transaction also creates the command. */
  begin(run: ScheduleRun, transaction: HistoryTransaction): void {
    const { schedule_id, machine_id, scheduled_for: at } = run;
    // Replaces a row which says that this due time was missed or skipped. After that row was stored, the clock may have
    // been set back, so that the due time came again.
    const key = 'schedule_id, scheduled_for, machine_id';
    transaction.put('schedule_runs', key, { ...run });
    // putMark() makes the write fail if another broker owns the machine. It is not called for runs without a due time:
    // a user may start a batch that includes machines of other brokers.
    if (at !== null) putMark({ schedule_id, machine_id, at }, transaction);
  }

  /** Stores runs without a command. Emits an event if the last one failed or was missed and `notify` has on_failure. */
  settle(runs: readonly ScheduleRun[], transaction: HistoryTransaction): void {
    for (const run of runs) this.begin(run, transaction);
    const last = runs.at(-1);
    if (!last) return;
    this.#emit(last, transaction);
    transaction.committed(() => this.#ended(last));
  }

  /**
   * Calls `watcher` whenever the end of a run has been stored. If settle() stores several runs, calls it only for the
   * last one. The returned function stops the calls.
   */
  watch(watcher: (run: ScheduleRun) => void): () => void {
    this.#watchers.add(watcher);
    return () => void this.#watchers.delete(watcher);
  }

  #ended(run: ScheduleRun): void {
    for (const watcher of this.#watchers) watcher(run);
  }

  /** Returns the last ended run for each schedule and machine in `on`. Skipped and cancelled runs do not count. */
  async lastOutcomes(on: readonly { schedule_id: string; machine_id: string }[]): Promise<ScheduleRun[]> {
    const sql = `SELECT ${columns} FROM schedule_runs WHERE schedule_id = ? AND machine_id = ?
      AND finished_at IS NOT NULL AND status NOT IN ('skipped', 'cancelled')
      ORDER BY decided_at DESC, rowid DESC LIMIT 1`;
    const queries = on.map(({ schedule_id, machine_id }) => ({ sql, values: [schedule_id, machine_id] }));
    return (await this.#history.read(queries)).flat().map(fromRow);
  }

  /** Stores the end of a run. Called in the transaction that stores the end of the run's command. */
  readonly ended = async (command: Command, transaction: HistoryTransaction): Promise<void> => {
    if (command.schedule_id === null) return;
    const run = await this.#one('command_id = ? AND finished_at IS NULL', [command.id], transaction);
    if (!run) return;
    const end = { ...run, ...endOf(command) };
    const { status, started_at, finished_at, exit_code, duration, reason } = end;
    transaction.run(
      `UPDATE schedule_runs SET status = ?, started_at = ?, finished_at = ?, exit_code = ?, duration = ?, reason = ?
       WHERE id = ?`,
      ...[status, started_at, finished_at, exit_code, duration, reason, run.id],
    );
    this.#emit(end, transaction);
    transaction.committed(() => this.#ended(end));
  };

  /** Deletes the marks of all schedules but these. */
  async forgetOthers(scheduleIds: readonly string[]): Promise<void> {
    const others = 'DELETE FROM schedule_marks WHERE schedule_id NOT IN (SELECT value FROM json_each(?))';
    await this.#history.write((transaction) => transaction.run(others, JSON.stringify(scheduleIds)));
  }

  async marksOf(scheduleIds: readonly string[]): Promise<Mark[]> {
    const some = 'schedule_id IN (SELECT value FROM json_each(?))';
    const sql = `SELECT schedule_id, machine_id, at FROM schedule_marks WHERE ${some}`;
    const rows = await this.#history.all(sql, JSON.stringify(scheduleIds));
    return rows.map((row) => ({
      schedule_id: textIn(row, 'schedule_id'),
      machine_id: textIn(row, 'machine_id'),
      at: Number(row.at),
    }));
  }

  /**
   * Stores marks for machines that have just got the tags of a schedule. Without these marks, the broker would overlook
   * due times that pass while it is down.
   */
  async mark(marks: readonly Mark[]): Promise<void> {
    for (let from = 0; from < marks.length; from += marksAtOnce) {
      await this.#history.write((transaction) => {
        for (const mark of marks.slice(from, from + marksAtOnce)) putMark(mark, transaction);
      });
    }
  }

  /** Returns the last state of a watched path that see() stored; undefined if there is none. */
  async seen({ schedule, machine_id }: OnMachine): Promise<string | undefined> {
    const sql = 'SELECT seen FROM schedule_marks WHERE schedule_id = ? AND machine_id = ?';
    const row = await this.#history.get(sql, schedule.id, machine_id);
    return typeof row?.seen === 'string' ? row.seen : undefined;
  }

  /**
   * Stores the state of a watched path. All changes up to this state must have been handled: by a run, or by a row that
   * says why there is no run.
   */
  see(
    { schedule: { id: schedule_id }, machine_id }: OnMachine,
    seen: string,
    transaction: HistoryTransaction,
  ): void {
    putMark({ schedule_id, machine_id, at: now(), seen }, transaction);
  }

  /** Removes the marks of a schedule on machines that no longer have its tags. */
  forget(scheduleId: string, machineIds: readonly string[]): Promise<void> {
    const some = 'schedule_id = ? AND machine_id IN (SELECT value FROM json_each(?))';
    return this.#history.write((transaction) =>
      transaction.run(`DELETE FROM schedule_marks WHERE ${some}`, scheduleId, JSON.stringify(machineIds)),
    );
  }

  /**
   * Must be called when the clock was set back to `to`. Sets later marks back to `to`, and deletes the rows of later
   * due times that did not run.
   */
  rewind(to: number, transaction: HistoryTransaction): void {
    transaction.run('UPDATE schedule_marks SET at = ?1 WHERE at > ?1', to);
    // Rows are selected by schedule, because no index has only the time.
    transaction.run(
      `DELETE FROM schedule_runs WHERE schedule_id IN (SELECT schedule_id FROM schedule_marks)
       AND scheduled_for > ? AND ${neverRan}`,
      to,
    );
  }

  /** The runs of a schedule that have not ended, on all machines or only on `machineId`. */
  async open(scheduleId: string, machineId?: MachineId): Promise<ScheduleRun[]> {
    const [where, values] = allOf([
      ['schedule_id = ?', scheduleId],
      machineId && ['+machine_id = ?', machineId],
    ]);
    const open = `SELECT ${columns} FROM schedule_runs WHERE ${where} AND finished_at IS NULL`;
    return (await this.#history.all(open, ...values)).map(fromRow);
  }

  /** Returns the ids of the runs whose commands have not ended, on these machines or on all. */
  async unfinishedIds(machineIds?: readonly string[]): Promise<string[]> {
    const [where, values] = allOf([['finished_at IS NULL'], machineIds && among('machine_id', machineIds)]);
    const rows = await this.#history.all(`SELECT id FROM schedule_runs WHERE ${where}`, ...values);
    return rows.map((row) => textIn(row, 'id'));
  }

  /**
   * Returns the due times from `from` to `to` at which these schedules ran or still run. Without `machineId`, runs on
   * all machines count.
   */
  async ran(
    scheduleIds: readonly string[],
    from: number,
    to = latestInstant,
    machineId?: MachineId,
  ): Promise<RanTimes> {
    const [ran, values] = allOf([
      ['schedule_id IN (SELECT value FROM json_each(?))', JSON.stringify(scheduleIds)],
      ['scheduled_for BETWEEN ? AND ?', from, to],
      machineId && ['+machine_id = ?', machineId],
      [`NOT ${neverRan}`],
    ]);
    const rows = await this.#history.all(
      `SELECT DISTINCT schedule_id, scheduled_for AS at FROM schedule_runs WHERE ${ran} ORDER BY schedule_id, at LIMIT ?`,
      // The limit is for all schedules together, so one of them may get more than `mostRan` due times.
      ...[...values, scheduleIds.length * mostRan],
    );
    const times = new Map<string, Set<number>>();
    for (const row of rows) {
      const id = textIn(row, 'schedule_id');
      times.set(id, (times.get(id) ?? new Set()).add(Number(row.at)));
    }
    return times;
  }

  find(id: string): Promise<ScheduleRun | undefined> {
    return this.#one('id = ?', [id]);
  }

  /**
   * Returns the last ended run of a schedule on the machines in `reach`. If several machines ran together, returns the
   * run with the worst status. Skipped and missed runs do not count.
   */
  async last({ id, tags }: Schedule, reach: Reach): Promise<ScheduleRun | undefined> {
    const ended: Condition[] = [
      ['schedule_id = ?', id],
      reachableOnly(reach),
      ["finished_at IS NOT NULL AND status NOT IN ('skipped', 'missed')"],
    ];
    const [where, values] = allOf(ended);
    const last = await this.#one(`${where} ORDER BY decided_at DESC, rowid DESC LIMIT 1`, values);
    if (!last || !tags || (last.batch_id ?? last.scheduled_for) === null) return last;
    const same: Condition =
      last.batch_id === null
        ? ['scheduled_for = ?', last.scheduled_for ?? 0]
        : ['batch_id = ?', last.batch_id];
    const [together, all] = allOf([...ended, same]);
    return this.#one(`${together} ORDER BY ${worstFirst}, rowid LIMIT 1`, all);
  }

  /** Returns the machines on which a schedule has run. The schedule may have been removed. */
  async machinesOf(scheduleId: string): Promise<MachineId[]> {
    const sql = 'SELECT DISTINCT machine_id FROM schedule_runs WHERE schedule_id = ?';
    const rows = await this.#history.all(sql, scheduleId);
    return rows.map((row) => textIn(row, 'machine_id') as MachineId);
  }

  /** Returns the machine of the run with this command. The row of the command itself may have been deleted. */
  async machineOfCommand(commandId: string): Promise<MachineId | undefined> {
    return (await this.#one('command_id = ?', [commandId]))?.machine_id;
  }

  async page(input: Input<Api['schedules']['history']>, reach: Reach): Promise<Page<ScheduleRun>> {
    const findBy = input.command_id ? ['command_id', 'schedule_id'] : ['status', 'machine_id'];
    const page = await pageOfRows(
      this.#history,
      // Runs of one write have the same `decided_at`. They are written in the order of their due times, so `rowid`
      // sorts them by due time.
      { table: 'schedule_runs', columns, counted, tie: ['rowid'], findBy },
      [reachableOnly(reach), ...filtersOf(routes.history, input)],
      { ...input, sort: input.sort.replace('started_at', 'decided_at') },
    );
    return { items: page.items.map(fromRow), total: page.total };
  }

  async #one(
    sql: string,
    values: readonly (string | number)[],
    reader: RowReader = this.#history,
  ): Promise<ScheduleRun | undefined> {
    const row = await reader.get(`SELECT ${columns} FROM schedule_runs WHERE ${sql}`, ...values);
    return row && fromRow(row);
  }

  #emit(run: ScheduleRun, transaction: HistoryTransaction): void {
    const { state, events } = this.#context;
    const schedule = state.schedules.get(run.schedule_id);
    const success = run.status === 'completed';
    if (!schedule?.notify?.[success ? 'on_success' : 'on_failure'] || run.status === 'skipped') return;
    const machine = state.machines.get(run.machine_id) ?? { id: run.machine_id, name: '' };
    events.emit(transaction, success ? 'schedule.completed' : 'schedule.failed', machine, {
      schedule_id: schedule.id,
      name: schedule.name,
      run_id: run.id,
      command_id: run.command_id,
      exit_code: run.exit_code,
      duration: run.duration,
      status: run.status,
    });
  }
}

/** Creates the record of a new run. `scheduled_for` is null for a run without a due time. */
export function newRun(
  { schedule, machine_id }: OnMachine,
  trigger: ScheduleRun['trigger'],
  scheduled_for: number | null,
): ScheduleRun {
  return {
    ...{ id: newId('run') as RunId, schedule_id: schedule.id, machine_id, command_id: null, batch_id: null },
    ...{ status: 'running', trigger, scheduled_for, exit_code: null, duration: null, reason: null },
    ...{ decided_at: now(), started_at: now(), finished_at: null },
  };
}

/** Returns the record of a run that ends without a command. */
export function settledRun(run: ScheduleRun, status: Status, reason: string): ScheduleRun {
  const at = now();
  return { ...run, status, reason, started_at: at, finished_at: at, exit_code: -1, duration: 0 };
}

/** Returns the fields of a run that are set when its command ends. */
function endOf(command: Command) {
  const { started_at, finished_at, exit_code, reason } = command;
  const end = finished_at ?? command.created_at;
  return {
    status: statusOf(command),
    started_at: started_at ?? end,
    finished_at: end,
    exit_code: exit_code ?? -1,
    duration: started_at === null ? 0 : Math.max(0, end - started_at),
    reason,
  };
}

function statusOf({ status, reason }: Command): Status {
  if (status === 'queued') return 'running';
  if (status !== 'expired') return status;
  return reason === 'machine_offline' ? 'failed' : 'missed';
}

function putMark(mark: Mark & { seen?: string }, transaction: HistoryTransaction): void {
  transaction.about(mark.machine_id);
  transaction.put('schedule_marks', 'schedule_id, machine_id', { ...mark });
}

/** The cast is safe: the columns of the row are the fields of the run that begin() stored. */
function fromRow(row: Row): ScheduleRun {
  return row as unknown as ScheduleRun;
}
