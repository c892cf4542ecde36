// A PostgreSQL server for the tests of one file, and brokers on databases of their own.
import { describe } from 'vitest';
import { atEnd } from '../close-after-tests.ts';
import { startFarhand, temporaryFolder } from '../start-farhand.ts';
import { missingPostgres, type PostgresServer, startPostgres } from '../start-postgres.ts';

/** Tests that need PostgreSQL; skipped where it is missing, with the reason in the name. */
export function withPostgres(name: string, tests: () => void): void {
  describe.skipIf(missingPostgres)(missingPostgres ? `${name} (${missingPostgres})` : name, tests);
}

/** Ended with the test, or after the file if it is shared. */
export async function createServer(settings?: readonly string[]): Promise<PostgresServer> {
  const server = await startPostgres(temporaryFolder('postgres'), settings);
  atEnd(() => server.stop());
  return server;
}

/** A broker on an empty database of this server. */
export async function startOn(server: PostgresServer, flags: readonly string[] = []) {
  const url = await server.createDatabase();
  const system = await startFarhand({ flags: ['--database-url', url, ...flags] });
  return { ...system, databaseUrl: url, database: databaseOf(url) };
}

export const databaseOf = (url: string): string => new URL(url).pathname.slice(1);

/** Starts a broker again on its data directory and database. */
export const startAgain = (dataDir: string, url: string) =>
  startFarhand({ dataDir, flags: ['--database-url', url] });
