// The tables of commands, their columns, and the conversion between rows and commands.
import { jsonIn, type Row, textIn } from '../history/history-database.ts';
import { type CountedTable, createCounts } from '../history/row-counts.ts';
import type { Command } from './command-record.ts';
import { listedBytes } from './command-to-json.ts';

export const countedCommands: CountedTable = {
  ...{ table: 'commands', time: 'created_at', number: 'rowid' },
  columns: ['status', 'stdout_truncated', 'stderr_truncated'],
};
/** SQL conditions for commands that ended with a status other than completed. */
const failures = ['failed', 'timeout', 'cancelled', 'expired', 'lost'].map(
  (status) => `status = '${status}'`,
);

// Rows are short, because lists read them: output longer than listedBytes is in command_tails. An index that serves
// only a few rows is partial (WHERE), because each insert writes to every full index.
export const tables = [
  `CREATE TABLE commands (
    id TEXT NOT NULL UNIQUE, machine_id TEXT NOT NULL, command TEXT NOT NULL, args TEXT, cwd TEXT, "user" TEXT,
    status TEXT NOT NULL, exit_code INTEGER, signal TEXT, stdout BLOB NOT NULL, stderr BLOB NOT NULL,
    stdout_bytes INTEGER NOT NULL, stderr_bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, started_at INTEGER,
    finished_at INTEGER, reason TEXT, requested_by TEXT NOT NULL, journal_id TEXT NOT NULL, cancel INTEGER NOT NULL,
    stdout_start INTEGER NOT NULL, stderr_start INTEGER NOT NULL, kept_bytes INTEGER NOT NULL, schedule_id TEXT,
    batch_id TEXT, queue_until INTEGER, spec TEXT
  );
  CREATE INDEX commands_by_time ON commands (created_at, id);
  CREATE INDEX commands_by_machine ON commands (machine_id, created_at);
  CREATE INDEX commands_open ON commands (created_at) WHERE finished_at IS NULL;
  CREATE INDEX commands_kept ON commands (finished_at) WHERE kept_bytes > 0;
  CREATE INDEX commands_by_schedule ON commands (schedule_id, created_at) WHERE schedule_id IS NOT NULL;
  CREATE INDEX commands_by_batch ON commands (batch_id) WHERE batch_id IS NOT NULL;
  CREATE TABLE command_tails (id TEXT NOT NULL UNIQUE, stdout BLOB NOT NULL, stderr BLOB NOT NULL);
  CREATE TRIGGER command_tails_go AFTER DELETE ON commands BEGIN
    DELETE FROM command_tails WHERE id = old.id;
  END`,
  'CREATE INDEX commands_by_status ON commands (status, created_at)',
  // - commands_by_time loses `id`: rows with the same time are listed in the order of their rowids.
  // - commands_open is dropped: commands_by_status finds open commands.
  `DROP INDEX commands_open; DROP INDEX commands_by_time; CREATE INDEX commands_by_time ON commands (created_at);
  ALTER TABLE commands ADD COLUMN stdout_truncated INTEGER AS (stdout_bytes > length(stdout));
  ALTER TABLE commands ADD COLUMN stderr_truncated INTEGER AS (stderr_bytes > length(stderr));
  CREATE INDEX commands_stdout_truncated ON commands (created_at) WHERE stdout_truncated = 1;
  CREATE INDEX commands_stderr_truncated ON commands (created_at) WHERE stderr_truncated = 1;
  CREATE INDEX commands_failed ON commands (machine_id, status, created_at) WHERE ${failures.join(' OR ')};
  DROP INDEX commands_by_schedule;
  CREATE INDEX commands_by_schedule ON commands (schedule_id, created_at, machine_id) WHERE schedule_id IS NOT NULL;
  ${createCounts(countedCommands)}`,
  'CREATE INDEX commands_by_start ON commands (started_at, created_at)',
  'ALTER TABLE commands ADD COLUMN output_directory TEXT',
];

const lasting =
  'id, machine_id, command, args, cwd, "user", created_at, requested_by, schedule_id, batch_id, queue_until';
export const changing = [
  ...(['status', 'exit_code', 'signal', 'stdout', 'stderr', 'stdout_bytes', 'stderr_bytes'] as const),
  ...(['stdout_start', 'stderr_start', 'started_at', 'finished_at', 'reason', 'journal_id'] as const),
  ...(['cancel', 'kept_bytes', 'output_directory'] as const),
];
export const stored = `${lasting}, ${changing.join(', ')}`;
/** Selects a column that all commands of a batch share. Its value is stored once, in the row of the batch. */
const ofBatch = (column: string): string =>
  `CASE WHEN batch_id IS NULL THEN ${column} ELSE (SELECT ${column} FROM batches WHERE batches.id = batch_id) END AS ${column}`;
/** The columns of a command, with only the last listedBytes of each output stream. */
export const columns = stored.replace('command, args', `${ofBatch('command')}, ${ofBatch('args')}`);

export const assignments = changing.map((column) => `${column} = ?`).join(', ');
/** The columns of a command, with all output that the database has. */
export const withTails = columns.replace('stdout, stderr', `${ofTail('stdout')}, ${ofTail('stderr')}`);

function ofTail(stream: 'stdout' | 'stderr'): string {
  return `coalesce((SELECT ${stream} FROM command_tails t WHERE t.id = commands.id), ${stream}) AS ${stream}`;
}

/**
 * SQL that records that a command has no output files any more. Its output then starts at the first byte that is in the
 * database.
 */
export const dropFiles = `UPDATE commands SET kept_bytes = 0,
  stdout_start = stdout_bytes - coalesce((SELECT length(stdout) FROM command_tails t WHERE t.id = commands.id), length(stdout)),
  stderr_start = stderr_bytes - coalesce((SELECT length(stderr) FROM command_tails t WHERE t.id = commands.id), length(stderr))
  WHERE id = ?`;

/** SQL condition for ended commands that have output files. */
export const endedWithFiles = 'kept_bytes > 0 AND finished_at IS NOT NULL';

/** Converts a command to a row. The command line of a member of a batch is in the row of the batch. */
export function rowOf({ command, args, stdout, stderr, cancel, ...rest }: Command) {
  return {
    ...rest,
    ...(rest.batch_id === null
      ? { command, args: args && JSON.stringify(args) }
      : { command: '', args: null }),
    stdout: stdout.subarray(-listedBytes),
    stderr: stderr.subarray(-listedBytes),
    cancel: Number(cancel),
  };
}

export function lineIn(row: Row): Pick<Command, 'command' | 'args'> {
  const args = row.args === null ? null : (jsonIn(row, 'args') as string[]);
  return { command: textIn(row, 'command'), args };
}

/** Converts a row to a command; the columns are those that insert() and update() write. */
export function fromRow(row: Row): Command {
  return {
    ...(row as unknown as Command),
    args: row.args === null ? null : (jsonIn(row, 'args') as string[]),
    stdout: Buffer.from(row.stdout as Uint8Array),
    stderr: Buffer.from(row.stderr as Uint8Array),
    cancel: row.cancel === 1,
  };
}
