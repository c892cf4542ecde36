// Starts PostgreSQL from Debian's package for tests, in a temporary folder and as an ordinary user.
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
import {
  chmodSync,
  chownSync,
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { Client, type CustomTypesConfig } from 'pg';
import { freePort } from './find-free-ports.ts';

const installed = '/usr/lib/postgresql';

/** How many brokers run in place of each broker of a test. Several brokers share a database. */
export const brokerCount = Number(process.env.FARHAND_TEST_BROKERS ?? 1);

/** Returns the folder with the programs of PostgreSQL's newest version; undefined if none is installed. */
export function programs(): string | undefined {
  const versions = existsSync(installed) ? readdirSync(installed).map(Number) : [];
  const folder = join(installed, String(Math.max(...versions)), 'bin');
  return existsSync(join(folder, 'initdb')) ? folder : undefined;
}

/** The reason why tests cannot use PostgreSQL; undefined if it is installed. */
export const missingPostgres = programs() ? undefined : 'needs the Debian package postgresql';

/** A user and group id without rights. The server runs as this user, because PostgreSQL refuses to run as root. */
export const serverUser = 65_534;
const user = process.getuid?.() === 0 ? { uid: serverUser, gid: serverUser } : {};

export interface PostgresServer {
  /** Returns the URL of a database, over the server's socket. */
  url(database: string): string;
  port: number;
  folder: string;
  /** Creates an empty database. Resolves with its URL. */
  createDatabase(): Promise<string>;
  query(sql: string, database?: string): Promise<Record<string, unknown>[]>;
  start(): Promise<void>;
  /** Stops the server. SIGINT, the default, stops it as systemd does; SIGKILL stops it at once. */
  stop(signal?: 'SIGINT' | 'SIGKILL'): Promise<void>;
}

/** Creates a database cluster in an existing folder and starts it. `settings` are lines of postgresql.conf. */
export async function startPostgres(
  folder: string,
  settings: readonly string[] = [],
): Promise<PostgresServer> {
  const bin = programs();
  if (!bin) throw new Error(missingPostgres);
  const data = join(folder, 'data');
  mkdirSync(data);
  for (const path of [folder, data]) {
    chmodSync(path, path === data ? 0o700 : 0o755);
    if (user.uid) chownSync(path, user.uid, user.gid);
  }
  const options = ['--no-sync', '--auth=trust', '--username=farhand', '--encoding=UTF8', '--locale=C.UTF-8'];
  execFileSync(join(bin, 'initdb'), ['-D', data, ...options], { ...user, cwd: folder, stdio: 'pipe' });
  const port = await freePort();
  const lines = [
    ...[`port = ${port}`, `unix_socket_directories = '${folder}'`, "listen_addresses = '127.0.0.1'"],
    ...['max_connections = 400', 'shared_buffers = 32MB', ...settings],
  ];
  writeFileSync(join(data, 'postgresql.auto.conf'), `${lines.join('\n')}\n`);
  const hosts = ['local all farhand trust', 'hostssl all farhand all trust', 'host all farhand all trust'];
  writeFileSync(join(data, 'pg_hba.conf'), `${hosts.join('\n')}\nhost all all all scram-sha-256\n`);
  let child: ChildProcess | undefined;
  let count = 0;
  const url = (database: string): string => `postgres://farhand@localhost:${port}/${database}?host=${folder}`;
  const query = async (sql: string, database = 'postgres'): Promise<Record<string, unknown>[]> => {
    const client = new Client({ host: folder, port, user: 'farhand', database });
    client.on('error', () => {});
    try {
      await client.connect();
      return (await client.query<Record<string, unknown>>(sql)).rows;
    } finally {
      await client.end().catch(() => {});
    }
  };
  const start = async (): Promise<void> => {
    child = spawn(join(bin, 'postgres'), ['-D', data], { ...user, cwd: folder, stdio: 'ignore' });
    for (;;) {
      if (child.exitCode !== null) throw new Error(`postgres ended with ${child.exitCode}`);
      if (
        await query('SELECT 1').then(
          () => true,
          () => false,
        )
      )
        return;
      await new Promise((resolve) => setTimeout(resolve, 20));
    }
  };
  await start();
  return {
    ...{ url, port, folder, query, start },
    async createDatabase() {
      count += 1;
      const name = `test_${process.pid}_${count}`;
      await query(`CREATE DATABASE ${name}`);
      return url(name);
    },
    async stop(signal = 'SIGINT') {
      if (!child || child.exitCode !== null || child.signalCode !== null) return;
      const ended = once(child, 'exit');
      const { pid } = child;
      // SIGKILL ends only the main process. Its children may wait forever for each other's locks, so they are killed as
      // well. SIGSTOP first prevents the main process from starting more children.
      if (signal === 'SIGKILL') child.kill('SIGSTOP');
      const others = signal === 'SIGKILL' ? readFileSync(`/proc/${pid}/task/${pid}/children`, 'utf8') : '';
      child.kill(signal);
      await ended;
      for (const other of others.split(' ').filter(Boolean)) killIfAlive(Number(other));
      if (signal === 'SIGKILL') rmSync(join(data, 'postmaster.pid'), { force: true });
    },
  };
}

function killIfAlive(pid: number): void {
  try {
    process.kill(pid, 'SIGKILL');
  } catch {
    // The process has already ended.
  }
}

/** The database of each broker by data directory, with FARHAND_TEST_DATABASE=postgres. */
const databases = new Map<string, Promise<string>>();

/** Returns the URL of the database for a broker on this data directory; undefined without FARHAND_TEST_DATABASE. */
export async function databaseOf(dataDir: string): Promise<string | undefined> {
  const server = process.env.FARHAND_TEST_DATABASE_URL;
  if (!server) return undefined;
  const made = databases.get(dataDir) ?? createDatabaseIn(server);
  databases.set(dataDir, made);
  return await made;
}

/** Returns the flags with which a broker on this data directory uses its database. */
export async function databaseFlags(dataDir: string): Promise<string[]> {
  const url = await databaseOf(dataDir);
  return url === undefined ? [] : ['--database-url', url];
}

/** Connects to a database of a test server, over its socket. */
export async function clientOf(url: string, types?: CustomTypesConfig): Promise<Client> {
  const { searchParams, port, pathname } = new URL(url);
  const host = searchParams.get('host') ?? '';
  const database = pathname.slice(1);
  const client = new Client({ host, port: Number(port), user: 'farhand', database, ...(types && { types }) });
  client.on('error', () => {});
  await client.connect();
  return client;
}

async function createDatabaseIn(server: string): Promise<string> {
  const name = `test_${randomBytes(6).toString('hex')}`;
  const url = new URL(server);
  const client = await clientOf(server);
  await client.query(`CREATE DATABASE ${name}`);
  await client.end();
  url.pathname = `/${name}`;
  return url.href;
}
