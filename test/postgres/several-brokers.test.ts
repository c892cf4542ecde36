// Several brokers on one database: what each learns of the others, and which of them owns a machine. Also what happens
// to a machine's work if its owner is killed, frozen or disconnected.
import { randomBytes } from 'node:crypto';
import { readFileSync, writeFileSync } from 'node:fs';
import { hostname } from 'node:os';
import { join } from 'node:path';
import { expect, onTestFinished, test } from 'vitest';
import { enrollWith } from '../../agent/link/dial.ts';
import { claimingRemoved, expiring, pruning } from '../../broker/cluster/cluster-tables.ts';
import { commitLock } from '../../broker/history/postgres-write-connection.ts';
import { parseJoinToken } from '../../shared/join-token.ts';
import { Farhand } from '../../shared/sdk/index.ts';
import { shared } from '../close-after-tests.ts';
import { gate, leapingClock, soon } from '../commands-fixture.ts';
import { call, startFarhand, type TestSystem, temporaryFolder } from '../start-farhand.ts';
import { clientOf, type PostgresServer } from '../start-postgres.ts';
import { program } from '../start-processes.ts';
import { startProxy } from '../tcp-proxy.ts';
import { packageOf, signingKey, upgradesOf } from '../upgrades-fixture.ts';
import { waitFor } from '../wait-for.ts';
import { copyOf, createServer, databaseOf, startTwo, withPostgres } from './postgres-fixture.ts';

const server = shared(() => createServer());
const peer = ['--peer-listen', '127.0.0.1:0'];

/** Registers a machine without linking it. Returns its id. */
async function enroll({ grpc, dataDir }: TestSystem, token: string, name: string): Promise<string> {
  const { certificate } = JSON.parse(readFileSync(join(dataDir, 'authority.json'), 'utf8'));
  const host = { hostname: name, os: 'linux', arch: 'x64' };
  const request = { token, public_key: randomBytes(32), name, tags: [], host, agent_version: '0.0.0' };
  return (await enrollWith(grpc, certificate, request)).machine_id;
}

/** Returns SQL that moves a machine from its owner to the other of two brokers, as if that broker had claimed it. */
const becomeOwner = (machineId: string): string =>
  `UPDATE owners SET epoch = epoch + 1, changed = pg_current_xact_id(),
   broker_id = (SELECT id FROM brokers WHERE id <> owners.broker_id) WHERE machine_id = '${machineId}'`;

/** Creates a key with the scope machines:read. */
async function limitedKey(system: TestSystem): Promise<{ key: string; key_id: string }> {
  const { key } = await system.keyed(['machines:read']);
  const { items } = await system.client.keys.list();
  return { key, key_id: items.find(({ name }) => name === 'limited')?.id ?? '' };
}

/**
 * Creates a key at the first broker. atTwo() uses the key at the second broker to read a single machine, and resolves
 * with the status. A list would not do: before a broker answers with a list, it reads the changes of other brokers.
 */
async function keyUsedAtBoth(one: TestSystem, two: TestSystem) {
  const { key, key_id } = await limitedKey(one);
  const { machineId } = await two.agent();
  const atTwo = async () => (await call(`${two.url}/api/v1/machines/${machineId}`, 'GET', { key })).status;
  expect(await atTwo()).toBe(200);
  return { key_id, atTwo };
}

/** Expects that a key is refused within this time. Call it right after the answer to the revocation. */
async function expectRefused(atTwo: () => Promise<number>, withinMs: number): Promise<void> {
  const revoked = performance.now();
  await expect.poll(atTwo, { interval: 10, timeout: 20_000 }).toBe(401);
  expect(performance.now() - revoked).toBeLessThan(withinMs);
}

/** Returns SQL that finds statements that wait for a lock on this table. */
const waitingFor = (table: string): string =>
  `SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%${table}%'`;

/**
 * Waits until `count` brokers listen for notifications. Returns the pids of the PostgreSQL processes that serve these
 * connections. They are found by their latest query, which usually reads `owners`.
 */
async function listeners(database: string, count: number): Promise<Set<number>> {
  const { query } = await server();
  const reading =
    "SELECT pid FROM pg_stat_activity WHERE query LIKE 'SELECT machine_id, broker_id%FROM owners%'";
  const pids = new Set<number>();
  await soon(async () => {
    for (const { pid } of await query(reading, database)) pids.add(Number(pid));
    return pids.size;
  }).toBe(count);
  return pids;
}

/** Runs `work` while these processes are stopped. */
async function whileFrozen(pids: Iterable<number>, work: () => Promise<void>): Promise<void> {
  for (const pid of pids) process.kill(pid, 'SIGSTOP');
  try {
    await work();
  } finally {
    for (const pid of pids) process.kill(pid, 'SIGCONT');
  }
}

withPostgres('two brokers', () => {
  test('with two certificate authorities are not started on one database', async () => {
    const url = await (await server()).createDatabase();
    const flags = ['--database-url', url, ...peer];
    await startFarhand({ flags });
    await expect(startFarhand({ flags })).rejects.toThrow('farhand-broker cluster join');
    const other = await startFarhand({ flags: [] });
    await expect(startFarhand({ flags, dataDir: copyOf(other.dataDir) })).rejects.toThrow(
      'authority.json differs from that of the other brokers on this database',
    );
  });

  test('cannot listen for each other on 0.0.0.0 without --peer-url', async () => {
    const url = await (await server()).createDatabase();
    const flags = ['--database-url', url, '--peer-listen', '0.0.0.0:0'];
    await expect(startFarhand({ flags })).rejects.toThrow('set --peer-url to https://HOST:PORT');
  });

  test('are listed once each, also after one of them was killed and started again', async () => {
    const { database } = await startTwo(await server());
    const { query } = await server();
    const killed = `INSERT INTO brokers SELECT id || '0', url, now() - interval '1 s', directory_id FROM brokers`;
    await query(`${killed} ORDER BY id LIMIT 1`, database);
    for (const statement of expiring) await query(statement, database);
    expect(await query('SELECT 1 FROM brokers', database)).toHaveLength(2);
  });

  test('are listed by each with leases and machines, and a machine names its owner', async () => {
    const { one, two, database } = await startTwo(await server());
    const { machineId } = await two.agent();
    const { query } = await server();
    const list = async ({ client }: TestSystem) => (await client.brokers.list({ sort: '-machines' })).items;
    await soon(async () => (await list(one)).map(({ linked }) => linked)).toEqual([1, 0]);
    const [owner, other] = await list(one);
    expect(owner).toMatchObject({ status: 'online', machines: 1, self: false });
    expect(other).toMatchObject({ status: 'online', machines: 0, self: true });
    expect((await list(two)).map(({ self }) => self)).toEqual([true, false]);
    expect(Date.parse(owner?.lease_until ?? '') - Date.now()).toBeGreaterThan(5_000);
    // Before a broker listens, its URL has the port 0. The other broker reads the new URL within a second.
    for (const { client } of [one, two])
      await soon(async () => (await client.machines.get({ machine_id: machineId })).broker).toEqual({
        id: owner?.id,
        url: owner?.url,
      });
    await query(
      "INSERT INTO brokers VALUES ('broker_gone', 'https://gone:1', now() - interval '9 s')",
      database,
    );
    expect(await list(one)).toContainEqual(expect.objectContaining({ id: 'broker_gone', status: 'offline' }));
    const { key } = await limitedKey(one);
    expect((await call(`${one.url}/api/v1/brokers`, 'GET', { key })).status).toBe(403);
  });

  test('are refused unless both are started with --peer-listen, which needs --database-url', async () => {
    await expect(startFarhand({ flags: peer })).rejects.toThrow('they need --database-url');
    const url = await (await server()).createDatabase();
    const alone = await startFarhand({ flags: ['--database-url', url] });
    const dataDir = copyOf(alone.dataDir);
    const flags = ['--database-url', url, ...peer];
    await expect(startFarhand({ flags, dataDir })).rejects.toThrow('without --peer-listen');
    await alone.broker.close();
    const first = await startFarhand({ flags, dataDir });
    await expect(startFarhand({ flags: ['--database-url', url] })).rejects.toThrow('another farhand-broker');
    await first.broker.close();
  }, 40_000);

  test('accept a key of the other at once, and refuse it within a second after it is revoked', async () => {
    const { one, two } = await startTwo(await server());
    const { key_id, atTwo } = await keyUsedAtBoth(one, two);
    await one.client.keys.remove({ key_id });
    await expectRefused(atTwo, 1_000);
  });

  test('list the last use of a key, whichever of them it was used at', async () => {
    const { one, two } = await startTwo(await server());
    const { key, key_id } = await limitedKey(one);
    expect((await one.call('GET', '/machines', { key })).status).toBe(200);
    const used = { last_used_ip: '127.0.0.1', last_used_at: expect.any(String) };
    await soon(() => two.client.keys.get({ key_id })).toMatchObject(used);
    expect((await two.client.keys.list({ id: key_id })).items).toMatchObject([used]);
  });

  test('log a failure of their regular work once', async () => {
    const clock = leapingClock();
    const { one, database } = await startTwo(await server());
    const { query } = await server();
    for (const table of ['machine_facts', 'rate_limits'])
      await query(`ALTER TABLE ${table} RENAME TO no_${table}`, database);
    const lines = (text: string) => one.log.filter((line) => line.includes(text)).length;
    for (let n = 0; n < 3; n += 1) {
      clock.leap(16_000);
      await soon(() => lines('could not read the reports of machines that other brokers own')).toBe(1);
    }
    clock.leap(3_600_000);
    await soon(() => lines('outdated rows about brokers and tokens could not be deleted')).toBe(1);
    expect(lines('could not read the reports of machines that other brokers own')).toBe(1);
  }, 40_000);

  test('run a schedule that was moved to a machine of the other, although its mark could not be read at first', async () => {
    const { one, two, database } = await startTwo(await server());
    const [{ machineId: machine_id }, { machineId: next }] = [await one.agent(), await two.agent()];
    const folder = temporaryFolder('watched');
    const on_change = { path: folder, settle: 1_000 };
    const { id: schedule_id } = await one.client.schedules.create({
      ...{ machine_id, name: 'x', command: 'true', on_change },
    });
    const { query } = await server();
    await query('ALTER TABLE schedule_marks RENAME TO no_marks', database);
    await one.client.schedules.update({ schedule_id, machine_id: next });
    await soon(() => two.log.join('').includes('schedules moved to another machine')).toBe(true);
    await query('ALTER TABLE no_marks RENAME TO schedule_marks', database);
    const machines = async (): Promise<string[]> => {
      writeFileSync(join(folder, String(Date.now())), '');
      const { items } = await two.client.schedules.history({ schedule_id });
      return items.map((run) => run.machine_id);
    };
    await expect.poll(machines, { interval: 1_500, timeout: 20_000 }).toContain(next);
  }, 40_000);

  test('refuse a revoked key within a second while the open work of machines cannot be loaded', async () => {
    const { one, two, url, database } = await startTwo(await server());
    const { machineId } = await one.agent();
    const { key_id, atTwo } = await keyUsedAtBoth(one, two);
    const { query } = await server();
    const blocker = await clientOf(url);
    onTestFinished(() => blocker.end());
    await blocker.query('BEGIN; LOCK TABLE sessions IN ACCESS EXCLUSIVE MODE');
    // The second broker becomes the owner, and waits to read the sessions of the machine.
    await query(becomeOwner(machineId), database);
    await soon(async () => (await query(waitingFor('sessions'), database)).length).toBeGreaterThan(0);
    await one.client.keys.remove({ key_id });
    await expectRefused(atTwo, 1_000);
    await blocker.query('ROLLBACK');
  });

  test('refuse a revoked key within a second while a write of their own waits for a slow commit of another broker', async () => {
    const { one, two, url, database } = await startTwo(await server());
    const { query } = await server();
    const { key_id, atTwo } = await keyUsedAtBoth(one, two);
    const [first, second] = [await clientOf(url), await clientOf(url)];
    onTestFinished(async () => void (await Promise.all([first.end(), second.end()])));
    const waiting = `SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted`;
    const expectWaiting = (count: number) =>
      soon(async () => (await query(waiting, database)).length).toBeGreaterThanOrEqual(count);
    const lock = `BEGIN; SELECT pg_advisory_xact_lock(${commitLock})`;
    // `first` holds the lock that every commit needs. Three transactions wait for it in this order: the revocation, a
    // slow one of `second`, and one of the second broker.
    await first.query(lock);
    const revoking = one.client.keys.remove({ key_id });
    await expectWaiting(1);
    const slow = second.query(lock);
    await expectWaiting(2);
    const writing = two.client.savedCommands.create({ name: 'waits', argv: ['true'] });
    await expectWaiting(3);
    await first.query('COMMIT');
    await revoking;
    await expectRefused(atTwo, 1_000);
    await slow;
    await expectWaiting(1);
    await second.query('COMMIT');
    await writing;
  });

  test('refuse a revoked key within a second while many lists of their own are being read', async () => {
    const { one, two, url, database } = await startTwo(await server());
    const { query } = await server();
    const { key_id, atTwo } = await keyUsedAtBoth(one, two);
    const blocker = await clientOf(url);
    onTestFinished(() => blocker.end());
    await blocker.query('BEGIN; LOCK TABLE commands IN ACCESS EXCLUSIVE MODE');
    const lists = Array.from({ length: 8 }, () => two.call('GET', '/commands'));
    // Waits for five blocked statements. Four are lists of the second broker, which take all of its four connections
    // for reading. The fifth is from the first broker, which reads the commands of batches.
    await soon(async () => (await query(waitingFor('commands'), database)).length).toBeGreaterThanOrEqual(5);
    await one.client.keys.remove({ key_id });
    await expectRefused(atTwo, 1_000);
    await blocker.query('ROLLBACK');
    await Promise.all(lists);
  });

  test('refuse a revoked key within five seconds although no notification arrives', async () => {
    const { one, two, database } = await startTwo(await server());
    const { key_id, atTwo } = await keyUsedAtBoth(one, two);
    const pids = await listeners(database, 2);
    await whileFrozen(pids, async () => {
      await one.client.keys.remove({ key_id });
      await expectRefused(atTwo, 5_000);
    });
  });

  test('answer with what the other has just changed, although no notification has arrived', async () => {
    const { one, two, database } = await startTwo(await server());
    const { key, key_id } = await limitedKey(one);
    expect((await two.call('GET', '/commands', { key })).status).toBe(403);
    await whileFrozen(await listeners(database, 2), async () => {
      for (let n = 0; n < 5; n += 1) {
        const { id } = await one.client.savedCommands.create({ name: `saved-${n}`, argv: ['true'] });
        expect((await two.client.savedCommands.list()).items.map((saved) => saved.id)).toContain(id);
        await one.client.savedCommands.update({ saved_command_id: id, name: `changed-${n}` });
        const saved = await two.call('GET', `/saved-commands/${id}`, { key: one.key });
        expect(saved.body.data.name).toBe(`changed-${n}`);
      }
      await one.client.keys.update({ key_id, scopes: ['machines:read', 'commands:read'] });
      expect((await two.call('GET', '/commands', { key })).status).toBe(200);
      for (let n = 0; n < 5; n += 1) {
        const page = { 'X-Farhand-Console': '1', 'Sec-Fetch-Site': 'same-origin' };
        const { headers } = await one.call('POST', '/logins', { body: {}, headers: page });
        const [Cookie = ''] = (headers.get('set-cookie') ?? '').split(';');
        expect((await two.call('GET', '/auth/me', { key: null, headers: { ...page, Cookie } })).status).toBe(
          200,
        );
      }
    });
  });

  test('run a batch on a machine that the other has just tagged, although no notification has arrived', async () => {
    const { one, two, database } = await startTwo(await server());
    const { secret } = parseJoinToken((await one.client.joinTokens.create({ uses: 1 })).token);
    const machine_id = await enroll(one, secret, 'machine');
    await whileFrozen(await listeners(database, 2), async () => {
      for (let n = 0; n < 5; n += 1) {
        await one.client.machines.update({ machine_id, tags: [`tag-${n}`] });
        const body = { tags: [`tag-${n}`], command: 'true', queue_for: 60_000, wait: 0 };
        const { results } = (await two.call('POST', '/commands/batch', { body })).body.data;
        expect(results).toMatchObject([{ machine_id }]);
      }
    });
  });

  test('remove a batch ten minutes after the broker that stored it was killed, without a restart', async () => {
    const clock = leapingClock();
    const { query } = await startTwo(await server());
    await query(
      `INSERT INTO batches (id, command, created_at, requested_by, cancel)
       VALUES ('bat_cut', 'true', ${Date.now()}, 'key_cut', 0);
       INSERT INTO commands (id, machine_id, command, status, stdout, stderr, stdout_bytes, stderr_bytes, created_at,
         requested_by, journal_id, cancel, stdout_start, stderr_start, kept_bytes, batch_id)
       VALUES ('cmd_cut', 'mach_cut', '', 'queued', '', '', 0, 0, ${Date.now()}, 'key_cut', '', 0, 0, 0, 0, 'bat_cut')`,
    );
    await soon(() => {
      clock.leap(100_000);
      return query("SELECT 1 FROM commands WHERE id = 'cmd_cut'");
    }, 500).toEqual([]);
  });

  test('forward requests about a machine that has just linked, although no notification has arrived', async () => {
    const { createDatabase } = await server();
    const flags = ['--database-url', await createDatabase(), ...peer];
    const database = databaseOf(flags[1] ?? '');
    const one = await startFarhand({ flags });
    const ofOne = await listeners(database, 1);
    const two = await startFarhand({ flags, dataDir: copyOf(one.dataDir) });
    const ofTwo = [...(await listeners(database, 2))].filter((pid) => !ofOne.has(pid));
    await whileFrozen(ofTwo, async () => {
      const { machineId } = await one.agent();
      const { status } = await two.call('GET', `/machines/${machineId}/files/stat?path=/etc`);
      expect(status).toBe(200);
    });
  });

  test('own a machine from its registration on', async () => {
    const { one, two } = await startTwo(await server());
    const { secret } = parseJoinToken((await one.client.joinTokens.create({ uses: 100 })).token);
    for (let n = 0; n < 10; n += 1) {
      const machine_id = await enroll(n % 2 ? one : two, secret, `machine-${n}`);
      const body = { machine_id, command: 'true', queue_for: 60_000 };
      const { status } = await one.call('POST', '/commands/async', { body });
      expect(status).toBe(201);
    }
  });

  test('find at once what the other has just created, and answer unknown ids with 404', async () => {
    const { one, two } = await startTwo(await server());
    const { token } = await one.client.joinTokens.create({ uses: 100 });
    const { secret } = parseJoinToken(token);
    for (let n = 0; n < 20; n += 1) {
      const saved = await one.client.savedCommands.create({ name: `saved-${n}`, argv: ['true'] });
      expect((await two.call('GET', `/saved-commands/${saved.id}`)).status).toBe(200);
      const id = await enroll(one, secret, `machine-${n}`);
      expect((await two.call('GET', `/machines/${id}`)).status).toBe(200);
      const next = await enroll(one, secret, `next-${n}`);
      expect((await two.call('GET', `/machines/${next}/commands`)).status).toBe(200);
    }
    const unknown = Array.from({ length: 50 }, (_, n) =>
      two.call('GET', `/machines/mach_${'0'.repeat(20)}${n + 10}`),
    );
    for (const { status } of await Promise.all(unknown)) expect(status).toBe(404);
  }, 30_000);

  test('know the host of a machine that the other has just registered, also after it is removed', async () => {
    const { one, two } = await startTwo(await server());
    const { secret } = parseJoinToken((await one.client.joinTokens.create({ uses: 1 })).token);
    const machine_id = await enroll(one, secret, 'new-host');
    const listed = async () => (await two.client.machines.list()).items.map(({ hostname: name }) => name);
    // The poll ends after 5 s, so the name must arrive sooner than the reports of machines of other brokers. These are
    // read only every 15 s.
    await expect.poll(listed, { timeout: 5_000 }).toEqual(['new-host']);
    await one.client.machines.remove({ machine_id });
    expect((await two.call('GET', `/commands?machine_id=${machine_id}`)).status).toBe(200);
  });

  test('begin a stream of events after those that the other has just recorded', async () => {
    const { one, two, database } = await startTwo(await server());
    const { secret } = parseJoinToken((await one.client.joinTokens.create({ uses: 10 })).token);
    await whileFrozen(await listeners(database, 2), async () => {
      for (let n = 0; n < 5; n += 1) {
        await enroll(one, secret, `machine-${n}`);
        const { items } = await one.client.events.list({ limit: 1, sort: '-created_at' });
        const ending = new AbortController();
        const headers = { Authorization: `Bearer ${two.key}` };
        const url = `${two.url}/api/v1/events/stream`;
        const { headers: answered } = await fetch(url, { headers, signal: ending.signal });
        ending.abort();
        expect(answered.get('x-last-event-id')).toBe(items[0]?.id);
      }
    });
  });

  test('upgrade the machines of each other, a wave at a time', async () => {
    const { one, two } = await startTwo(await server());
    const key = signingKey();
    const { file, bytes, signature } = packageOf('9.0.0', key);
    for (const { client } of [one, two])
      await client.packages.upload({ package: file, signature, content: bytes });
    const [atOne, atTwo] = [upgradesOf(one, key), upgradesOf(two, key)];
    const machines = [await atOne.machine('a'), await atTwo.machine('b'), await atOne.machine('c')];
    const online = async () => (await one.client.machines.list({ status: 'online' })).total;
    await soon(online).toBe(3);
    const { id } = await atOne.upgrade({ machine_ids: machines.map((one) => one.id), wave: '1' });
    for (const machine of machines) await machine.upgrade();
    for (const broker of [atOne, atTwo])
      expect(await broker.ended(id)).toMatchObject({ status: 'completed', counts: { upgraded: 3 } });
    const { items } = await two.client.events.list({ type: 'upgrade.wave_started' });
    expect(items).toHaveLength(3);
    const cancelled = await atTwo.upgrade({ machine_ids: machines.map((one) => one.id), version: '9.1.0' });
    expect(await atOne.ended(cancelled.id)).toMatchObject({ counts: { skipped: 3 } });
  });

  test('change the same documents in turns, and no change is lost', async () => {
    const { one, two } = await startTwo(await server());
    const names = Array.from({ length: 40 }, (_, n) => `key-${n}`);
    await Promise.all(
      names.map((name, n) => (n % 2 ? one : two).client.keys.create({ name, scopes: ['machines:read'] })),
    );
    for (const { client } of [one, two]) {
      await soon(async () => {
        const { items } = await client.keys.list({ limit: 100 });
        return items
          .map(({ name }) => name)
          .filter((name) => names.includes(name))
          .sort();
      }).toEqual([...names].sort());
    }
  });

  test('run a request with an Idempotency-Key once, whichever of them gets the repeated request', async () => {
    const { one, two } = await startTwo(await server());
    const { machineId: machine_id } = await one.agent();
    const { wait, open } = gate();
    const body = { machine_ids: [machine_id], command: wait, wait: 20_000 };
    // The other broker does not forward this request to the owner, because a batch may have several machines.
    const send = ({ call }: typeof one) =>
      call('POST', '/commands/batch', { key: one.key, body, headers: { 'Idempotency-Key': 'once' } });
    const first = send(one);
    await soon(async () => (await one.client.commands.list()).total).toBe(1);
    expect(await send(two)).toMatchObject({ status: 409, body: { error: { details: { under_way: true } } } });
    open();
    const { body: answer } = await first;
    expect(answer.data).toMatchObject({ status: 'completed' });
    expect((await send(two)).body.data).toMatchObject({ id: answer.data.id });
    expect((await one.client.commands.list()).total).toBe(1);
  });

  test('repeat a request whose broker lost the database during it, and do not count it as under way any longer', async () => {
    const { createDatabase, port } = await server();
    const url = await createDatabase();
    const two = await startFarhand({ flags: ['--database-url', url, ...peer] });
    const proxy = await startProxy(`127.0.0.1:${port}`);
    onTestFinished(() => proxy.close());
    const through = `postgres://farhand@${proxy.address}/${databaseOf(url)}?sslmode=disable`;
    const one = await startFarhand({
      flags: ['--database-url', through, ...peer],
      dataDir: copyOf(two.dataDir),
    });
    const { machineId } = await two.agent();
    const { wait, open } = gate();
    // The first command of an agent starts its spawner, which takes a moment.
    await two.client.commands.create({ machine_id: machineId, command: 'true' });
    const body = { machine_ids: [machineId], command: wait, wait: 500 };
    const send = ({ call }: typeof one) =>
      call('POST', '/commands/batch', { key: two.key, body, headers: { 'Idempotency-Key': 'once' } });
    const first = send(one);
    await soon(async () => (await two.client.commands.list()).total).toBe(2);
    proxy.forbid();
    expect(await first).toMatchObject({ status: 503 });
    proxy.allow();
    open();
    await soon(async () => (await send(two)).status).toBe(201);
    expect((await two.client.commands.list()).total).toBe(2);
  });

  test('send an event once to a follower that moves to a broker which has not heard of it yet', async () => {
    const { one, two } = await startTwo(await server());
    const { machineId: machine_id } = await one.agent();
    await soon(async () => (await two.client.machines.list()).items[0]?.status).toBe('online');
    for (let round = 0; round < 10; round += 1) {
      await one.client.commands.create({ machine_id, command: 'true', wait: 20_000 });
      const { items } = await one.client.events.list({ limit: 1, sort: '-created_at' });
      const last_event_id = items[0]?.id ?? '';
      const ending = new AbortController();
      const received: string[] = [];
      const stream = await two.client.events.stream({ last_event_id }, { signal: ending.signal });
      const reading = (async () => {
        for await (const { id } of stream) received.push(String(id));
      })().catch(() => {});
      await two.client.commands.create({ machine_id, command: 'true', wait: 20_000 });
      await soon(() => received.length).toBeGreaterThanOrEqual(2);
      ending.abort();
      await reading;
      expect(received).not.toContain(last_event_id);
      expect(new Set(received).size).toBe(received.length);
    }
  });

  test('delete rows that are no longer needed, and a broker that is far behind still notices removed documents', async () => {
    const { one, two, database } = await startTwo(await server());
    const { query } = await server();
    const { key } = await one.keyed(['machines:read']);
    const atTwo = async () => (await two.call('GET', '/machines', { key })).status;
    expect(await atTwo()).toBe(200);
    await query(
      "INSERT INTO brokers VALUES ('broker_old', 'https://x:1', now() - interval '2 days')",
      database,
    );
    await query("INSERT INTO owners VALUES ('mach_removed', 'broker_old', 1, NULL)", database);
    await query(
      "INSERT INTO removed_documents VALUES ('keys', 'key_old', (SELECT generation FROM installation))",
      database,
    );
    await query(
      "INSERT INTO broker_tokens VALUES ('old', '', now() - interval '1 s'), ('new', '', now() + interval '1 h')",
      database,
    );
    const { items } = await one.client.keys.list();
    const limited = items.find(({ name }) => name === 'limited');
    // Removes the key, and makes it look as if 30,000 further changes had followed before the other broker reads again.
    await query(
      `BEGIN; DELETE FROM documents WHERE collection = 'keys' AND id = '${limited?.id}';
       UPDATE installation SET generation = generation + 30000; COMMIT`,
      database,
    );
    await soon(atTwo).toBe(401);
    // Before the row of a removed machine is deleted, a living broker becomes its owner, and ends its open work.
    const [living] = await query('SELECT id FROM brokers WHERE lease_until > now() LIMIT 1', database);
    await query(claimingRemoved.replaceAll('$1', `'${String(living?.id)}'`), database);
    const owners = await query('SELECT broker_id FROM owners', database);
    expect(owners).toEqual([{ broker_id: living?.id }]);
    for (const statement of [...pruning, ...expiring]) await query(statement, database);
    const left = async (table: string) => (await query(`SELECT 1 FROM ${table}`, database)).length;
    const tables = ['brokers', 'owners', 'removed_documents', 'broker_tokens'];
    expect(await Promise.all(tables.map(left))).toEqual([2, 0, 0, 1]);
  });

  test('store the ends of many links with one statement when they stop', async () => {
    const { one, database } = await startTwo(await server());
    const { query } = await server();
    for (const name of ['a', 'b', 'c']) await one.agent({ name });
    await query(
      `CREATE TABLE statements (text text);
       CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
         $$ BEGIN INSERT INTO statements VALUES (current_query()); RETURN NULL; END $$;
       CREATE TRIGGER note AFTER UPDATE ON owners FOR EACH STATEMENT EXECUTE FUNCTION note()`,
      database,
    );
    await one.broker.close();
    expect(await query('SELECT 1 FROM owners WHERE link_id IS NOT NULL', database)).toEqual([]);
    const unlinking = await query("SELECT 1 FROM statements WHERE text LIKE 'UPDATE owners%'", database);
    expect(unlinking).toHaveLength(1);
  });

  test('list what the machines of both have reported', async () => {
    const { one, two } = await startTwo(await server());
    const { machineId } = await two.agent({ name: 'b' });
    const listed = async () => (await one.client.machines.list()).items.find(({ id }) => id === machineId);
    await expect.poll(async () => (await listed())?.hostname, { timeout: 20_000 }).toBe(hostname());
  }, 30_000);

  test('list at once which agent a machine of the other has, and how its last upgrade ended', async () => {
    const { one, two } = await startTwo(await server());
    const machine = await upgradesOf(two, signingKey()).machine('b', { agent_version: '7.0.0' });
    await soon(async () => (await one.client.machines.list()).total).toBe(1);
    const listed = async () => {
      const { items } = await one.client.machines.list({ include: 'agent_version,upgrade' });
      return [items[0]?.agent_version, items[0]?.upgrade?.last?.outcome];
    };
    expect(await listed()).toEqual(['7.0.0', undefined]);
    const last = { upgrade_id: 'upg_1', from_version: '7.0.0', to_version: '7.1.0', reason: '' };
    await machine.back('7.1.0', { ...last, outcome: 'UPGRADE_OUTCOME_ROLLED_BACK' });
    expect(await listed()).toEqual(['7.1.0', 'rolled_back']);
    const last_upgrade = { ...last, outcome: 'UPGRADE_OUTCOME_SUCCEEDED' } as const;
    machine.agent.send({ heartbeat: { last_upgrade } });
    await expect.poll(listed, { timeout: 5_000 }).toEqual(['7.1.0', 'succeeded']);
  });

  test('make the machines of both collect their inventory for a list', async () => {
    const { one, two } = await startTwo(await server());
    await two.agent({ name: 'b' });
    await soon(async () => (await one.client.machines.list()).total).toBe(1);
    const { items } = await one.client.inventory.list({ refresh: 'true' });
    expect(items).toMatchObject([{ machine_name: 'b', facts: { cpu_cores: expect.any(Number) } }]);
  }, 60_000);

  test('stream the events of both to a client of one, each once and in order', async () => {
    const { one, two, database } = await startTwo(await server());
    const machine = await one.agent({ name: 'a' });
    const other = await two.agent({ name: 'b' });
    const ending = new AbortController();
    const received: string[] = [];
    const reading = (async () => {
      for await (const event of await two.client.events.stream({}, { signal: ending.signal }))
        received.push(String(event.id));
    })().catch(() => {});
    const run = ({ client }: typeof one, machine_id: string) =>
      Promise.all(
        Array.from({ length: 30 }, () =>
          client.commands.create({ machine_id, command: 'true', wait: 20_000 }),
        ),
      );
    await Promise.all([run(one, machine.machineId), run(two, other.machineId)]);
    const stored = await (await server()).query('SELECT id, type FROM events ORDER BY seq', database);
    const completed = new Set(stored.filter(({ type }) => type === 'command.completed').map(({ id }) => id));
    expect(completed.size).toBe(60);
    await soon(() => received.filter((id) => completed.has(id)).length).toBe(60);
    ending.abort();
    await reading;
    const all = (await (await server()).query('SELECT id FROM events ORDER BY seq', database)).map(({ id }) =>
      String(id),
    );
    expect(received).toEqual(all.filter((id) => received.includes(id)));
    expect(new Set(received).size).toBe(received.length);
  });
});

/**
 * Starts a broker in a separate process and another one in this process. An agent connects to either of them through a
 * proxy.
 */
async function startWithOwner({ createDatabase, query }: PostgresServer) {
  const url = await createDatabase();
  const flags = ['--database-url', url, ...peer];
  const two = await startFarhand({ flags });
  const ports = ['--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0'];
  const owner = program('broker/main.ts', ['--data-dir', copyOf(two.dataDir), ...flags, ...ports]);
  const { http, grpc } = await owner.line('broker is up');
  const proxy = await startProxy(String(grpc));
  onTestFinished(() => proxy.close());
  const agent = await two.agent({ through: proxy.address });
  const client = new Farhand({ baseUrl: String(http), apiKey: two.key, retries: 0 });
  return {
    ...{ two, owner, proxy, agent, client, machine_id: agent.machineId },
    query: (sql: string) => query(sql, databaseOf(url)),
  };
}

withPostgres('when the owner of a machine', () => {
  test('is frozen, forwarded requests and streams end once its lease has ended, and not before', async () => {
    const { two, owner, client, machine_id, query } = await startWithOwner(await server());
    const [row] = await query(`SELECT broker_id FROM owners WHERE machine_id = '${machine_id}'`);
    const { id } = await client.commands.async({ machine_id, command: 'sleep 300' });
    const stat = () => two.call('GET', `/machines/${machine_id}/files/stat?path=/etc`);
    await soon(async () => (await stat()).status).toBe(200);
    const stream = await fetch(`${two.url}/api/v1/commands/${id}/stream`, {
      headers: { Authorization: `Bearer ${two.key}` },
    });
    const broken = stream.text().then(
      () => 'ended',
      () => 'broken',
    );
    const body = { machine_id, command: 'sleep 300', wait: 50_000 };
    const waiting = two.call('POST', '/commands', { body });
    await soon(async () => (await client.commands.list({ status: 'running' })).total).toBe(2);
    owner.kill('SIGSTOP');
    const frozen = performance.now();
    const { status, headers } = await waiting;
    const afterMs = performance.now() - frozen;
    const leases = await query(
      `SELECT lease_until <= clock_timestamp() AS over FROM brokers WHERE id = '${String(row?.broker_id)}'`,
    );
    expect(leases).toEqual([{ over: true }]);
    expect([status, headers.get('retry-after'), await broken]).toEqual([503, '1', 'broken']);
    // The lease ends at most 10 s after the broker is frozen, and the other brokers read that within a second.
    expect(afterMs).toBeLessThan(14_000);
    // Another broker claims the machine, whose agent is still linked to the frozen broker.
    await expect
      .poll(async () => (await stat()).body.error.code, { timeout: 15_000, interval: 500 })
      .toBe('machine_offline');
  });

  test('is killed, its running command continues at the next owner, and ends once with its whole output', async () => {
    const { two, owner, proxy, agent, client, machine_id } = await startWithOwner(await server());
    const { wait, open } = gate();
    const counter = join(temporaryFolder('counter'), 'runs');
    const lines = (from: number, to: number) => `seq -f 'line %.0f' ${from} ${to}`;
    const command = `echo run >>${counter}; ${lines(1, 50_000)}; ${wait}; ${lines(50_001, 100_000)}`;
    const { id } = await client.commands.async({ machine_id, command });
    await soon(async () => (await client.commands.get({ command_id: id })).stdout_bytes).toBe(538_894);
    owner.kill('SIGKILL');
    proxy.aim(two.grpc);
    await agent.linked(true);
    await soon(async () => (await two.client.commands.get({ command_id: id })).status).toBe('running');
    open();
    await soon(async () => (await two.client.commands.get({ command_id: id })).status).toBe('completed');
    const { body } = await two.call('GET', `/commands/${id}/output`);
    expect(body.split('\n').length).toBe(100_001);
    expect(body).toBe(`${Array.from({ length: 100_000 }, (_, n) => `line ${n + 1}`).join('\n')}\n`);
    expect(readFileSync(counter, 'utf8')).toBe('run\n');
  }, 40_000);

  test('is killed, an attach to its terminal gets 503 until another broker owns the machine', async () => {
    const { two, owner, client, machine_id } = await startWithOwner(await server());
    const { id } = await client.sessions.create({ machine_id, shell: '/bin/sh' });
    const statuses = new Set<number>();
    const attach = async () => {
      const { status } = await two.call('POST', `/sessions/${id}/attach`, { body: {} });
      statuses.add(status);
      return status;
    };
    await soon(attach).toBe(200);
    owner.kill('SIGKILL');
    statuses.clear();
    await soon(attach).toBe(200);
    expect([...statuses]).toEqual([503, 200]);
  });

  test('is killed, the stream of its command gets 503 until another broker owns the machine, and then goes on', async () => {
    const { two, owner, proxy, client, machine_id } = await startWithOwner(await server());
    const { wait, open } = gate();
    const { id } = await client.commands.async({ machine_id, command: `echo first; ${wait}; echo last` });
    await soon(async () => (await client.commands.get({ command_id: id })).stdout).toBe('first\n');
    owner.kill('SIGKILL');
    const statuses = new Set<number>();
    const headers = { Authorization: `Bearer ${two.key}`, 'Last-Event-ID': '6.0' };
    const stream = () => fetch(`${two.url}/api/v1/commands/${id}/stream`, { headers });
    const answer = await waitFor(async () => {
      const one = await stream();
      statuses.add(one.status);
      expect(one.status).toBe(200);
      return one;
    });
    proxy.aim(two.grpc);
    open();
    const text = await answer.text();
    expect([...statuses]).toEqual([503, 200]);
    expect(text.match(/(?<=^event: ).*/gm)).toEqual(['output', 'exit']);
    expect(text).toContain('"data":"last\\n"');
  }, 40_000);

  test('is killed, cancels are refused until another broker owns the machine, and then stored', async () => {
    const { two, owner, agent, client, machine_id } = await startWithOwner(await server());
    const { id: session } = await client.sessions.create({ machine_id, shell: '/bin/sh' });
    await agent.close();
    const { id } = await client.commands.async({ machine_id, command: 'true', queue_for: 600_000 });
    owner.kill('SIGKILL');
    for (const path of [`/commands/${id}`, `/sessions/${session}`]) {
      const answer = await waitFor(async () => {
        const { status, body } = await two.call('DELETE', path);
        expect(status).toBe(200);
        return body.data;
      });
      expect(['cancelled', 'DISCONNECTED']).toContain(answer.status);
    }
  }, 40_000);

  test('is killed, a command that waits for the machine runs once when the machine is back', async () => {
    const { two, owner, proxy, agent, client, machine_id } = await startWithOwner(await server());
    await agent.close();
    const { id } = await client.commands.async({ machine_id, command: 'echo late', queue_for: 600_000 });
    owner.kill('SIGKILL');
    proxy.aim(two.grpc);
    await two.agent({ through: proxy.address, dataDir: agent.dataDir });
    await soon(() => two.client.commands.get({ command_id: id })).toMatchObject({
      status: 'completed',
      stdout: 'late\n',
    });
  }, 40_000);

  test('is frozen for 15 s, another one takes over, and later writes of the frozen one are rejected', async () => {
    const { two, owner, proxy, agent, client, machine_id, query } = await startWithOwner(await server());
    const { wait, open } = gate();
    const { id } = await client.commands.async({ machine_id, command: `${wait}; echo over` });
    await soon(async () => (await client.commands.get({ command_id: id })).status).toBe('running');
    owner.kill('SIGSTOP');
    const frozen = performance.now();
    // The agent still reports the end to the frozen owner, which reads the report only later.
    open();
    await soon(async () => (await query('SELECT 1 FROM commands WHERE finished_at IS NOT NULL')).length).toBe(
      0,
    );
    await new Promise((resolve) => setTimeout(resolve, 500));
    proxy.aim(two.grpc);
    proxy.cut();
    await agent.linked(true);
    await soon(() => two.client.commands.get({ command_id: id })).toMatchObject({
      status: 'completed',
      stdout: 'over\n',
    });
    const before = await query('SELECT * FROM commands');
    const count = async (): Promise<unknown> =>
      (await query(`SELECT count(*)::int AS n FROM events WHERE data LIKE '%${id}%'`))[0]?.n;
    const events = await count();
    await new Promise((resolve) => setTimeout(resolve, 15_000 - (performance.now() - frozen)));
    owner.kill('SIGCONT');
    await owner.line('this broker is no longer the owner of a machine');
    await new Promise((resolve) => setTimeout(resolve, 6_000));
    expect([await query('SELECT * FROM commands'), await count()]).toEqual([before, events]);
    expect(await two.client.commands.create({ machine_id, command: 'true', wait: 10_000 })).toMatchObject({
      status: 'completed',
    });
  }, 60_000);

  test('is killed, another one claims the machine once the lease is over, and refuses no command', async () => {
    const { two, owner, agent, client, machine_id } = await startWithOwner(await server());
    await agent.close();
    const { id } = await client.commands.async({ machine_id, command: 'true', queue_for: 600_000 });
    const create = () =>
      two.call('POST', '/commands/async', { body: { machine_id, command: 'true', queue_for: 600_000 } });
    // The owner still runs, and accepts the forwarded request although the machine is offline.
    expect((await create()).status).toBe(201);
    owner.kill('SIGKILL');
    await expect.poll(async () => (await create()).status, { timeout: 25_000, interval: 500 }).toBe(201);
    await two.client.commands.cancel({ command_id: id });
    expect((await two.client.commands.get({ command_id: id })).status).toBe('cancelled');
  }, 60_000);
});
