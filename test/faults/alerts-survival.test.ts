// Alerts of a broker that is killed after each step. Each step of an alert has exactly one event, for every kind of
// rule.
import { cpSync } from 'node:fs';
import { expect, test } from 'vitest';
import { type AlertSystem, looksInto, soon, startAlertSystem } from '../alerts-fixture.ts';
import { startFarhand, type TestSystem, temporaryFolder } from '../start-farhand.ts';

const minute = 60_000;

/** Starts a broker on a copy of another broker's data directory. The copy has what kill -9 would leave. */
async function afterKill(system: Pick<TestSystem, 'broker' | 'dataDir' | 'grpc'>): Promise<TestSystem> {
  const dataDir = temporaryFolder('killed');
  cpSync(system.dataDir, dataDir, { recursive: true, filter: (path) => !path.endsWith('.sock') });
  await system.broker.close();
  return startFarhand({
    ...{
      dataDir,
      flags: ['--grpc', system.grpc, '--webhook-allow', '127.0.0.0/8'],
      tuning: { alerts: soon },
    },
  });
}

/** A system with an alert of each kind. */
async function everyKind(): Promise<AlertSystem> {
  const system = await startAlertSystem();
  const { client, rule, machine, clock, agent, statuses } = system;
  const away = await machine('away');
  await away.leave();
  clock.leap(6 * minute);
  const one = await machine('web-1', { agent_version: '0.1.0' });
  const { machineId: machine_id } = await agent({ name: 'db-1' });
  const { id: schedule_id } = await client.schedules.create({
    ...{ machine_id, name: 'backup', command: 'false', cron: '@yearly' },
  });
  await client.schedules.run({ schedule_id });
  const expires_at = new Date(Date.now() + 24 * 60 * minute).toISOString();
  await client.keys.create({ name: 'deploy', scopes: ['files:read'], expires_at });
  const machine_ids = [one.id];
  for (const kind of ['cpu', 'memory', 'disk', 'load'] as const)
    await rule({ name: kind, kind, above: 50, for: 0, machine_ids });
  await rule({ name: 'away', kind: 'offline', machine_ids: [away.id] });
  await rule({ name: 'old', kind: 'agent_outdated', machine_ids });
  await rule({ name: 'jobs', kind: 'schedule' });
  await rule({ name: 'keys', kind: 'key' });
  await one.report({ cpu: 60, memory: 60, disk: 60, load: 60 });
  await expect.poll(async () => (await statuses()).length).toBe(8);
  return system;
}

test('an alert of every kind is open after kill -9, and nothing is sent or recorded a second time', async () => {
  const system = await everyKind();
  const before = await system.alerts();
  const again = await afterKill(system);
  const { alerts, steps } = looksInto(again.client);
  system.clock.leap(2 * minute);
  expect(await alerts()).toEqual(before);
  expect(new Set(before.map(({ kind }) => kind)).size).toBe(8);
  expect(await steps()).toEqual(Array(8).fill('opened'));
});

test('killed after each step of one alert, the broker writes each step once', async () => {
  const first = await startAlertSystem();
  const one = await first.machine();
  await first.rule({ name: 'busy', kind: 'cpu', above: 50, for: 0, repeat_every: 10 * minute });
  await one.report({ cpu: 60 });
  await expect.poll(first.statuses).toEqual(['open']);
  const second = await afterKill(first);
  await one.back(second.client);
  const seen = looksInto(second.client);
  expect(await seen.steps()).toEqual(['opened']);
  // The alert is repeated although the machine sends no new report.
  first.clock.leap(11 * minute);
  await expect.poll(seen.steps).toEqual(['opened', 'repeated']);
  const third = await afterKill(second);
  const { items } = await third.client.alerts.list();
  const alert_id = items[0]?.id ?? '';
  expect(await looksInto(third.client).steps()).toEqual(['opened', 'repeated']);
  await third.client.alerts.acknowledge({ alert_id, acknowledged: true });
  const fourth = await afterKill(third);
  await one.back(fourth.client);
  first.clock.leap(20_000);
  expect(await looksInto(fourth.client).steps()).toEqual(['opened', 'repeated', 'acknowledged']);
  await fourth.client.alertRules.remove({ rule_id: items[0]?.rule_id ?? '' });
  const all = ['opened', 'repeated', 'acknowledged', 'resolved'];
  await expect.poll(looksInto(fourth.client).steps).toEqual(all);
  const fifth = await afterKill(fourth);
  expect(await looksInto(fifth.client).steps()).toEqual(all);
  expect((await fifth.client.alerts.get({ alert_id })).status).toBe('resolved');
});
