// Reads what a broker has stored directly from its files or, with FARHAND_TEST_DATABASE, from its database.
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { DatabaseSync } from 'node:sqlite';
import type { Row, Value } from '../broker/history/database-interface.ts';
import { types } from '../broker/history/postgres-write-connection.ts';
import { toPostgres } from '../broker/history/translate-to-postgres.ts';
import { names } from '../broker/state/state-documents-schema.ts';
import { clientOf, databaseOf } from './start-postgres.ts';

/** Returns rows of the history. `sql` is in the dialect of SQLite. */
export async function storedRows(dataDir: string, sql: string, ...values: Value[]): Promise<Row[]> {
  const url = await databaseOf(dataDir);
  if (url === undefined) {
    const database = new DatabaseSync(join(dataDir, 'history.db'), { readOnly: true });
    const rows = database.prepare(sql).all(...values);
    database.close();
    return rows;
  }
  const client = await clientOf(url, types);
  const { rows } = await client.query<Row>(toPostgres(sql), values);
  await client.end();
  return rows;
}

/** Returns the rows of all tables of the history, by table, except tables that match `without`. */
export async function storedTables(dataDir: string, without: RegExp): Promise<Record<string, Row[]>> {
  const isFile = (await databaseOf(dataDir)) === undefined;
  const all = isFile
    ? "SELECT name FROM sqlite_master WHERE type = 'table'"
    : "SELECT tablename AS name FROM pg_tables WHERE schemaname = 'public'";
  const tables = (await storedRows(dataDir, all))
    .map(({ name }) => String(name))
    .filter((name) => !without.test(name));
  return Object.fromEntries(
    await Promise.all(tables.map(async (name) => [name, await storedRows(dataDir, `SELECT * FROM ${name}`)])),
  );
}

/** Returns the state that the broker has stored, in the form of state.json. */
// biome-ignore lint/suspicious/noExplicitAny: JSON of any shape
export async function storedState(dataDir: string): Promise<any> {
  if ((await databaseOf(dataDir)) === undefined)
    return JSON.parse(readFileSync(join(dataDir, 'state.json'), 'utf8'));
  const rows = await storedRows(dataDir, 'SELECT collection, document FROM documents ORDER BY position');
  const [installation] = await storedRows(dataDir, 'SELECT generation FROM installation');
  const declared = names.map((name) => [
    name,
    rows.filter(({ collection }) => collection === name).map((row) => JSON.parse(String(row.document))),
  ]);
  return { ...Object.fromEntries(declared), generation: installation?.generation };
}
