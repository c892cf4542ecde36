// Changes of API keys: who may change what, new secrets, and the time of the last use.

import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, test } from 'vitest';
import { withBroker } from '../broker/cli/connect-to-broker.ts';
import { scopes } from '../shared/api/route.ts';
import { Farhand } from '../shared/sdk/index.ts';
import { leapingClock } from './commands-fixture.ts';
import { dividedSystem } from './keys-fixture.ts';
import { storedRows, storedState } from './read-stored-state.ts';
import {
  type Answer,
  call,
  startFarhand,
  startWithAgent,
  statusAndCode,
  type TestSystem,
} from './start-farhand.ts';

const hour = 3_600_000;
const later = (hours: number): string => new Date(Date.now() + hours * hour).toISOString();

const knows = async (system: TestSystem, key: string): Promise<number> =>
  (await system.call('GET', '/auth/me', { key })).status;

describe('a change is refused', () => {
  test('of a key that is stronger than the caller’s; the caller can neither read it nor give it a new secret', async () => {
    const { system, inside, outside, byId, byTag } = await dividedSystem();
    const wider = [
      await system.client.keys.create({ name: 'all', scopes: ['files:read'] }),
      await system.client.keys.create({
        name: 'two',
        scopes: ['files:read'],
        machine_ids: [inside, outside],
      }),
      await system.client.keys.create({ name: 'tags', scopes: ['files:read'], tags: ['a', 'b'] }),
    ];
    for (const { key } of [byId, byTag]) {
      for (const { id } of wider) {
        const path = `/api-keys/${id}`;
        // The change would limit the key to the tag `a`. It is refused, because before the change the key has more
        // rights than the caller.
        const body = { name: 'mine', tags: ['a'] };
        expect(statusAndCode(await system.call('PATCH', path, { key, body }))).toEqual([403, 'forbidden']);
        expect(statusAndCode(await system.call('POST', `${path}/rotate`, { key }))).toEqual([
          403,
          'forbidden',
        ]);
        expect(statusAndCode(await system.call('GET', path, { key }))).toEqual([403, 'forbidden']);
      }
    }
    for (const { key } of wider) expect(await knows(system, key)).toBe(200);
  });

  test('that makes a key stronger than the caller’s, whether it is the caller’s own or another key', async () => {
    const { system, inside, outside, byId, byTag } = await dividedSystem();
    const requests = [
      { machine_ids: null, tags: null },
      { machine_ids: [inside, outside] },
      { tags: ['a', 'b'] },
    ];
    for (const [limit, { key, client }] of Object.entries({ byId, byTag })) {
      const own = await client.keys.me();
      const limits = limit === 'byId' ? { machine_ids: [inside] } : { tags: ['a'] };
      const other = await client.keys.create({ name: 'other', scopes: ['files:read'], ...limits });
      for (const { id } of [own, other]) {
        for (const body of requests) {
          const answer = await system.call('PATCH', `/api-keys/${id}`, { key, body });
          expect([limit, body, ...statusAndCode(answer)]).toEqual([limit, body, 403, 'forbidden']);
        }
      }
      expect(await system.client.keys.get({ key_id: own.id })).toMatchObject(limits);
    }
  });

  test('that lets a key outlive the caller’s, by its expiry or by a new secret', async () => {
    const system = await startFarhand();
    const expires_at = later(1);
    const short = await system.client.keys.create({ name: 'short', scopes: ['admin'], expires_at });
    const long = await system.client.keys.create({ name: 'long', scopes: ['files:read'] });
    const ask = (id: string, how: string, body: object): Promise<Answer> =>
      system.call(how === '' ? 'PATCH' : 'POST', `/api-keys/${id}${how}`, { key: short.key, body });
    for (const id of [short.id, long.id]) {
      for (const how of ['', '/rotate']) {
        for (const params of [{ expires_at: null }, { expires_at: later(2) }]) {
          expect(statusAndCode(await ask(id, how, params))).toEqual([403, 'forbidden']);
        }
      }
    }
    // A new secret alone is refused as well: the key `long` never expires, so it would still outlive the key of the
    // caller.
    expect(statusAndCode(await ask(long.id, '/rotate', {}))).toEqual([403, 'forbidden']);
    expect(await knows(system, long.key)).toBe(200);
    expect((await ask(long.id, '', { expires_at })).status).toBe(200);
  });

  test('of an unknown key, and of unknown fields', async () => {
    const system = await startFarhand();
    const { id } = await system.client.keys.create({ name: 'one', scopes: ['files:read'] });
    for (const [method, path] of [
      ['GET', '/api-keys/key_none'],
      ['PATCH', '/api-keys/key_none'],
      ['POST', '/api-keys/key_none/rotate'],
    ] as const) {
      expect(statusAndCode(await system.call(method, path))).toEqual([404, 'key_not_found']);
    }
    for (const body of [
      { hash: 'x' },
      { scopes: [] },
      { machine_ids: [] },
      { expires_at: 'soon' },
      { name: '' },
    ]) {
      expect((await system.call('PATCH', `/api-keys/${id}`, { body })).status).toBe(422);
    }
    for (const body of [{ grace: -1 }, { grace: 8 * 24 * hour }, { name: 'x' }]) {
      expect((await system.call('POST', `/api-keys/${id}/rotate`, { body })).status).toBe(422);
    }
  });
});

describe('a change', () => {
  test('takes effect with its answer, whether it adds or removes rights, and after a restart', async () => {
    const { system, inside, outside } = await dividedSystem();
    const made = await system.client.keys.create({
      name: 'one',
      scopes: ['machines:read'],
      machine_ids: [inside],
    });
    const looks = (at: TestSystem): Promise<number[]> =>
      Promise.all(
        [inside, outside].map(
          async (id) => (await at.call('GET', `/machines/${id}`, { key: made.key })).status,
        ),
      );
    const change = (body: object) => system.client.keys.update({ key_id: made.id, ...body });
    expect(await looks(system)).toEqual([200, 403]);
    await change({ machine_ids: null });
    expect(await looks(system)).toEqual([200, 200]);
    await change({ tags: ['b'] });
    expect(await looks(system)).toEqual([403, 200]);
    await change({ scopes: ['files:read'] });
    expect(await looks(system)).toEqual([403, 403]);
    const expires_at = later(-1);
    expect(await change({ name: 'two', expires_at })).toMatchObject({
      ...{ id: made.id, name: 'two', scopes: ['files:read'], machine_ids: null, tags: ['b'], expires_at },
    });
    expect(await looks(system)).toEqual([401, 401]);
    await system.broker.close();
    const again = await startFarhand({ dataDir: system.dataDir });
    expect(await looks(again)).toEqual([401, 401]);
  });

  test('may remove the rights of the admin key that requests it, with effect at once', async () => {
    const { system, inside, byTag } = await dividedSystem();
    const own = await byTag.client.keys.me();
    await byTag.client.keys.update({ key_id: own.id, scopes: ['machines:read'] });
    expect((await system.call('GET', `/machines/${inside}`, { key: byTag.key })).status).toBe(200);
    expect((await system.call('GET', '/api-keys', { key: byTag.key })).status).toBe(403);
  });
});

test('the last admin key may revoke itself, because the broker’s own machine can create another', async () => {
  const system = await startFarhand();
  const own = await system.client.keys.me();
  expect(await system.client.keys.remove({ key_id: own.id })).toEqual({
    deleted: true,
    schedules: [],
    webhooks: [],
    alert_channels: [],
    saved_commands: [],
  });
  expect(await knows(system, system.key)).toBe(401);
  const { key } = await withBroker({ dataDir: system.dataDir, url: undefined, apiKey: undefined }, (local) =>
    local.keys.create({ name: 'again', scopes: ['admin'] }),
  );
  expect(await knows(system, key)).toBe(200);
});

test('only a request with the secret of an expired key learns that it has expired', async () => {
  const system = await startFarhand();
  const { key } = await system.client.keys.create({ name: 'x', scopes: ['admin'], expires_at: later(-1) });
  const message = async (given: string): Promise<string> =>
    (await system.call('GET', '/auth/me', { key: given })).body.error.message;
  expect(await message(key)).toMatch(/expired/);
  expect(await message(`${key.slice(0, -1)}_`)).not.toMatch(/expired/);
});

describe('a new secret', () => {
  test('ends the old secret at once, for the same key with the same rights', async () => {
    const system = await startFarhand();
    const { key, ...made } = await system.client.keys.create({ name: 'ci', scopes: ['admin'], tags: ['a'] });
    const { key: next, ...rotated } = await system.client.keys.rotate({ key_id: made.id });
    expect([rotated, next === key]).toEqual([made, false]);
    expect([await knows(system, key), await knows(system, next)]).toEqual([401, 200]);
    await system.broker.close();
    const again = await startFarhand({ dataDir: system.dataDir });
    expect([await knows(again, key), await knows(again, next)]).toEqual([401, 200]);
  });

  test('with a grace leaves the old secret valid until then, but not an older one', async () => {
    const clock = leapingClock();
    const system = await startFarhand();
    const first = await system.client.keys.create({ name: 'ci', scopes: ['machines:read'] });
    const second = await system.client.keys.rotate({ key_id: first.id, grace: hour });
    const all = async (...keys: { key: string }[]): Promise<number[]> =>
      Promise.all(keys.map(({ key }) => knows(system, key)));
    expect(await all(first, second)).toEqual([200, 200]);
    const third = await system.client.keys.rotate({ key_id: first.id, grace: hour });
    expect(await all(first, second, third)).toEqual([401, 200, 200]);
    clock.leap(hour + 1);
    expect(await all(first, second, third)).toEqual([401, 401, 200]);
  });

  test('is in one answer only: repeating the request is a conflict, and no file has the secret', async () => {
    const system = await startFarhand();
    const { id } = await system.client.keys.create({ name: 'ci', scopes: ['machines:read'] });
    const ask = (): Promise<Answer> =>
      system.call('POST', `/api-keys/${id}/rotate`, {
        headers: { 'Idempotency-Key': 'once' },
        body: { grace: 9 },
      });
    const { data } = (await ask()).body;
    const repeat = await ask();
    expect([...statusAndCode(repeat), repeat.body.error.details]).toEqual([409, 'conflict', { id }]);
    expect(await knows(system, data.key)).toBe(200);
    expect(JSON.stringify(await storedState(system.dataDir))).not.toContain(data.key);
    const printed = JSON.stringify(await system.client.keys.list());
    expect(printed).not.toMatch(/hash|previous|until/);
  });

  test('does not affect the commands, schedules and webhooks of the key', async () => {
    const { system, agent } = await startWithAgent();
    const machine_id = agent.machineId;
    await agent.close();
    const made = await system.client.keys.create({ name: 'ci', scopes: ['admin'] });
    const client = new Farhand({ baseUrl: system.url, apiKey: made.key });
    const waiting = await client.commands.async({ machine_id, command: 'true', queue_for: hour });
    const { id: webhook_id } = await client.webhooks.create({
      url: 'http://example.org/',
      events: ['command.*'],
    });
    const schedule = await client.schedules.create({
      machine_id,
      name: 'x',
      command: 'true',
      cron: '@yearly',
    });
    await system.client.keys.rotate({ key_id: made.id });
    expect((await system.client.commands.get({ command_id: waiting.id })).status).toBe('queued');
    expect(await system.client.webhooks.get({ webhook_id })).toMatchObject({
      enabled: true,
      disabled_reason: null,
    });
    const { schedules, webhooks } = await system.client.keys.remove({ key_id: made.id });
    expect([schedules, webhooks]).toEqual([[schedule.id], [webhook_id]]);
    await expect
      .poll(() => system.client.commands.get({ command_id: waiting.id }))
      .toMatchObject({ status: 'cancelled', reason: 'key_revoked' });
    expect((await system.client.webhooks.get({ webhook_id })).disabled_reason).toBe('key_revoked');
  });
});

test('the last use of a key is listed, written once a minute, and never to state.json', async () => {
  const clock = leapingClock();
  const system = await startFarhand();
  const { id: key_id, key } = await system.client.keys.create({ name: 'ci', scopes: ['machines:read'] });
  const generation = async (): Promise<number> => (await storedState(system.dataDir)).generation;
  const received = async (): Promise<number> =>
    Date.parse((await system.client.keys.get({ key_id })).last_used_at ?? '');
  const written = async (): Promise<number> => {
    const sql = 'SELECT last_used_at AS at FROM key_uses WHERE key_id = ?';
    const [row] = await storedRows(system.dataDir, sql, key_id);
    return Number(row?.at);
  };
  const before = await generation();
  await knows(system, key);
  const [first, kept] = [await received(), await written()];
  expect(kept).toBe(first);
  clock.leap(30_000);
  await knows(system, key);
  expect(await received()).toBeGreaterThanOrEqual(first + 30_000);
  expect(await written()).toBe(kept);
  clock.leap(31_000);
  await knows(system, key);
  expect([await received(), await generation()]).toEqual([await written(), before]);
  const last = await written();
  await system.broker.close();
  const again = await startFarhand({ dataDir: system.dataDir });
  expect(await again.client.keys.get({ key_id })).toMatchObject({
    last_used_at: new Date(last).toISOString(),
    last_used_ip: '127.0.0.1',
  });
});

test('docs/keys.md explains each scope, and metrics of all machines need a key for all of them', async () => {
  const chapter = readFileSync(join(import.meta.dirname, '../docs/keys.md'), 'utf8');
  const received = [...chapter.matchAll(/^\| `([a-z]+(?::[a-z]+)?)` \|/gm)].map(([, scope]) => scope);
  expect(received).toEqual([...scopes]);
  const system = await startFarhand();
  const ask = async (limits: object): Promise<number> => {
    const { key } = await system.keyed(['machines:read'], limits);
    return (await call(`${system.url}/metrics`, 'GET', { key })).status;
  };
  expect([await ask({ tags: ['a'] }), await ask({})]).toEqual([403, 200]);
});
