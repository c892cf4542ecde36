// A broker with --database-url: what it refuses, what it stores, and what it does while the database is unreachable.
import { KeyObject, webcrypto } from 'node:crypto';
import { once } from 'node:events';
import { chmodSync, chownSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { createServer as createTcpServer } from 'node:net';
import { join } from 'node:path';
import 'reflect-metadata';
import { SubjectAlternativeNameExtension, X509CertificateGenerator } from '@peculiar/x509';
import { expect, onTestFinished, test } from 'vitest';
import { withBroker } from '../../broker/cli/connect-to-broker.ts';
import { Farhand } from '../../shared/sdk/index.ts';
import { createLine } from '../cli-fixture.ts';
import { shared } from '../close-after-tests.ts';
import { startFarhand, temporaryFolder } from '../start-farhand.ts';
import { type PostgresServer, serverUser } from '../start-postgres.ts';
import { program } from '../start-processes.ts';
import { startProxy } from '../tcp-proxy.ts';
import { copyOf, createServer, databaseOf, startAgain, startOn, withPostgres } from './postgres-fixture.ts';

const server = shared(() => createServer());

const start = (url: string, flags: readonly string[] = []) =>
  startFarhand({ flags: ['--database-url', url, ...flags] });

const refused = (exitCode: number, part: string | RegExp) => ({
  name: 'StartError',
  exitCode,
  message: expect.stringMatching(part),
});

/** Starts a fake PostgreSQL server, which answers each query with one row of one value: this version. */
async function pretend(version: string): Promise<number> {
  const message = (type: string, body: Buffer): Buffer => {
    const head = Buffer.from(`${type}0000`);
    head.writeInt32BE(body.length + 4, 1);
    return Buffer.concat([head, body]);
  };
  const int32 = (...values: number[]): Buffer => Buffer.from(new Int32Array(values).buffer).swap32();
  const ready = message('Z', Buffer.from('I'));
  const row = Buffer.concat([
    message(
      'T',
      Buffer.concat([
        Buffer.from([0, 1]),
        Buffer.from('version\0'),
        int32(0),
        Buffer.alloc(2),
        int32(25),
        Buffer.alloc(8),
      ]),
    ),
    message('D', Buffer.concat([Buffer.from([0, 1]), int32(version.length), Buffer.from(version)])),
    message('C', Buffer.from('SELECT 1\0')),
    ready,
  ]);
  const fake = createTcpServer((socket) => {
    socket.once('data', () => {
      socket.write(Buffer.concat([message('R', int32(0)), ready]));
      socket.on('data', () => socket.write(row));
    });
    socket.on('error', () => {});
  }).listen(0, '127.0.0.1');
  onTestFinished(() => void fake.close());
  await once(fake, 'listening');
  const address = fake.address();
  return typeof address === 'object' && address ? address.port : 0;
}

withPostgres('a start is refused', () => {
  test('with a text that is no URL, and the text is not repeated', async () => {
    for (const url of [
      'mysql://me:secret-word@x/y',
      'postgres://me:secret-word@',
      'postgres://me:secret-word@h/d?ssl=1',
      'postgres://me:secret-word%@h/d',
    ]) {
      const error = await start(url).catch((one: unknown) => one);
      expect(error).toMatchObject(refused(78, '--database-url'));
      expect(String(error)).not.toContain('secret-word');
    }
  });

  test('if no server answers, with exit code 1, so that systemd tries again', async () => {
    await expect(start('postgres://me@127.0.0.1:1/x')).rejects.toMatchObject(refused(1, 'ECONNREFUSED'));
  });

  test('with a wrong password, and the password is in no message', async () => {
    const { port, query } = await server();
    await query("CREATE ROLE guarded LOGIN PASSWORD 'right-word'");
    const error = await start(`postgres://guarded:wrong-word@127.0.0.1:${port}/postgres`).catch(
      (one: unknown) => one,
    );
    expect(error).toMatchObject(refused(78, 'refuses the password'));
    expect(String(error)).not.toContain('wrong-word');
  });

  test('with no password where one is needed', async () => {
    const { port } = await server();
    await expect(start(`postgres://guarded@127.0.0.1:${port}/postgres`)).rejects.toMatchObject(
      refused(78, '--database-password-file'),
    );
  });

  test('for a database that does not exist', async () => {
    await expect(start((await server()).url('unknown'))).rejects.toMatchObject(
      refused(78, 'does not exist: create the database'),
    );
  });

  test('for a server that is too old', async () => {
    const port = await pretend('130012');
    await expect(start(`postgres://me@127.0.0.1:${port}/x`)).rejects.toMatchObject(
      refused(78, 'version 14 or newer'),
    );
  });

  test('if the server offers no TLS that can be verified', async () => {
    const { port } = await server();
    const url = `postgres://farhand@127.0.0.1:${port}/postgres?sslmode=verify-full`;
    await expect(start(url)).rejects.toMatchObject(refused(78, 'TLS'));
  });

  test('when a newer broker wrote the tables of a noun', async () => {
    const { broker, dataDir, databaseUrl, database } = await startOn(await server());
    await broker.close();
    await (await server()).query("UPDATE migrations SET steps = steps + 1 WHERE noun = 'commands'", database);
    await expect(startAgain(dataDir, databaseUrl)).rejects.toMatchObject(
      refused(78, 'commands of a newer farhand-broker: install the newer version again'),
    );
  });

  test('while another broker uses the database', async () => {
    const { databaseUrl } = await startOn(await server());
    await expect(start(databaseUrl)).rejects.toMatchObject(refused(1, 'in use by another farhand-broker'));
  });

  test('in the data directory of a broker without a database, and with flags that work only with files', async () => {
    const url = await (await server()).createDatabase();
    const folder = temporaryFolder('files');
    writeFileSync(join(folder, 'state.json'), '{}');
    await expect(startAgain(folder, url)).rejects.toMatchObject(refused(78, 'state.json'));
    await expect(start(url, ['--new-history'])).rejects.toMatchObject(refused(78, '--new-history'));
  });
});

/**
 * Makes a certificate for only this name or address, and its key. It is self-signed, and the server's user can read
 * both files.
 */
async function certificate(name: {
  type: 'ip' | 'dns';
  value: string;
}): Promise<{ cert: string; key: string }> {
  const folder = temporaryFolder('certificate');
  const algorithm = { name: 'ECDSA', namedCurve: 'P-256', hash: 'SHA-256' };
  const keys = await webcrypto.subtle.generateKey(algorithm, true, ['sign', 'verify']);
  const made = await X509CertificateGenerator.createSelfSigned({
    ...{ name: 'CN=database', keys, signingAlgorithm: algorithm },
    extensions: [new SubjectAlternativeNameExtension([name])],
  });
  const [cert, key] = [join(folder, 'server.crt'), join(folder, 'server.key')];
  writeFileSync(cert, made.toString('pem'));
  writeFileSync(key, KeyObject.from(keys.privateKey).export({ format: 'pem', type: 'pkcs8' }), {
    mode: 0o600,
  });
  chmodSync(folder, 0o755);
  if (process.getuid?.() === 0) chownSync(key, serverUser, serverUser);
  return { cert, key };
}

withPostgres('over TLS', () => {
  test('the server’s authority and name are verified, unless sslmode says otherwise', async () => {
    const { cert, key } = await certificate({ type: 'ip', value: '127.0.0.1' });
    const other = await certificate({ type: 'ip', value: '127.0.0.1' });
    const own = await createServer(['ssl = on', `ssl_cert_file = '${cert}'`, `ssl_key_file = '${key}'`]);
    const address = async (host: string): Promise<string> =>
      `postgres://farhand@${host}:${own.port}/${databaseOf(await own.createDatabase())}?`;
    const loopback = await address('127.0.0.1');
    for (const options of ['sslmode=verify-full', `sslmode=verify-ca&sslrootcert=${other.cert}`])
      await expect(start(`${loopback}${options}`)).rejects.toMatchObject(refused(78, 'TLS'));
    const named = await address('localhost');
    await expect(start(`${named}sslmode=verify-full&sslrootcert=${cert}`)).rejects.toMatchObject(
      refused(78, 'TLS'),
    );
    const { broker } = await start(`${loopback}sslmode=verify-full&sslrootcert=${cert}`);
    const sessions = await own.query(
      "SELECT DISTINCT ssl FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE application_name = 'farhand-broker'",
    );
    expect(sessions).toEqual([{ ssl: true }]);
    await broker.close();
    await start(`${named}sslmode=verify-ca&sslrootcert=${cert}`);
    await start(`${await address('127.0.0.1')}sslmode=require`);
  });
});

withPostgres('a broker on PostgreSQL', () => {
  test('that has stopped is used by commands with --data-dir, but no other directory becomes its own', async () => {
    const url = await (await server()).createDatabase();
    const { broker, dataDir } = await start(url);
    await broker.close();
    const farhand = createLine();
    const env = { FARHAND_DATABASE_URL: url };
    const listed = await farhand('auth list-keys', ['--data-dir', dataDir, '-o', 'json'], { env });
    expect([listed.code, JSON.parse(listed.out)]).toMatchObject([0, [{ name: 'test' }]]);
    const other = join(temporaryFolder('other'), 'data');
    const made = await farhand('auth create-key', ['--data-dir', other], { env });
    expect([made.code, made.out]).toEqual([1, '']);
    expect(made.err).toContain('authority.json is missing');
  });

  test('has all data after a restart, and writes neither state.json nor history.db', async () => {
    const { broker, dataDir, databaseUrl, client, agent, key } = await startOn(await server());
    const { machineId: machine_id } = await agent({ name: 'web-1', tags: 'prod' });
    const command = await client.commands.create({ machine_id, command: 'echo hello', wait: 5_000 });
    expect(command).toMatchObject({ status: 'completed' });
    await broker.close();
    expect(readdirSync(dataDir).filter((name) => /^(state|history)/.test(name))).toEqual([]);
    const again = await startAgain(dataDir, databaseUrl);
    const asBefore = new Farhand({ baseUrl: again.url, apiKey: key, retries: 0 });
    expect(await asBefore.machines.get({ machine_id })).toMatchObject({ name: 'web-1', tags: ['prod'] });
    expect(await asBefore.commands.get({ command_id: command.id })).toMatchObject({
      stdout: 'hello\n',
      exit_code: 0,
    });
  });

  test('has every answered change after it was killed with -9', async () => {
    const url = await (await server()).createDatabase();
    const dataDir = temporaryFolder('broker');
    const addresses = ['--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0'];
    const answered: string[] = [];
    for (let round = 0; round < 3; round += 1) {
      const broker = program('broker/main.ts', ['--data-dir', dataDir, ...addresses, '--database-url', url]);
      const { http } = await broker.line('broker is up');
      const { key } = await withBroker({ dataDir, url: undefined, apiKey: undefined }, (local) =>
        local.keys.create({ name: 'first', scopes: ['admin'] }),
      );
      const client = new Farhand({ baseUrl: String(http), apiKey: key, retries: 0 });
      const stored = new Set((await client.keys.list({ limit: 100 })).items.map(({ name }) => name));
      expect(answered.filter((name) => !stored.has(name))).toEqual([]);
      const writing = Array.from({ length: 4 }, async (_, writer) => {
        for (let count = 0; ; count += 1) {
          const name = `key-${round}-${writer}-${count}`;
          await client.keys.create({ name, scopes: ['machines:read'] });
          answered.push(name);
          if (answered.length === 8 * (round + 1)) broker.kill('SIGKILL');
        }
      });
      await Promise.allSettled(writing);
    }
    expect(answered.length).toBeGreaterThanOrEqual(24);
  });

  test('refuses a password on its command line, and takes one from a file', async () => {
    const { port, query } = await server();
    await query("CREATE ROLE filed LOGIN PASSWORD 'file-word'");
    await query('CREATE DATABASE filed OWNER filed');
    const dataDir = temporaryFolder('broker');
    const address = `127.0.0.1:${port}/filed`;
    const flags = ['--data-dir', dataDir, '--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0'];
    const open = program('broker/main.ts', [
      ...flags,
      '--database-url',
      `postgres://filed:file-word@${address}`,
    ]);
    const [code] = await once(open, 'exit');
    expect(code).toBe(2);
    const file = join(dataDir, 'password');
    writeFileSync(file, 'file-word\n', { mode: 0o600 });
    const own = ['--database-url', `postgres://filed@${address}`, '--database-password-file', file];
    const broker = program('broker/main.ts', [...flags, ...own]);
    const up = await broker.line('broker is up');
    expect(JSON.stringify(up)).not.toContain('file-word');
    expect(readFileSync(`/proc/${broker.pid}/cmdline`, 'utf8')).not.toContain('file-word');
  });
});

type Call = Awaited<ReturnType<typeof startOn>>['call'];

const createKey = (call: Call, name: string) =>
  call('POST', '/api-keys', { body: { name, scopes: ['machines:read'] } });

/**
 * Kills the server after it has committed a change and before it has answered. Returns the pending answer to that
 * change.
 */
async function losesAnswer(server: PostgresServer, call: Call): Promise<{ answer: ReturnType<Call> }> {
  // Each commit now waits for a standby that does not exist.
  await server.query("ALTER SYSTEM SET synchronous_standby_names = 'missing'");
  await server.query('SELECT pg_reload_conf()');
  // The server's processes apply the setting one after another, so the first changes may still be answered.
  for (let count = 0; ; count += 1) {
    const answer = createKey(call, `first-${count}`);
    const isAnswered = answer.then(
      () => true,
      () => true,
    );
    if (await Promise.race([isAnswered, commitWaits(server)])) continue;
    await server.query('ALTER SYSTEM RESET synchronous_standby_names');
    await server.stop('SIGKILL');
    return { answer };
  }
}

/** Resolves with false when a commit waits for a standby. */
async function commitWaits(server: PostgresServer): Promise<boolean> {
  const waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
  await expect.poll(async () => (await server.query(waiting)).length).toBe(1);
  return false;
}

withPostgres('while PostgreSQL is killed and started again', () => {
  test('requests are unavailable while the server does not answer, and succeed when it goes on', async () => {
    const own = await createServer();
    const { call, databaseUrl } = await startOn(own);
    const locks = "SELECT pid FROM pg_locks WHERE locktype = 'advisory'";
    const [lock] = await own.query(locks, databaseOf(databaseUrl));
    const pid = Number(lock?.pid);
    const create = async () =>
      (await call('POST', '/api-keys', { body: { name: 'x', scopes: ['machines:read'] } })).status;
    process.kill(pid, 'SIGSTOP');
    try {
      expect(await create()).toBe(503);
    } finally {
      process.kill(pid, 'SIGCONT');
    }
    await expect.poll(create).toBe(201);
  });

  test('requests are refused until a restart if another broker has used the database meanwhile', async () => {
    const own = await createServer();
    const proxy = await startProxy(`127.0.0.1:${own.port}`);
    const name = databaseOf(await own.createDatabase());
    const [through, direct] = [proxy.address, `127.0.0.1:${own.port}`].map((address) => [
      '--database-url',
      `postgres://farhand@${address}/${name}?sslmode=disable`,
    ]);
    const { call, dataDir, log } = await startFarhand({ flags: through! });
    const status = async () => (await call('GET', '/commands')).status;
    expect(await status()).toBe(200);
    proxy.forbid();
    await expect.poll(status).toBe(503);
    const other = await startFarhand({ dataDir: copyOf(dataDir), flags: direct! });
    await other.broker.close();
    proxy.allow();
    await expect.poll(() => log.join('')).toContain('another broker has written to');
    expect(await status()).toBe(503);
  });

  test('the broker is not ready meanwhile, but alive, so that no watchdog ends it', async () => {
    const own = await createServer();
    const { url, broker } = await startOn(own);
    const ready = async () => (await fetch(`${url}/readyz`)).status;
    expect(await ready()).toBe(200);
    await own.stop();
    await expect.poll(ready).toBe(503);
    expect(await broker.alive()).toBe(true);
    await own.start();
    await expect.poll(ready).toBe(200);
  });

  test('requests that wait for a commit whose answer was lost get 503 at once, and the commit ends when the server is back', async () => {
    const own = await createServer();
    const { call, client } = await startOn(own);
    const first = await losesAnswer(own, call);
    const behind = [createKey(call, 'second'), call('GET', '/events')];
    expect((await Promise.all(behind)).map(({ status }) => status)).toEqual([503, 503]);
    await own.start();
    expect((await first.answer).status).toBe(201);
    expect((await client.keys.list({ limit: 100 })).items.map(({ name }) => name)).not.toContain('second');
  });

  test('a broker stops although the answer to a commit was lost', async () => {
    const own = await createServer();
    const { call, broker } = await startOn(own);
    const { answer } = await losesAnswer(own, call);
    const isAnswered = answer.then(
      () => true,
      () => false,
    );
    await broker.close();
    expect(await isAnswered).toBe(false);
  });

  test('requests get 503, agents stay linked, and no answered change is lost', async () => {
    const own = await createServer();
    const { client, call, agent, databaseUrl, log } = await startOn(own);
    const { machineId: machine_id, logged } = await agent();
    const answered: string[] = [];
    let isOver = false;
    const writers = Array.from({ length: 4 }, async (_, writer) => {
      for (let count = 0; !isOver; count += 1) {
        const name = `t-${writer}-${count}`;
        const made = await client.keys.create({ name, scopes: ['machines:read'] }).catch(() => undefined);
        if (made) answered.push(name);
      }
    });
    await expect.poll(() => answered.length).toBeGreaterThan(20);
    await own.stop('SIGKILL');
    const away = await call('POST', '/api-keys', { body: { name: 'x', scopes: ['machines:read'] } });
    expect([away.status, away.body.error.code]).toEqual([503, 'unavailable']);
    expect((await call('GET', '/events')).status).toBe(503);
    expect(await client.machines.get({ machine_id })).toMatchObject({ status: 'online' });
    await own.start();
    const back = performance.now();
    await expect
      .poll(
        async () =>
          (await call('POST', '/api-keys', { body: { name: 'x', scopes: ['machines:read'] } })).status,
      )
      .toBe(201);
    expect(performance.now() - back).toBeLessThan(5_000);
    isOver = true;
    await Promise.all(writers);
    const stored = await own.query(
      "SELECT document::json->>'name' AS name FROM documents WHERE collection = 'keys'",
      databaseOf(databaseUrl),
    );
    const names = stored.map(({ name }) => String(name));
    expect(answered.filter((name) => !names.includes(name))).toEqual([]);
    // A change whose commit was interrupted is either both in the database and in the broker, or in neither.
    expect((await client.keys.list({ limit: 1 })).total).toBe(stored.length);
    expect(await client.commands.create({ machine_id, command: 'true', wait: 5_000 })).toMatchObject({
      status: 'completed',
    });
    expect(logged.filter((line) => line.includes('link lost'))).toEqual([]);
    expect(log.some((line) => line.includes('answers again'))).toBe(true);
  });
});
