// The mark that farhand-broker migrate puts into a database while it copies data to it, and after it has moved the
// data to files. No broker starts with a marked database.
import { StartError } from '../../shared/errors.ts';
import type { History, HistoryTransaction } from './history.ts';

/** `unfinished`: the database lacks rows. `moved`: the newest rows are in the files of the data directory. */
type Mark = 'unfinished' | 'moved';

const tables = ['CREATE TABLE copy_marks (mark TEXT NOT NULL)'];

/** Returns the mark of a PostgreSQL database; undefined if a broker may use it. */
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

/** Throws StartError if the database has a mark. */
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
