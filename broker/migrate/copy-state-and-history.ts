// Copies both stores of a broker, state and history, from files to a PostgreSQL database or back. The originals stay
// in place until the copy is complete. Original files are then moved aside; an original database is marked as moved.
import { existsSync } from 'node:fs';
import { copyFile, mkdir, rename, rm } from 'node:fs/promises';
import { join } from 'node:path';
import { iso, monotonic } from '../../shared/clock.ts';
import { takeDirectory } from '../../shared/directory-lock.ts';
import { syncDirectory } from '../../shared/durable-file.ts';
import { StartError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import { authorityFiles } from '../ca-and-broker-certificates.ts';
import { History, type HistoryTransaction } from '../history/history-database.ts';
import { openHistory } from '../history/open-sqlite-file.ts';
import { PostgresDatabase } from '../history/postgres-database.ts';
import { copyMarkOf, setCopyMark } from '../history/unfinished-or-moved-mark.ts';
import type { BrokerSettings } from '../settings-schema.ts';
import { startBroker } from '../start/index.ts';
import { PostgresStore } from '../state/documents-in-postgres.ts';
import { FileStore } from '../state/documents-in-state-json.ts';
import { type Documents, names } from '../state/state-documents-schema.ts';
import { StateFile } from '../state/state-file.ts';
import { copyTable, digestOf, insert, mostRows, type Table, tablesOf } from './copy-rows.ts';

type DatabaseSettings = BrokerSettings & { database_url: string };

/** Called after each copied table, with the number of its rows. */
type Report = (table: string, rows: number) => void;

export interface Copied {
  documents: number;
  rows: number;
  seconds: number;
}

/**
 * The files of the two stores. On a migration, state.json is moved away first and put in place last, so that no broker
 * starts with only some of the files.
 */
const files = ['state.json', 'state.json.last', 'history.db', 'history.db-wal', 'history.db-shm'];
/** Name of a temporary directory in the data directory. A broker that runs only to create the tables uses it. */
const scratch = 'migration';

/**
 * Copies the files to an empty database, and then moves them to the new directory `aside`. Throws StartError if a
 * broker runs or the database has data.
 */
export async function copyToDatabase(
  settings: DatabaseSettings,
  report: Report,
  log: Logger,
): Promise<Copied & { database: string; aside: string }> {
  const { data_dir } = settings;
  const begun = monotonic();
  if (!existsSync(join(data_dir, 'state.json')))
    throw new StartError(`${data_dir} has no state.json to copy; check --data-dir`);
  await startAndStop(withFiles(settings, data_dir), log);
  const unlock = takeDirectory(data_dir, 'broker');
  try {
    const { documents } = await FileStore.open(data_dir, false);
    const source = openHistory(join(data_dir, 'history.db'), documents.install_id, log);
    const { database, rows } = await whileOpen(source, async () => {
      const tables = await tablesOf(source);
      await createTables(settings, tables, log);
      const { name, history } = await openDatabase(settings, log);
      const copy = (): Promise<number> => fillDatabase(history, tables, { documents, source }, report);
      return { database: name, rows: await whileOpen(history, copy) };
    });
    const aside = await moveAside(data_dir);
    return { ...countsOf(documents, rows, begun), database, aside };
  } finally {
    unlock();
  }
}

/** Copies documents and rows to a database whose tables exist. Returns the number of rows. */
async function fillDatabase(
  target: History,
  tables: readonly Table[],
  { documents, source }: { documents: Documents; source: History },
  report: Report,
): Promise<number> {
  await target.write((transaction) => setCopyMark(transaction, 'unfinished'));
  await truncate(target, tables);
  const rows = await copyAll(tables, source, target, report);
  await target.write((transaction) => {
    for (const { name, key } of tables) {
      if (!key.includes('rowid')) continue;
      // The next new row gets the number after the highest copied one.
      transaction.run(`SELECT setval(pg_get_serial_sequence('${name}', 'rowid'), max(rowid)) FROM ${name}`);
    }
  });
  // Without ANALYZE, PostgreSQL would plan queries as if the tables were empty, until its next autovacuum.
  await target.all('ANALYZE');
  await target.write((transaction) => putDocuments(documents, transaction));
  return rows;
}

/** Copies a database to files in the data directory. Throws StartError if a broker runs or a state.json exists. */
export async function copyToFiles(settings: DatabaseSettings, report: Report, log: Logger): Promise<Copied> {
  const { data_dir } = settings;
  const begun = monotonic();
  if (existsSync(join(data_dir, 'state.json')))
    throw new StartError(`${data_dir} has a state.json already; move it away, or check --data-dir`);
  await assertInstallation(settings, log);
  await startAndStop(settings, log);
  const unlock = takeDirectory(data_dir, 'broker');
  const folder = join(data_dir, scratch);
  try {
    const { history } = await openDatabase(settings, log);
    return await whileOpen(history, async () => {
      const { documents } = await PostgresStore.open(history);
      const rows = await fillFiles(withFiles(settings, folder), documents, history, report, log);
      await moveAside(data_dir);
      for (const name of ['history.db', 'state.json']) await rename(join(folder, name), join(data_dir, name));
      await syncDirectory(data_dir);
      await history.write((transaction) => setCopyMark(transaction, 'moved'));
      return countsOf(documents, rows, begun);
    });
  } finally {
    await rm(folder, { recursive: true, force: true });
    unlock();
  }
}

/** Creates state.json and history.db in a temporary directory. Returns the number of rows. */
async function fillFiles(
  settings: BrokerSettings,
  documents: Documents,
  source: History,
  report: Report,
  log: Logger,
): Promise<number> {
  const folder = settings.data_dir;
  await rm(folder, { recursive: true, force: true });
  await startAndStop(settings, log);
  const created = await FileStore.open(folder, false);
  const target = openHistory(join(folder, 'history.db'), created.documents.install_id, log);
  return await whileOpen(target, async () => {
    const tables = await tablesOf(target);
    await target.write((transaction) => {
      for (const { name } of tables) transaction.run(`DELETE FROM ${name}`);
    });
    const rows = await copyAll(tables, source, target, report);
    const identify = 'UPDATE installation SET id = ?, outbox = NULL';
    await target.write((transaction) => transaction.run(identify, documents.install_id));
    await new StateFile(folder, false).write(documents);
    return rows;
  });
}

/**
 * Runs a broker without ports for a moment, to create or update the tables and to complete unfinished changes. Throws
 * StartError if another broker runs.
 */
async function startAndStop(settings: BrokerSettings, log: Logger): Promise<void> {
  const broker = await startBroker({ ...settings, local: true }, log);
  await broker.close();
}

const withFiles = (settings: BrokerSettings, data_dir: string): BrokerSettings => ({
  ...settings,
  data_dir,
  database_url: undefined,
  database_password_file: undefined,
});

/** Connects to the database. Throws StartError if a broker uses it. */
async function openDatabase(
  { database_url, database_password_file }: DatabaseSettings,
  log: Logger,
): Promise<{ name: string; history: History }> {
  const database = await PostgresDatabase.open({ database_url, database_password_file }, log);
  return { name: database.name, history: new History(database, log) };
}

/** Calls `use`, and closes the history when the promise of `use` settles. */
async function whileOpen<T>(history: History, use: () => Promise<T>): Promise<T> {
  try {
    return await use();
  } finally {
    await history.close();
  }
}

async function assertInstallation(settings: DatabaseSettings, log: Logger): Promise<void> {
  const { name, history } = await openDatabase(settings, log);
  const found = await whileOpen(history, () => history.get('SELECT id FROM installation'));
  if (!found) throw new StartError(`${name} has no data of a broker; check --database-url`);
}

/**
 * Creates the tables of an empty database. Removes the data of an unfinished copy. Throws StartError if the database
 * has any other data.
 */
async function createTables(
  settings: DatabaseSettings,
  tables: readonly Table[],
  log: Logger,
): Promise<void> {
  const { name, history } = await openDatabase(settings, log);
  await whileOpen(history, async () => {
    if ((await copyMarkOf(history)) === 'unfinished') await reset(history, tables);
    else if (!(await isEmpty(history, tables)))
      throw new StartError(`${name} is not empty: create another database with createdb`);
  });
  const folder = join(settings.data_dir, scratch);
  await rm(folder, { recursive: true, force: true });
  await mkdir(folder, { mode: 0o700 });
  try {
    // The broker that startAndStop() runs stores the fingerprint of its certificate authority in the database. After
    // that, no broker with another authority can use the database. So this broker gets a copy of the real authority.
    const [authority] = authorityFiles;
    await copyFile(join(settings.data_dir, authority), join(folder, authority));
    await startAndStop({ ...settings, data_dir: folder }, log);
  } finally {
    await rm(folder, { recursive: true, force: true });
  }
}

/** True if a copy into the database would overwrite no data. */
async function isEmpty(history: History, tables: readonly Table[]): Promise<boolean> {
  const row = await history.get('SELECT generation FROM installation');
  // The first broker stores generation 1, and each change of the state increases the generation. Generation 1 thus
  // means that the state was never changed.
  if (row) return Number(row.generation) === 1 && (await copyMarkOf(history)) === undefined;
  const existing = await existingOf(history, tables);
  return existing.every((name) => name === 'counted');
}

async function existingOf(history: History, tables: readonly Table[]): Promise<string[]> {
  const found = await history.all(
    'SELECT table_name FROM information_schema.tables WHERE table_schema = current_schema()',
  );
  const all = new Set(found.map(({ table_name }) => String(table_name)));
  return tables.map(({ name }) => name).filter((name) => all.has(name));
}

/** Empties a database that has an unfinished copy, so that it is like the database of a new broker. */
async function reset(history: History, tables: readonly Table[]): Promise<void> {
  await truncate(history, tables);
  await history.write((transaction) => {
    transaction.run('UPDATE installation SET generation = 1');
    setCopyMark(transaction, undefined);
  });
}

async function truncate(history: History, tables: readonly Table[]): Promise<void> {
  const existing = await existingOf(history, tables);
  await history.write((transaction) => transaction.run(`TRUNCATE ${['documents', ...existing].join(', ')}`));
}

/** Copies all tables. Then reads the copies and compares them with the originals. Returns the number of rows. */
async function copyAll(
  tables: readonly Table[],
  source: History,
  target: History,
  report: Report,
): Promise<number> {
  const digests = new Map<Table, string>();
  let all = 0;
  for (const table of tables) {
    const { rows, digest } = await copyTable(table, source, target);
    digests.set(table, digest);
    all += rows;
    if (rows > 0) report(table.name, rows);
  }
  for (const [table, digest] of digests) {
    if ((await digestOf(table, target)) !== digest)
      throw new StartError(
        `the copy of the table ${table.name} differs from the original, so nothing was moved; run migrate again`,
        1,
      );
  }
  return all;
}

/** Writes the documents to the database, and removes the mark `unfinished`, so that a broker can use the database. */
function putDocuments(documents: Documents, transaction: HistoryTransaction): void {
  const rows = names.flatMap((collection) =>
    documents[collection].map((one) => ({ collection, id: one.id, document: JSON.stringify(one) })),
  );
  for (let at = 0; at < rows.length; at += mostRows)
    insert('documents', ['collection', 'id', 'document'], rows.slice(at, at + mostRows), transaction);
  transaction.run(
    'UPDATE installation SET id = ?, generation = ?',
    documents.install_id,
    documents.generation,
  );
  setCopyMark(transaction, undefined);
}

/** Moves the files of both stores into a new directory, and returns its path. */
async function moveAside(dataDir: string): Promise<string> {
  const aside = join(dataDir, `before-migration-${iso().replaceAll(':', '-')}`);
  const existing = files.filter((name) => existsSync(join(dataDir, name)));
  if (existing.length === 0) return aside;
  await mkdir(aside, { mode: 0o700 });
  for (const name of existing) await rename(join(dataDir, name), join(aside, name));
  await syncDirectory(aside);
  await syncDirectory(dataDir);
  return aside;
}

function countsOf(documents: Documents, rows: number, begun: number): Copied {
  const count = names.reduce((sum, name) => sum + documents[name].length, 0);
  return { documents: count, rows, seconds: Math.round((monotonic() - begun) / 100) / 10 };
}
