// Commands in history: one row each, from the moment it is accepted.
import type { Api, Reply } from '../../shared/api/index.ts';
import type { CommandId, KeyId, MachineId } from '../../shared/api/route.ts';
import { iso } from '../../shared/clock.ts';
import { type History, jsonIn, type Row } from '../history.ts';

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
  stdout: Buffer;
  stderr: Buffer;
  stdout_bytes: number;
  stderr_bytes: number;
  created_at: number;
  started_at: number | null;
  finished_at: number | null;
  reason: string | null;
  requested_by: KeyId;
  /** The agent's journal that accepted it: another journal means a wiped agent. */
  journal_id: string;
  /** Somebody asked to end it. */
  cancel: boolean;
}

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
];

const columns =
  'id, machine_id, command, args, cwd, user, status, exit_code, signal, stdout, stderr, stdout_bytes, stderr_bytes, created_at, started_at, finished_at, reason, requested_by, journal_id, cancel';

export interface Records {
  /** Writes the row as the command now is; inside a transaction. */
  save(command: Command): void;
  find(id: string): Command | undefined;
  open(): Command[];
}

export function openRecords(history: History, keepMs: number): Records {
  history.migrate('commands', tables);
  history.retain({ table: 'commands', column: 'finished_at', keepMs, where: 'finished_at IS NOT NULL' });
  return {
    save(c) {
      history
        .sql(`INSERT OR REPLACE INTO commands (${columns}) VALUES (${columns.replaceAll(/\w+/g, '?')})`)
        .run(
          ...[
            c.id,
            c.machine_id,
            c.command,
            c.args && JSON.stringify(c.args),
            c.cwd,
            c.user,
            c.status,
            c.exit_code,
          ],
          ...[c.signal, c.stdout, c.stderr, c.stdout_bytes, c.stderr_bytes, c.created_at, c.started_at],
          ...[c.finished_at, c.reason, c.requested_by, c.journal_id, c.cancel ? 1 : 0],
        );
    },
    find(id) {
      const row = history.sql('SELECT * FROM commands WHERE id = ?').get(id);
      return row && fromRow(row);
    },
    open: () =>
      history
        .sql('SELECT * FROM commands WHERE finished_at IS NULL')
        .all()
        .map((row) => fromRow(row)),
  };
}

/** A row back as a command; the columns are those that save() wrote. */
export function fromRow(row: Row): Command {
  return {
    ...(row as unknown as Command),
    args: row.args === null ? null : (jsonIn(row, 'args') as string[]),
    stdout: Buffer.from(row.stdout as Uint8Array),
    stderr: Buffer.from(row.stderr as Uint8Array),
    cancel: row.cancel === 1,
  };
}

/** What a list shows of each stream: enough to see what happened, and a page stays small. */
const listedBytes = 4096;
/** Columns of a list: the outputs are cut by the database. */
export const listColumns = columns.replaceAll(
  /\b(stdout|stderr)\b/g, // Of an empty blob substr makes NULL.
  `ifnull(substr($1, -${listedBytes}), x'') AS $1`,
);

/** A command as a list shows it: with the end of its output only. */
export function listed(command: Command): CommandRecord {
  const { stdout, stderr } = command;
  return shown({ ...command, stdout: stdout.subarray(-listedBytes), stderr: stderr.subarray(-listedBytes) });
}

/** A command as REST shows it. */
export function shown(command: Command): CommandRecord {
  const { cancel: _, journal_id: __, ...rest } = command;
  const { started_at, finished_at } = command;
  return {
    ...rest,
    stdout: textOf(command.stdout, command.stdout_bytes),
    stderr: textOf(command.stderr, command.stderr_bytes),
    stdout_truncated: command.stdout.length < command.stdout_bytes,
    stderr_truncated: command.stderr.length < command.stderr_bytes,
    duration: started_at === null || finished_at === null ? null : Math.max(0, finished_at - started_at),
    created_at: iso(command.created_at),
    started_at: started_at === null ? null : iso(started_at),
    finished_at: finished_at === null ? null : iso(finished_at),
    schedule_id: null,
    batch_id: null,
  };
}

/** Text of the kept bytes; a cut in the middle of a character does not show as a bad one. */
function textOf(kept: Buffer, total: number): string {
  let from = 0;
  if (kept.length < total) while (from < 3 && ((kept[from] ?? 0) & 0xc0) === 0x80) from += 1;
  return kept.toString('utf8', from);
}
