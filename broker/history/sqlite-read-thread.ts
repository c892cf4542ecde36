// The thread that reads history.db for lists. It answers queries in the order of their arrival, over a read-only
// connection.
import { DatabaseSync } from 'node:sqlite';
import { parentPort, workerData } from 'node:worker_threads';
import type { Query } from './database-interface.ts';
import type { Answer } from './sqlite-read-client.ts';
import { prepareOnce } from './sqlite-statement-cache.ts';

const database = new DatabaseSync(String(workerData), { readOnly: true });
const prepare = prepareOnce(database);

/** Reads all queries in one transaction, so that the rows of a page and their total agree. */
function answer(queries: readonly Query[]): Answer {
  try {
    database.exec('BEGIN');
    return { rows: queries.map(({ sql, values }) => prepare(sql).all(...values)) };
  } catch (error) {
    return { error };
  } finally {
    if (database.isTransaction) database.exec('COMMIT');
  }
}

parentPort?.on('message', (queries: readonly Query[]) => parentPort?.postMessage(answer(queries)));
