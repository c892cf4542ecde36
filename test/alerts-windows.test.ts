// Maintenance windows, once or by cron, for machines and tags: an alert in a window is listed as held and sends no
// notification.
import { expect, test, vi } from 'vitest';
import type { History } from '../broker/history/history-database.ts';
import { looksInto, soon, startAlertSystem } from './alerts-fixture.ts';
import { refusalIn } from './all-routes.ts';
import { startFarhand } from './start-farhand.ts';

const minute = 60_000;

test.each([
  ['without an end', {}, 'ends_at'],
  ['with an end and a duration', { ends_at: '2099-01-01T00:00:00Z', duration: minute }, 'ends_at'],
  ['that ends before it starts', { ends_at: '2001-01-01T00:00:00Z' }, 'ends_at'],
  ['by cron without a duration', { cron: '@daily' }, 'duration'],
  [
    'by cron with a start',
    { cron: '@daily', duration: minute, starts_at: '2099-01-01T00:00:00Z' },
    'starts_at',
  ],
  ['by a wrong expression', { cron: '61 * * * *', duration: minute }, 'cron'],
  ['in a zone that does not exist', { cron: '@daily', duration: minute, timezone: 'Mars/Base' }, 'timezone'],
  ['once, in a zone that does not exist', { duration: minute, timezone: 'Mars/Base' }, 'timezone'],
  ['once, in a zone with a long name', { duration: minute, timezone: 'a'.repeat(65) }, 'timezone'],
])('a window %s is refused, and the answer names the field', async (_what, body, field) => {
  const { call } = await startAlertSystem();
  const answer = await call('POST', '/alerts/windows', { body: { name: 'x', ...body } });
  expect(refusalIn(answer)).toBe('422 validation_failed');
  expect(answer.body.error.details.issues[0].path).toBe(field);
});

test('an alert in a window is held and listed, and opens at the end of the window unless its condition has ended', async () => {
  const { client, rule, machine, clock, steps, alerts } = await startAlertSystem();
  const [one, other] = [await machine('web-1'), await machine('web-2')];
  await rule({ name: 'busy', kind: 'cpu', above: 50, for: 0 });
  const window = await client.maintenanceWindows.create({
    ...{ name: 'reboot', machine_ids: [one.id], duration: 10 * minute },
  });
  expect([window.active_until, window.next_start]).toEqual([window.ends_at, null]);
  const starts_at = new Date(Date.parse(window.created_at) + 60 * minute).toISOString();
  const planned = await client.maintenanceWindows.create({ name: 'later', starts_at, duration: minute });
  expect([planned.active_until, planned.next_start]).toEqual([null, starts_at]);
  const states = async () => (await alerts()).map(({ status, machine_id }) => [status, machine_id]);
  await one.report({ cpu: 60 });
  await expect.poll(states).toEqual([['held', one.id]]);
  expect((await alerts())[0]).toMatchObject({ window_id: window.id, opened_at: null });
  await other.report({ cpu: 60 });
  await expect.poll(steps).toEqual(['opened']);
  await one.report({ cpu: 1 });
  await expect.poll(states).toEqual([
    ['resolved', one.id],
    ['open', other.id],
  ]);
  expect(await steps()).toEqual(['opened']);
  await one.report({ cpu: 70 });
  for (let n = 0; n < 22; n += 1) {
    clock.leap(minute / 2);
    await Promise.all([one.report({ cpu: 70 }), other.report({ cpu: 70 })]);
  }
  await expect.poll(steps).toEqual(['opened', 'opened']);
  expect((await alerts()).map(({ status }) => status)).toEqual(['resolved', 'open', 'open']);
});

test('a window by cron and tag holds alerts back each time, and its removal opens them at once', async () => {
  const { client, rule, machine, steps, statuses } = await startAlertSystem();
  const one = await machine();
  await client.machines.update({ machine_id: one.id, tags: ['web'] });
  await rule({ name: 'busy', kind: 'cpu', above: 50, for: 0 });
  const past = await client.maintenanceWindows.create({
    name: 'past',
    tags: ['web'],
    cron: '0 0 29 2 *',
    duration: minute,
  });
  expect(past).toMatchObject({ active_until: null, next_start: expect.stringMatching(/-02-29T00:00:00/) });
  await client.maintenanceWindows.create({
    name: 'others',
    tags: ['db'],
    cron: '* * * * *',
    duration: minute,
  });
  const { id: window_id } = await client.maintenanceWindows.create({
    ...{ name: 'always', tags: ['web'], cron: '* * * * *', duration: 2 * minute },
  });
  await one.report({ cpu: 60 });
  await expect.poll(statuses).toEqual(['held']);
  await client.maintenanceWindows.remove({ window_id });
  await expect.poll(statuses).toEqual(['open']);
  expect(await steps()).toEqual(['opened']);
});

test('an open alert does not repeat in a window, and resolves as usual', async () => {
  const { client, rule, machine, clock, steps } = await startAlertSystem();
  const one = await machine();
  await rule({ name: 'busy', kind: 'cpu', above: 50, for: 0, repeat_every: minute });
  await one.report({ cpu: 60 });
  await expect.poll(steps).toEqual(['opened']);
  await client.maintenanceWindows.create({ name: 'now', duration: 10 * minute });
  for (let n = 0; n < 6; n += 1) {
    clock.leap(minute / 2);
    await one.report({ cpu: 60 });
  }
  await one.report({ cpu: 1 });
  await expect.poll(steps).toEqual(['opened', 'resolved']);
});

test('a limited key creates and removes only windows for its own machines', async () => {
  const { client, machine, keyed, call } = await startAlertSystem();
  const [mine, other] = [await machine('mine'), await machine('other')];
  const all = await client.maintenanceWindows.create({ name: 'all', duration: minute });
  const { key, client: limited } = await keyed(['machines:read', 'webhooks:write'], {
    machine_ids: [mine.id],
  });
  for (const body of [{}, { machine_ids: [other.id] }, { tags: ['web'] }]) {
    const answer = await call('POST', '/alerts/windows', {
      key,
      body: { name: 'x', duration: minute, ...body },
    });
    expect(refusalIn(answer)).toBe('403 forbidden');
  }
  const own = await limited.maintenanceWindows.create({
    name: 'x',
    duration: minute,
    machine_ids: [mine.id],
  });
  expect((await limited.maintenanceWindows.list()).items.map(({ id }) => id)).toEqual([own.id]);
  expect(refusalIn(await call('DELETE', `/alerts/windows/${all.id}`, { key }))).toBe('403 forbidden');
  expect(await limited.maintenanceWindows.remove({ window_id: own.id })).toEqual({ deleted: true });
});

test('after a restart, held alerts of machines that are back within a minute are not opened', async () => {
  const system = await startAlertSystem();
  const { client, rule, machine, clock, statuses, dataDir, grpc } = system;
  const one = await machine('web-1');
  for (let n = 0; n < 6; n += 1) {
    clock.leap(30_000);
    await one.report({});
  }
  await rule({ name: 'away', kind: 'offline', for: 0 });
  await client.maintenanceWindows.create({ name: 'reboot', duration: 600_000 });
  await one.leave();
  await expect.poll(statuses).toEqual(['held']);
  await system.broker.close();
  clock.leap(660_000);
  const flags = ['--grpc', grpc, '--webhook-allow', '127.0.0.0/8'];
  const again = await startFarhand({ dataDir, flags, tuning: { alerts: soon } });
  const { alerts, steps } = looksInto(again.client);
  await one.back(again.client);
  await expect.poll(async () => (await alerts())[0]?.status).toBe('resolved');
  expect(await steps()).toEqual([]);
});

test('a held alert whose end could not be stored opens at the end of the window if its condition has begun again', async () => {
  const stores: { history?: History } = {};
  const onStores = (given: object): void => void Object.assign(stores, given);
  const { client, rule, machine, clock, statuses } = await startAlertSystem({ tuning: { onStores } });
  const one = await machine();
  await rule({ name: 'busy', kind: 'cpu', above: 50, for: 0 });
  await client.maintenanceWindows.create({ name: 'reboot', duration: 10 * minute });
  await one.report({ cpu: 60 });
  await expect.poll(statuses).toEqual(['held']);
  const failing = vi
    .spyOn(stores.history as History, 'write')
    .mockRejectedValue(new Error('the disk is full'));
  await one.report({ cpu: 1 });
  await one.report({ cpu: 60 });
  failing.mockRestore();
  for (let n = 0; n < 22; n += 1) {
    clock.leap(minute / 2);
    await one.report({ cpu: 60 });
  }
  await expect.poll(statuses).toEqual(['open']);
});
