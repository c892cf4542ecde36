// A database that no longer has the last commits, as after a failover to a late standby. Each test restores a copy of
// the server's files.
import { execFileSync } from 'node:child_process';
import { once } from 'node:events';
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, onTestFinished, test } from 'vitest';
import { withBroker } from '../../broker/cli/connect-to-broker.ts';
import { Cluster } from '../../broker/cluster/index.ts';
import { History } from '../../broker/history/history-database.ts';
import { PostgresDatabase } from '../../broker/history/postgres-database.ts';
import { addressOf } from '../../broker/history/postgres-settings.ts';
import { PostgresStore } from '../../broker/state/documents-in-postgres.ts';
import { State } from '../../broker/state/index.ts';
import type { Key } from '../../broker/state/state-documents-schema.ts';
import type { KeyId } from '../../shared/api/shared-schemas.ts';
import { quiet, startFarhand, temporaryFolder } from '../start-farhand.ts';
import type { PostgresServer } from '../start-postgres.ts';
import { program } from '../start-processes.ts';
import { startProxy } from '../tcp-proxy.ts';
import { createServer, databaseOf, withPostgres } from './postgres-fixture.ts';

/** Stops a server to copy its files. The returned function makes the server go back to this copy. */
async function copyFiles(server: PostgresServer): Promise<() => Promise<void>> {
  const copy = `${server.folder}/copy`;
  const [data, copied] = [join(server.folder, 'data'), join(copy, 'data')];
  await server.stop();
  execFileSync('mkdir', [copy]);
  execFileSync('cp', ['-a', data, copied]);
  await server.start();
  return async () => {
    await server.stop('SIGKILL');
    execFileSync('rm', ['-r', data]);
    execFileSync('cp', ['-a', copied, data]);
    await server.start();
  };
}

async function openHistory(url: string, brokerId: string): Promise<History> {
  const database = await PostgresDatabase.open({ database_url: url }, quiet, brokerId);
  await database.writer.started();
  const history = new History(database, quiet);
  onTestFinished(() => history.close());
  return history;
}

const succeeds = (work: Promise<unknown>): Promise<boolean> =>
  work.then(
    () => true,
    () => false,
  );

/** An API key without rights. */
const keyOf = (name: string): Key => ({
  ...{ id: `key_${name}` as KeyId, name, hash: name, scopes: [], machine_ids: null, tags: null },
  ...{ created_at: '2026-01-01T00:00:00.000Z', expires_at: null, created_by: null, previous: null },
});

withPostgres('a database that goes back', () => {
  test('ends a broker whose confirmed changes are lost; started again, it has what the database has', async () => {
    const server = await createServer();
    const url = await server.createDatabase();
    const dataDir = temporaryFolder('broker');
    const start = () =>
      program('broker/main.ts', [
        ...['--data-dir', dataDir, '--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0', '--database-url', url],
      ]);
    const names = () =>
      withBroker({ dataDir, url: undefined, apiKey: undefined }, async (client) =>
        (await client.keys.list({ limit: 100 })).items.map(({ name }) => name).toSorted(),
      );
    const create = (name: string) =>
      withBroker({ dataDir, url: undefined, apiKey: undefined }, (client) =>
        client.keys.create({ name, scopes: ['machines:read'] }),
      );
    const broker = start();
    await broker.line('broker is up');
    await create('before');
    const goBack = await copyFiles(server);
    await expect.poll(() => succeeds(create('after'))).toBe(true);
    expect(await names()).toContain('after');
    let text = '';
    broker.stderr?.on('data', (chunk) => {
      text += String(chunk);
    });
    const ended = once(broker, 'close');
    await goBack();
    expect((await ended)[0]).toBe(1);
    expect(text).toContain('has lost changes that it had confirmed');
    await start().line('broker is up');
    expect(await names()).not.toContain('after');
    expect(await names()).toContain('before');
  });

  test('refuses a change whose answer it lost, also if another transaction has its id now', async () => {
    const server = await createServer();
    const name = databaseOf(await server.createDatabase());
    const proxy = await startProxy(`127.0.0.1:${server.port}`);
    onTestFinished(() => proxy.close());
    const through = `postgres://farhand@${proxy.address}/${name}?sslmode=disable`;
    const history = await openHistory(through, 'broker_a');
    await history.migrate('notes', ['CREATE TABLE notes (id TEXT NOT NULL)']);
    let lost: Error | undefined;
    history.connection.onCommitsLost((error) => {
      lost = error;
    });
    const goBack = await copyFiles(server);
    await expect.poll(() => history.connection.isReady).toBe(true);
    // The commit waits for a standby that does not exist.
    await server.query("ALTER SYSTEM SET synchronous_standby_names = 'missing'");
    await server.query('SELECT pg_reload_conf()');
    await server.query('CHECKPOINT');
    const written = history.write((transaction) => transaction.run("INSERT INTO notes VALUES ('a')"));
    const refused = expect(written).rejects.toMatchObject({ code: 'unavailable' });
    await expect
      .poll(() => server.query("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"))
      .toHaveLength(1);
    proxy.forbid();
    await goBack();
    for (let count = 0; count < 20; count += 1) await server.query('SELECT pg_current_xact_id()', name);
    proxy.allow();
    await refused;
    await history.write((transaction) => transaction.run("INSERT INTO notes VALUES ('b')"));
    expect(await server.query('SELECT id FROM notes', name)).toEqual([{ id: 'b' }]);
    expect(lost).toBeUndefined();
  });

  test('makes a broker that lost no change of its own read all documents and owners again', async () => {
    const server = await createServer();
    const url = await server.createDatabase();
    const [one, other] = [await openHistory(url, 'broker_a'), await openHistory(url, 'broker_b')];
    const [here, there] = [
      new State(await PostgresStore.open(one)),
      new State(await PostgresStore.open(other)),
    ];
    let lost: Error | undefined;
    one.connection.onCommitsLost((error) => {
      lost = error;
    });
    const options = { address: addressOf({ database_url: url }), url: '', log: quiet };
    const cluster = await Cluster.open({ ...options, brokerId: 'broker_a', directoryId: 'a' }, here, one);
    onTestFinished(() => cluster.close());
    await cluster.start();
    const put = (state: State, name: string) =>
      state.change((transaction) => transaction.put('keys', keyOf(name)));
    await put(there, 'revoked-later');
    const owner = (id: string, epoch: number) =>
      server.query(
        `INSERT INTO owners VALUES ('mach_1', '${id}', ${epoch}) ON CONFLICT (machine_id)
          DO UPDATE SET broker_id = excluded.broker_id, epoch = excluded.epoch, changed = pg_current_xact_id()`,
        databaseOf(url),
      );
    await owner('broker_b', 4);
    const goBack = await copyFiles(server);
    const seen = () => [...here.keys.keys()].toSorted();
    await expect.poll(() => here.refresh().then(seen, () => [])).toEqual(['key_revoked-later']);
    await expect.poll(() => succeeds(put(there, 'lost'))).toBe(true);
    await there.change((transaction) => transaction.remove('keys', 'key_revoked-later'));
    await owner('broker_a', 5);
    await expect.poll(seen).toEqual(['key_lost']);
    await expect.poll(() => cluster.owns('mach_1')).toBe(true);
    await goBack();
    await expect.poll(seen).toEqual(['key_revoked-later']);
    await expect.poll(() => cluster.owns('mach_1')).toBe(false);
    // The restored database has an earlier generation number, so new changes get numbers that broker_a has seen before.
    // broker_c makes most of these changes: broker_b has lost commits, so it writes no more changes.
    await expect.poll(() => succeeds(put(here, 'kept'))).toBe(true);
    const third = new State(await PostgresStore.open(await openHistory(url, 'broker_c')));
    for (const name of ['x', 'y', 'z']) await put(third, name);
    await third.change((transaction) => transaction.remove('keys', 'key_revoked-later'));
    await expect.poll(seen).toEqual(['key_kept', 'key_x', 'key_y', 'key_z']);
    expect(lost).toBeUndefined();
  });
});

withPostgres('a read', () => {
  test('whose connection breaks is refused, and the broker goes on', async () => {
    const server = await createServer();
    const url = await server.createDatabase();
    const { call } = await startFarhand({ flags: ['--database-url', url] });
    const lock = server
      .query('BEGIN; LOCK TABLE commands IN ACCESS EXCLUSIVE MODE; SELECT pg_sleep(600)', databaseOf(url))
      .catch(() => {});
    const waiting = () =>
      server.query(
        "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%commands%'",
      );
    await expect
      .poll(() =>
        server.query(
          "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'BEGIN; LOCK%' AND wait_event = 'PgSleep'",
        ),
      )
      .toHaveLength(1);
    const answer = call('GET', '/commands?limit=1');
    await expect.poll(waiting).toHaveLength(1);
    const [reader] = await waiting();
    await server.query(`SELECT pg_terminate_backend(${Number(reader?.pid)})`);
    expect(await answer).toMatchObject({ status: 503 });
    await server.query(
      "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'BEGIN; LOCK%'",
    );
    await lock;
    expect(await call('GET', '/commands?limit=1')).toMatchObject({ status: 200 });
  });

  test('is refused if its connection leads to a standby', async () => {
    const [primary, standby] = [await createServer(), await createServer()];
    const url = await primary.createDatabase();
    const name = databaseOf(url);
    await standby.query(`CREATE DATABASE ${name}`);
    await standby.stop();
    writeFileSync(join(standby.folder, 'data/standby.signal'), '', { mode: 0o644 });
    await standby.start();
    const proxy = await startProxy(`127.0.0.1:${primary.port}`);
    onTestFinished(() => proxy.close());
    const history = await openHistory(
      `postgres://farhand@${proxy.address}/${name}?sslmode=disable`,
      'broker_a',
    );
    proxy.aim(`127.0.0.1:${standby.port}`);
    await expect(
      Promise.all([1, 2].map(() => history.all('SELECT pg_is_in_recovery()::text AS standby'))),
    ).rejects.toMatchObject({ code: 'unavailable' });
  });
});
