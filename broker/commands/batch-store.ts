// Stores batches in the history database (SQLite). Their members are rows of the table `commands`.
import type { BatchId, MachineId } from '../../shared/api/shared-schemas.ts';
import { AppError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import { type History, type HistoryTransaction, jsonIn, type Row, textIn } from '../history/history.ts';
import type { Batch, BatchProgress, Spec, Tally } from './command-record.ts';

const table = `CREATE TABLE batches (
    id TEXT NOT NULL UNIQUE, command TEXT NOT NULL, args TEXT, cwd TEXT, "user" TEXT, concurrency INTEGER,
    max_failures INTEGER, created_at INTEGER NOT NULL, requested_by TEXT NOT NULL, cancel INTEGER NOT NULL, spec TEXT
  );
  CREATE INDEX batches_by_time ON batches (created_at)`;
/** The columns of a batch without its spec, which can contain secrets. */
export const batchColumns =
  'id, command, args, cwd, "user", concurrency, max_failures, created_at, requested_by, cancel';
const memberless = 'NOT EXISTS (SELECT 1 FROM commands WHERE batch_id = batches.id)';

/** Condition for commands that have not ended. The index of the column `status` finds them. */
export const isOpen = "status IN ('queued', 'running')";

export class BatchStore {
  readonly #history: History;
  readonly #log: Logger;
  /** Number of changes of members since the broker started, by open batch. */
  readonly #changes = new Map<string, number>();

  constructor(history: History, log: Logger) {
    this.#history = history;
    this.#log = log;
  }

  /** Creates the table. Batches without members are deleted after `keepMs` milliseconds. */
  static async migrate(history: History, keepMs: number): Promise<void> {
    await history.migrate('batches', [table]);
    history.retain({ table: 'batches', column: 'created_at', keepMs, where: memberless });
  }

  /** Inserts a batch that is not complete yet. */
  insert(batch: Batch, transaction: HistoryTransaction): void {
    const args = batch.args && JSON.stringify(batch.args);
    transaction.put('batches', 'id', { ...batch, args, cancel: Number(batch.cancel) });
  }

  /** Stores what the members of a batch run, once all of them are stored. */
  complete(id: BatchId, spec: Spec, transaction: HistoryTransaction): void {
    transaction.run('UPDATE batches SET spec = ? WHERE id = ?', JSON.stringify(spec), id);
  }

  /**
   * Removes the batches that were being stored when the broker crashed. No request for them was answered, and
   * no agent got one of their commands.
   */
  async removeIncomplete(): Promise<void> {
    const open = `SELECT batch_id FROM commands WHERE ${isOpen}`;
    const begun = `SELECT 1 FROM commands WHERE batch_id = batches.id AND (journal_id <> '' OR finished_at IS NOT NULL)`;
    const incomplete = `spec IS NULL AND id IN (${open}) AND NOT EXISTS (${begun})`;
    const rows = await this.#history.all(`SELECT id FROM batches WHERE ${incomplete}`);
    for (const row of rows) await this.remove(textIn(row, 'id'));
  }

  async remove(id: string): Promise<void> {
    await this.#history.write((transaction) => {
      transaction.run('DELETE FROM commands WHERE batch_id = ?', id);
      transaction.run('DELETE FROM batches WHERE id = ?', id);
    });
  }

  /** Finds a batch. Throws batch_not_found. */
  async get(id: string): Promise<Batch> {
    const row = await this.#history.get(`SELECT ${batchColumns} FROM batches WHERE id = ?`, id);
    if (row) return batchFromRow(row);
    throw new AppError('batch_not_found', `no batch has the id ${id}`, { batch_id: id });
  }

  /** Reads the progress of the batches that had not ended when an earlier broker process stopped. */
  async open(): Promise<BatchProgress[]> {
    const members = 'SELECT count(*) FROM commands WHERE batch_id = batches.id';
    const sql = `SELECT id, concurrency, max_failures, cancel, 0 AS running, (${members} AND finished_at IS NULL) AS open,
        (${members} AND finished_at IS NOT NULL AND status <> 'completed') AS failures
      FROM batches WHERE id IN (SELECT batch_id FROM commands WHERE ${isOpen})`;
    const rows = await this.#history.all(sql);
    return rows.map((row) => ({ ...(row as unknown as BatchProgress), cancel: row.cancel === 1 }));
  }

  /** Counts a change of a member, once the change is on disk. */
  countChange(id: string): void {
    this.#changes.set(id, this.changesOf(id) + 1);
  }

  changesOf(id: string): number {
    return this.#changes.get(id) ?? 0;
  }

  async cancel(id: BatchId): Promise<void> {
    const cancel = 'UPDATE batches SET cancel = 1 WHERE id = ?';
    await this.#history.write((transaction) => transaction.run(cancel, id));
  }

  /**
   * Removes the spec of a batch, which can contain secrets. Called when no command of the batch will start
   * any more.
   */
  dropSpec(id: BatchId): void {
    this.#changes.delete(id);
    this.#history
      .write((transaction) => transaction.run('UPDATE batches SET spec = NULL WHERE id = ?', id))
      .catch((err: unknown) =>
        this.#log.warn({ err, batch_id: id }, 'env and stdin of an ended batch could not be deleted'),
      );
  }

  /** Counts the members of a batch by status, on these machines or on all. */
  async tally(batchId: string, machines?: readonly MachineId[]): Promise<Tally[]> {
    // This query runs on the thread for lists, because a batch can have 10,000 commands.
    const sql = `SELECT status, count(*) AS n, max(finished_at) AS finished_at FROM commands
       WHERE batch_id = ?1 AND (CAST(?2 AS TEXT) IS NULL OR machine_id IN (SELECT value FROM json_each(?2))) GROUP BY status`;
    const values = [batchId, machines ? JSON.stringify(machines) : null];
    const [rows = []] = await this.#history.read([{ sql, values }]);
    return rows.map((row) => row as unknown as Tally);
  }

  async machines(batchId: string): Promise<MachineId[]> {
    const rows = await this.#history.all('SELECT machine_id FROM commands WHERE batch_id = ?', batchId);
    return rows.map((row) => textIn(row, 'machine_id') as MachineId);
  }
}

/** Converts a row to a batch; the columns are those that insert() writes. */
export function batchFromRow(row: Row): Batch {
  return {
    ...(row as unknown as Batch),
    args: row.args === null ? null : (jsonIn(row, 'args') as string[]),
    cancel: row.cancel === 1,
  };
}
