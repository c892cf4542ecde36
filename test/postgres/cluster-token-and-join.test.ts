// The verbs farhand-broker cluster token and cluster join: a new broker gets the authority and keys of an existing one.
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, mkdirSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { text } from 'node:stream/consumers';
import { expect, test } from 'vitest';
import { cluster } from '../../broker/cluster/token-and-join-verbs.ts';
import { shared } from '../close-after-tests.ts';
import { soon } from '../commands-fixture.ts';
import { startFarhand, temporaryFolder } from '../start-farhand.ts';
import { program } from '../start-processes.ts';
import { startProxy } from '../tcp-proxy.ts';
import { createServer, databaseOf, withPostgres } from './postgres-fixture.ts';

const server = shared(() => createServer());
const main = join(import.meta.dirname, '../../broker/main.ts');
const peer = ['--peer-listen', '127.0.0.1:0'];
const secretFiles = ['authority.json', 'webhooks.key', 'rest-key.json'];

/** Runs farhand-broker cluster as a separate process with this standard input. */
async function run(argv: string[], input = '') {
  const child = spawn(process.execPath, [main, 'cluster', ...argv]);
  child.stdin.end(input);
  const [stdout, stderr] = await Promise.all([text(child.stdout), text(child.stderr), once(child, 'close')]);
  return { code: child.exitCode, stdout, stderr };
}

/** Returns the verbs for this database. They run in this process. */
function verbsOn(url: string) {
  const call = (verb: string, directory: string, ...more: string[]) =>
    cluster({ argv: [verb, '--data-dir', directory, '--database-url', url, ...more], env: {} });
  return {
    token: (directory: string) => call('token', directory),
    join(directory: string, token: string) {
      const file = join(temporaryFolder('token'), 'token');
      writeFileSync(file, token);
      return call('join', directory, '--token-file', file);
    },
  };
}

/** Starts a broker in a separate process. */
async function startFirst() {
  const { createDatabase, query } = await server();
  const url = await createDatabase();
  const dataDir = temporaryFolder('first');
  const ports = ['--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0'];
  const broker = program('broker/main.ts', ['--data-dir', dataDir, '--database-url', url, ...ports, ...peer]);
  const { grpc } = await broker.line('broker is up');
  const where = (directory: string) => ['--data-dir', directory, '--database-url', url];
  return {
    ...{ broker, dataDir, url, grpc: String(grpc) },
    query: (sql: string) => query(sql, databaseOf(url)),
    token: () => run(['token', ...where(dataDir)]),
    join: (directory: string, input: string) => run(['join', ...where(directory)], input),
  };
}

withPostgres('a broker', () => {
  test('gets no token from a directory without authority, or for a database of one broker', async () => {
    await expect(cluster({ argv: ['join'], env: {} })).rejects.toThrow('--database-url is missing');
    await expect(cluster({ argv: ['leave'], env: {} })).rejects.toThrow('needs a verb: token or join');
    const url = await (await server()).createDatabase();
    const { dataDir } = await startFarhand({ flags: ['--database-url', url] });
    const { token } = verbsOn(url);
    await expect(token(dataDir)).rejects.toThrow(
      'is not shared by several brokers yet: start the first broker',
    );
    const other = await (await server()).createDatabase();
    await startFarhand({ flags: ['--database-url', other, ...peer] });
    await expect(verbsOn(other).token(temporaryFolder('second'))).rejects.toThrow(
      'authority.json is missing',
    );
  });

  test('does not join with a wrong, used or expired token, or in a directory of a broker', async () => {
    const { createDatabase, query } = await server();
    const url = await createDatabase();
    const first = await startFarhand({ flags: ['--database-url', url, ...peer] });
    const { token, join: joinIn } = verbsOn(url);
    const folder = temporaryFolder('second');
    const refusal = (exitCode: number, reason: string) =>
      expect.objectContaining({ name: 'StartError', exitCode, message: expect.stringContaining(reason) });
    await expect(joinIn(folder, '\n')).rejects.toEqual(refusal(78, 'contains no token'));
    const made = await token(first.dataDir);
    expect(made).toMatch(/^farhand_broker_\w{43}\n$/);
    await expect(joinIn(first.dataDir, made)).rejects.toEqual(refusal(1, 'already uses'));
    const wrong = `farhand_broker_${'0'.repeat(43)}`;
    await expect(joinIn(folder, wrong)).rejects.toEqual(refusal(1, 'the token is wrong, was used already'));
    await query("UPDATE broker_tokens SET valid_until = now() - interval '1 second'", databaseOf(url));
    await expect(joinIn(folder, made)).rejects.toEqual(refusal(1, 'older than 15 minutes'));
    expect(await query('SELECT * FROM broker_tokens', databaseOf(url))).toEqual([]);
    writeFileSync(join(folder, 'authority.json'), '{}');
    await expect(joinIn(folder, await token(first.dataDir))).rejects.toEqual(
      refusal(78, `${folder} already belongs to a broker: it contains authority.json`),
    );
    expect(readFileSync(join(folder, 'authority.json'), 'utf8')).toBe('{}');
  });

  test('that could not write a file has no authority, and joins with the same token afterwards', async () => {
    const url = await (await server()).createDatabase();
    const first = await startFarhand({ flags: ['--database-url', url, ...peer] });
    const { token, join: joinIn } = verbsOn(url);
    const folder = temporaryFolder('second');
    const made = await token(first.dataDir);
    mkdirSync(join(folder, 'webhooks.key/x'), { recursive: true });
    await expect(joinIn(folder, made)).rejects.toThrow('webhooks.key');
    expect(existsSync(join(folder, 'authority.json'))).toBe(false);
    rmSync(join(folder, 'webhooks.key'), { recursive: true });
    await joinIn(folder, made);
    expect(existsSync(join(folder, 'authority.json'))).toBe(true);
  });

  test('joins once with a token, and an agent of the first broker moves to it', async () => {
    const first = await startFirst();
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
      stdout: expect.stringContaining(
        'Next, install this broker, or start it, with --database-url and --peer-listen',
      ),
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
    proxy.aim(second.grpc);
    await agent.linked(true);
    await soon(async () => (await run('echo at the second')).stdout).toBe('at the second\n');
  }, 90_000);
});
