// Runs before all tests: generates the types of the protos, and makes a temporary folder for the run. Afterwards
// removes the folder, and prints how to run only some tests.
import { execFileSync } from 'node:child_process';
import { chmodSync, existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, statfsSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { brokerCount, type PostgresServer, startPostgres } from './start-postgres.ts';

const root = join(import.meta.dirname, '..');
/** Free memory that is enough for all files of a run, in bytes. */
const enoughBytes = 4 * 1024 ** 3;

export default async function setup(): Promise<(() => Promise<void>) | undefined> {
  // vitest calls this function once for each tier of tests, but one folder and one message are enough for a run.
  if (process.env.FARHAND_TEST_DISK) return undefined;
  if (!existsSync(join(root, 'proto/types')))
    execFileSync(process.execPath, [join(root, 'scripts/generate-proto-types.ts')]);
  process.env.FARHAND_TEST_DISK = tmpdir();
  const folder = mkdtempSync(join(process.env.TMPDIR ?? inMemory() ?? tmpdir(), 'farhand-tests-'));
  // Tests also start programs as other users, who need this folder.
  chmodSync(folder, 0o1777);
  // All worker processes and programs of tests inherit these variables.
  process.env.TMPDIR = folder;
  process.env.NODE_COMPILE_CACHE ??= join(root, 'node_modules/.cache/node');
  // Brokers that work together need a database.
  const isOnPostgres = process.env.FARHAND_TEST_DATABASE === 'postgres' || brokerCount > 1;
  const server = isOnPostgres ? await createServer(folder) : undefined;
  process.env.FARHAND_TEST_DATABASE_URL = server?.url('postgres') ?? '';
  return async () => {
    await server?.stop();
    rmSync(folder, { recursive: true, force: true });
    console.log(
      'one tier: npm test -- --project default (or cli, agent, faults, box, attack, console, postgres, cluster); one file: npm test -- test/files.test.ts',
    );
  };
}

/** Starts one PostgreSQL server for the brokers of all tests. */
async function createServer(folder: string): Promise<PostgresServer> {
  const data = join(folder, 'postgres');
  mkdirSync(data);
  return await startPostgres(data);
}

/**
 * Returns a folder in memory with enough space, in which programs may run. On a disk, tests would spend up to half of
 * their time waiting for fsync.
 */
function inMemory(): string | undefined {
  const folder = '/dev/shm';
  const mounts = existsSync('/proc/self/mounts') ? readFileSync('/proc/self/mounts', 'utf8').split('\n') : [];
  const [, , type, options] = mounts.find((line) => line.split(' ')[1] === folder)?.split(' ') ?? [];
  if (type !== 'tmpfs' || options?.split(',').includes('noexec')) return undefined;
  const { bavail, bsize } = statfsSync(folder);
  return bavail * bsize < enoughBytes ? undefined : folder;
}
