// Stores batches in the database of the history. Their members are rows of the table `commands`.
import type { BatchId, MachineId } from '../../shared/api/shared-schemas.ts';
import { monotonic, sleep } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import { notFound } from '../find-or-not-found.ts';
import {
  type History,
  type HistoryTransaction,
  jsonIn,
  type Row,
  type RowReader,
  textIn,
} from '../history/history-database.ts';
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
const hasFailed = "finished_at IS NOT NULL AND status <> 'completed'";
/** Condition for commands that an agent has, or is about to get. */
const isSent = `finished_at IS NULL AND journal_id <> ''`;

/** Milliseconds between two checks whether commands of a batch have ended at other brokers. */
const pollMs = 100;

export class BatchStore {
  readonly #history: History;
  readonly #log: Logger;
  readonly #brokerId: string | undefined;

  /** `brokerId` is the id of this broker; undefined if no other broker shares the database. */
  constructor(history: History, brokerId: string | undefined, log: Logger) {
    this.#history = history;
    this.#brokerId = brokerId;
    this.#log = log;
  }

  /**
   * Creates the table. A batch is deleted once all its commands are deleted, and at the earliest `keepMs` milliseconds
   * after its creation.
   */
  static async migrate(history: History, keepMs: number): Promise<void> {
    await history.migrate('batches', [table]);
    history.retain({ table: 'batches', column: 'created_at', keepMs, where: memberless });
  }

  /** Inserts a batch that is not complete yet. */
  insert(batch: Batch, transaction: HistoryTransaction): void {
    const args = batch.args && JSON.stringify(batch.args);
    transaction.put('batches', 'id', { ...batch, args, cancel: Number(batch.cancel) });
  }

  /** Completes a batch: stores the spec of its members. Call it after all members are stored. */
  complete(id: BatchId, spec: Spec, transaction: HistoryTransaction): void {
    transaction.run('UPDATE batches SET spec = ? WHERE id = ?', JSON.stringify(spec), id);
  }

  /**
   * Removes batches that a broker was storing when it crashed; no agent got their commands. With `before` (milliseconds
   * since 1970), removes only batches created earlier.
   */
  async removeIncomplete(before = Number.MAX_SAFE_INTEGER): Promise<void> {
    const open = `SELECT batch_id FROM commands WHERE ${isOpen}`;
    const begun = `SELECT 1 FROM commands WHERE batch_id = batches.id AND (journal_id <> '' OR finished_at IS NOT NULL)`;
    const incomplete = `spec IS NULL AND created_at < ? AND id IN (${open}) AND NOT EXISTS (${begun})`;
    const rows = await this.#history.all(`SELECT id FROM batches WHERE ${incomplete}`, before);
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
    throw notFound('batch', id);
  }

  /**
   * Reads the progress of batches with open commands. `open` and `running` are 0 here, because the scheduler counts
   * them. `elsewhere` is 0 until isFull() reads it.
   */
  async open(): Promise<BatchProgress[]> {
    const failed = `SELECT count(*) FROM commands WHERE batch_id = batches.id AND ${hasFailed}`;
    const sql = `SELECT id, concurrency, max_failures, cancel, (${failed}) AS failures,
        CASE WHEN spec IS NULL THEN 0 ELSE 1 END AS complete
      FROM batches WHERE id IN (SELECT batch_id FROM commands WHERE ${isOpen})`;
    const rows = await this.#history.all(sql);
    return rows.map((row) => ({
      ...(row as unknown as BatchProgress),
      ...{ cancel: row.cancel === 1, isComplete: row.complete === 1, open: 0, running: 0, elsewhere: 0 },
    }));
  }

  /** Marks a batch as cancelled, unless all of its commands have ended. */
  async cancel(id: BatchId): Promise<void> {
    const open = 'EXISTS (SELECT 1 FROM commands WHERE batch_id = ?1 AND finished_at IS NULL)';
    const cancel = `UPDATE batches SET cancel = 1 WHERE id = ?1 AND ${open}`;
    await this.#history.write((transaction) => transaction.run(cancel, id));
  }

  /**
   * Removes the spec of a batch, which can contain secrets. Call it when no command of the batch will start any more.
   */
  dropSpec(id: BatchId): void {
    this.#history
      .write((transaction) =>
        transaction.run(
          `UPDATE batches SET spec = NULL WHERE id = ?1
           AND NOT EXISTS (SELECT 1 FROM commands WHERE batch_id = ?1 AND finished_at IS NULL)`,
          id,
        ),
      )
      .catch((err: unknown) =>
        this.#log.warn(
          { err, batch_id: id },
          'env and stdin of an ended batch could not be deleted: they stay in the database until the batch is deleted',
        ),
      );
  }

  /**
   * If several brokers share the database, reads `elsewhere` and `failures` from it, and returns true if the batch
   * allows no further command to start. With a single broker, returns false, because the scheduler checks the limits.
   * If `reader` is a transaction, the result is exact: the transactions of all brokers run one after another.
   */
  async isFull(batch: BatchProgress, reader: RowReader = this.#history): Promise<boolean> {
    const { id, concurrency, max_failures } = batch;
    if (this.#brokerId === undefined || (concurrency === null && max_failures === null)) return false;
    const here = 'machine_id IN (SELECT machine_id FROM owners WHERE broker_id = ?)';
    const row = await reader.get(
      `SELECT count(*) FILTER (WHERE ${isSent}) AS sent, count(*) FILTER (WHERE ${isSent} AND NOT ${here}) AS elsewhere,
        count(*) FILTER (WHERE ${hasFailed}) AS failures FROM commands WHERE batch_id = ?`,
      ...[this.#brokerId, id],
    );
    batch.elsewhere = Number(row?.elsewhere);
    batch.failures = Number(row?.failures);
    const isOver = max_failures !== null && batch.failures > max_failures;
    return isOver || (concurrency !== null && Number(row?.sent) >= concurrency);
  }

  /** Returns those of the given ids whose batches were cancelled. */
  async cancelled(ids: readonly string[]): Promise<string[]> {
    const some = 'SELECT id FROM batches WHERE cancel <> 0 AND id IN (SELECT value FROM json_each(?))';
    const rows = await this.#history.all(some, JSON.stringify(ids));
    return rows.map((row) => textIn(row, 'id'));
  }

  /** Returns the batches with a row number above `last`, and those with an id in `incomplete`. */
  async since(last: number, incomplete: readonly string[]) {
    const open = 'EXISTS (SELECT 1 FROM commands WHERE batch_id = batches.id AND finished_at IS NULL)';
    const rows = await this.#history.all(
      `SELECT id, rowid AS number, CASE WHEN spec IS NULL THEN 0 ELSE 1 END AS complete, CASE WHEN ${open} THEN 1 ELSE 0 END AS open
       FROM batches WHERE rowid > ? OR id IN (SELECT value FROM json_each(?)) ORDER BY rowid`,
      ...[last, JSON.stringify(incomplete)],
    );
    return rows.map((row) => ({
      ...{ id: textIn(row, 'id'), number: Number(row.number) },
      // `isComplete`: all commands of the batch are stored. `isOpen`: some of these commands have not ended.
      ...{ isComplete: row.complete === 1, isOpen: row.open === 1 },
    }));
  }

  /**
   * Returns the highest row number in the table `batches`, and the ids of incomplete batches. Another broker is storing
   * these batches, or ended while it was storing them.
   */
  async unfinished(): Promise<{ ids: string[]; last: number }> {
    const open = `spec IS NULL AND id IN (SELECT batch_id FROM commands WHERE ${isOpen})`;
    const last = await this.#history.get('SELECT coalesce(max(rowid), 0) AS n FROM batches');
    const rows = await this.#history.all(`SELECT id FROM batches WHERE ${open}`);
    return { ids: rows.map((row) => textIn(row, 'id')), last: Number(last?.n) };
  }

  /**
   * Waits until all commands of a batch have ended at their brokers, at most `ms` milliseconds, and only until the
   * signal fires.
   */
  async untilEnded(id: string, ms: number, signal?: AbortSignal): Promise<void> {
    const until = monotonic() + ms;
    const open = 'SELECT 1 AS n FROM commands WHERE batch_id = ? AND finished_at IS NULL LIMIT 1';
    while (!signal?.aborted && (await this.#history.get(open, id))) {
      const left = until - monotonic();
      if (left <= 0) return;
      await sleep(Math.min(left, pollMs), signal);
    }
  }

  /** Counts the members of a batch by status, on these machines or on all. */
  async tally(batchId: string, machines?: readonly MachineId[]): Promise<Tally[]> {
    // A batch can have 10,000 commands. Unlike all(), read() counts them without blocking the event loop.
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
