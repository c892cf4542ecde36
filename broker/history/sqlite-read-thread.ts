// The thread that reads history.db for lists. It answers queries in the order of their arrival, over a read-only
// connection.
import { DatabaseSync, type StatementSync } from 'node:sqlite';
import { parentPort, workerData } from 'node:worker_threads';
import type { Answer, Question } from './sqlite-read-client.ts';

/** Maximum number of prepared statements in the cache. The oldest one is dropped first. */
const mostStatements = 100;

const database = new DatabaseSync(String(workerData), { readOnly: true });
const statements = new Map<string, StatementSync>();

function prepare(sql: string): StatementSync {
  const statement = statements.get(sql) ?? database.prepare(sql);
  statements.set(sql, statement);
  const [oldest] = statements.keys();
  if (oldest !== undefined && statements.size > mostStatements) statements.delete(oldest);
  return statement;
}

/** Reads all queries in one transaction, so that the rows of a page and their total agree. */
function answer({ id, queries }: Question): Answer {
  try {
    database.exec('BEGIN');
    const rows = queries.map(({ sql, values }) => prepare(sql).all(...values));
    return { id, rows };
  } catch (error) {
    return { id, error };
  } finally {
    if (database.isTransaction) database.exec('COMMIT');
  }
}

parentPort?.on('message', (question: Question | 'close') => {
  if (question !== 'close') return parentPort?.postMessage(answer(question));
  database.close();
  parentPort?.close();
});
