// The mark of a PostgreSQL database whose data is incomplete or outdated. No broker starts with such a database.
// `farhand-broker migrate` sets the mark.
import { StartError } from '../../shared/errors.ts';
import type { History, HistoryTransaction } from './history-database.ts';

/**
 * `unfinished`: data is still being copied into the database, so rows are missing. `moved`: the data has moved to files
 * of the data directory, which have the newest rows.
 */
type Mark = 'unfinished' | 'moved';

const tables = ['CREATE TABLE copy_marks (mark TEXT NOT NULL)'];

/** Returns the mark of a PostgreSQL database. Undefined means that there is no mark: a broker may use the database. */
export async function copyMarkOf(history: History): Promise<Mark | undefined> {
  await history.migrate('copies', tables);
  const row = await history.get('SELECT mark FROM copy_marks');
  if (!row) return undefined;
  return row.mark === 'moved' ? 'moved' : 'unfinished';
}

export function setCopyMark(transaction: HistoryTransaction, mark: Mark | undefined): void {
  transaction.run('DELETE FROM copy_marks');
  if (mark) transaction.run('INSERT INTO copy_marks (mark) VALUES (?)', mark);
}

/** Throws StartError if farhand-broker migrate has marked the database as unfinished or moved. */
export async function refuseMarked(history: History, name: string): Promise<void> {
  const mark = await copyMarkOf(history);
  if (mark === 'unfinished')
    throw new StartError(
      `${name} has an unfinished copy of a data directory: run farhand-broker migrate again, or use another database`,
    );
  if (mark === 'moved')
    throw new StartError(
      `the data of ${name} has moved to files: start the broker without --database-url, or with an empty database`,
    );
}
