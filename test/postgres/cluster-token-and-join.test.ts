// farhand-broker cluster token and cluster join: a new broker gets the authority and keys of an existing one.
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { text } from 'node:stream/consumers';
import { expect, test } from 'vitest';
import { shared } from '../close-after-tests.ts';
import { soon } from '../commands-fixture.ts';
import { startFarhand, temporaryFolder } from '../start-farhand.ts';
import { program } from '../start-processes.ts';
import { startProxy } from '../tcp-proxy.ts';
import { createServer, databaseOf, withPostgres } from './postgres-fixture.ts';

const server = shared(() => createServer());
const main = join(import.meta.dirname, '../../broker/main.ts');
const secretFiles = ['authority.json', 'webhooks.key', 'rest-key.json'];

/** Runs farhand-broker cluster as a process, with this standard input. */
async function cluster(argv: string[], input = '') {
  const child = spawn(process.execPath, [main, 'cluster', ...argv]);
  child.stdin.end(input);
  const [stdout, stderr] = await Promise.all([text(child.stdout), text(child.stderr), once(child, 'close')]);
  return { code: child.exitCode, stdout, stderr };
}

/** A broker in a process of its own. */
async function startFirst(...flags: string[]) {
  const { createDatabase, query } = await server();
  const url = await createDatabase();
  const dataDir = temporaryFolder('first');
  const ports = ['--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0'];
  const broker = program('broker/main.ts', [
    '--data-dir',
    dataDir,
    '--database-url',
    url,
    ...ports,
    ...flags,
  ]);
  const { grpc } = await broker.line('broker is up');
  const where = (directory: string) => ['--data-dir', directory, '--database-url', url];
  return {
    ...{ broker, dataDir, url, grpc: String(grpc) },
    query: (sql: string) => query(sql, databaseOf(url)),
    token: () => cluster(['token', ...where(dataDir)]),
    join: (directory: string, input: string) => cluster(['join', ...where(directory)], input),
  };
}

withPostgres('a broker', () => {
  test('gets no token from a directory without authority, or for a database of one broker', async () => {
    expect(await cluster(['join'])).toMatchObject({
      ...{ code: 2, stdout: '' },
      stderr: expect.stringContaining('--database-url is missing'),
    });
    expect(await cluster(['leave'])).toMatchObject({
      ...{ code: 2, stdout: '' },
      stderr: expect.stringContaining('cluster needs a verb: token or join'),
    });
    const alone = await startFirst();
    expect(await alone.token()).toMatchObject({
      ...{ code: 78, stdout: '' },
      stderr: expect.stringContaining('is not shared by several brokers yet: start the first broker'),
    });
  }, 30_000);

  test('does not join with a wrong, used or expired token, or in a directory of a broker', async () => {
    const first = await startFirst('--peer-listen', '127.0.0.1:0');
    const refused = (code: number, reason: string) => ({
      ...{ code, stdout: '' },
      stderr: expect.stringContaining(reason),
    });
    const folder = temporaryFolder('second');
    expect(await cluster(['token', '--data-dir', folder, '--database-url', first.url])).toEqual(
      refused(78, 'authority.json is missing'),
    );
    expect(await first.join(folder, '')).toEqual(refused(78, 'standard input contains no token'));
    const { stdout: token } = await first.token();
    expect(token).toMatch(/^farhand_broker_\w{43}\n$/);
    expect(await first.join(first.dataDir, token)).toEqual(refused(1, 'already uses'));
    const wrong = `farhand_broker_${'0'.repeat(43)}`;
    expect(await first.join(folder, wrong)).toEqual(refused(1, 'the token is wrong, was used already'));
    await first.query("UPDATE broker_tokens SET valid_until = now() - interval '1 second'");
    expect(await first.join(folder, token)).toEqual(refused(1, 'older than 15 minutes'));
    expect(await first.query('SELECT * FROM broker_tokens')).toEqual([]);
    writeFileSync(join(folder, 'authority.json'), '{}');
    expect(await first.join(folder, (await first.token()).stdout)).toEqual(
      refused(78, `${folder} belongs to a broker already, because it has authority.json`),
    );
    expect(readFileSync(join(folder, 'authority.json'), 'utf8')).toBe('{}');
  }, 60_000);

  test('joins once with a token, and an agent of the first broker moves to it', async () => {
    const peer = ['--peer-listen', '127.0.0.1:0'];
    const first = await startFirst(...peer);
    const dataDir = temporaryFolder('second');
    const { stdout: token, stderr } = await first.token();
    expect(stderr).toContain('valid for 15 minutes, and for one broker');
    // The database has no secret in plain text.
    const [row] = await first.query('SELECT * FROM broker_tokens');
    const { private_key } = JSON.parse(readFileSync(join(first.dataDir, 'authority.json'), 'utf8'));
    expect(JSON.stringify(row)).not.toContain(token.trim());
    expect(Buffer.from(String(row?.secrets), 'base64').includes(private_key.split('\n')[1])).toBe(false);
    expect(await first.join(dataDir, token)).toMatchObject({
      code: 0,
      stdout: expect.stringContaining('Next, start this broker with --database-url and --peer-listen'),
    });
    for (const file of secretFiles) {
      expect(readFileSync(join(dataDir, file))).toEqual(readFileSync(join(first.dataDir, file)));
      expect(statSync(join(dataDir, file)).mode & 0o777).toBe(0o600);
    }
    expect((await first.join(temporaryFolder('third'), token)).code).toBe(1);
    expect(await first.query('SELECT * FROM broker_tokens')).toEqual([]);

    const second = await startFarhand({ dataDir, flags: ['--database-url', first.url, ...peer] });
    const proxy = await startProxy(first.grpc);
    const agent = await second.agent({ through: proxy.address });
    const { machineId: machine_id } = agent;
    const run = (command: string) => second.client.commands.create({ machine_id, command, wait: 20_000 });
    await soon(async () => (await run('echo at the first')).stdout).toBe('at the first\n');
    first.broker.kill('SIGTERM');
    await proxy.aim(second.grpc);
    await agent.linked(true);
    await soon(async () => (await run('echo at the second')).stdout).toBe('at the second\n');
  }, 60_000);
});
