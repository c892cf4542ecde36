// Prepares each statement of a SQLite connection once.
import type { DatabaseSync, StatementSync } from 'node:sqlite';

/** Maximum number of statements in memory. Each combination of list filters has its own statement. */
const mostStatements = 500;

/** Returns a function that prepares a statement. It returns the same statement again for the same SQL. */
export function prepareOnce(database: DatabaseSync): (sql: string) => StatementSync {
  const prepared = new Map<string, StatementSync>();
  return (sql) => {
    const statement = prepared.get(sql) ?? database.prepare(sql);
    prepared.set(sql, statement);
    const [oldest = ''] = prepared.keys();
    if (prepared.size > mostStatements) prepared.delete(oldest);
    return statement;
  };
}
