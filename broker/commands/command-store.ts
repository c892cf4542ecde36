// Stores commands in the database of the history, and limits the age and size of their output.
import type { EventType } from '../../shared/api/events.ts';
import type { Journal } from '../../shared/api/route-table.ts';
import type { MachineId } from '../../shared/api/shared-schemas.ts';
import { waitingCommands } from '../../shared/command-and-terminal-limits.ts';
import type { Cluster } from '../cluster/index.ts';
import type { OtherBrokers } from '../cluster/peers/owner-interfaces.ts';
import type { Events } from '../event-log.ts';
import { notFound } from '../find-or-not-found.ts';
import {
  type History,
  type HistoryTransaction,
  jsonIn,
  type Row,
  type RowReader,
  textIn,
} from '../history/history-database.ts';
import { allOf, among, reachableOnly } from '../list-pages-and-filters.ts';
import type { Presence } from '../presence/index.ts';
import type { MachineFacts } from '../presence/stored-facts-and-metrics.ts';
import type { State } from '../state/index.ts';
import { BatchStore, isOpen } from './batch-store.ts';
import type { Command, Spec } from './command-record.ts';
import {
  assignments,
  changing,
  columns,
  countedCommands,
  dropFiles,
  endedWithFiles,
  fromRow,
  lineIn,
  rowOf,
  stored,
  tables,
  withTails,
} from './command-tables.ts';
import { durationOf, listedBytes } from './command-to-json.ts';
import type { OutputDirectory } from './stored-output.ts';

/**
 * The broker that has a command's output files removes the files together with the command. If that broker does not
 * run, another broker removes the command, this many milliseconds later than the first broker would do it.
 */
const longerMs = 86_400_000;

/** The parts of the broker that commands use. */
export interface CommandServices {
  state: State;
  history: History;
  events: Events;
  /** Called when a command ends, inside the transaction that writes the end. */
  ended(command: Command, transaction: HistoryTransaction): Promise<void>;
  presence: Presence;
  machineFacts: MachineFacts;
  /** This broker's part in the cluster of brokers on the same database; undefined with a single broker. */
  cluster?: Pick<Cluster, 'join' | 'follow' | 'brokerId' | 'directoryId'> | undefined;
  others?: OtherBrokers | undefined;
  /** True if the key that requested the command may still run commands on its machine. */
  mayRun(command: Command): boolean;
}

/**
 * Commands are removed `keepMs` milliseconds after their end. If the output files of this broker exceed `keepBytes`
 * together, the oldest ones are removed.
 */
export interface CommandSettings {
  /** Directory for the output of commands. */
  directory: string;
  keepMs: number;
  keepBytes: number;
}

/** Events of a batch's commands contain at most this many characters of the command line. */
const longestBatchLine = 4096;

export class CommandStore {
  readonly history: History;
  readonly batches: BatchStore;
  readonly #services: CommandServices;
  readonly #outputs: OutputDirectory;
  readonly #keepBytes: number;
  /** SQL condition for commands whose output files this broker has. */
  readonly #filesAreHere: string;
  /** Bytes in this broker's output files, counting only commands that have ended. */
  #storedBytes = 0;
  #dropping = false;
  readonly #watchers = new Set<(command: Command) => void>();

  private constructor(services: CommandServices, outputs: OutputDirectory, keepBytes: number) {
    this.history = services.history;
    this.batches = new BatchStore(services.history, services.cluster?.brokerId, outputs.log);
    this.#services = services;
    this.#outputs = outputs;
    this.#keepBytes = keepBytes;
    // The id is hexadecimal, so it needs no escaping in SQL.
    const id = services.cluster?.directoryId;
    this.#filesAreHere = id === undefined ? 'TRUE' : `output_directory = '${id}'`;
  }

  static async open(
    services: CommandServices,
    outputs: OutputDirectory,
    { keepMs, keepBytes }: CommandSettings,
  ): Promise<CommandStore> {
    const { history } = services;
    // Version 0.1.0 created these tables in three steps. The first step in `tables` replaces all three, so it has the
    // number 3.
    await history.migrate('commands', tables, 3);
    history.count(countedCommands);
    await BatchStore.migrate(history, keepMs);
    const store = new CommandStore(services, outputs, keepBytes);
    await store.#claimFiles();
    const here = store.#filesAreHere;
    const stored = await history.get(
      `SELECT coalesce(sum(kept_bytes), 0) AS n FROM commands WHERE ${endedWithFiles} AND ${here}`,
    );
    store.#storedBytes = Number(stored?.n);
    const removed = (rows: Row[]): void => {
      const directory = services.cluster?.directoryId;
      const own = rows.filter((row) => directory === undefined || row.output_directory === directory);
      for (const row of own) store.#storedBytes -= Number(row.kept_bytes);
      outputs.remove(own.map((row) => textIn(row, 'id')));
    };
    const where = `finished_at < ?1 AND (kept_bytes = 0 OR ${here} OR finished_at < ?1 - ${longerMs})`;
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
    transaction.committed(() => this.#created(command));
  }

  /**
   * Inserts a waiting command of a batch, for a machine of another broker. That broker loads it once the batch is
   * complete.
   */
  insertElsewhere(command: Command, transaction: HistoryTransaction): void {
    transaction.put('commands', 'id', { ...rowOf(command), spec: null });
    transaction.committed(() => this.#created(command));
  }

  /** Returns the ids of those machines whose queue is full. A queue holds at most `waitingCommands` commands. */
  async withLongQueue(machineIds: readonly string[]): Promise<string[]> {
    const [where, values] = allOf([among('machine_id', machineIds)]);
    const rows = await this.history.all(
      `SELECT machine_id FROM commands WHERE status = 'queued' AND journal_id = '' AND ${where}
       GROUP BY machine_id HAVING count(*) >= ?`,
      ...[...values, waitingCommands],
    );
    return rows.map((row) => textIn(row, 'machine_id'));
  }

  /** Writes those columns of a command that can change after its creation. */
  update(command: Command, transaction: HistoryTransaction): void {
    const { id, stdout, stderr, status } = command;
    transaction.about(command.machine_id);
    const row = { ...rowOf(command), output_directory: this.#services.cluster?.directoryId ?? null };
    transaction.run(
      `UPDATE commands SET ${assignments}, spec = CASE WHEN ? THEN spec ELSE NULL END WHERE id = ?`,
      ...[...changing.map((column) => row[column]), status === 'queued' ? 1 : 0, id],
    );
    if (Math.max(stdout.length, stderr.length) > listedBytes)
      transaction.put('command_tails', 'id', { id, stdout, stderr });
  }

  /** Records that an agent may have the command. Call this before the command is sent. */
  dispatched({ id, machine_id, journal_id }: Command, transaction: HistoryTransaction): void {
    transaction.about(machine_id);
    const directory = this.#services.cluster?.directoryId ?? null;
    // Sets only two columns, which have no index. SQLite rewrites the indexes of each column that is set.
    const dispatched = 'UPDATE commands SET journal_id = ?, output_directory = ? WHERE id = ?';
    transaction.run(dispatched, journal_id, directory, id);
  }

  /** Emits command.started. */
  announce(command: Command, transaction: HistoryTransaction): void {
    transaction.about(command.machine_id);
    const then = { status: 'running', exit_code: null, finished_at: null } as const;
    this.#emit(transaction, 'command.started', { ...command, ...then });
  }

  /** Writes the end of a command and the event about the end. Must be called once for each command. */
  end(command: Command, transaction: HistoryTransaction): Promise<void> {
    const { status } = command;
    this.update(command, transaction);
    const type = status === 'completed' || status === 'timeout' ? status : 'failed';
    this.#emit(transaction, `command.${type}`, command);
    return this.#services.ended(command, transaction);
  }

  /** Calls `watcher` with each command that this broker has created. Call the returned function to stop. */
  watch(watcher: (command: Command) => void): () => void {
    this.#watchers.add(watcher);
    return () => void this.#watchers.delete(watcher);
  }

  #created(command: Command): void {
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
      command: batch_id === null ? text : text.slice(0, longestBatchLine).toWellFormed(),
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
    throw notFound('command', id);
  }

  /** Finds commands by their ids, with only the end of their output. Unknown ids are left out. */
  async some(ids: readonly string[]): Promise<Command[]> {
    const some = `SELECT ${columns} FROM commands WHERE id IN (SELECT value FROM json_each(?))`;
    return (await this.history.all(some, JSON.stringify(ids))).map(fromRow);
  }

  /**
   * Returns the machine of a command. With several brokers, also returns the id of the data directory that has the
   * output files of an ended command. The owner of the machine answers requests about a command that has not ended.
   */
  async whereIs(id: string): Promise<{ machine: MachineId; directory?: string } | undefined> {
    const row = await this.history.get(
      `SELECT machine_id, CASE WHEN ${endedWithFiles} THEN output_directory END AS directory FROM commands WHERE id = ?`,
      id,
    );
    if (!row) return undefined;
    const machine = textIn(row, 'machine_id') as MachineId;
    const hasFiles = this.#services.cluster && row.directory !== null;
    return { machine, ...(hasFiles && { directory: textIn(row, 'directory') }) };
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
    // The command line of a batch is read once, and the commands of the batch share it in memory.
    const lines = `SELECT id, command, args FROM batches WHERE id IN (SELECT batch_id ${open})`;
    const batches = await this.history.all(lines, ...values);
    const shared = new Map(batches.map((row) => [textIn(row, 'id'), lineIn(row)]));
    return rows.map((row) => {
      const command = fromRow(row);
      return { ...command, ...(command.batch_id !== null && shared.get(command.batch_id)) };
    });
  }

  /**
   * Sets `output_directory` for commands whose output files are here. This column is null if a command ended while
   * this broker was the only one.
   */
  async #claimFiles(): Promise<void> {
    const { history, cluster } = this.#services;
    if (!cluster) return;
    const claim = `UPDATE commands SET output_directory = ? WHERE ${endedWithFiles} AND output_directory IS NULL
      AND id IN (SELECT value FROM json_each(?))`;
    const ids = JSON.stringify(await this.#outputs.ids());
    await history.write((transaction) => transaction.run(claim, cluster.directoryId, ids));
  }

  /** Returns the ids of commands that may have output files on this broker's disk. */
  async withFiles(): Promise<Set<string>> {
    const rows = await this.history.all(
      `SELECT id FROM commands WHERE ${isOpen} OR (kept_bytes > 0 AND ${this.#filesAreHere})`,
    );
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
      .catch((err: unknown) =>
        this.#outputs.log.error(
          { err },
          'old output files could not be deleted; trying again when the next command ends',
        ),
      )
      .finally(() => {
        this.#dropping = false;
      });
  }

  async #dropOldest(): Promise<void> {
    const oldest = `SELECT id, kept_bytes FROM commands WHERE ${endedWithFiles} AND ${this.#filesAreHere} ORDER BY finished_at LIMIT 1`;
    while (this.#storedBytes > this.#keepBytes) {
      // The row is read inside the transaction. Otherwise it could be deleted for its age at the same time, and its
      // bytes would be subtracted twice.
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
