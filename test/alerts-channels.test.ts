// Alert channels: the body that each service documents, one message for many alerts, and what a channel never sends.
import { cpSync } from 'node:fs';
import { expect, test } from 'vitest';
import * as z from 'zod';
import type { State } from '../broker/state/index.ts';
import type { MachineId } from '../shared/api/shared-schemas.ts';
import { type AlertSystem, looksInto, soon, startAlertSystem } from './alerts-fixture.ts';
import { refusalIn } from './all-routes.ts';
import { startFarhand, temporaryFolder } from './start-farhand.ts';
import { answering, type Receiver, startReceiver } from './webhook-receivers.ts';

/** The body that each service documents for messages. No other fields are allowed. */
const documented = {
  // https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks
  slack: z.strictObject({ text: z.string().min(1).max(40_000) }),
  // https://discord.com/developers/docs/resources/webhook#execute-webhook
  discord: z.strictObject({
    content: z.string().min(1).max(2_000),
    allowed_mentions: z.strictObject({ parse: z.array(z.enum(['roles', 'users', 'everyone'])) }),
  }),
  // https://docs.ntfy.sh/publish/#publish-as-json
  ntfy: z.strictObject({
    topic: z.string().regex(/^[-_A-Za-z0-9]{1,64}$/),
    title: z.string(),
    message: z.string().refine((text) => Buffer.byteLength(text) <= 4_096),
    priority: z.int().min(1).max(5),
    tags: z.array(z.string()),
  }),
  webhook: z.strictObject({
    id: z.string().startsWith('evt_'),
    type: z.literal('alert.notified'),
    timestamp: z.iso.datetime(),
    data: z.looseObject({ counts: z.looseObject({}), alerts: z.array(z.looseObject({})) }),
  }),
};
type Type = keyof typeof documented;

const urlFor = (type: Type, { port }: Receiver): string =>
  `http://127.0.0.1:${port}/${type === 'ntfy' ? 'my-topic' : 'services/T000/XXXX'}`;

/** Returns the messages that a receiver got. Fails if one differs from the documented form of its service. */
const messages = (type: Type, { got }: Receiver): string[] =>
  got.map(({ body }) => {
    const parsed = documented[type].parse(JSON.parse(body.toString()));
    return JSON.stringify(parsed);
  });

/** Makes each of these machines report a value that opens an alert. */
async function burn(system: AlertSystem, names: string[]): Promise<void> {
  const machines = await Promise.all(names.map((name) => system.machine(name)));
  await system.rule({ name: 'busy', kind: 'cpu', above: 50, for: 0 });
  await Promise.all(machines.map((one) => one.report({ cpu: 60 })));
}

test.each(Object.keys(documented) as Type[])(
  'a channel of the type %s sends one alert and its end in the documented form; a test comes at once',
  async (type) => {
    const system = await startAlertSystem();
    const receiver = await startReceiver();
    const secret = type === 'ntfy' ? 'tk_secret' : type === 'webhook' ? 'of us both' : undefined;
    const { id: channel_id, ...channel } = await system.client.alertChannels.create({
      ...{ name: 'ops', type, url: urlFor(type, receiver), ...(secret && { secret }) },
    });
    expect(JSON.stringify(channel)).not.toMatch(/tk_secret|of us both/);
    expect(channel.url.includes('XXXX')).toBe(type === 'webhook');
    expect(await system.client.alertChannels.test({ channel_id })).toMatchObject({ delivered: true });
    expect(receiver.got.splice(0)).toHaveLength(1);
    const one = await system.machine('<!channel> & @everyone');
    await system.rule({ name: 'busy', kind: 'cpu', above: 50, for: 0 });
    await one.report({ cpu: 60 });
    const [opened] = await receiver.heard(1);
    await one.report({ cpu: 1 });
    await receiver.heard(2);
    const [first, second] = messages(type, receiver);
    if (type === 'webhook') {
      expect(opened?.headers['x-service-signature']).toMatch(/^sha256=/);
      expect([first, second]).toEqual([
        expect.stringContaining('"step":"opened"'),
        expect.stringContaining('"step":"resolved"'),
      ]);
    } else {
      expect([first, second]).toEqual([
        expect.stringContaining('Alert: CPU'),
        expect.stringContaining('Resolved: CPU'),
      ]);
      expect(first?.includes('<!channel>')).toBe(type === 'ntfy');
    }
    expect(opened?.headers.authorization).toBe(type === 'ntfy' ? 'Bearer tk_secret' : undefined);
    const sent = async () =>
      (await system.client.alertChannels.deliveries({ channel_id })).items.map((one) => [
        one.status,
        one.type,
      ]);
    await expect.poll(sent).toEqual([
      ['delivered', 'alert.notified'],
      ['delivered', 'alert.notified'],
    ]);
  },
);

test.each([
  ['slack without http', { type: 'slack', url: 'smtp://example.org' }, 'url'],
  ['e-mail over http', { type: 'email', url: 'https://example.org/' }, 'url'],
  ['e-mail without a sender', { type: 'email', url: 'smtps://example.org' }, 'from'],
  [
    'a user without a password',
    { type: 'email', url: 'smtps://example.org', from: 'a@b.org', to: ['a@b.org'], user: 'me' },
    'secret',
  ],
  ['ntfy without a topic', { type: 'ntfy', url: 'https://ntfy.sh/' }, 'url'],
  ['a secret for slack', { type: 'slack', url: 'https://example.org/x', secret: 'x' }, 'secret'],
  ['an internal address', { type: 'webhook', url: 'http://10.0.0.1/' }, 'url'],
  [
    'a mail server at an internal address',
    { type: 'email', url: 'smtp://10.0.0.1', from: 'a@b.org', to: ['a@b.org'] },
    'url',
  ],
  ['a name in the URL', { type: 'webhook', url: 'https://me:word@example.org/' }, 'url'],
])('a channel with %s is refused, and the answer names the field', async (_what, body, field) => {
  const { call } = await startAlertSystem();
  const answer = await call('POST', '/alerts/channels', { body: { name: 'x', ...body } });
  expect(refusalIn(answer)).toBe('422 validation_failed');
  expect(answer.body.error.details.issues[0].path).toBe(field);
});

test('a token is not sent to another server: a url of another server needs the token again, or its removal', async () => {
  const { client, call } = await startAlertSystem();
  const { id: channel_id } = await client.alertChannels.create({
    ...{ name: 'phone', type: 'ntfy', url: 'https://ntfy.sh/topic', secret: 'tk_1' },
  });
  const path = `/alerts/channels/${channel_id}`;
  for (const url of ['https://evil.example.org/topic', 'http://ntfy.sh/topic']) {
    const answer = await call('PATCH', path, { body: { url } });
    expect([refusalIn(answer), answer.body.error.details.issues[0].path]).toEqual([
      '422 validation_failed',
      'secret',
    ]);
  }
  expect((await call('PATCH', path, { body: { url: 'https://ntfy.sh/other' } })).status).toBe(200);
  expect(
    (await call('PATCH', path, { body: { url: 'https://ntfy.example.org/t', secret: null } })).status,
  ).toBe(200);
});

test('thirty alerts at once are one message with their number; a rule can name its channels', async () => {
  const system = await startAlertSystem({ tuning: { alerts: { quietMs: 500, longestMs: 20_000 } } });
  const [all, some] = [await startReceiver(), await startReceiver()];
  const channel = (receiver: Receiver, name: string) =>
    system.client.alertChannels.create({ name, type: 'slack', url: urlFor('slack', receiver) });
  await channel(all, 'all');
  const { id } = await channel(some, 'some');
  const names = Array.from({ length: 30 }, (_, n) => `web-${n}`);
  await burn(system, names);
  await all.heard(1);
  const [text = ''] = messages('slack', all);
  expect(text).toContain('Alerts: 30 opened');
  expect(text).toContain('and 10 more');
  await some.heard(1);
  const { items } = await system.client.alertRules.list();
  const [rule] = items;
  await system.client.alertRules.update({ rule_id: rule?.id ?? '', channel_ids: [id] });
  await system.client.alertRules.update({ rule_id: rule?.id ?? '', enabled: false });
  await some.heard(2);
  expect(messages('slack', some)[1]).toContain('30 resolved');
  expect([all.got.length, some.got.length]).toEqual([1, 2]);
});

test('a channel that rules name is not deleted: the answer lists the rules, until they name other channels', async () => {
  const { client, call, rule } = await startAlertSystem();
  const channel = async (name: string): Promise<string> =>
    (await client.alertChannels.create({ name, type: 'slack', url: 'https://example.org/x' })).id;
  const [first, second] = [await channel('first'), await channel('second')];
  const both = await rule({ name: 'both', kind: 'offline', channel_ids: [first, second] });
  const only = await rule({ name: 'only', kind: 'offline', channel_ids: [first] });
  await rule({ name: 'all', kind: 'offline' });
  const answer = await call('DELETE', `/alerts/channels/${first}`);
  expect(refusalIn(answer)).toBe('409 conflict');
  expect(answer.body.error.message).toContain('2 alert rules name this channel: change or delete');
  expect(answer.body.error.details.rules.toSorted()).toEqual([both.id, only.id].toSorted());
  await client.alertRules.update({ rule_id: both.id, channel_ids: [second] });
  await client.alertRules.remove({ rule_id: only.id });
  expect(await client.alertChannels.remove({ channel_id: first })).toEqual({ deleted: true });
});

test('the events about the alert of a removed machine have its name', async () => {
  const system = await startAlertSystem();
  const receiver = await startReceiver();
  await system.client.alertChannels.create({ name: 'ops', type: 'slack', url: urlFor('slack', receiver) });
  await burn(system, ['web-1']);
  await receiver.heard(1);
  const [machine] = (await system.client.machines.list()).items;
  await system.client.machines.remove({ machine_id: machine?.id ?? '' });
  await receiver.heard(2);
  const { items } = await system.client.events.list({ machine_id: machine?.id ?? '', sort: 'created_at' });
  const named = items.filter(({ type }) => type.startsWith('alert.'));
  expect(named.map(({ type, data }) => [type, data.machine_name])).toEqual(
    ['opened', 'notified', 'resolved', 'notified'].map((step) => [`alert.${step}`, 'web-1']),
  );
  const [alert] = await system.alerts();
  expect(alert).not.toHaveProperty('machine_name');
});

test('the steps of a deleted rule go only to its channels, also if it is deleted before they are sent or while its alert cannot be resolved', async () => {
  const system = await startAlertSystem({ tuning: { alerts: { quietMs: 3_000, longestMs: 20_000 } } });
  const [all, some] = [await startReceiver(), await startReceiver()];
  const channel = async (receiver: Receiver, name: string): Promise<string> =>
    (await system.client.alertChannels.create({ name, type: 'slack', url: urlFor('slack', receiver) })).id;
  await channel(all, 'all');
  const channel_ids = [await channel(some, 'some')];
  const rule = { kind: 'cpu' as const, above: 50, for: 0, channel_ids };
  const one = await system.machine();
  const { id: rule_id } = await system.rule({ name: 'first', ...rule });
  await one.report({ cpu: 60 });
  await expect.poll(system.statuses).toEqual(['open']);
  await system.client.alertRules.remove({ rule_id });
  await expect.poll(system.statuses).toEqual(['resolved']);
  system.clock.leap(3_000);
  await some.heard(1);
  expect(messages('slack', some)[0]).toContain('Alerts: 1 opened, 1 resolved');
  const { id: second } = await system.rule({ name: 'second', ...rule });
  await expect.poll(system.statuses).toEqual(['resolved', 'open']);
  system.clock.leap(3_000);
  await some.heard(2);
  await system.broker.close();
  const onStores = ({ state }: { state: State }): void => {
    void state.change((transaction) => transaction.remove('alert_rules', second));
  };
  const flags = ['--webhook-allow', '127.0.0.0/8', '--grpc', system.grpc];
  const tuning = { onStores, alerts: soon };
  const again = await startFarhand({ dataDir: system.dataDir, flags, tuning });
  await some.heard(3);
  expect(messages('slack', some)[2]).toContain('Resolved: CPU usage');
  await one.back(again.client);
  await again.client.alertRules.create({ ...rule, name: 'third', channel_ids: null });
  await all.heard(1);
  expect(messages('slack', all)).toEqual([expect.stringContaining('Rule: third')]);
});

test('a thousand machines that are offline at once are one message, and a restart of the broker sends none', async () => {
  let declared: State | undefined;
  const onStores = ({ state }: { state: State }): void => {
    declared = state;
  };
  const times = { quietMs: 1_000, longestMs: 60_000 };
  const system = await startAlertSystem({ tuning: { onStores, alerts: times } });
  const receiver = await startReceiver();
  await system.client.alertChannels.create({ name: 'ops', type: 'slack', url: urlFor('slack', receiver) });
  const machines = Array.from({ length: 1_000 }, (_, n) => ({
    ...{
      id: `mach_${n}` as MachineId,
      name: `web-${n}`,
      tags: [],
      public_key: '',
      join_token_id: 'join_x' as never,
    },
    created_at: new Date().toISOString(),
  }));
  await declared?.change((transaction) => {
    for (const machine of machines) transaction.put('machines', machine);
  });
  await system.rule({ name: 'away', kind: 'offline' });
  system.clock.leap(5 * 60_000);
  expect(await system.steps()).toEqual([]);
  system.clock.leap(70_000);
  await receiver.heard(1);
  expect(messages('slack', receiver)[0]).toContain('Alerts: 1,000 opened');
  await system.broker.close();
  const again = await startFarhand({
    ...{ dataDir: system.dataDir, flags: ['--webhook-allow', '127.0.0.0/8'], tuning: { alerts: times } },
  });
  system.clock.leap(10 * 60_000);
  const { total } = await again.client.events.list({ type: 'alert.opened' });
  expect([total, receiver.got.length]).toEqual([1_000, 1]);
});

test('a channel of a limited key sends only alerts about its machines; revoking the key lists and disables the channel', async () => {
  const system = await startAlertSystem();
  const receiver = await startReceiver();
  const [mine, other] = [await system.machine('mine'), await system.machine('other')];
  const { client } = await system.keyed(['machines:read', 'webhooks:read', 'webhooks:write'], {
    machine_ids: [mine.id],
  });
  const { id: channel_id } = await client.alertChannels.create({
    ...{ name: 'ops', type: 'slack', url: urlFor('slack', receiver) },
  });
  await system.rule({ name: 'busy', kind: 'cpu', above: 50, for: 0 });
  for (const one of [other, mine]) await one.report({ cpu: 60 });
  await receiver.heard(1);
  const [text = ''] = messages('slack', receiver);
  expect([text.includes('mine'), text.includes('other')]).toEqual([true, false]);
  const { items } = await system.client.keys.list({ name: 'limited' });
  const { alert_channels } = await system.client.keys.remove({ key_id: items[0]?.id ?? '' });
  expect(alert_channels).toEqual([channel_id]);
  expect(await system.client.alertChannels.get({ channel_id })).toMatchObject({
    disabled_reason: 'key_revoked',
  });
});

test('a channel whose service fails is tried again and stays enabled', async () => {
  const system = await startAlertSystem();
  const receiver = await startReceiver(answering(500, 429, 204));
  const { id: channel_id } = await system.client.alertChannels.create({
    ...{ name: 'chat', type: 'discord', url: urlFor('discord', receiver) },
  });
  await burn(system, ['web-1']);
  await receiver.heard(3);
  await expect
    .poll(async () =>
      (await system.client.alertChannels.deliveries({ channel_id })).items.map(({ status }) => status),
    )
    .toEqual(['delivered']);
  expect((await system.client.alertChannels.get({ channel_id })).enabled).toBe(true);
});

test('a broker killed between an alert and its message sends the message once after its next start', async () => {
  const system = await startAlertSystem({ tuning: { alerts: { quietMs: 3_600_000, longestMs: 3_600_000 } } });
  const receiver = await startReceiver();
  await system.client.alertChannels.create({ name: 'ops', type: 'slack', url: urlFor('slack', receiver) });
  await burn(system, ['web-1']);
  await expect.poll(system.statuses).toEqual(['open']);
  // A copy of the data directory at this moment has what kill -9 would leave.
  const dataDir = temporaryFolder('killed');
  cpSync(system.dataDir, dataDir, { recursive: true, filter: (path) => !path.endsWith('.sock') });
  await system.broker.close();
  expect(receiver.got).toEqual([]);
  const flags = ['--webhook-allow', '127.0.0.0/8'];
  const again = await startFarhand({ dataDir, flags, tuning: { alerts: soon } });
  await receiver.heard(1);
  expect(await looksInto(again.client).steps()).toEqual(['opened']);
  await again.broker.close();
  const third = await startFarhand({ dataDir, flags, tuning: { alerts: soon } });
  expect(await looksInto(third.client).steps()).toEqual(['opened']);
  expect(messages('slack', receiver)).toEqual([expect.stringContaining('Alert: CPU usage of web-1')]);
});

test('after a downtime of the broker one message reports its start and the machines that did not come back, instead of an alert for each', async () => {
  const system = await startAlertSystem();
  const receiver = await startReceiver();
  await system.client.alertChannels.create({ name: 'ops', type: 'slack', url: urlFor('slack', receiver) });
  await system.rule({ name: 'away', kind: 'offline' });
  const machines = await Promise.all(Array.from({ length: 20 }, (_, n) => system.machine(`web-${n}`)));
  await system.broker.close();
  for (const { agent } of machines) agent.close();
  system.clock.leap(10 * 60_000);
  const flags = ['--webhook-allow', '127.0.0.0/8', '--grpc', system.grpc];
  const again = await startFarhand({
    dataDir: system.dataDir,
    flags,
    tuning: { alerts: { ...soon, startMs: 5_000 } },
  });
  for (const one of machines.slice(1)) await one.back(again.client);
  system.clock.leap(5_000);
  await receiver.heard(1);
  const [text = ''] = messages('slack', receiver);
  expect(text).toContain('The broker was down');
  expect(text).toContain('Machines that have not linked to the broker again: web-0');
  expect(text).not.toContain('web-1');
  expect(await looksInto(again.client).steps()).toEqual([]);
});
