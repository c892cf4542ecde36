// Every kind of rule under kill -9: a broker in a process of its own is killed at each step of its alerts. Each step has
// one event, and is in one notification.
//
// | kind           | opens, resolves, does nothing at the limit  | by machine, by tag, killed at each step |
// |----------------|---------------------------------------------|-----------------------------------------|
// | offline        | test/alerts.test.ts and here                | here                                    |
// | cpu            | test/alerts.test.ts and here                | here                                    |
// | memory         | test/alerts.test.ts and here                | here                                    |
// | disk           | test/alerts.test.ts and here                | here                                    |
// | load           | test/alerts.test.ts and here                | here                                    |
// | schedule       | failed: test/alerts.test.ts and here; did not run: here | here                        |
// | agent_outdated | test/alerts.test.ts and here                | here                                    |
// | key            | test/alerts.test.ts and here                | here; a rule about keys has no machines |
// | certificate    | here                                        | here; it has no machines either         |
//
// test/postgres/alerts-of-several-brokers.test.ts tests the alerts of several brokers.
import { KeyObject, webcrypto } from 'node:crypto';
import { renameSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import 'reflect-metadata';
import { X509CertificateGenerator } from '@peculiar/x509';
import { expect, test } from 'vitest';
import { withBroker } from '../../broker/cli/connect-to-broker.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { version } from '../../shared/version.ts';
import { type AlertMachine, machineOf, notifiedSteps, recordedSteps } from '../alerts-fixture.ts';
import { leapingClock } from '../commands-fixture.ts';
import { type KillableBroker, prepareBroker } from '../killable-broker.ts';
import { startFarhand, temporaryFolder } from '../start-farhand.ts';
import { program } from '../start-processes.ts';
import { startReceiver } from '../webhook-receivers.ts';

const minute = 60_000;
const hour = 60 * minute;
const day = 24 * hour;
/** These times are so long that no notification is made before the test kills the broker. */
const never = { quietMs: 300 * day, longestMs: 300 * day, startMs: 0, downMs: 300 * day };
const soon = { ...never, quietMs: 300, longestMs: 3_000 };
const waiting = { timeout: 20_000, interval: 50 };

/** Writes a certificate for localhost and its key. A running broker reads them again. */
async function writeCertificate(folder: string, validMs: number) {
  const algorithm = { name: 'ECDSA', namedCurve: 'P-256', hash: 'SHA-256' };
  const keys = await webcrypto.subtle.generateKey(algorithm, true, ['sign', 'verify']);
  const notAfter = new Date(Date.now() + validMs);
  const made = await X509CertificateGenerator.createSelfSigned({
    ...{ name: 'CN=localhost', keys, signingAlgorithm: algorithm, notAfter },
  });
  const texts = {
    cert: made.toString('pem'),
    key: KeyObject.from(keys.privateKey).export({ format: 'pem', type: 'pkcs8' }),
  };
  for (const [name, text] of Object.entries(texts)) {
    writeFileSync(join(folder, `${name}.new`), text, { mode: 0o600 });
    renameSync(join(folder, `${name}.new`), join(folder, name));
  }
}

/**
 * A receiver that answers no request while `hangs` is true. `steps` counts the steps in the notifications that it got.
 */
async function startNotified() {
  const state = { hangs: true };
  const receiver = await startReceiver((response) => {
    if (!state.hangs) response.end();
  });
  return Object.assign(state, { receiver, steps: () => notifiedSteps(receiver, 'name') });
}

/** Creates a rule for each kind and for each way to choose machines. Resolves with the names of the rules. */
async function createRules(client: Farhand, machines: Record<string, string>): Promise<string[]> {
  const repeat_every = 10 * minute;
  const names: string[] = [];
  const measured = { above: 90, recover: 80, for: 2 * minute };
  const rules = {
    offline: ['away', { for: 2 * minute }],
    cpu: ['busy', measured],
    memory: ['busy', measured],
    disk: ['busy', measured],
    load: ['busy', measured],
    schedule: ['jobs', {}],
    agent_outdated: ['old', {}],
  } as const;
  const create = async (name: string, rule: Omit<Parameters<typeof client.alertRules.create>[0], 'name'>) => {
    names.push(name);
    await client.alertRules.create({ name, repeat_every, ...rule });
  };
  for (const [kind, [machine, fields]] of Object.entries(rules) as [keyof typeof rules, [string, object]][]) {
    await create(`${kind} by machine`, { kind, ...fields, machine_ids: [machines[machine] ?? ''] });
    await create(`${kind} by tag`, { kind, ...fields, tags: [machine] });
  }
  for (const kind of ['key', 'certificate'] as const) await create(kind, { kind, before: 14 * day });
  return names;
}

/** Starts a real agent in a separate process. Resolves with the id of its machine. */
async function startAgentProcess(broker: KillableBroker, name: string): Promise<string> {
  const flags = ['--broker', broker.grpc, '--data-dir', temporaryFolder('agent'), '--name', name];
  await program('agent/main.ts', [...flags, '--join-token', await broker.joinToken()]).line('linked');
  const { items } = await broker.client.machines.list({ name });
  return items[0]?.id ?? '';
}

async function prepare() {
  const folder = temporaryFolder('certificate');
  await writeCertificate(folder, 14 * day + 10 * hour);
  const tls = ['--tls-cert', join(folder, 'cert'), '--tls-key', join(folder, 'key')];
  const flags = [...tls, '--webhook-allow', '127.0.0.0/8', '--webhook-retry', '50ms'];
  const broker = await prepareBroker({ flags });
  await broker.start(never);
  const { client } = broker;
  const notified = await startNotified();
  await client.alertChannels.create({ name: 'hook', type: 'webhook', url: notified.receiver.url });
  const hello = { agent_version: version };
  const busy = await machineOf(broker, 'busy');
  const away = await machineOf(broker, 'away');
  const old = await machineOf(broker, 'old', hello);
  const jobs = await startAgentProcess(broker, 'jobs');
  const ids = { busy: busy.id, away: away.id, old: old.id, jobs };
  for (const [tag, machine_id] of Object.entries(ids))
    await client.machines.update({ machine_id, tags: [tag] });
  const rules = await createRules(client, ids);
  const { id: key_id } = await client.keys.create({
    ...{ name: 'deploy', scopes: ['files:read'] },
    expires_at: new Date(Date.now() + 14 * day + 10 * hour).toISOString(),
  });
  return { ...{ broker, client, notified, hello, busy, away, old, jobs, rules, key_id, folder } };
}

const values = (value: number) => ({ cpu: value, memory: value, disk: value, load: value });

/** Moves the clock in small steps. Meanwhile these machines report this value. */
async function pass(
  broker: KillableBroker,
  ms: number,
  value: number,
  ...machines: AlertMachine[]
): Promise<void> {
  for (let left = ms; left > 0; left -= 20_000) {
    await broker.leap(Math.min(20_000, left));
    for (const machine of machines) await machine.report(values(value));
  }
}

test('killed at each step, a broker opens, repeats and resolves each alert once, and sends each step once', async () => {
  const { broker, client, notified, hello, busy, away, old, jobs, rules, key_id, folder } = await prepare();
  const all = (steps: Record<string, number>) =>
    Object.fromEntries(
      // A rule about schedules has two alerts, one for each schedule. Every other rule has one alert.
      rules.map((name) => [
        name,
        Object.fromEntries(
          Object.entries(steps).map(([step, n]) => [step, name.startsWith('schedule') ? 2 * n : n]),
        ),
      ]),
    );
  const events = () => recordedSteps(client, 'name');
  // The real agent may wait up to 30 s before its next attempt to link.
  const online = (machine_id: string) =>
    expect
      .poll(async () => (await client.machines.get({ machine_id })).status, { timeout: 60_000 })
      .toBe('online');
  const ran = async (schedule_id: string, count: number) => {
    const ended = async () =>
      (await client.schedules.history({ schedule_id })).items.filter(({ status }) => status !== 'running');
    await expect.poll(async () => (await ended()).length, waiting).toBe(count);
  };
  const due = new Date(Date.now() + 6 * hour);
  const cron = `${due.getUTCMinutes()} ${due.getUTCHours()} ${due.getUTCDate()} ${due.getUTCMonth() + 1} *`;
  const missed = await client.schedules.create({ machine_id: jobs, name: 'missed', command: 'true', cron });
  const failing = await client.schedules.create({
    ...{ machine_id: jobs, name: 'failing', command: 'sleep 60', cron: '0 0 29 2 *' },
  });

  // None of these opens an alert: a value equal to the limit of 90, an absence shorter than two minutes, an agent with
  // the same version as the broker, and a cancelled run.
  await pass(broker, 3 * minute, 90, busy, away);
  await away.leave();
  await pass(broker, minute, 90, busy);
  await away.back();
  await old.back();
  await online(jobs);
  const { command_id } = await client.schedules.run({ schedule_id: failing.id });
  await client.commands.cancel({ command_id });
  await ran(failing.id, 1);
  expect(await events()).toEqual({});

  // Kills the broker when conditions have begun, but no alert is open: high values, an absence, a run that will fail.
  await pass(broker, minute, 91, busy);
  await away.leave();
  await online(jobs);
  await client.schedules.update({ schedule_id: failing.id, command: 'sleep 1; exit 3' });
  await client.schedules.run({ schedule_id: failing.id });
  expect(await events()).toEqual({});
  await broker.kill();
  hello.agent_version = '0.1.0';
  await broker.start(never, 12 * hour);
  for (const machine of [busy, old]) await machine.back();
  await pass(broker, 4 * minute, 91, busy);
  await expect.poll(events, waiting).toEqual(all({ opened: 1 }));

  // Kills the broker between the alerts and their notification, and again while the notification is being sent.
  await broker.kill();
  expect(notified.receiver.got).toEqual([]);
  await broker.start(soon);
  await notified.receiver.heard(1);
  await broker.kill();
  notified.hangs = false;
  await broker.start(soon);
  const { items: channels } = await client.alertChannels.list();
  const channel_id = channels[0]?.id ?? '';
  const unsent = async () =>
    (await client.alertChannels.deliveries({ channel_id })).items.filter(
      ({ status }) => status !== 'delivered',
    );
  await expect.poll(async () => (await unsent()).length, waiting).toBe(0);
  expect(notified.steps()).toEqual(all({ opened: 1 }));

  // Kills the broker after the notification. Values above 80 (`recover`) resolve no alert, and neither does another
  // failed run.
  await broker.kill();
  await broker.start(never);
  for (const machine of [busy, old]) await machine.back();
  await online(jobs);
  await client.schedules.run({ schedule_id: failing.id });
  await ran(failing.id, 3);
  for (const value of [85, 91, 90, 80.01]) await busy.report(values(value));
  expect(await events()).toEqual(all({ opened: 1 }));
  await pass(broker, 11 * minute, 85, busy);
  await expect.poll(events, waiting).toEqual(all({ opened: 1, repeated: 1 }));

  // Kills the broker three times: before the repeated alerts are notified, after their notification, and after the
  // alerts are acknowledged.
  await broker.kill();
  await broker.start(soon);
  await expect.poll(notified.steps, waiting).toEqual(all({ opened: 1, repeated: 1 }));
  await broker.kill();
  await broker.start(never);
  for (const { id: alert_id } of (await client.alerts.list({ limit: 100 })).items)
    await client.alerts.acknowledge({ alert_id, acknowledged: true });
  await broker.kill();

  // The causes of some alerts end while the broker is down, and the others later.
  await writeCertificate(folder, 60 * day);
  hello.agent_version = version;
  await broker.start(never);
  for (const machine of [busy, away, old]) await machine.back();
  await busy.report(values(80));
  await client.keys.update({ key_id, expires_at: new Date(Date.now() + 60 * day).toISOString() });
  await online(jobs);
  await client.schedules.update({ schedule_id: failing.id, command: 'true' });
  for (const { id: schedule_id } of [missed, failing]) await client.schedules.run({ schedule_id });
  const steps = { opened: 1, repeated: 1, acknowledged: 1, resolved: 1 };
  await expect.poll(events, waiting).toEqual(all(steps));

  // Kills the broker twice: before the resolved alerts are notified, and after their notification.
  await broker.kill();
  await broker.start(soon);
  await expect.poll(notified.steps, waiting).toEqual(all({ opened: 1, repeated: 1, resolved: 1 }));
  await broker.kill();
  await broker.start(soon);
  for (const machine of [busy, away, old]) await machine.back();
  await pass(broker, 3 * minute, 80, busy, away);
  await expect.poll(async () => (await unsent()).length, waiting).toBe(0);
  expect(await events()).toEqual(all(steps));
  expect(notified.steps()).toEqual(all({ opened: 1, repeated: 1, resolved: 1 }));
  const { items } = await client.alerts.list({ limit: 100 });
  expect(items.map(({ status }) => status)).toEqual(Array(rules.length + 2).fill('resolved'));
}, 240_000);

test('rules about a certificate that cannot be read are evaluated again every 5 s, once each time', async () => {
  const clock = leapingClock();
  const folder = temporaryFolder('certificate');
  await writeCertificate(folder, 60 * day);
  const flags = ['--tls-cert', join(folder, 'cert'), '--tls-key', join(folder, 'key')];
  const { dataDir, log } = await startFarhand({ flags });
  await withBroker({ dataDir, url: undefined, apiKey: undefined }, async ({ alertRules }) => {
    for (const name of ['soon', 'very soon']) await alertRules.create({ name, kind: 'certificate' });
  });
  rmSync(join(folder, 'cert'));
  const failures = () => log.filter((line) => line.includes('alert rules could not be evaluated')).length;
  clock.leap(hour);
  for (let round = 1; round <= 10; round += 1) {
    await expect.poll(failures, { interval: 5 }).toBeGreaterThanOrEqual(round);
    clock.leap(5_000);
  }
  expect(failures()).toBeLessThanOrEqual(11);
});
