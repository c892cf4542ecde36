// Webhooks over REST: the rights to create and change them, and how they are stored.
import { rmSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, test } from 'vitest';
import { groups } from '../shared/api/events.ts';
import { storedState } from './read-stored-state.ts';
import { startFarhand, startWithAgent, temporaryFolder } from './start-farhand.ts';
import { startReceiver, startWebhookSystem } from './webhook-receivers.ts';

const url = 'https://receiver.example.org/hook';

describe('a webhook is refused', () => {
  test('with 422 and the name of the field that is wrong', async () => {
    const system = await startFarhand();
    const refused: [string, object, string][] = [
      ['without a url', { events: ['*'] }, 'url'],
      ['with a url that is no URL', { url: 'receiver', events: ['*'] }, 'url'],
      ['with a space in its url', { url: 'https://example.org/a b', events: ['*'] }, 'url'],
      ['with a line break after its url', { url: `${url}\n`, events: ['*'] }, 'url'],
      ['with a url of another protocol', { url: 'ftp://example.org/', events: ['*'] }, 'url'],
      ['with a file as url', { url: 'file:///etc/passwd', events: ['*'] }, 'url'],
      ['with credentials in its url', { url: 'https://me:secret@example.org/', events: ['*'] }, 'url'],
      [
        'with a url that is too long',
        { url: `https://example.org/${'x'.repeat(2048)}`, events: ['*'] },
        'url',
      ],
      ['with an internal address in its url', { url: 'http://169.254.169.254/latest', events: ['*'] }, 'url'],
      ['without events', { url, events: [] }, 'events'],
      ['with a type that does not exist', { url, events: ['machine.exploded'] }, 'events.0'],
      ['with a type that only the event log has', { url, events: ['machine.fenced'] }, 'events.0'],
      ['with a family that does not exist', { url, events: ['webhook.*'] }, 'events.0'],
      ['with an empty secret', { url, events: ['*'], secret: '' }, 'secret'],
      [
        'with a secret of other characters than printable ASCII',
        { url, events: ['*'], secret: 'schlüssel' },
        'secret',
      ],
      ['with a line break in its secret', { url, events: ['*'], secret: 'one\ntwo' }, 'secret'],
      ['with a whsec_ secret that is not base64', { url, events: ['*'], secret: 'whsec_!' }, 'secret'],
      ['with no machines', { url, events: ['*'], machine_ids: [] }, 'machine_ids'],
    ];
    for (const [what, body, path] of refused) {
      const { status, body: answer } = await system.call('POST', '/webhooks', { body });
      expect([what, status, answer.error.code]).toEqual([what, 422, 'validation_failed']);
      expect([what, answer.error.details.issues[0].path]).toEqual([what, path]);
    }
    expect((await system.client.webhooks.list({})).total).toBe(0);
  });

  test('with 403 and the missing scope when its key may not read its events', async () => {
    const system = await startFarhand();
    const { key } = await system.keyed(['webhooks:write', 'machines:read', 'commands:read']);
    const missing = { 'session.created': 'sessions:read', 'file.*': 'files:read', '*': 'sessions:read' };
    for (const [event, scope] of Object.entries(missing)) {
      const answer = await system.call('POST', '/webhooks', { key, body: { url, events: [event] } });
      expect([answer.status, answer.body.error.details.required_scope]).toEqual([403, scope]);
    }
    const { status } = await system.call('POST', '/webhooks', {
      key,
      body: { url, events: ['machine.*', 'command.failed'] },
    });
    expect(status).toBe(201);
  });
});

test('a webhook is created, answered without its secret, changed, found again after a restart and removed', async () => {
  const system = await startFarhand();
  const secret = 'a very secret secret';
  const { status, body } = await system.call('POST', '/webhooks', {
    body: { url, events: ['machine.*'], secret },
  });
  expect(status).toBe(201);
  const made = body.data;
  expect(made).toEqual({
    id: expect.stringMatching(/^hook_[0-9A-Za-z]{22}$/),
    url,
    events: ['machine.*'],
    enabled: true,
    machine_ids: null,
    disabled_reason: null,
    last_delivery: null,
    created_at: expect.any(String),
    updated_at: expect.any(String),
  });
  const webhook_id = made.id;
  expect(await system.client.webhooks.get({ webhook_id })).toEqual(made);
  const change = { url: `${url}2`, events: ['*'], secret: 'another', enabled: false };
  const { body: changed } = await system.call('PATCH', `/webhooks/${webhook_id}`, { body: change });
  expect(changed.data).toMatchObject({
    url: `${url}2`,
    events: ['*'],
    enabled: false,
    disabled_reason: null,
  });
  expect(JSON.stringify(changed)).not.toContain('another');
  const list = async (query: string) => (await system.call('GET', `/webhooks?${query}`)).body.data.length;
  expect([await list('enabled=true'), await list('enabled=false'), await list('')]).toEqual([0, 1, 1]);
  await system.broker.close();

  const stored = JSON.stringify(await storedState(system.dataDir));
  expect(stored).not.toMatch(/a very secret|another/);
  expect(statSync(join(system.dataDir, 'webhooks.key')).mode & 0o777).toBe(0o600);
  const again = await startFarhand({ dataDir: system.dataDir });
  expect((await again.client.webhooks.get({ webhook_id })).url).toBe(`${url}2`);
  expect(await again.client.webhooks.remove({ webhook_id })).toEqual({ deleted: true });
  expect((await again.call('GET', `/webhooks/${webhook_id}`)).body.error.code).toBe('webhook_not_found');
});

test('each specified event type, schedule.failed and the types of alerts and upgrades are accepted one by one', async () => {
  const system = await startFarhand();
  const types = Object.values(groups).flatMap(({ types }) => [...types]);
  expect(types).toHaveLength(27);
  const made = await system.client.webhooks.create({ url, events: [...types, ...types] });
  expect(made.events).toEqual(types);
});

test('a new secret with characters other than printable ASCII is refused, and the old one stays', async () => {
  const system = await startFarhand();
  const { id } = await system.client.webhooks.create({ url, events: ['*'], secret: 'old' });
  const { status, body } = await system.call('PATCH', `/webhooks/${id}`, { body: { secret: '🔑' } });
  expect([status, body.error.details.issues[0].path]).toEqual([422, 'secret']);
  expect((await system.client.webhooks.update({ webhook_id: id, secret: 'new ~!' })).id).toBe(id);
  const now = await system.client.webhooks.get({ webhook_id: id });
  expect(await system.client.webhooks.update({ webhook_id: id })).toEqual(now);
});

test('a POST repeated with its Idempotency-Key creates one webhook', async () => {
  const system = await startFarhand();
  const request = { body: { url, events: ['*'], secret: 'x' }, headers: { 'Idempotency-Key': 'once' } };
  const [first, second] = [
    await system.call('POST', '/webhooks', request),
    await system.call('POST', '/webhooks', request),
  ];
  expect(second.body.data).toEqual(first.body.data);
  expect((await system.client.webhooks.list({})).total).toBe(1);
});

describe('a key uses only webhooks whose events it may read', () => {
  test('and neither reads nor changes a webhook of a key with more scopes or machines', async () => {
    const { system, machine_id } = await startWithAgent({ tags: 'web' });
    const { id } = await system.client.webhooks.create({ url, events: ['file.*'] });
    const keys = [
      await system.keyed(['webhooks:read', 'webhooks:write']),
      await system.keyed(['webhooks:read', 'webhooks:write', 'files:read'], { machine_ids: [machine_id] }),
      await system.keyed(['webhooks:read', 'webhooks:write', 'files:read'], { tags: ['web'] }),
    ];
    for (const { key, client } of keys) {
      expect((await client.webhooks.list({})).total).toBe(0);
      const tries: [string, string, unknown?][] = [
        ['GET', `/webhooks/${id}`],
        ['PATCH', `/webhooks/${id}`, { url: 'https://evil.example.org/' }],
        ['DELETE', `/webhooks/${id}`],
        ['POST', `/webhooks/${id}/test`],
        ['GET', `/webhooks/${id}/deliveries`],
        ['POST', `/webhooks/${id}/redeliver`, { since: '2026-01-01T00:00:00Z' }],
      ];
      for (const [method, path, body] of tries) {
        const answer = await system.call(method, path, { key, body });
        expect([method, path, answer.status]).toEqual([method, path, 403]);
      }
    }
    const equal = await system.keyed(['webhooks:read', 'files:read']);
    expect((await equal.client.webhooks.list({})).total).toBe(1);
  });

  test('and adds no events that it may not read, even if the webhook’s own key may', async () => {
    const system = await startFarhand();
    const { id } = await system.client.webhooks.create({ url, events: ['machine.*'] });
    const { key } = await system.keyed(['webhooks:read', 'webhooks:write', 'machines:read']);
    const patch = (body: unknown) => system.call('PATCH', `/webhooks/${id}`, { key, body });
    for (const event of ['*', 'command.started']) {
      const { status, body } = await patch({ url: `${url}/mine`, events: ['machine.*', event] });
      expect([event, status, body.error?.code]).toEqual([event, 403, 'forbidden']);
    }
    expect(await system.client.webhooks.get({ webhook_id: id })).toMatchObject({
      url,
      events: ['machine.*'],
    });
    expect((await patch({ events: ['machine.offline'] })).status).toBe(200);
  });

  test('a webhook of a limited key stays within the limits of that key, also when another key changes it', async () => {
    const system = await startFarhand();
    const [here, there] = [await system.agent({ name: 'here' }), await system.agent({ name: 'there' })];
    const limited = await system.keyed(['webhooks:write', 'machines:read'], {
      machine_ids: [here.machineId],
    });
    const own = await limited.client.webhooks.create({ url, events: ['machine.*'] });
    const patch = (body: unknown) => system.call('PATCH', `/webhooks/${own.id}`, { body });
    expect((await patch({ events: ['file.*'] })).body.error.details).toEqual({
      required_scope: 'files:read',
    });
    const wider = await patch({ machine_ids: [there.machineId] });
    expect([wider.status, wider.body.error.details]).toEqual([403, { machine_id: there.machineId }]);
    expect((await patch({ machine_ids: [here.machineId] })).status).toBe(200);
  });
});

test('a webhook belongs to the key that set its URL, and sends what that key may read until the key is revoked', async () => {
  const system = await startWebhookSystem();
  const [first, second] = [await startReceiver(), await startReceiver()];
  const maker = await system.client.keys.create({
    name: 'maker',
    scopes: ['webhooks:write', 'machines:read'],
  });
  const mover = await system.client.keys.create({
    name: 'mover',
    scopes: ['webhooks:write', 'machines:read'],
  });
  const asked = { url: first.url, events: ['machine.*'] };
  const made = await system.call('POST', '/webhooks', { key: maker.key, body: asked });
  const webhook_id = made.body.data.id;
  const patch = (key: string, body: object) => system.call('PATCH', `/webhooks/${webhook_id}`, { key, body });
  // The first change, by `mover`, leaves the URL as it is, so the webhook still belongs to `maker`. The second change
  // sets a new URL, so the webhook then belongs to `mover`.
  await patch(mover.key, { ...asked, events: ['machine.online', 'machine.offline'] });
  await patch(mover.key, { url: second.url });
  await patch(maker.key, { events: ['machine.*'] });
  expect((await system.client.keys.remove({ key_id: maker.id })).webhooks).toEqual([]);
  await system.happen('machine.online');
  await second.heard(1);
  expect((await system.client.keys.remove({ key_id: mover.id })).webhooks).toEqual([webhook_id]);
  await system.happen('machine.offline');
  const { enabled, disabled_reason } = await system.client.webhooks.get({ webhook_id });
  expect([enabled, disabled_reason]).toEqual([false, 'key_revoked']);
  expect([first.types(), second.types()]).toEqual([[], ['machine.online']]);
});

test('a webhook whose key was revoked is disabled, and belongs to the key that enables it', async () => {
  const system = await startWebhookSystem();
  const receiver = await startReceiver();
  const other = await system.client.keys.create({
    name: 'other',
    scopes: ['webhooks:write', 'machines:read'],
  });
  const made = await system.call('POST', '/webhooks', {
    key: other.key,
    body: { url: receiver.url, events: ['machine.*'] },
  });
  const webhook_id = made.body.data.id;
  await system.client.keys.remove({ key_id: other.id });
  expect(await system.client.webhooks.get({ webhook_id })).toMatchObject({
    enabled: false,
    disabled_reason: 'key_revoked',
  });
  await system.happen('machine.online');
  const enabled = await system.client.webhooks.update({ webhook_id, enabled: true });
  expect(enabled).toMatchObject({ enabled: true, disabled_reason: null });
  await system.happen('machine.offline');
  await receiver.heard(1);
  expect(receiver.types()).toEqual(['machine.offline']);
});

test('a broker that lost its key file starts, delivers nothing unsigned, and accepts a new secret', async () => {
  const first = await startWebhookSystem();
  const receiver = await startReceiver();
  const { id } = await first.client.webhooks.create({ url: receiver.url, events: ['*'], secret: 'old' });
  await first.broker.close();
  rmSync(join(first.dataDir, 'webhooks.key'));
  const system = await startWebhookSystem({ dataDir: first.dataDir });
  const path = `/webhooks/${id}`;
  expect((await system.call('GET', path)).body.data).toMatchObject({
    enabled: false,
    disabled_reason: 'secret_unreadable',
  });
  await system.happen('machine.online');
  expect((await system.call('POST', `${path}/test`)).status).toBe(409);
  const { body } = await system.call('PATCH', path, { body: { secret: 'new' } });
  expect(body.data.enabled).toBe(true);
  await system.happen('machine.offline');
  const [got] = await receiver.heard(1);
  expect(got?.headers).toMatchObject({
    'x-service-event': 'machine.offline',
    'x-service-signature': expect.stringMatching(/^sha256=[0-9a-f]{64}$/),
  });
});

test('a broker whose key file is damaged does not start', async () => {
  const system = await startFarhand();
  await system.client.webhooks.create({ url, events: ['*'], secret: 'x' });
  await system.broker.close();
  writeFileSync(join(system.dataDir, 'webhooks.key'), 'no key');
  await expect(startFarhand({ dataDir: system.dataDir })).rejects.toMatchObject({ exitCode: 78 });
});

const notNetworks = [
  '10.0.0.0/33',
  'example.org',
  '10.0.0',
  '0x7f.1',
  '10/8',
  '10.1/16',
  '012.0.0.0/8',
  '10.0.0.0/',
  'fd00::/129',
  'fe80::1%eth0',
  '::ffff:10.0.0.0/95',
  '::ffff:0:0/64',
  '64:ff9b::a00:0/104',
  '2002::/16',
];

test('a broker does not start with a --webhook-allow that is no complete network', async () => {
  const dataDir = temporaryFolder('broker');
  for (const range of notNetworks) {
    await expect(startFarhand({ dataDir, flags: ['--webhook-allow', range] })).rejects.toMatchObject({
      exitCode: 78,
      message: expect.stringContaining(`--webhook-allow ${range}:`),
    });
  }
});
