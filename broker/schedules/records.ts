// Runs of schedules in history: one row for each time that was due and each run by hand, and how far each schedule has come.
import type { Api, Input, Page, Reply } from '../../shared/api/index.ts';
import type { CommandId, MachineId, RunId, ScheduleId } from '../../shared/api/route.ts';
import { schedules as routes } from '../../shared/api/schedules.ts';
import { now } from '../../shared/clock.ts';
import { newId } from '../../shared/ids.ts';
import type { Command } from '../commands/command.ts';
import type { Events } from '../events.ts';
import { type History, type HistoryTransaction, type Row, textIn } from '../history.ts';
import { allOf, filtersOf, pageOfRows, reachableOnly } from '../paging.ts';
import type { Schedule, State } from '../state/index.ts';

type Shown = Reply<Api['schedules']['getRun']>;
type Status = Shown['status'];

/** A run as history holds it: times in milliseconds. */
export interface ScheduleRun {
  id: RunId;
  schedule_id: ScheduleId;
  machine_id: MachineId;
  command_id: CommandId | null;
  status: Status;
  trigger: Shown['trigger'];
  /** The time it was due; null by hand. */
  scheduled_for: number | null;
  started_at: number;
  finished_at: number | null;
  exit_code: number | null;
  duration: number | null;
  reason: string | null;
}

export interface ScheduleRecords {
  /** A run has its command; inside a transaction. */
  begin(run: ScheduleRun): void;
  /** Runs that were decided without a command; the last of them is an event if its schedule wants that. */
  settle(runs: readonly ScheduleRun[], transaction: HistoryTransaction): void;
  /** The command of a run ends; inside its transaction. */
  ended(command: Command, transaction: HistoryTransaction): void;
  /** Calls back when the end of a schedule's command is on disk. */
  onEnd(listener: (scheduleId: string) => void): void;
  /** How far each schedule has come. */
  marks(): Map<string, number>;
  /** The clock was set back to this: marks and rows of later times that did not run are void; inside a transaction. */
  rewind(to: number): void;
  /** These schedules are no longer declared; inside a transaction. */
  forget(scheduleIds: readonly string[]): void;
  /** Its runs whose commands have not ended. */
  open(scheduleId: string): ScheduleRun[];
  /** The ids of all such runs. */
  openIds(): string[];
  /** Whether a time ran, or a command for it is open. */
  ran(scheduleId: string, at: number): boolean;
  find(id: string): ScheduleRun | undefined;
  /** The last that has ended, of those that ran or were to on a machine of these. */
  last(scheduleId: string, reach: Reach): ScheduleRun | undefined;
  /** The machine that a schedule which has gone ran on at the end. */
  machineOf(scheduleId: string): MachineId | undefined;
  page(input: Input<Api['schedules']['history']>, reach: Reach): Page<ScheduleRun>;
}

/** The machines that whoever asks may see; undefined: all there are and were. */
export type Reach = readonly string[] | undefined;

const tables = [
  `CREATE TABLE schedule_runs (
    id TEXT NOT NULL UNIQUE, schedule_id TEXT NOT NULL, machine_id TEXT NOT NULL, command_id TEXT,
    status TEXT NOT NULL, trigger TEXT NOT NULL, scheduled_for INTEGER, started_at INTEGER NOT NULL,
    finished_at INTEGER, exit_code INTEGER, duration INTEGER, reason TEXT, UNIQUE (schedule_id, scheduled_for)
  );
  CREATE INDEX schedule_runs_by_schedule ON schedule_runs (schedule_id, started_at);
  CREATE INDEX schedule_runs_by_time ON schedule_runs (started_at);
  CREATE INDEX schedule_runs_open ON schedule_runs (schedule_id) WHERE finished_at IS NULL;
  CREATE INDEX schedule_runs_commands ON schedule_runs (command_id) WHERE finished_at IS NULL;
  CREATE TABLE schedule_marks (schedule_id TEXT PRIMARY KEY, at INTEGER NOT NULL) WITHOUT ROWID`,
  // started_at is told by the machine, whose clock can be wrong: order and age go by the broker's.
  `ALTER TABLE schedule_runs ADD COLUMN decided_at INTEGER NOT NULL DEFAULT 0;
  UPDATE schedule_runs SET decided_at = started_at;
  DROP INDEX schedule_runs_by_schedule;
  DROP INDEX schedule_runs_by_time;
  CREATE INDEX schedule_runs_by_schedule ON schedule_runs (schedule_id, decided_at);
  CREATE INDEX schedule_runs_by_time ON schedule_runs (decided_at)`,
];
/** Of a row: no command of this run ever reached its machine. */
const neverRan =
  "(status IN ('missed', 'skipped') OR status = 'failed' AND (command_id IS NULL OR reason IS 'machine_offline'))";
const columns =
  'id, schedule_id, machine_id, command_id, status, trigger, scheduled_for, started_at, finished_at, exit_code, duration, reason';

/** Opens the tables; runs that were decided longer than `keepMs` ago go. */
export function openScheduleRecords(
  { state, history, events }: { state: State; history: History; events: Events },
  keepMs: number,
): ScheduleRecords {
  history.migrate('schedules', tables);
  const where = 'finished_at IS NOT NULL';
  history.retain({ table: 'schedule_runs', column: 'decided_at', keepMs, where });
  const listeners: ((scheduleId: string) => void)[] = [];

  function insert(run: ScheduleRun): void {
    history
      .sql(
        // A row of a time that did not run gives way when the clock comes to that time again.
        `INSERT OR REPLACE INTO schedule_runs (decided_at, ${columns}) VALUES (?, ${columns.replaceAll(/\w+/g, '?')})`,
      )
      .run(
        now(),
        ...[run.id, run.schedule_id, run.machine_id, run.command_id, run.status, run.trigger],
        ...[run.scheduled_for, run.started_at, run.finished_at, run.exit_code, run.duration, run.reason],
      );
    if (run.scheduled_for === null) return;
    history
      .sql('INSERT OR REPLACE INTO schedule_marks VALUES (?, ?)')
      .run(run.schedule_id, run.scheduled_for);
  }

  function tell(run: ScheduleRun, transaction: HistoryTransaction): void {
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

  function one(sql: string, ...values: (string | number)[]): ScheduleRun | undefined {
    const row = history.sql(`SELECT ${columns} FROM schedule_runs WHERE ${sql}`).get(...values);
    return row && fromRow(row);
  }

  return {
    begin: insert,
    settle(runs, transaction) {
      for (const run of runs) insert(run);
      // Many at once are one piece of news.
      const last = runs.at(-1);
      if (last) tell(last, transaction);
    },
    ended(command, transaction) {
      if (command.schedule_id === null) return;
      const run = one('command_id = ? AND finished_at IS NULL', command.id);
      if (!run) return;
      const end = { ...run, ...endOf(command) };
      history
        .sql(
          `UPDATE schedule_runs SET status = ?, started_at = ?, finished_at = ?, exit_code = ?, duration = ?, reason = ?
           WHERE id = ?`,
        )
        .run(end.status, end.started_at, end.finished_at, end.exit_code, end.duration, end.reason, end.id);
      tell(end, transaction);
      transaction.committed(() => {
        for (const listener of listeners) listener(end.schedule_id);
      });
    },
    onEnd: (listener) => void listeners.push(listener),
    marks: () =>
      new Map(
        history
          .sql('SELECT schedule_id, at FROM schedule_marks')
          .all()
          .map((row) => [textIn(row, 'schedule_id'), Number(row.at)]),
      ),
    rewind(to) {
      history.sql('UPDATE schedule_marks SET at = ?1 WHERE at > ?1').run(to);
      // By schedule, for there is no index by time alone.
      history
        .sql(
          `DELETE FROM schedule_runs WHERE schedule_id IN (SELECT schedule_id FROM schedule_marks)
           AND scheduled_for > ? AND ${neverRan}`,
        )
        .run(to);
    },
    forget(ids) {
      history
        .sql('DELETE FROM schedule_marks WHERE schedule_id IN (SELECT value FROM json_each(?))')
        .run(JSON.stringify(ids));
    },
    open: (scheduleId) =>
      history
        .sql(`SELECT ${columns} FROM schedule_runs WHERE schedule_id = ? AND finished_at IS NULL`)
        .all(scheduleId)
        .map(fromRow),
    openIds: () =>
      history
        .sql('SELECT id FROM schedule_runs WHERE finished_at IS NULL')
        .all()
        .map((row) => textIn(row, 'id')),
    ran: (scheduleId, at) =>
      one(`schedule_id = ? AND scheduled_for = ? AND NOT ${neverRan}`, scheduleId, at) !== undefined,
    find: (id) => one('id = ?', id),
    last(scheduleId, reach) {
      const [seen, values] = allOf([['schedule_id = ?', scheduleId], reachableOnly(reach)]);
      return one(
        `${seen} AND ${where} AND status NOT IN ('skipped', 'missed') ORDER BY decided_at DESC, rowid DESC LIMIT 1`,
        ...values,
      );
    },
    machineOf: (scheduleId) =>
      one('schedule_id = ? ORDER BY decided_at DESC LIMIT 1', scheduleId)?.machine_id,
    page(input, reach) {
      const page = pageOfRows(
        history,
        { table: 'schedule_runs', columns },
        [
          reachableOnly(reach),
          ...filtersOf(routes.history, input, {
            since: input.since && ['decided_at >= ?', input.since.getTime()],
            until: input.until && ['decided_at < ?', input.until.getTime()],
          }),
        ],
        { ...input, sort: input.sort.replace('started_at', 'decided_at') },
        // Those decided together stay in the order of their times.
        'rowid',
      );
      return { items: page.items.map(fromRow), total: page.total };
    },
  };
}

/** A run whose command is about to be made. */
export function newRun(
  { id, machine_id }: Schedule,
  trigger: ScheduleRun['trigger'],
  scheduled_for: number | null,
  started_at: number,
): ScheduleRun {
  return {
    ...{
      id: newId('run') as RunId,
      schedule_id: id,
      machine_id,
      command_id: null,
      status: 'running',
      trigger,
    },
    ...{ scheduled_for, started_at, finished_at: null, exit_code: null, duration: null, reason: null },
  };
}

/** A run that was over with the decision about it. */
export function settledRun(
  schedule: Schedule,
  how: Pick<ScheduleRun, 'status' | 'trigger' | 'scheduled_for' | 'reason'>,
): ScheduleRun {
  const at = now();
  const run = newRun(schedule, how.trigger, how.scheduled_for, at);
  return { ...run, ...how, finished_at: at, exit_code: -1, duration: 0 };
}

/** What the end of its command means for a run. */
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

/** The columns are those that insert() wrote. */
function fromRow(row: Row): ScheduleRun {
  return row as unknown as ScheduleRun;
}
