// Starts PostgreSQL, from Debian's package, in a temporary folder and as an ordinary user.
import { execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { chmodSync, chownSync, mkdirSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { Client } from 'pg';

const installed = '/usr/lib/postgresql';
/** User id of the server, because PostgreSQL refuses to run as root. */
const serverUser = 65_534;

type Row = Record<string, unknown>;

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
  const settings = [
    '-c',
    'listen_addresses=',
    '-c',
    `unix_socket_directories=${data}`,
    '-c',
    'max_connections=200',
  ];
  const server = spawn(join(bin, 'postgres'), ['-D', data, ...settings], {
    ...user,
    cwd: data,
    stdio: 'ignore',
  });
  const query = async (sql: string): Promise<Row[]> => {
    const client = new Client({ host: data, user: 'farhand', database: 'postgres' });
    client.on('error', () => {});
    try {
      await client.connect();
      return (await client.query<Row>(sql)).rows;
    } finally {
      await client.end().catch(() => {});
    }
  };
  for (let tries = 0; ; tries += 1) {
    const answered = await query('SELECT 1').catch((error: unknown) => error);
    if (Array.isArray(answered)) break;
    if (tries > 300 || server.exitCode !== null) throw answered;
    await sleep(50);
  }
  return {
    url: `postgres://farhand@localhost/postgres?host=${data}`,
    query,
    async stop(): Promise<void> {
      const ended = once(server, 'exit');
      server.kill('SIGQUIT');
      await ended;
    },
  };
}
