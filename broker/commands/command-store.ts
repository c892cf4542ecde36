// Stores commands in the database of the history, and limits the age and size of their output.
import type { EventType } from '../../shared/api/events.ts';
import type { Journal } from '../../shared/api/route-table.ts';
import type { MachineId } from '../../shared/api/shared-schemas.ts';
import { waitingCommands } from '../../shared/command-and-terminal-limits.ts';
import { AppError } from '../../shared/errors.ts';
import type { Cluster } from '../cluster/owners.ts';
import type { OtherBrokers } from '../cluster/peers/owner-lookup.ts';
import type { Events } from '../events.ts';
import {
  type History,
  type HistoryTransaction,
  jsonIn,
  type Row,
  type RowReader,
  textIn,
} from '../history/history.ts';
import { type CountedTable, createCounts, dropOldCounts } from '../history/row-counts.ts';
import { allOf, among, reachableOnly } from '../paging.ts';
import type { MachineFacts } from '../presence/facts-and-metrics.ts';
import type { Presence } from '../presence/index.ts';
import type { State } from '../state/in-memory-state.ts';
import { BatchStore, isOpen } from './batch-store.ts';
import type { Command, Spec } from './command-record.ts';
import { durationOf, listedBytes } from './command-to-json.ts';
import type { OutputDirectory } from './stored-output.ts';

export const countedCommands: CountedTable = {
  ...{ table: 'commands', time: 'created_at', number: 'rowid' },
  columns: ['status', 'stdout_truncated', 'stderr_truncated'],
};
/** SQL conditions for commands that have ended but not completed. */
const failures = ['failed', 'timeout', 'cancelled', 'expired', 'lost'].map(
  (status) => `status = '${status}'`,
);

// The table command_tails has the output beyond listedBytes, so that lists read short rows. An index that finds only
// few rows is partial, because each insert must write to every full index.
const tables = [
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
  // Rows with the same time are listed in the order of their rowids. Open commands are found by their status.
  `${dropOldCounts('commands')} DROP INDEX IF EXISTS commands_stdout_cut; DROP INDEX IF EXISTS commands_stderr_cut;
  DROP INDEX commands_open; DROP INDEX commands_by_time; CREATE INDEX commands_by_time ON commands (created_at);
  ALTER TABLE commands ADD COLUMN stdout_truncated INTEGER AS (stdout_bytes > length(stdout));
  ALTER TABLE commands ADD COLUMN stderr_truncated INTEGER AS (stderr_bytes > length(stderr));
  CREATE INDEX commands_stdout_truncated ON commands (created_at) WHERE stdout_truncated = 1;
  CREATE INDEX commands_stderr_truncated ON commands (created_at) WHERE stderr_truncated = 1;
  CREATE INDEX commands_failed ON commands (machine_id, status, created_at) WHERE ${failures.join(' OR ')};
  DROP INDEX commands_by_schedule;
  CREATE INDEX commands_by_schedule ON commands (schedule_id, created_at, machine_id) WHERE schedule_id IS NOT NULL;
  ${createCounts(countedCommands)}`,
  'CREATE INDEX commands_by_start ON commands (started_at, created_at)',
];

const lasting =
  'id, machine_id, command, args, cwd, "user", created_at, requested_by, schedule_id, batch_id, queue_until';
const changing = [
  ...(['status', 'exit_code', 'signal', 'stdout', 'stderr', 'stdout_bytes', 'stderr_bytes'] as const),
  ...(['stdout_start', 'stderr_start', 'started_at', 'finished_at', 'reason', 'journal_id'] as const),
  ...(['cancel', 'kept_bytes'] as const),
];
const stored = `${lasting}, ${changing.join(', ')}`;
/** Selects a column that all commands of a batch share. Its value is stored once, in the row of the batch. */
const ofBatch = (column: string): string =>
  `CASE WHEN batch_id IS NULL THEN ${column} ELSE (SELECT ${column} FROM batches WHERE batches.id = batch_id) END AS ${column}`;
/** The columns of a command, with only the last listedBytes of each output stream. */
export const columns = stored.replace('command, args', `${ofBatch('command')}, ${ofBatch('args')}`);

const assignments = changing.map((column) => `${column} = ?`).join(', ');
/** The columns of a command, with all output that the database has. */
const withTails = columns.replace('stdout, stderr', `${ofTail('stdout')}, ${ofTail('stderr')}`);

function ofTail(stream: 'stdout' | 'stderr'): string {
  return `coalesce((SELECT ${stream} FROM command_tails t WHERE t.id = commands.id), ${stream}) AS ${stream}`;
}

/** Marks a command's output files as removed, so that only the output in the database remains. */
const dropFiles = `UPDATE commands SET kept_bytes = 0,
  stdout_start = stdout_bytes - coalesce((SELECT length(stdout) FROM command_tails t WHERE t.id = commands.id), length(stdout)),
  stderr_start = stderr_bytes - coalesce((SELECT length(stderr) FROM command_tails t WHERE t.id = commands.id), length(stderr))
  WHERE id = ?`;

const ended = 'kept_bytes > 0 AND finished_at IS NOT NULL';

/** The parts of the broker that commands use. */
export interface CommandServices {
  state: State;
  history: History;
  events: Events;
  /** Is called when a command ends, inside the transaction that writes the end. */
  ended(command: Command, transaction: HistoryTransaction): Promise<void>;
  presence: Presence;
  machineFacts: MachineFacts;
  /** The other brokers of the database; undefined if there are none. */
  cluster?: Pick<Cluster, 'join' | 'follow' | 'brokerId'> | undefined;
  others?: OtherBrokers | undefined;
  /** True if the key that requested the command may still run commands on its machine. */
  mayRun(command: Command): boolean;
}

/**
 * Commands are removed `keepMs` milliseconds after their end. If all output files together exceed `keepBytes`, the
 * oldest ones are removed.
 */
export interface CommandSettings {
  /** Directory for the output of commands. */
  directory: string;
  keepMs: number;
  keepBytes: number;
}

/** Maximum number of characters of the command line in an event of a batch member. */
const mostOfBatch = 4096;

export class CommandStore {
  readonly history: History;
  readonly batches: BatchStore;
  readonly #services: CommandServices;
  readonly #outputs: OutputDirectory;
  readonly #keepBytes: number;
  /** Bytes in the output files of all commands that have ended. */
  #storedBytes: number;
  #dropping = false;
  readonly #watchers = new Set<(command: Command) => void>();

  private constructor(
    services: CommandServices,
    outputs: OutputDirectory,
    keepBytes: number,
    storedBytes: number,
  ) {
    this.history = services.history;
    this.batches = new BatchStore(services.history, services.cluster?.brokerId, outputs.log);
    this.#services = services;
    this.#outputs = outputs;
    this.#keepBytes = keepBytes;
    this.#storedBytes = storedBytes;
  }

  static async open(
    services: CommandServices,
    outputs: OutputDirectory,
    { keepMs, keepBytes }: CommandSettings,
  ): Promise<CommandStore> {
    const { history } = services;
    // Version 0.1.0 created these tables in three steps.
    await history.migrate('commands', tables, 3);
    history.count(countedCommands);
    await BatchStore.migrate(history, keepMs);
    const stored = await history.get(`SELECT coalesce(sum(kept_bytes), 0) AS n FROM commands WHERE ${ended}`);
    const store = new CommandStore(services, outputs, keepBytes, Number(stored?.n));
    const removed = (rows: Row[]): void => {
      for (const row of rows) store.#storedBytes -= Number(row.kept_bytes);
      outputs.remove(rows.map((row) => textIn(row, 'id')));
    };
    const where = 'finished_at < ?1';
    history.retain({ table: 'commands', column: 'created_at', keepMs, where, removed });
    return store;
  }

  /**
   * Inserts a command. With a stored `spec` the command can be sent to an agent later. The spec is removed
   * when the command starts.
   */
  insert(command: Command, spec: Spec | undefined, transaction: HistoryTransaction): void {
    transaction.about(command.machine_id);
    transaction.put('commands', 'id', { ...rowOf(command), spec: spec ? JSON.stringify(spec) : null });
    transaction.committed(() => this.#changed(command));
  }

  /**
   * Inserts a waiting command of a batch, for a machine of another broker. That broker loads it once the batch is
   * complete.
   */
  insertElsewhere(command: Command, transaction: HistoryTransaction): void {
    transaction.put('commands', 'id', { ...rowOf(command), spec: null });
    transaction.committed(() => this.#changed(command));
  }

  /** Returns the ids of those machines for which the maximum number of commands already wait. */
  async withLongQueue(machineIds: readonly string[]): Promise<string[]> {
    const [where, values] = allOf([among('machine_id', machineIds)]);
    const rows = await this.history.all(
      `SELECT machine_id FROM commands WHERE status = 'queued' AND journal_id = '' AND ${where}
       GROUP BY machine_id HAVING count(*) >= ?`,
      ...[...values, waitingCommands],
    );
    return rows.map((row) => textIn(row, 'machine_id'));
  }

  /** Writes the changing columns of a command. */
  update(command: Command, transaction: HistoryTransaction): void {
    const { id, stdout, stderr, status, batch_id } = command;
    transaction.about(command.machine_id);
    const row = rowOf(command);
    if (batch_id !== null) transaction.committed(() => this.batches.countChange(batch_id));
    transaction.run(
      `UPDATE commands SET ${assignments}, spec = CASE WHEN ? THEN spec ELSE NULL END WHERE id = ?`,
      ...[...changing.map((column) => row[column]), status === 'queued' ? 1 : 0, id],
    );
    if (Math.max(stdout.length, stderr.length) > listedBytes)
      transaction.put('command_tails', 'id', { id, stdout, stderr });
  }

  /** Emits command.started. */
  announce(command: Command, transaction: HistoryTransaction): void {
    transaction.about(command.machine_id);
    const then = { status: 'running', exit_code: null, finished_at: null } as const;
    this.#emit(transaction, 'command.started', { ...command, ...then });
    this.#changed(command);
  }

  /** Writes the end of a command and the event about the end. Must be called once for each command. */
  end(command: Command, transaction: HistoryTransaction): Promise<void> {
    const { status } = command;
    this.update(command, transaction);
    const type = status === 'completed' || status === 'timeout' ? status : 'failed';
    this.#emit(transaction, `command.${type}`, command);
    transaction.committed(() => this.#changed(command));
    return this.#services.ended(command, transaction);
  }

  /** Calls `watcher` with each command that was created, started or ended. Call the returned function to stop. */
  watch(watcher: (command: Command) => void): () => void {
    this.#watchers.add(watcher);
    return () => void this.#watchers.delete(watcher);
  }

  #changed(command: Command): void {
    for (const watcher of this.#watchers) watcher(command);
  }

  #emit(journal: Journal, type: EventType, command: Command): void {
    const machine = this.#services.state.machines.get(command.machine_id) ?? {
      id: command.machine_id,
      name: '',
    };
    const { batch_id, command: text } = command;
    this.#services.events.emit(journal, type, machine, {
      command_id: command.id,
      // A batch emits two events per machine, so its events contain only the beginning of a long command line.
      command: batch_id === null ? text : text.slice(0, mostOfBatch).toWellFormed(),
      status: command.status,
      exit_code: command.exit_code,
      duration: durationOf(command),
      schedule_id: command.schedule_id,
    });
  }

  /** Finds a command, with its stored output. Throws command_not_found. */
  async get(id: string): Promise<Command> {
    const row = await this.history.get(`SELECT ${withTails} FROM commands WHERE id = ?`, id);
    if (row) return fromRow(row);
    throw new AppError('command_not_found', `no command has the id ${id}`, { command_id: id });
  }

  /** Finds commands by their ids, with only the end of their output. Unknown ids are left out. */
  async some(ids: readonly string[]): Promise<Command[]> {
    const some = `SELECT ${columns} FROM commands WHERE id IN (SELECT value FROM json_each(?))`;
    return (await this.history.all(some, JSON.stringify(ids))).map(fromRow);
  }

  async machineOf(id: string): Promise<MachineId | undefined> {
    const row = await this.history.get('SELECT machine_id FROM commands WHERE id = ?', id);
    return row && (textIn(row, 'machine_id') as MachineId);
  }

  async specOf(id: string, reader: RowReader = this.history): Promise<Spec | undefined> {
    const row = await reader.get(
      `SELECT coalesce(commands.spec, batches.spec) AS spec
       FROM commands LEFT JOIN batches ON batches.id = batch_id WHERE commands.id = ?`,
      id,
    );
    // The cast is safe: a column `spec` holds nothing but specs.
    return row?.spec ? (jsonIn(row, 'spec') as Spec) : undefined;
  }

  /** Returns the commands that have not ended, oldest first. With machines or batches, returns only their commands. */
  async open({
    machineIds,
    batchIds,
  }: {
    machineIds?: readonly string[];
    batchIds?: readonly string[];
  } = {}) {
    const ofBatches = batchIds && among('batch_id', batchIds);
    const [where, values] = allOf([[isOpen], reachableOnly(machineIds), ofBatches]);
    const open = `FROM commands WHERE ${where}`;
    const rows = await this.history.all(`SELECT ${stored} ${open} ORDER BY created_at, rowid`, ...values);
    // The commands of a batch share one command line in memory too.
    const lines = `SELECT id, command, args FROM batches WHERE id IN (SELECT batch_id ${open})`;
    const batches = await this.history.all(lines, ...values);
    const shared = new Map(batches.map((row) => [textIn(row, 'id'), lineIn(row)]));
    return rows.map((row) => {
      const command = fromRow(row);
      return { ...command, ...(command.batch_id !== null && shared.get(command.batch_id)) };
    });
  }

  /** Ids of commands that may have output files. */
  async withFiles(): Promise<Set<string>> {
    const rows = await this.history.all(`SELECT id FROM commands WHERE ${isOpen} OR kept_bytes > 0`);
    return new Set(rows.map((row) => textIn(row, 'id')));
  }

  /**
   * Adds the bytes of an ended command's output files to the total. Removes the oldest files if the total is
   * too large.
   */
  limitOutput(bytes: number): void {
    this.#storedBytes += bytes;
    if (this.#storedBytes <= this.#keepBytes || this.#dropping) return;
    this.#dropping = true;
    this.#dropOldest()
      .catch((err: unknown) => this.#outputs.log.error({ err }, 'old output files could not be deleted'))
      .finally(() => {
        this.#dropping = false;
      });
  }

  async #dropOldest(): Promise<void> {
    const oldest = `SELECT id, kept_bytes FROM commands WHERE ${ended} ORDER BY finished_at LIMIT 1`;
    while (this.#storedBytes > this.#keepBytes) {
      // The size is read inside the transaction, because the row may be deleted for its age at the same time.
      const dropped = await this.history.write(async (transaction) => {
        const row = await transaction.get(oldest);
        if (row) transaction.run(dropFiles, textIn(row, 'id'));
        return row;
      });
      if (!dropped) return;
      this.#storedBytes -= Number(dropped.kept_bytes);
      this.#outputs.remove([textIn(dropped, 'id')]);
    }
  }

  /**
   * Reads up to `count` members of a batch, beginning at row `from`. `next` is the row at which to continue.
   */
  async ofBatch(id: string, from: number, count: number): Promise<{ command: Command; next: number }[]> {
    const rows = await this.history.all(
      `SELECT rowid + 1 AS next, ${stored} FROM commands WHERE batch_id = ? AND rowid >= ? ORDER BY rowid LIMIT ?`,
      ...[id, from, count],
    );
    return rows.map(({ next, ...row }) => ({ command: fromRow(row), next: Number(next) }));
  }
}

/** Converts a command to a row. The command line of a member of a batch is in the row of the batch. */
function rowOf({ command, args, stdout, stderr, cancel, ...rest }: Command) {
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

function lineIn(row: Row): Pick<Command, 'command' | 'args'> {
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
