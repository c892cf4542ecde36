// Starts a PostgreSQL server for the tests of a file, and brokers that each have a database on it.
import { copyFileSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { describe } from 'vitest';
import type { Tuning } from '../../broker/start/index.ts';
import { atEnd } from '../close-after-tests.ts';
import { startFarhand, temporaryFolder } from '../start-farhand.ts';
import { missingPostgres, type PostgresServer, startPostgres } from '../start-postgres.ts';

/** Declares tests that need PostgreSQL. Without PostgreSQL they are skipped, and the reason is added to the name. */
export function withPostgres(name: string, tests: () => void): void {
  describe.skipIf(missingPostgres)(missingPostgres ? `${name} (${missingPostgres})` : name, tests);
}

/** Starts a server. It ends with the test or, if it is shared, after the last test of the file. */
export async function createServer(settings?: readonly string[]): Promise<PostgresServer> {
  const server = await startPostgres(temporaryFolder('postgres'), settings);
  atEnd(() => server.stop());
  return server;
}

/** Starts a broker on an empty database of this server. */
export async function startOn(server: PostgresServer, flags: readonly string[] = []) {
  const url = await server.createDatabase();
  const system = await startFarhand({ flags: ['--database-url', url, ...flags] });
  return { ...system, databaseUrl: url, database: databaseOf(url) };
}

export const databaseOf = (url: string): string => new URL(url).pathname.slice(1);

/** Starts a broker again with its data directory and database. */
export const startAgain = (dataDir: string, url: string) =>
  startFarhand({ dataDir, flags: ['--database-url', url] });

/** Returns a data directory with the authority and keys of a broker, for another broker on its database. */
export function copyOf(dataDir: string): string {
  const folder = temporaryFolder('broker');
  for (const name of readdirSync(dataDir).filter((one) =>
    /^(authority\.json|.*\.key|.*-key\.json)$/.test(one),
  ))
    copyFileSync(join(dataDir, name), join(folder, name));
  return folder;
}

/** Starts two brokers on one empty database, both in this process. */
export async function startTwo(
  { createDatabase, query }: PostgresServer,
  more: readonly string[] = [],
  tuning: Tuning = {},
) {
  const url = await createDatabase();
  const flags = ['--database-url', url, '--peer-listen', '127.0.0.1:0', ...more];
  const one = await startFarhand({ flags, tuning });
  const two = await startFarhand({ flags, tuning, dataDir: copyOf(one.dataDir) });
  const database = databaseOf(url);
  return { one, two, url, flags, database, query: (sql: string) => query(sql, database) };
}
