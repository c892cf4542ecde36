// The tables of schedule runs in the history, and the migration steps that create them.
import { type CountedTable, createCounts } from '../history/row-counts.ts';

/**
 * The progress mark of a schedule on a machine: every due time up to `at` has run, or is recorded as skipped or missed.
 */
export interface Mark {
  schedule_id: string;
  machine_id: string;
  at: number;
}

export const counted: CountedTable = {
  ...{ table: 'schedule_runs', time: 'decided_at', number: 'rowid' },
  ...{ columns: ['schedule_id', 'status', 'trigger'], scope: 'schedule_id' },
};
// Rows are sorted and deleted by decided_at, a time of the broker's clock. started_at is a time of the machine's clock,
// which can be wrong.
export const tables = [
  `CREATE TABLE schedule_runs (
    id TEXT NOT NULL UNIQUE, schedule_id TEXT NOT NULL, machine_id TEXT NOT NULL, command_id TEXT,
    status TEXT NOT NULL, trigger TEXT NOT NULL, scheduled_for INTEGER, started_at INTEGER NOT NULL,
    finished_at INTEGER, exit_code INTEGER, duration INTEGER, reason TEXT, decided_at INTEGER NOT NULL,
    UNIQUE (schedule_id, scheduled_for)
  );
  CREATE INDEX schedule_runs_by_schedule ON schedule_runs (schedule_id, decided_at);
  CREATE INDEX schedule_runs_by_time ON schedule_runs (decided_at);
  CREATE INDEX schedule_runs_open ON schedule_runs (schedule_id) WHERE finished_at IS NULL;
  CREATE INDEX schedule_runs_commands ON schedule_runs (command_id) WHERE finished_at IS NULL;
  CREATE TABLE schedule_marks (schedule_id TEXT PRIMARY KEY, at INTEGER NOT NULL) WITHOUT ROWID`,
  `CREATE INDEX schedule_runs_by_status ON schedule_runs (schedule_id, status, decided_at);
  CREATE INDEX schedule_runs_by_trigger ON schedule_runs (schedule_id, trigger, decided_at)`,
  'CREATE INDEX schedule_runs_by_command ON schedule_runs (command_id) WHERE command_id IS NOT NULL',
  `CREATE INDEX schedule_runs_by_machine ON schedule_runs (schedule_id, machine_id, decided_at);
  ${createCounts(counted)}`,
  // The new table allows a row for each machine: a schedule with tags runs on several machines at the same time. The
  // rows are copied, because SQLite cannot change a UNIQUE constraint.
  `CREATE TABLE runs_by_machine (
    id TEXT NOT NULL UNIQUE, schedule_id TEXT NOT NULL, machine_id TEXT NOT NULL, command_id TEXT, batch_id TEXT,
    status TEXT NOT NULL, trigger TEXT NOT NULL, scheduled_for INTEGER, started_at INTEGER NOT NULL,
    finished_at INTEGER, exit_code INTEGER, duration INTEGER, reason TEXT, decided_at INTEGER NOT NULL,
    UNIQUE (schedule_id, scheduled_for, machine_id)
  );
  INSERT INTO runs_by_machine (id, schedule_id, machine_id, command_id, status, trigger, scheduled_for, started_at,
      finished_at, exit_code, duration, reason, decided_at)
    SELECT id, schedule_id, machine_id, command_id, status, trigger, scheduled_for, started_at,
      finished_at, exit_code, duration, reason, decided_at FROM schedule_runs ORDER BY rowid;
  DROP TRIGGER IF EXISTS schedule_runs_counted_insert; DROP TRIGGER IF EXISTS schedule_runs_counted_delete;
  DROP TRIGGER IF EXISTS schedule_runs_counted_update;
  DROP TABLE schedule_runs; DROP TABLE schedule_runs_by_quarter; DROP TABLE schedule_runs_by_machine_id;
  DELETE FROM counted WHERE name = 'schedule_runs';
  ALTER TABLE runs_by_machine RENAME TO schedule_runs;
  CREATE INDEX schedule_runs_by_schedule ON schedule_runs (schedule_id, decided_at);
  CREATE INDEX schedule_runs_by_time ON schedule_runs (decided_at);
  CREATE INDEX schedule_runs_open ON schedule_runs (schedule_id) WHERE finished_at IS NULL;
  CREATE INDEX schedule_runs_commands ON schedule_runs (command_id) WHERE finished_at IS NULL;
  CREATE INDEX schedule_runs_by_status ON schedule_runs (schedule_id, status, decided_at);
  CREATE INDEX schedule_runs_by_trigger ON schedule_runs (schedule_id, trigger, decided_at);
  CREATE INDEX schedule_runs_by_command ON schedule_runs (command_id) WHERE command_id IS NOT NULL;
  CREATE INDEX schedule_runs_by_batch ON schedule_runs (batch_id) WHERE batch_id IS NOT NULL;
  CREATE INDEX schedule_runs_by_machine ON schedule_runs (schedule_id, machine_id, decided_at);
  ${createCounts(counted)}
  CREATE TABLE marks_by_machine (schedule_id TEXT NOT NULL, machine_id TEXT NOT NULL, at INTEGER NOT NULL,
    PRIMARY KEY (schedule_id, machine_id)) WITHOUT ROWID;
  INSERT INTO marks_by_machine SELECT schedule_id, '', at FROM schedule_marks;
  DROP TABLE schedule_marks;
  ALTER TABLE marks_by_machine RENAME TO schedule_marks`,
  // `seen` is the last state of the path of a schedule with on_change.
  'ALTER TABLE schedule_marks ADD COLUMN seen TEXT',
];
