// Opens history.db, the SQLite file. Refuses a file that belongs to another installation or lacks data, and
// applies migrations.
import { closeSync, openSync, statSync } from 'node:fs';
import { DatabaseSync } from 'node:sqlite';
import { StartError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import { History } from './history-database.ts';
import { countedTable } from './row-counts.ts';
import { migrate, SqliteDatabase } from './sqlite-database.ts';

const schemaVersion = 1;
/**
 * `running` is 1 while a broker runs. A clean stop sets it to 0, and removes the -wal file. After a crash, `running` is
 * still 1, and the -wal file has the last changes. If that file is missing, they are lost.
 */
const installationSteps = ['ALTER TABLE installation ADD COLUMN running INTEGER'];

/** Which data may be missing in history.db without an error. */
interface Accepted {
  /** history.db may be missing or empty: no broker has run here yet, or the user accepts the loss (--new-history). */
  isNew?: boolean;
  /** history.db may lack its last changes: the user accepts this loss (--old-history). */
  isOld?: boolean;
}

/**
 * Opens or creates the database. Throws StartError if another installation or a newer version wrote the file. Throws it
 * also if data is missing and the user has not accepted the loss.
 */
export function openHistory(
  file: string,
  installId: string,
  log: Logger,
  { isNew = true, isOld = false }: Accepted = {},
): History {
  if (!isNew && sizeOf(file) === 0) throw lost(file);
  // The size of the -wal file must be read before SQLite creates a new one.
  const hasWal = sizeOf(`${file}-wal`) > 0;
  closeSync(openSync(file, 'a', 0o600));
  const database = new DatabaseSync(file);
  setUp(database, file, installId, { isNew, isOld: isOld || hasWal });
  return new History(new SqliteDatabase(database, file, log), log);
}

function setUp(database: DatabaseSync, file: string, installId: string, accepted: Accepted): void {
  // - secure_delete overwrites deleted rows, because they may contain secrets, such as the environment of a command.
  // - recursive_triggers also overwrites rows that INSERT OR REPLACE replaces.
  // - temp_store: each change in a group commit has a savepoint, for which SQLite saves the old content of some 25
  //   pages. MEMORY avoids a file for these pages.
  database.exec(
    'PRAGMA synchronous = FULL; PRAGMA secure_delete = FAST; PRAGMA recursive_triggers = ON; PRAGMA temp_store = MEMORY',
  );
  // This check must come before the first write. A write creates a -wal file, so the next start could not notice
  // that an older one was lost.
  const isFound = refuseOther(database, file, installId, accepted);
  database.exec(`PRAGMA auto_vacuum = INCREMENTAL; PRAGMA journal_mode = WAL;
    CREATE TABLE IF NOT EXISTS installation (id TEXT NOT NULL, outbox TEXT);
    CREATE TABLE IF NOT EXISTS migrations (noun TEXT PRIMARY KEY, steps INTEGER NOT NULL) WITHOUT ROWID;
    ${countedTable}`);
  migrate(database, 'history', installationSteps);
  if (!isFound) database.prepare('INSERT INTO installation (id) VALUES (?)').run(installId);
  // The checkpoint copies `running = 1` to history.db, so that the next start notices if the -wal file is lost.
  database.exec(`PRAGMA user_version = ${schemaVersion};
    UPDATE installation SET running = 1; PRAGMA wal_checkpoint`);
}

/**
 * Returns true if the file already belongs to this installation, false if it is new. Throws StartError as openHistory()
 * does. Does not write.
 */
function refuseOther(database: DatabaseSync, file: string, installId: string, accepted: Accepted): boolean {
  const { user_version: version } = database.prepare('PRAGMA user_version').get() as { user_version: number };
  if (version > schemaVersion) {
    throw new StartError(`${file} was written by a newer farhand-broker: install the newer version again`);
  }
  const table = database.prepare("SELECT 1 FROM sqlite_master WHERE name = 'installation'").get();
  const row = table && database.prepare('SELECT * FROM installation').get();
  if (row && row.id !== installId) {
    throw new StartError(
      `${file} and state.json belong to two installations: restore both from the same backup`,
    );
  }
  if (!row && !accepted.isNew) throw lost(file);
  if (row?.running === 1 && !accepted.isOld) {
    throw new StartError(
      `${file} lacks its last changes because ${file}-wal is missing or empty: put that file back, restore ${file} from a backup, or start once with --old-history to continue without those changes`,
    );
  }
  return row !== undefined;
}

function lost(file: string): StartError {
  const state = statSync(file, { throwIfNoEntry: false }) ? 'empty' : 'missing';
  return new StartError(
    `${file} is ${state}, although a broker has run here: restore it from a backup, or start once with --new-history to continue without past commands and events`,
  );
}

/** Returns the size of a file in bytes; 0 if the file does not exist. */
function sizeOf(file: string): number {
  return statSync(file, { throwIfNoEntry: false })?.size ?? 0;
}
