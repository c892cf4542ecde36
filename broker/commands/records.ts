// Commands in history: one row each, from the moment it is accepted.
import type { Api, Reply } from '../../shared/api/index.ts';
import type { BatchId, CommandId, KeyId, MachineId, ScheduleId } from '../../shared/api/route.ts';
import { type History, jsonIn, type Row, textIn } from '../history.ts';

export type CommandRecord = Reply<Api['commands']['get']>;
export type Status = CommandRecord['status'];

/** A command as the broker holds it: times in milliseconds, output as bytes. */
export interface Command {
  id: CommandId;
  machine_id: MachineId;
  command: string;
  args: string[] | null;
  cwd: string | null;
  user: string | null;
  status: Status;
  exit_code: number | null;
  signal: string | null;
  /** Its last MiB, once it has ended. */
  stdout: Buffer;
  stderr: Buffer;
  stdout_bytes: number;
  stderr_bytes: number;
  /** First byte that can still be had. */
  stdout_start: number;
  stderr_start: number;
  created_at: number;
  started_at: number | null;
  finished_at: number | null;
  reason: string | null;
  requested_by: KeyId;
  schedule_id: ScheduleId | null;
  batch_id: BatchId | null;
  /** The agent's journal it was given to: another journal means a wiped agent. Empty: it waits, no agent has it. */
  journal_id: string;
  /** How long it may wait for its machine. */
  queue_until: number | null;
  /** Somebody asked to end it. */
  cancel: boolean;
  /** Bytes of its output in files. */
  kept_bytes: number;
}

/** What an agent is to start. */
export interface Spec {
  command: string;
  direct: boolean;
  args: string[];
  cwd: string;
  env: Record<string, string>;
  user: string;
  stdin: string;
  timeout_ms: number;
  input: boolean;
}

/** What a list shows of each stream: enough to see what happened, and a page stays small. */
export const listedBytes = 4096;

// Rows are read by the page: what is long lies beside them.
const tables = [
  `CREATE TABLE commands (
    id TEXT NOT NULL UNIQUE, machine_id TEXT NOT NULL, command TEXT NOT NULL, args TEXT, cwd TEXT, user TEXT,
    status TEXT NOT NULL, exit_code INTEGER, signal TEXT, stdout BLOB NOT NULL, stderr BLOB NOT NULL,
    stdout_bytes INTEGER NOT NULL, stderr_bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, started_at INTEGER,
    finished_at INTEGER, reason TEXT, requested_by TEXT NOT NULL, journal_id TEXT NOT NULL, cancel INTEGER NOT NULL
  );
  CREATE INDEX commands_by_time ON commands (created_at, id);
  CREATE INDEX commands_by_machine ON commands (machine_id, created_at);
  CREATE INDEX commands_by_end ON commands (finished_at);
  CREATE INDEX commands_open ON commands (machine_id) WHERE finished_at IS NULL`,
  // Indexes cost every command: those that only few rows need are partial.
  `ALTER TABLE commands ADD COLUMN stdout_start INTEGER NOT NULL DEFAULT 0;
  ALTER TABLE commands ADD COLUMN stderr_start INTEGER NOT NULL DEFAULT 0;
  ALTER TABLE commands ADD COLUMN kept_bytes INTEGER NOT NULL DEFAULT 0;
  ALTER TABLE commands ADD COLUMN schedule_id TEXT;
  ALTER TABLE commands ADD COLUMN batch_id TEXT;
  ALTER TABLE commands ADD COLUMN queue_until INTEGER;
  ALTER TABLE commands ADD COLUMN spec TEXT;
  UPDATE commands SET stdout_start = stdout_bytes - length(stdout), stderr_start = stderr_bytes - length(stderr);
  DROP INDEX commands_open;
  CREATE INDEX commands_open ON commands (created_at) WHERE finished_at IS NULL;
  CREATE INDEX commands_kept ON commands (finished_at) WHERE kept_bytes > 0;
  CREATE INDEX commands_by_schedule ON commands (schedule_id, created_at) WHERE schedule_id IS NOT NULL;
  CREATE INDEX commands_by_batch ON commands (batch_id) WHERE batch_id IS NOT NULL;
  CREATE TABLE command_tails (id TEXT NOT NULL UNIQUE, stdout BLOB NOT NULL, stderr BLOB NOT NULL);
  INSERT INTO command_tails SELECT id, stdout, stderr FROM commands
    WHERE length(stdout) > ${listedBytes} OR length(stderr) > ${listedBytes};
  UPDATE commands SET stdout = substr(stdout, -${listedBytes}), stderr = substr(stderr, -${listedBytes})
    WHERE id IN (SELECT id FROM command_tails);
  CREATE TRIGGER command_tails_go AFTER DELETE ON commands BEGIN
    DELETE FROM command_tails WHERE id = old.id;
  END`,
  // What ended long ago began before that: it is found by its time.
  'DROP INDEX commands_by_end',
];

const lasting =
  'id, machine_id, command, args, cwd, user, created_at, requested_by, schedule_id, batch_id, queue_until';
const changing =
  'status, exit_code, signal, stdout, stderr, stdout_bytes, stderr_bytes, stdout_start, stderr_start, started_at, finished_at, reason, journal_id, cancel, kept_bytes';
const stored = `${lasting}, ${changing}`;
/** Of a member of a batch, what runs is stored once, with the batch. */
const ofBatch = (column: string): string =>
  `iif(batch_id IS NULL, ${column}, (SELECT ${column} FROM batches WHERE batches.id = batch_id)) AS ${column}`;
/** A command with the end of its output only. */
export const columns = stored.replace('command, args', `${ofBatch('command')}, ${ofBatch('args')}`);

/** How many commands have a status, and when the last of them ended. */
export interface Tally {
  status: Status;
  n: number;
  finished_at: number | null;
}

export interface Records {
  /** Inside a transaction. With `spec`, which goes once it has started, it can be given to an agent later. */
  insert(command: Command, spec: Spec | undefined): void;
  /** Writes what changes of a command; inside a transaction. */
  update(command: Command): void;
  find(id: string): Command | undefined;
  /** Those of these ids that are known, with the end of their output only. */
  some(ids: readonly string[]): Command[];
  machineOf(id: string): MachineId | undefined;
  specOf(id: string): Spec | undefined;
  /** In the order they came. */
  open(): Command[];
  /** Those that may have files. */
  withFiles(): string[];
  /** Those of a batch, with the end of their output only, and without command and args, which are the batch's. */
  ofBatch(batchId: string): Command[];
  /** Of a batch, on these machines or on all. */
  tally(batchId: string, machines: readonly MachineId[] | undefined): Tally[];
  machinesOfBatch(batchId: string): MachineId[];
  /** Of those that have ended, which hold files, oldest first. */
  kept(limit: number): { id: string; kept_bytes: number }[];
  keptBytes(): number;
  /** Its files have gone; inside a transaction. */
  dropped(id: string): void;
}

/** Opens the table; commands that ended longer than `keepMs` ago go, and `removed` is told. */
export function openRecords(history: History, keepMs: number, removed: (ids: string[]) => void): Records {
  history.migrate('commands', tables);
  const where = 'finished_at < ?1';
  history.retain({ table: 'commands', column: 'created_at', keepMs, where, removed });
  const insert = `INSERT INTO commands (${stored}, spec) VALUES (${`${stored}, spec`.replaceAll(/\w+/g, '?')})`;
  const assignments = changing.replaceAll(/\w+/g, '$& = ?');
  return {
    insert(command, spec) {
      const values = [...lastingOf(command), ...changingOf(command)];
      history.sql(insert).run(...values, spec ? JSON.stringify(spec) : null);
    },
    update(command) {
      const { id, stdout, stderr, status } = command;
      history
        .sql(`UPDATE commands SET ${assignments}, spec = iif(?, spec, NULL) WHERE id = ?`)
        .run(...changingOf(command), status === 'queued' ? 1 : 0, id);
      if (Math.max(stdout.length, stderr.length) <= listedBytes) return;
      history.sql('INSERT OR REPLACE INTO command_tails VALUES (?, ?, ?)').run(id, stdout, stderr);
    },
    find(id) {
      const row = history.sql(`SELECT ${columns} FROM commands WHERE id = ?`).get(id);
      const tails = row && history.sql('SELECT stdout, stderr FROM command_tails WHERE id = ?').get(id);
      return row && fromRow({ ...row, ...tails });
    },
    some: (ids) =>
      history
        .sql(`SELECT ${columns} FROM commands WHERE id IN (SELECT value FROM json_each(?))`)
        .all(JSON.stringify(ids))
        .map(fromRow),
    machineOf(id) {
      const row = history.sql('SELECT machine_id FROM commands WHERE id = ?').get(id);
      return row && (textIn(row, 'machine_id') as MachineId);
    },
    specOf(id) {
      const row = history
        .sql(
          `SELECT ifnull(commands.spec, batches.spec) AS spec
           FROM commands LEFT JOIN batches ON batches.id = batch_id WHERE commands.id = ?`,
        )
        .get(id);
      // Written by insert() or with its batch, which take no other shape.
      return row?.spec ? (jsonIn(row, 'spec') as Spec) : undefined;
    },
    withFiles: () =>
      history
        .sql('SELECT id FROM commands WHERE finished_at IS NULL OR kept_bytes > 0')
        .all()
        .map((row) => textIn(row, 'id')),
    open() {
      const sql = `SELECT ${columns} FROM commands WHERE finished_at IS NULL ORDER BY created_at, rowid`;
      // In memory, too, members of a batch share what runs.
      const shared = new Map<BatchId, Pick<Command, 'command' | 'args'>>();
      return Array.from(history.sql(sql).iterate(), (row) => {
        const command = fromRow(row);
        if (command.batch_id === null) return command;
        const { command: text, args } = shared.get(command.batch_id) ?? command;
        shared.set(command.batch_id, { command: text, args });
        return { ...command, command: text, args };
      });
    },
    ofBatch: (batchId) =>
      history
        .sql(`SELECT ${stored} FROM commands WHERE batch_id = ? ORDER BY rowid`)
        .all(batchId)
        .map(fromRow),
    tally: (batchId, machines) =>
      history
        .sql(
          `SELECT status, count(*) AS n, max(finished_at) AS finished_at FROM commands
           WHERE batch_id = ?1 AND (?2 IS NULL OR machine_id IN (SELECT value FROM json_each(?2))) GROUP BY status`,
        )
        .all(batchId, machines ? JSON.stringify(machines) : null)
        .map((row) => row as unknown as Tally),
    machinesOfBatch: (batchId) =>
      history
        .sql('SELECT machine_id FROM commands WHERE batch_id = ?')
        .all(batchId)
        .map((row) => textIn(row, 'machine_id') as MachineId),
    kept: (limit) =>
      history
        .sql(
          `SELECT id, kept_bytes FROM commands WHERE kept_bytes > 0 AND finished_at IS NOT NULL ORDER BY finished_at LIMIT ?`,
        )
        .all(limit)
        .map((row) => ({ id: textIn(row, 'id'), kept_bytes: Number(row.kept_bytes) })),
    keptBytes: () =>
      Number(history.sql('SELECT total(kept_bytes) AS n FROM commands WHERE kept_bytes > 0').get()?.n),
    dropped(id) {
      history
        .sql(
          `UPDATE commands SET kept_bytes = 0,
             stdout_start = stdout_bytes - ifnull((SELECT length(stdout) FROM command_tails t WHERE t.id = commands.id), length(stdout)),
             stderr_start = stderr_bytes - ifnull((SELECT length(stderr) FROM command_tails t WHERE t.id = commands.id), length(stderr))
           WHERE id = ?`,
        )
        .run(id);
    },
  };
}

function lastingOf(c: Command) {
  const [command, args] = c.batch_id === null ? [c.command, c.args && JSON.stringify(c.args)] : ['', null];
  const what = [c.id, c.machine_id, command, args, c.cwd, c.user];
  return [...what, c.created_at, c.requested_by, c.schedule_id, c.batch_id, c.queue_until];
}

function changingOf(c: Command) {
  const sizes = [c.stdout_bytes, c.stderr_bytes, c.stdout_start, c.stderr_start];
  const output = [c.stdout.subarray(-listedBytes), c.stderr.subarray(-listedBytes), ...sizes];
  const rest = [c.started_at, c.finished_at, c.reason, c.journal_id, c.cancel ? 1 : 0, c.kept_bytes];
  return [c.status, c.exit_code, c.signal, ...output, ...rest];
}

/** A row back as a command; the columns are those that insert() and update() wrote. */
export function fromRow(row: Row): Command {
  return {
    ...(row as unknown as Command),
    args: row.args === null ? null : (jsonIn(row, 'args') as string[]),
    stdout: Buffer.from(row.stdout as Uint8Array),
    stderr: Buffer.from(row.stderr as Uint8Array),
    cancel: row.cancel === 1,
  };
}
