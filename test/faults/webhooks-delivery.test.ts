// Deliveries of webhooks: retries, disabled webhooks, the events that a key may send, and receivers that misbehave.
import { once } from 'node:events';
import { readFileSync, writeFileSync } from 'node:fs';
import type { ServerResponse } from 'node:http';
import { createServer } from 'node:https';
import { type AddressInfo, createServer as createTcpServer, type Socket } from 'node:net';
import { join } from 'node:path';
import { DatabaseSync } from 'node:sqlite';
import { gzipSync } from 'node:zlib';
import { verify } from '@octokit/webhooks-methods';
import { Webhook } from 'standardwebhooks';
import { describe, expect, onTestFinished, test } from 'vitest';
import { loadIdentity } from '../../agent/join-or-load-identity.ts';
import { loadAuthority } from '../../broker/ca-and-broker-certificates.ts';
import type { EventType } from '../../shared/api/events.ts';
import { fakeClock } from '../fake-clock.ts';
import { temporaryFolder } from '../start-farhand.ts';
import { waitFor } from '../wait-for.ts';
import {
  answering,
  type Received,
  startReceiver,
  startWebhookSystem,
  type WebhookSystem,
} from '../webhook-receivers.ts';

/** Returns the deliveries of a webhook, oldest first. */
async function deliveriesOf(system: WebhookSystem, webhook_id: string) {
  const { items } = await system.client.webhooks.deliveries({ webhook_id, sort: 'created_at', limit: 100 });
  return items;
}

/** Resolves when all deliveries of a webhook have this status. */
function settled(system: WebhookSystem, webhook_id: string, status: string, count: number) {
  return waitFor(
    async () => {
      const items = await deliveriesOf(system, webhook_id);
      expect(items.map((one) => one.status)).toEqual(Array.from({ length: count }, () => status));
      return items;
    },
    { interval: 20 },
  );
}

/** Resolves at the next event of this type. */
function next(system: WebhookSystem, type: EventType): Promise<Record<string, unknown>> {
  return new Promise((resolve) => {
    const stop = system.events.listen([type], (event) => {
      stop();
      resolve(event.data);
    });
  });
}

const sameBytes = (got: Received[]): boolean => got.every(({ body }) => body.equals(got[0]!.body));
const gap = (got: Received[], n: number): number => got[n]!.at - got[n - 1]!.at;

describe('a failure', () => {
  test('is retried after the configured waits, with the same id and the same bytes, until it is delivered', async () => {
    const system = await startWebhookSystem({ flags: ['--webhook-retry', '200ms,400ms'] });
    const receiver = await startReceiver(answering(500, 500, 200));
    const { id } = await system.client.webhooks.create({ url: receiver.url, events: ['machine.*'] });
    await system.happen('machine.offline', { last_seen: '2026-11-21T10:00:00.000Z' });
    const got = await receiver.heard(3);
    // The gap may be shorter than the configured 200 ms, because the first attempt may arrive late on a busy machine.
    expect(gap(got, 1)).toBeGreaterThan(120);
    expect(gap(got, 2)).toBeGreaterThan(300);
    expect(sameBytes(got)).toBe(true);
    expect(new Set(got.map(({ headers }) => headers['webhook-id'])).size).toBe(1);
    expect(new Set(got.map(({ headers }) => headers['x-service-delivery'])).size).toBe(1);
    const [delivery] = await settled(system, id, 'delivered', 1);
    expect(delivery?.attempts.map((one) => one.status_code)).toEqual([500, 500, 200]);
    expect(delivery?.next_attempt_at).toBeNull();
    const webhook = await system.client.webhooks.get({ webhook_id: id });
    expect(webhook).toMatchObject({ enabled: true, disabled_reason: null });
    expect(webhook.last_delivery).toMatchObject({
      delivered: true,
      status_code: 200,
      delivery_id: delivery?.id,
    });
    expect(JSON.parse(got[0]!.body.toString())).toEqual({
      id: got[0]!.headers['webhook-id'],
      type: 'machine.offline',
      timestamp: expect.stringMatching(/^\d{4}-.*Z$/),
      data: expect.objectContaining({
        machine_id: expect.any(String),
        last_seen: '2026-11-21T10:00:00.000Z',
      }),
    });
  });

  test('of all attempts disables the webhook and causes an event; no delivery is lost', async () => {
    const system = await startWebhookSystem({ flags: ['--webhook-retry', '20ms'] });
    let status = 500;
    const receiver = await startReceiver((response) => {
      response.statusCode = status;
      response.end();
    });
    // Events from before the webhook was created are never sent to it.
    await system.happen('machine.registered');
    await new Promise((resolve) => setTimeout(resolve, 2));
    const { id } = await system.client.webhooks.create({ url: receiver.url, events: ['machine.*'] });
    const disabled = next(system, 'webhook.disabled');
    await system.happen('machine.offline');
    expect(await disabled).toMatchObject({ webhook_id: id, reason: 'attempts_failed' });
    expect(receiver.got).toHaveLength(3);
    expect(await system.client.webhooks.get({ webhook_id: id })).toMatchObject({
      enabled: false,
      disabled_reason: 'attempts_failed',
    });
    const [failed] = await settled(system, id, 'failed', 1);
    // No delivery is queued for events while the webhook is disabled.
    await system.happen('machine.online');
    expect(await deliveriesOf(system, id)).toHaveLength(1);
    const again = `/webhooks/${id}/deliveries/${failed?.id}/redeliver`;
    expect((await system.call('POST', again)).body.error.code).toBe('conflict');

    await system.broker.close();
    const later = await startWebhookSystem({ dataDir: system.dataDir });
    expect((await later.client.webhooks.get({ webhook_id: id })).enabled).toBe(false);
    status = 200;
    await later.client.webhooks.update({ webhook_id: id, enabled: true });
    const since = { since: '2026-01-01T00:00:00Z' };
    const asked = await later.call('POST', `/webhooks/${id}/redeliver`, { body: since });
    expect(asked.body.data).toEqual({ redelivered: 2 });
    await receiver.heard(5);
    expect(receiver.types().slice(3).sort()).toEqual(['machine.offline', 'machine.online']);
    await settled(later, id, 'delivered', 2);
    expect(
      (await later.call('POST', `/webhooks/${id}/redeliver`, { body: since })).body.data.redelivered,
    ).toBe(0);
    // A delivered event is sent again only on request of its delivery id.
    expect((await later.call('POST', again)).body.data.status).toBe('pending');
    await receiver.heard(6);
    expect(receiver.types()[5]).toBe('machine.offline');
  });

  test('that waits for its next attempt becomes final when the webhook is disabled', async () => {
    const system = await startWebhookSystem({ flags: ['--webhook-retry', '1h'] });
    const receiver = await startReceiver(answering(500));
    const { id } = await system.client.webhooks.create({ url: receiver.url, events: ['*'] });
    await system.happen('machine.online');
    await receiver.heard(1);
    await system.client.webhooks.update({ webhook_id: id, enabled: false });
    const [delivery] = await settled(system, id, 'failed', 1);
    expect(delivery?.reason).toBe('webhook_disabled');
    expect(await system.client.webhooks.get({ webhook_id: id })).toMatchObject({
      enabled: false,
      disabled_reason: null,
    });
  });

  test('is retried after the wait, or at the time that a busy receiver asks for', async () => {
    const system = await startWebhookSystem({ flags: ['--webhook-retry', '1h'] });
    const receivers: [string, number, string, number, number][] = [
      ['a receiver that says nothing', 500, '', 3240, 3960],
      ['a busy receiver that says nothing', 503, '', 3240, 3960],
      ['a busy receiver that says nothing sensible', 429, 'soon', 3240, 3960],
      ['one that asks for less than the wait', 503, '60', 3600, 3600],
      ['one that asks for more than the wait', 429, '5400', 5400, 5400],
      ['one that asks for more than twice the wait', 503, '86400', 7200, 7200],
      ['one that names a date', 503, new Date(Date.now() + 5_400_000).toUTCString(), 5370, 5400],
      ['one that is not busy, whatever it asks for', 500, '5400', 3240, 3960],
    ];
    const ids: string[] = [];
    for (const [, status, header] of receivers) {
      const { url } = await startReceiver((response) => {
        response.writeHead(status, header ? { 'Retry-After': header } : {}).end();
      });
      ids.push((await system.client.webhooks.create({ url, events: ['*'] })).id);
    }
    await system.happen('machine.online');
    for (const [n, [what, , , least, most]] of receivers.entries()) {
      const wait = await waitFor(async () => {
        const { next_attempt_at, attempts } = (await deliveriesOf(system, ids[n]!))[0]!;
        const [attempt] = attempts;
        return (Date.parse(next_attempt_at!) - Date.parse(attempt!.at) - attempt!.duration) / 1000;
      });
      expect(wait, what).toBeGreaterThan(least - 1);
      expect(wait, what).toBeLessThan(most + 1);
    }
  });
});

test('redirects are failures and are never followed', async () => {
  const system = await startWebhookSystem();
  const elsewhere = await startReceiver();
  for (const status of [301, 302, 303, 307, 308]) {
    const receiver = await startReceiver((response) =>
      response.writeHead(status, { Location: elsewhere.url }).end(),
    );
    const { id } = await system.client.webhooks.create({ url: receiver.url, events: ['*'] });
    const result = await system.client.webhooks.test({ webhook_id: id });
    expect(result).toMatchObject({
      delivered: false,
      status_code: status,
      error: 'the URL redirects, and redirects are not followed: set the final URL',
    });
  }
  expect(elsewhere.got).toHaveLength(0);
});

test('a test event is sent at once, also to a disabled webhook, is neither retried nor counted', async () => {
  const system = await startWebhookSystem();
  const receiver = await startReceiver(answering(500, 200));
  const { id } = await system.client.webhooks.create({
    url: receiver.url,
    events: ['machine.*'],
    secret: 'quiet',
    enabled: false,
  });
  const result = await system.call('POST', `/webhooks/${id}/test`);
  expect([result.status, result.body.data]).toEqual([
    200,
    { delivered: false, status_code: 500, duration: expect.any(Number) },
  ]);
  expect(await system.client.webhooks.test({ webhook_id: id })).toMatchObject({
    delivered: true,
    status_code: 200,
  });
  const { headers, body } = receiver.got[0]!;
  expect(JSON.parse(body.toString())).toEqual({
    id: 'evt_test',
    type: 'test',
    timestamp: expect.any(String),
    data: { message: expect.any(String) },
  });
  expect(headers).toMatchObject({ 'x-service-event': 'test', 'content-type': 'application/json' });
  expect(await verify('quiet', body.toString(), String(headers['x-service-signature']))).toBe(true);
  expect(await deliveriesOf(system, id)).toEqual([]);
  expect((await system.client.webhooks.get({ webhook_id: id })).last_delivery).toBeNull();
});

test('one key may run four tests at once, which do not limit other keys', async () => {
  const system = await startWebhookSystem();
  const [hanging, healthy] = [await startReceiver(() => {}), await startReceiver()];
  const { key, client } = await system.keyed(['webhooks:write', 'machines:read']);
  const { id } = await client.webhooks.create({ url: hanging.url, events: ['machine.*'], enabled: false });
  const stop = new AbortController();
  const path = `/webhooks/${id}/test`;
  const under = Array.from({ length: 4 }, () =>
    system.call('POST', path, { key, signal: stop.signal }).catch(() => undefined),
  );
  await hanging.heard(4);
  expect((await system.call('POST', path, { key })).body.error.code).toBe('unavailable');
  const own = await system.client.webhooks.create({ url: healthy.url, events: ['*'] });
  expect((await system.client.webhooks.test({ webhook_id: own.id })).delivered).toBe(true);
  stop.abort();
  await Promise.all(under);
  // A further test is accepted: it waits for the receiver instead of being refused at once.
  await waitFor(async () => {
    const again = system.call('POST', path, { key, signal: AbortSignal.timeout(50) });
    await expect(again).rejects.toThrow();
  });
});

test('the test of a receiver that does not listen has the error', async () => {
  const system = await startWebhookSystem();
  const { id } = await system.client.webhooks.create({ url: 'http://127.0.0.1:1/', events: ['*'] });
  const result = await system.client.webhooks.test({ webhook_id: id });
  expect(result).toMatchObject({ delivered: false, status_code: null, error: 'ECONNREFUSED' });
});

test.each([
  ['an arbitrary secret', 'correct horse ~ battery'],
  ['a Standard Webhooks secret', `whsec_${Buffer.alloc(32, 7).toString('base64')}`],
])('libraries of others verify both signatures, with %s, over any Unicode', async (_what, secret) => {
  const system = await startWebhookSystem();
  const receiver = await startReceiver();
  await system.client.webhooks.create({ url: receiver.url, events: ['machine.*'], secret });
  await system.happen('machine.online', { text: 'Grüße\u2029 \ud83d\udc4b "\\ \u0000' });
  const [{ headers, body }] = (await receiver.heard(1)) as [Received];
  const text = body.toString();
  expect(text).toContain('web 🚀\u2028one');
  const signature = String(headers['x-service-signature']);
  expect(signature).toMatch(/^sha256=[0-9a-f]{64}$/);
  expect(await verify(secret, text, signature)).toBe(true);
  expect(await verify(`${secret}x`, text, signature)).toBe(false);
  const standard = secret.startsWith('whsec_')
    ? new Webhook(secret)
    : new Webhook(Buffer.from(secret), { format: 'raw' });
  const trio = headers as Record<string, string>;
  expect(standard.verify(text, trio)).toMatchObject({ type: 'machine.online', id: headers['webhook-id'] });
  expect(() => standard.verify(`${text} `, trio)).toThrow();
});

test('without a secret nothing is signed', async () => {
  const system = await startWebhookSystem();
  const receiver = await startReceiver();
  await system.client.webhooks.create({ url: receiver.url, events: ['*'] });
  await system.happen('machine.online');
  const [{ headers }] = (await receiver.heard(1)) as [Received];
  expect(Object.keys(headers).filter((name) => name.includes('signature'))).toEqual([]);
  expect(headers['webhook-id']).toMatch(/^evt_/);
});

describe('a webhook delivers', () => {
  test('only the event types, families and machines that it names', async () => {
    const system = await startWebhookSystem();
    const [one, family, all, mine] = await Promise.all([1, 2, 3, 4].map(() => startReceiver()));
    const { machineId } = await system.agent();
    await system.client.webhooks.create({ url: one!.url, events: ['command.failed'] });
    await system.client.webhooks.create({ url: family!.url, events: ['session.*'] });
    await system.client.webhooks.create({ url: all!.url, events: ['*'] });
    await system.client.webhooks.create({ url: mine!.url, events: ['command.*'], machine_ids: [machineId] });
    await system.happen('command.failed');
    await system.happen('command.completed', {}, { id: machineId, name: 'mine' });
    await system.happen('session.grace_period');
    await system.happen('machine.fenced');
    await system.happen('schedule.failed');
    await all!.heard(4);
    expect(all!.types().sort()).toEqual([
      'command.completed',
      'command.failed',
      'schedule.failed',
      'session.grace_period',
    ]);
    await Promise.all([one!.heard(1), family!.heard(1), mine!.heard(1)]);
    expect([one!.types(), family!.types(), mine!.types()]).toEqual([
      ['command.failed'],
      ['session.grace_period'],
      ['command.completed'],
    ]);
  });

  test('only events that its key may read now, and no event of a machine that has lost the key’s tag', async () => {
    const system = await startWebhookSystem();
    const receiver = await startReceiver();
    const { machineId } = await system.agent({ tags: 'web' });
    const about = { id: machineId, name: 'tagged' };
    const { client } = await system.keyed(['webhooks:write', 'machines:read', 'files:read'], {
      tags: ['web'],
    });
    await client.webhooks.create({ url: receiver.url, events: ['file.*'] });
    await system.happen('file.uploaded', { path: '/other' });
    await system.happen('file.uploaded', { path: '/mine' }, about);
    await receiver.heard(1);
    await system.client.machines.update({ machine_id: machineId, tags: [] });
    await system.happen('file.uploaded', { path: '/no longer' }, about);
    await system.client.machines.update({ machine_id: machineId, tags: ['web'] });
    await system.happen('file.deleted', { path: '/again' }, about);
    await receiver.heard(2);
    expect(receiver.got.map(({ body }) => JSON.parse(body.toString()).data.path)).toEqual([
      '/mine',
      '/again',
    ]);
  });

  test('later events, but none of many events that waited when the machine lost the key’s tag', async () => {
    const system = await startWebhookSystem();
    const receiver = await startReceiver((response, _request, count) => void (count > 1 && response.end()));
    const { machineId } = await system.agent({ tags: 'web' });
    const { client } = await system.keyed(['webhooks:write', 'webhooks:read', 'files:read'], {
      tags: ['web'],
    });
    const { id } = await client.webhooks.create({ url: receiver.url, events: ['file.*'] });
    await system.history.write((transaction) => {
      const about = { id: machineId, name: 'tagged' };
      for (let n = 0; n < 600; n += 1) system.events.emit(transaction, 'file.uploaded', about, { n });
    });
    await receiver.heard(1);
    await system.client.machines.update({ machine_id: machineId, tags: [] });
    const ofWebhook = "FROM webhook_deliveries WHERE reason = 'not_permitted' AND webhook_id = ?";
    const refused = () => system.history.get(`SELECT count(*) AS n ${ofWebhook}`, id);
    await waitFor(async () => expect((await refused())?.n).toBe(600));
    await system.client.machines.update({ machine_id: machineId, tags: ['web'] });
    await system.happen('file.deleted', {}, { id: machineId, name: 'tagged' });
    await receiver.heard(2);
    expect(receiver.types()[1]).toBe('file.deleted');
  });

  test('nothing once its key is revoked: waiting deliveries fail, running attempts are aborted', async () => {
    const system = await startWebhookSystem();
    const receiver = await startReceiver((response, _request, count) => void (count > 1 && response.end()));
    const other = await system.client.keys.create({
      name: 'other',
      scopes: ['webhooks:write', 'machines:read'],
    });
    const made = await system.call('POST', '/webhooks', {
      key: other.key,
      body: { url: receiver.url, events: ['machine.*'] },
    });
    const { id } = made.body.data;
    for (let n = 0; n < 5; n += 1) await system.happen('machine.online', { n });
    await receiver.heard(1);
    await system.client.keys.remove({ key_id: other.id });
    const deliveries = await settled(system, id, 'failed', 5);
    const given = Array.from({ length: 5 }, () => ['key_revoked', []]);
    expect(deliveries.map((one) => [one.reason, one.attempts])).toEqual(given);
    expect(receiver.got).toHaveLength(1);
    // The aborted attempt is not recorded, because it says nothing about the receiver.
    await system.client.webhooks.update({ webhook_id: id, enabled: true });
    await system.happen('machine.offline');
    await waitFor(async () => expect((await deliveriesOf(system, id)).at(-1)?.status).toBe('delivered'));
    const later = (await deliveriesOf(system, id)).slice(0, 5);
    expect(later.map((one) => [one.reason, one.attempts])).toEqual(given);
  });

  test('no event of a scope that its key has lost', async () => {
    const first = await startWebhookSystem();
    const receiver = await startReceiver();
    const { id } = await first.client.keys.create({ name: 'k', scopes: ['admin'] });
    await first.client.webhooks.create({ url: receiver.url, events: ['*'] });
    await first.broker.close();
    const file = join(first.dataDir, 'state.json');
    const state = JSON.parse(readFileSync(file, 'utf8'));
    state.keys.find((key: { id: string }) => key.id === id).scopes = ['machines:read'];
    state.webhooks[0].key_id = id;
    writeFileSync(file, JSON.stringify(state));
    const system = await startWebhookSystem({ dataDir: first.dataDir, flags: ['--accept-state'] });
    await system.happen('command.failed');
    await system.happen('machine.online');
    await receiver.heard(1);
    expect(receiver.types()).toEqual(['machine.online']);
    expect(await system.history.all('SELECT type FROM webhook_deliveries')).toHaveLength(1);
  });

  test('nothing once its key has expired', async () => {
    const system = await startWebhookSystem({ flags: ['--webhook-retry', '2m'] });
    const receiver = await startReceiver(answering(500));
    const clock = fakeClock(Date.now());
    const { key } = await system.client.keys.create({
      name: 'brief',
      scopes: ['webhooks:write', 'machines:read'],
      expires_at: new Date(clock.now() + 60_000).toISOString(),
    });
    const made = await system.call('POST', '/webhooks', {
      key,
      body: { url: receiver.url, events: ['machine.*'] },
    });
    const { id } = made.body.data;
    await system.happen('machine.online');
    await receiver.heard(1);
    await waitFor(async () => {
      await clock.advance(100);
      expect((await deliveriesOf(system, id))[0]?.attempts).toHaveLength(1);
    });
    await clock.advance(200_000);
    const [delivery] = await settled(system, id, 'failed', 1);
    expect(delivery?.reason).toBe('key_revoked');
    expect(receiver.got).toHaveLength(1);
  });

  test('events that come through the outbox, such as that of a machine that registers', async () => {
    const system = await startWebhookSystem();
    const receiver = await startReceiver();
    await system.client.webhooks.create({ url: receiver.url, events: ['machine.registered'] });
    await loadIdentity(temporaryFolder('joining'), {
      broker: system.grpc,
      joinToken: await system.joinToken(),
      name: 'new 🎉',
      tags: [],
    });
    const [{ body }] = (await receiver.heard(1)) as [Received];
    expect(JSON.parse(body.toString()).data.machine_name).toBe('new 🎉');
  });
});

describe('a webhook that is narrowed', () => {
  test('sends no event that it no longer names, neither waiting nor requested again', async () => {
    const system = await startWebhookSystem({ flags: ['--webhook-retry', '1h'] });
    const receiver = await startReceiver(answering(500, 500, 200));
    const { id } = await system.client.webhooks.create({ url: receiver.url, events: ['*'] });
    await system.happen('command.failed');
    await system.happen('machine.online');
    // Waits until the first attempts of both deliveries have ended. The update below does not check a delivery whose
    // attempt is still running. Such a delivery would be checked only at its retry, in an hour.
    await waitFor(async () => {
      const waiting = await deliveriesOf(system, id);
      expect(waiting.map(({ attempts }) => attempts.length)).toEqual([1, 1]);
    });
    await system.client.webhooks.update({ webhook_id: id, events: ['machine.*'] });
    const command = await waitFor(async () => {
      const all = await deliveriesOf(system, id);
      // Sorts the two deliveries by type, because their times of creation may be equal.
      const [narrowed, machine] = all.toSorted((a, b) => (a.type < b.type ? -1 : 1));
      expect(narrowed).toMatchObject({ status: 'failed', reason: 'not_subscribed', next_attempt_at: null });
      expect(machine).toMatchObject({ status: 'pending', reason: null });
      return narrowed;
    });
    const again = await system.call('POST', `/webhooks/${id}/deliveries/${command?.id}/redeliver`);
    expect([again.status, again.body.error.code]).toEqual([409, 'conflict']);
    const since = '2026-01-01T00:00:00Z';
    expect(await system.client.webhooks.redeliverSince({ webhook_id: id, since })).toEqual({
      redelivered: 1,
    });
    await receiver.heard(3);
    expect(receiver.types()[2]).toBe('machine.online');
  });

  test('to one machine sends only events of this machine', async () => {
    const system = await startWebhookSystem({ flags: ['--webhook-retry', '1h'] });
    const receiver = await startReceiver(answering(500));
    const { machineId } = await system.agent();
    const { id } = await system.client.webhooks.create({ url: receiver.url, events: ['file.*'] });
    await system.happen('file.deleted');
    await system.happen('file.uploaded', {}, { id: machineId, name: 'named' });
    await receiver.heard(2);
    await system.client.webhooks.update({ webhook_id: id, machine_ids: [machineId] });
    const reasons = (await deliveriesOf(system, id)).map(({ type, reason }) => [type, reason]);
    expect(Object.fromEntries(reasons)).toEqual({ 'file.deleted': 'not_subscribed', 'file.uploaded': null });
  });

  test('lists and resends its earlier deliveries only for keys that may read those events', async () => {
    const system = await startWebhookSystem();
    const receiver = await startReceiver();
    const { id } = await system.client.webhooks.create({ url: receiver.url, events: ['*'] });
    await system.happen('machine.online');
    await receiver.heard(1);
    await system.happen('command.failed');
    await settled(system, id, 'delivered', 2);
    const [, command] = await deliveriesOf(system, id);
    await system.client.webhooks.update({ webhook_id: id, events: ['machine.*'] });
    const { key, client } = await system.keyed(['webhooks:read', 'webhooks:write', 'machines:read']);
    const seen = await client.webhooks.deliveries({ webhook_id: id });
    expect([seen.total, seen.items.map(({ type }) => type)]).toEqual([1, ['machine.online']]);
    expect((await client.webhooks.get({ webhook_id: id })).last_delivery).toBeNull();
    const path = `/webhooks/${id}/deliveries/${command?.id}/redeliver`;
    expect((await system.call('POST', path, { key })).body.error.code).toBe('delivery_not_found');
    expect((await system.client.webhooks.get({ webhook_id: id })).last_delivery?.type).toBe('command.failed');
  });
});

describe('a delivery that waits for its next attempt is due at once', () => {
  test.each<[string, (system: WebhookSystem, webhook_id: string, delivery_id: string) => Promise<unknown>]>([
    [
      'when it is requested again',
      ({ client }, webhook_id, delivery_id) => client.webhooks.redeliver({ webhook_id, delivery_id }),
    ],
    [
      'when all deliveries since a time are requested again',
      ({ client }, webhook_id) =>
        client.webhooks.redeliverSince({ webhook_id, since: '2026-01-01T00:00:00Z' }),
    ],
    [
      'when its webhook is enabled again',
      ({ client }, webhook_id) => client.webhooks.update({ webhook_id, enabled: true }),
    ],
  ])('%s', async (_what, ask) => {
    const system = await startWebhookSystem({ flags: ['--webhook-retry', '1h'] });
    const receiver = await startReceiver(answering(500, 200));
    const { id } = await system.client.webhooks.create({ url: receiver.url, events: ['*'] });
    await system.happen('machine.online');
    await receiver.heard(1);
    const waiting = await waitFor(async () => {
      const [delivery] = await deliveriesOf(system, id);
      expect(delivery?.attempts).toHaveLength(1);
      return delivery!.id;
    });
    await ask(system, id, waiting);
    await receiver.heard(2);
    await settled(system, id, 'delivered', 1);
  });
});

test('an event and its deliveries are committed together', async () => {
  const system = await startWebhookSystem({ flags: ['--webhook-retry', '1h'] });
  const { id } = await system.client.webhooks.create({ url: 'http://127.0.0.1:1/', events: ['*'] });
  const failing = system.history.write((transaction) => {
    system.events.emit(transaction, 'machine.online', undefined, {});
    throw new Error('no');
  });
  await expect(failing).rejects.toThrow('no');
  expect(await deliveriesOf(system, id)).toEqual([]);
  const file = new DatabaseSync(join(system.dataDir, 'history.db'), { readOnly: true });
  onTestFinished(() => file.close());
  const count = file.prepare('SELECT count(*) AS n FROM webhook_deliveries');
  const counts: unknown[] = [];
  await system.history.write((transaction) => {
    system.events.emit(transaction, 'machine.online', undefined, {});
    counts.push(count.get()?.n);
    transaction.committed(() => counts.push(count.get()?.n));
  });
  expect(counts).toEqual([0, 1]);
});

test('an event that only the outbox has, because the broker was killed, is delivered after the next start', async () => {
  const system = await startWebhookSystem();
  const receiver = await startReceiver();
  await system.client.webhooks.create({ url: receiver.url, events: ['machine.registered'] });
  await system.broker.close();
  const file = join(system.dataDir, 'state.json');
  const event = {
    id: 'evt_of_the_outbox',
    type: 'machine.registered',
    timestamp: new Date().toISOString(),
    data: {},
  };
  const entry = { kind: 'event', event, machine_id: null };
  writeFileSync(file, JSON.stringify({ ...JSON.parse(readFileSync(file, 'utf8')), outbox: [entry] }));
  await startWebhookSystem({ dataDir: system.dataDir, flags: ['--accept-state'] });
  const [{ body }] = (await receiver.heard(1)) as [Received];
  expect(JSON.parse(body.toString())).toEqual(event);
});

test('a delivery whose event is no longer stored fails, and the others go on', async () => {
  const system = await startWebhookSystem({ flags: ['--webhook-retry', '100ms'] });
  const receiver = await startReceiver(answering(500, 200));
  const { id } = await system.client.webhooks.create({ url: receiver.url, events: ['*'] });
  await system.happen('machine.online');
  await receiver.heard(1);
  await system.history.write((transaction) => transaction.run('DELETE FROM events'));
  const [gone] = await settled(system, id, 'failed', 1);
  expect(gone?.reason).toBe('event_gone');
  await system.happen('machine.offline');
  await receiver.heard(2);
  expect(receiver.types()).toEqual(['machine.online', 'machine.offline']);
});

test('answers are stored, but listed only for keys that may change webhooks', async () => {
  const system = await startWebhookSystem();
  const receiver = await startReceiver(answering(200));
  const { id } = await system.client.webhooks.create({ url: receiver.url, events: ['machine.*'] });
  await system.happen('machine.online');
  const [own] = await settled(system, id, 'delivered', 1);
  // The receiver has an internal address, so its answer is not stored.
  expect(own?.attempts[0]).not.toHaveProperty('answer');
  const answer = `UPDATE webhook_deliveries SET attempts = replace(attempts, '"at":', '"answer":"hello","at":')`;
  await system.history.write((transaction) => transaction.run(answer));
  const reader = await system.keyed(['webhooks:read', 'machines:read']);
  const seen = async (key: string) =>
    (await system.call('GET', `/webhooks/${id}/deliveries`, { key })).body.data[0].attempts[0].answer;
  expect([await seen(system.key), await seen(reader.key)]).toEqual(['hello', undefined]);
});

test('a delivery requested again before its last attempt is saved is sent again', async () => {
  const system = await startWebhookSystem();
  const receiver = await startReceiver();
  const { id } = await system.client.webhooks.create({ url: receiver.url, events: ['*'] });
  await system.happen('machine.online');
  await receiver.heard(1);
  const [pending] = await deliveriesOf(system, id);
  await system.client.webhooks.redeliver({ webhook_id: id, delivery_id: pending!.id });
  await receiver.heard(2);
  const [delivery] = await settled(system, id, 'delivered', 1);
  expect(delivery?.attempts).toHaveLength(2);
});

test('a delivery requested again during its last attempt is sent again, although this attempt fails', async () => {
  const system = await startWebhookSystem({ flags: ['--webhook-attempts', '1'] });
  const held: ServerResponse[] = [];
  const receiver = await startReceiver((response, _request, count) => {
    if (count === 1) held.push(response);
    else response.end();
  });
  const { id } = await system.client.webhooks.create({ url: receiver.url, events: ['*'] });
  await system.happen('machine.online');
  await receiver.heard(1);
  const [pending] = await deliveriesOf(system, id);
  await system.client.webhooks.redeliver({ webhook_id: id, delivery_id: pending!.id });
  held[0]?.destroy();
  const [delivery] = await settled(system, id, 'delivered', 1);
  expect(delivery?.attempts).toHaveLength(2);
});

/**
 * A receiver that answers the first request of each connection, and calls `end` at each later one. It counts the
 * answered and the ended requests.
 */
async function startBriefReceiver(end: (socket: Socket) => void) {
  const heard = { answered: 0, ended: 0 };
  const sockets = new Set<Socket>();
  const server = createTcpServer((socket) => {
    sockets.add(socket);
    let [text, answered] = ['', false];
    socket.on('error', () => {});
    socket.on('data', (chunk: Buffer) => {
      text += chunk.toString('latin1');
      const [head = '', body] = text.split('\r\n\r\n');
      const length = Number(/content-length: (\d+)/i.exec(head)?.[1]);
      if (body === undefined || body.length < length) return;
      text = '';
      heard[answered ? 'ended' : 'answered'] += 1;
      if (answered) end(socket);
      else socket.write('HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok');
      answered = true;
    });
  });
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  onTestFinished(() => {
    for (const socket of sockets) socket.destroy();
    server.close();
  });
  return { heard, url: `http://127.0.0.1:${(server.address() as AddressInfo).port}/` };
}

describe('a receiver that', () => {
  test.each<[string, (socket: Socket) => void]>([
    ['closes', (socket) => socket.destroy()],
    ['resets', (socket) => socket.resetAndDestroy()],
  ])(
    '%s a connection at its second request gets that delivery over a new connection at once',
    async (_what, end) => {
      const system = await startWebhookSystem({ flags: ['--webhook-retry', '1h'] });
      const { heard, url } = await startBriefReceiver(end);
      const { id } = await system.client.webhooks.create({ url, events: ['*'] });
      for (let n = 1; n <= 4; n += 1) {
        await system.happen('machine.online', { n });
        await settled(system, id, 'delivered', n);
      }
      const deliveries = await deliveriesOf(system, id);
      expect(deliveries.map(({ attempts }) => attempts.length)).toEqual([1, 1, 1, 1]);
      expect(heard.answered).toBe(4);
      // If no connection had a second request, the test would prove nothing.
      expect(heard.ended).toBeGreaterThan(0);
    },
  );

  test('answers with an endless body has received its delivery, and only the beginning of the body is read', async () => {
    const system = await startWebhookSystem();
    let sent = 0;
    const receiver = await startReceiver((response) => {
      const chunk = Buffer.alloc(64 * 1024);
      const more = (): void => {
        sent += chunk.length;
        if (!response.destroyed) response.write(chunk, () => setImmediate(more));
      };
      more();
    });
    const { id } = await system.client.webhooks.create({ url: receiver.url, events: ['*'] });
    const result = await system.client.webhooks.test({ webhook_id: id });
    expect(result).toMatchObject({ delivered: true, status_code: 200 });
    // The broker stopped reading, so the receiver could only fill socket buffers instead of sending a gigabyte.
    expect(sent).toBeLessThan(32 * 1024 * 1024);
  });

  test('answers with a gzip bomb is not unpacked', async () => {
    const system = await startWebhookSystem();
    const bomb = gzipSync(Buffer.alloc(64 * 1024 * 1024));
    const receiver = await startReceiver((response) =>
      response.writeHead(200, { 'Content-Encoding': 'gzip', 'Content-Length': bomb.length }).end(bomb),
    );
    const { id } = await system.client.webhooks.create({ url: receiver.url, events: ['*'] });
    const before = process.memoryUsage.rss();
    expect(await system.client.webhooks.test({ webhook_id: id })).toMatchObject({ delivered: true });
    expect(process.memoryUsage.rss() - before).toBeLessThan(32 * 1024 * 1024);
    expect(receiver.got[0]?.headers).not.toHaveProperty('accept-encoding');
  });

  test('resets the connection during its body has received its delivery; one that resets before its head has not', async () => {
    const system = await startWebhookSystem();
    const middle = await startReceiver((response) => {
      response.writeHead(200, { 'Content-Length': 1000 });
      response.write('some', () => response.destroy());
    });
    const before = await startReceiver((response) => response.destroy());
    const heads: [string, boolean][] = [
      [middle.url, true],
      [before.url, false],
    ];
    for (const [url, delivered] of heads) {
      const { id } = await system.client.webhooks.create({ url, events: ['*'] });
      expect((await system.client.webhooks.test({ webhook_id: id })).delivered).toBe(delivered);
    }
  });

  test('sends a head that never ends is disconnected at the limit', async () => {
    const system = await startWebhookSystem();
    const receiver = await startReceiver((response) => {
      response.socket?.write(`HTTP/1.1 200 OK\r\nX-Long: ${'x'.repeat(100_000)}`);
    });
    const { id } = await system.client.webhooks.create({ url: receiver.url, events: ['*'] });
    const result = await system.client.webhooks.test({ webhook_id: id });
    expect(result).toMatchObject({ delivered: false, status_code: null });
  });

  test.each([
    ['never answers', '', false],
    ['drips a byte of its head now and then', 'HTTP/1.1 200 OK\r\nX-Long: ', false],
    ['drips a byte of its body now and then', 'HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n', true],
  ])('%s holds an attempt up for 15 s in all', async (_what, beginning, delivered) => {
    const system = await startWebhookSystem();
    let [drips, ended] = [0, false];
    const receiver = await startReceiver(({ socket }) => {
      socket?.write(beginning);
      const timer = setInterval(() => {
        if (beginning) socket?.write('x');
        drips += 1;
      }, 5);
      socket?.once('close', () => clearInterval(timer));
    });
    const { id } = await system.client.webhooks.create({ url: receiver.url, events: ['*'] });
    const clock = fakeClock(Date.now());
    const result = system.client.webhooks.test({ webhook_id: id });
    void result.then(() => {
      ended = true;
    });
    await waitFor(() => expect(drips).toBeGreaterThan(20));
    await clock.advance(14_999);
    await waitFor(() => expect(drips).toBeGreaterThan(40));
    expect(ended).toBe(false);
    await clock.advance(1);
    expect(await result).toMatchObject({ delivered, duration: 15_000 });
  });

  test('hangs for a hundred webhooks delays no other receiver', async () => {
    const system = await startWebhookSystem();
    const dead = await startReceiver(() => {});
    const healthy = await startReceiver();
    await Promise.all(
      Array.from({ length: 100 }, (_, n) =>
        system.client.webhooks.create({ url: `${dead.url}&n=${n}`, events: ['*'] }),
      ),
    );
    for (let n = 0; n < 3; n += 1) await system.happen('machine.online', { n });
    await dead.heard(100);
    await system.client.webhooks.create({ url: healthy.url, events: ['*'] });
    const begun = performance.now();
    await system.happen('machine.offline');
    const [{ at }] = (await healthy.heard(1)) as [Received];
    expect(at - begun).toBeLessThan(2_000);
    // A receiver that does not answer gets one attempt at a time from each webhook.
    expect(dead.got).toHaveLength(100);
  });
});

test('a receiver that begins to fail gets one delivery at a time', async () => {
  const system = await startWebhookSystem({ flags: ['--webhook-retry', '1h'] });
  // The answers that the receiver holds back, and their number at each arrival.
  const held: ServerResponse[] = [];
  const open: number[] = [];
  let begins = false;
  const receiver = await startReceiver((response) => {
    open.push(held.push(response));
    if (begins) setTimeout(fail, 5);
  });
  const fail = (): void => void held.shift()?.writeHead(500).end();
  await system.client.webhooks.create({ url: receiver.url, events: ['*'] });
  await system.history.write((transaction) => {
    for (let n = 0; n < 100; n += 1) system.events.emit(transaction, 'machine.online', undefined, { n });
  });
  for (let answered = 0; answered < 40; answered += 1) {
    await receiver.heard(answered + 1);
    held.shift()?.end();
  }
  // With 40 answers the limit has grown to 16, so these are sent before any other answer.
  await receiver.heard(56);
  expect(held).toHaveLength(16);
  begins = true;
  while (held.length > 0) fail();
  await receiver.heard(100);
  expect(Math.max(...open)).toBe(16);
  expect(open.slice(56)).toEqual(Array.from({ length: 44 }, () => 1));
});

test('500 deliveries overdue at a start are sent at most 16 at once, and all arrive', async () => {
  const system = await startWebhookSystem({ flags: ['--webhook-retry', '1h'] });
  let open = 0;
  let most = 0;
  let ok = false;
  const receiver = await startReceiver((response) => {
    open += 1;
    most = Math.max(most, open);
    setTimeout(() => {
      open -= 1;
      response.statusCode = ok ? 200 : 500;
      response.end();
    }, 5);
  });
  const { id } = await system.client.webhooks.create({ url: receiver.url, events: ['*'] });
  await system.history.write((transaction) => {
    for (let n = 0; n < 500; n += 1) system.events.emit(transaction, 'machine.online', undefined, { n });
  });
  await receiver.heard(1);
  await system.broker.close();
  [ok, most] = [true, 0];
  const before = receiver.got.length;
  const { history } = await startWebhookSystem({ dataDir: system.dataDir, flags: ['--webhook-retry', '1h'] });
  const left = async () =>
    (await history.get('SELECT count(*) AS n FROM webhook_deliveries WHERE due_at <= ?', Date.now()))?.n;
  await waitFor(async () => expect(await left()).toBe(0), { interval: 50 });
  expect(receiver.got.length).toBeGreaterThan(before);
  // Leaves out deliveries that failed before the broker was closed, because they are retried only after an hour. All
  // others have arrived.
  const states = await history.all(
    `SELECT status, count(*) AS n FROM webhook_deliveries WHERE webhook_id = ? AND (tries = 0 OR status <> 'pending')
     GROUP BY status`,
    id,
  );
  expect(states.map((row) => row.status)).toEqual(['delivered']);
  expect(most).toBeLessThanOrEqual(16);
});

test('webhooks that have overdue deliveries at a start begin one after another', async () => {
  const system = await startWebhookSystem({ flags: ['--webhook-retry', '1h'] });
  const receiver = await startReceiver(answering(500));
  for (let n = 0; n < 80; n += 1) await system.client.webhooks.create({ url: receiver.url, events: ['*'] });
  await system.happen('machine.online');
  await receiver.heard(80);
  // Waits until all 80 failures are stored, and then makes all deliveries due in one step. A delivery that became due
  // earlier would be attempted again before the broker is closed.
  await waitFor(async () => {
    const failed = await system.history.all('SELECT id FROM webhook_deliveries WHERE tries = 1');
    expect(failed).toHaveLength(80);
  });
  await system.history.write((transaction) => transaction.run('UPDATE webhook_deliveries SET due_at = 1'));
  await system.broker.close();
  await startWebhookSystem({ dataDir: system.dataDir, flags: ['--webhook-retry', '1h'] });
  const got = await receiver.heard(160);
  // The broker starts the eighty queues at random times within 800 ms.
  expect(got[159]!.at - got[80]!.at).toBeGreaterThan(300);
});

test('a certificate that no authority has signed is a failure', async () => {
  const system = await startWebhookSystem({ tuning: { resolve: async () => ['127.0.0.1'] } });
  const authority = await loadAuthority(temporaryFolder('authority'), true);
  const leaf = await authority.leaf();
  let heard = 0;
  const names: string[] = [];
  const SNICallback = (name: string, give: (error: Error | null) => void): void => {
    names.push(name);
    give(null);
  };
  const server = createServer({ ...leaf, SNICallback }, (_request, response) => {
    heard += 1;
    response.end();
  });
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  onTestFinished(() => void server.close());
  const { port } = server.address() as AddressInfo;
  for (const host of ['127.0.0.1', 'secure.example']) {
    const { id } = await system.client.webhooks.create({ url: `https://${host}:${port}/`, events: ['*'] });
    const result = await system.client.webhooks.test({ webhook_id: id });
    expect(result).toMatchObject({
      delivered: false,
      status_code: null,
      error: expect.stringMatching(/CERT/),
    });
  }
  expect(heard).toBe(0);
  expect(names).toEqual(['secure.example']);
});

test('a thousand events to five webhooks all arrive, once each', async () => {
  const system = await startWebhookSystem();
  const receivers = await Promise.all(Array.from({ length: 5 }, () => startReceiver()));
  for (const { url } of receivers) await system.client.webhooks.create({ url, events: ['*'] });
  for (let n = 0; n < 100; n += 1) {
    await system.history.write((transaction) => {
      for (let m = 0; m < 10; m += 1) system.events.emit(transaction, 'machine.online', undefined, { n, m });
    });
  }
  for (const receiver of receivers) {
    const got = await receiver.heard(1000);
    expect(new Set(got.map(({ headers }) => headers['webhook-id'])).size).toBe(1000);
    expect(got).toHaveLength(1000);
  }
});
