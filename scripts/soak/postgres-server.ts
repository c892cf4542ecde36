// Starts PostgreSQL, from Debian's package, in a temporary directory and as an ordinary user. It listens only on
// loopback.
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { chmodSync, chownSync, mkdirSync, readdirSync, readFileSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { Client } from 'pg';
import { freePort } from '../bench/listen-on-free-port.ts';

const installed = '/usr/lib/postgresql';
/** User and group id for PostgreSQL if the test runs as root, because PostgreSQL refuses to run as root. */
const serverUser = 65_534;

export type Row = Record<string, unknown>;

export type PostgresServer = Awaited<ReturnType<typeof startPostgres>>;

export async function startPostgres(folder: string) {
  const bin = join(installed, String(Math.max(...readdirSync(installed).map(Number))), 'bin');
  const user = process.getuid?.() === 0 ? { uid: serverUser, gid: serverUser } : {};
  const data = join(folder, 'postgres');
  mkdirSync(data);
  chmodSync(join(folder, '..'), 0o755);
  chmodSync(folder, 0o755);
  if (user.uid) chownSync(data, user.uid, user.gid);
  const options = ['--auth=trust', '--username=farhand', '--encoding=UTF8', '--locale=C.UTF-8'];
  execFileSync(join(bin, 'initdb'), ['-D', data, ...options], { ...user, cwd: data, stdio: 'pipe' });
  const port = await freePort();
  const settings = [
    ...['listen_addresses=127.0.0.1', `port=${port}`, `unix_socket_directories=${data}`],
    'max_connections=200',
  ].flatMap((setting) => ['-c', setting]);
  let server: ChildProcess | undefined;
  /** Runs a statement on a new connection, so it also works after a restart of the server. */
  const query = async (sql: string, values: unknown[] = []): Promise<Row[]> => {
    const client = new Client({ host: data, port, user: 'farhand', database: 'postgres' });
    client.on('error', () => {});
    try {
      await client.connect();
      return (await client.query<Row>(sql, values)).rows;
    } finally {
      await client.end().catch(() => {});
    }
  };
  const start = async (): Promise<void> => {
    const args = ['-D', data, ...settings];
    const started = spawn(join(bin, 'postgres'), args, { ...user, cwd: data, stdio: 'ignore' });
    server = started;
    for (let tries = 0; ; tries += 1) {
      const answered = await query('SELECT 1').catch((error: unknown) => error);
      if (Array.isArray(answered)) return;
      if (tries > 600 || started.exitCode !== null) throw answered;
      await sleep(50);
    }
  };
  // When this process exits, the server ends too.
  process.once('exit', () => server?.kill('SIGQUIT'));
  await start();
  return {
    address: `127.0.0.1:${port}`,
    /** Returns the URL of the database at HOST:PORT, which may be the address of a proxy. */
    urlAt: (address: string) => `postgres://farhand@${address}/postgres?sslmode=disable`,
    query,
    start,
    async stop(): Promise<void> {
      if (!server || server.exitCode !== null || server.signalCode !== null) return;
      const ended = once(server, 'exit');
      server.kill('SIGQUIT');
      await ended;
    },
    /** Kills the server and the processes of all its connections with kill -9. */
    async kill(): Promise<void> {
      if (!server) return;
      const { pid } = server;
      const ended = once(server, 'exit');
      // Freezes the server with SIGSTOP. Otherwise it could start another process after its processes were listed.
      server.kill('SIGSTOP');
      const others = readFileSync(`/proc/${pid}/task/${pid}/children`, 'utf8').split(' ').filter(Boolean);
      server.kill('SIGKILL');
      await ended;
      for (const other of others) {
        try {
          process.kill(Number(other), 'SIGKILL');
        } catch {
          // The process has already ended: processes of PostgreSQL end when their server is gone.
        }
      }
      rmSync(join(data, 'postmaster.pid'), { force: true });
    },
  };
}
