// Alerts, from a rule that is created over HTTP to the event of each step: every kind of rule, values at the limit, and
// what ends an alert.
import { expect, test } from 'vitest';
import { type AlertMachine, type AlertSystem, looksInto, soon, startAlertSystem } from './alerts-fixture.ts';
import { refusalIn } from './all-routes.ts';
import { gate } from './commands-fixture.ts';
import { startFarhand } from './start-farhand.ts';

const minute = 60_000;

test.each([
  ['cpu without a value', { kind: 'cpu' }, 'above'],
  ['a value for the kind offline', { kind: 'offline', above: 5 }, 'above'],
  ['100 percent', { kind: 'disk', above: 100 }, 'above'],
  ['a value to recover that is above the limit', { kind: 'cpu', above: 50, recover: 51 }, 'recover'],
  ['tags for the kind key', { kind: 'key', tags: ['web'] }, 'tags'],
  ['a mount point for the kind cpu', { kind: 'cpu', above: 50, mount: '/srv' }, 'mount'],
  ['a relative mount point', { kind: 'disk', above: 50, mount: 'srv' }, 'mount'],
  ['a slash at the end of a mount point', { kind: 'disk', above: 50, mount: '/srv/' }, 'mount'],
  ['a duration for the kind schedule', { kind: 'schedule', for: 1 }, 'for'],
  ['an expiry for the kind cpu', { kind: 'cpu', above: 50, before: 1 }, 'before'],
])('a rule with %s is refused, and the answer names the field', async (_what, body, field) => {
  const { call } = await startAlertSystem();
  const answer = await call('POST', '/alerts/rules', { body: { name: 'x', ...body } });
  expect(refusalIn(answer)).toBe('422 validation_failed');
  expect(answer.body.error.details.issues[0].path).toBe(field);
});

const edges = [
  ['cpu', 90, 80],
  ['memory', 90, 80],
  ['disk', 90, 80],
  ['load', 8, 4],
] as const;

test('space that only root may use counts as neither used nor free, as in df', async () => {
  const { rule, machine, alerts, client } = await startAlertSystem();
  await rule({ name: 'full', kind: 'disk', above: 90, for: 0 });
  const one = await machine();
  await one.report({ disk: 46, reserved: 50 });
  await expect.poll(alerts).toMatchObject([{ value: 92 }]);
  const other = await machine('web-2');
  await other.report({ disk: 60 });
  const { items } = await client.machines.statuses({ sort: '-disk' });
  expect(items.map(({ id }) => id)).toEqual([one.id, other.id]);
});

test('a rule about disks watches the mount point that it names, and * the fullest that is not on a file server', async () => {
  const { rule, machine, alerts, client } = await startAlertSystem();
  const { id: rule_id } = await rule({ name: 'srv', kind: 'disk', above: 90, mount: '/srv', for: 0 });
  const one = await machine('db-1');
  // A machine that does not report the mount point opens no alert.
  await one.report({ disk: 95 });
  await one.report({ disk: 95, disks: { '/srv': ['xfs', 80] } });
  expect(await alerts()).toEqual([]);
  await one.report({ disks: { '/srv': ['xfs', 93] } });
  await expect
    .poll(alerts)
    .toMatchObject([
      { status: 'open', value: 93, message: 'disk usage at /srv of db-1 is 93 %, above 90 %' },
    ]);
  // Without a value for its mount point the alert stays open, because an unmounted file system may still be full.
  await one.report({});
  expect(await alerts()).toMatchObject([{ status: 'open' }]);
  await one.report({ disks: { '/srv': ['xfs', 20] } });
  await expect.poll(alerts).toMatchObject([{ status: 'resolved', reason: 'recovered' }]);

  const changed = await client.alertRules.update({ rule_id, mount: '*' });
  expect(await client.alertRules.update({ rule_id })).toEqual(changed);
  await one.report({ disks: { '/mnt': ['nfs4', 99], '/srv': ['xfs', 20] } });
  expect(await alerts()).toHaveLength(1);
  await one.report({ disk: 91, disks: { '/mnt': ['nfs4', 99], '/srv': ['xfs', 97] } });
  await expect
    .poll(async () => (await alerts())[1])
    .toMatchObject({ status: 'open', message: 'disk usage at /srv of db-1 is 97 %, above 90 %' });
  await one.report({ disk: 91, disks: { '/srv': ['xfs', 20] } });
  expect((await alerts())[1]).toMatchObject({ status: 'open' });
  await one.report({ disk: 20, disks: { '/srv': ['xfs', 20] } });
  await expect.poll(async () => (await alerts())[1]).toMatchObject({ status: 'resolved' });
});

test.each(edges)(
  '%s over %i for a minute opens one alert, which does not flap at the limit and resolves at %i',
  async (kind, above, recover) => {
    const { rule, machine, clock, statuses, steps, alerts } = await startAlertSystem();
    const { id: rule_id } = await rule({ name: 'busy', kind, above, recover, for: minute });
    const one = await machine();
    const over = async (ms: number, value: number): Promise<void> => {
      for (let left = ms; left > 0; left -= 20_000) {
        clock.leap(Math.min(left, 20_000));
        await one.report({ [kind]: value });
      }
    };
    // No alert is opened by a value that equals the limit, or by a higher value for less than a minute.
    await over(2 * minute, above);
    await over(20_000, above + 1);
    await over(20_000, above - 1);
    await over(minute, above + 1);
    expect(await statuses()).toEqual([]);
    await over(20_000, above + 1);
    await expect.poll(statuses).toEqual(['open']);
    const middle = (above + recover) / 2;
    for (const value of [middle, above + 1, middle, above, recover + 0.01]) await over(20_000, value);
    expect(await steps()).toEqual(['opened']);
    await over(20_000, recover);
    await expect.poll(statuses).toEqual(['resolved']);
    expect(await steps()).toEqual(['opened', 'resolved']);
    expect(await alerts()).toMatchObject([
      {
        rule_id,
        kind,
        machine_id: one.id,
        subject: one.id,
        value: above + 1,
        reason: 'recovered',
        name: 'busy',
      },
    ]);
  },
);

test('five minutes offline open an alert, a shorter time opens none, and the return resolves the alert', async () => {
  const { rule, machine, clock, statuses, alerts } = await startAlertSystem();
  await rule({ name: 'away', kind: 'offline' });
  const one = await machine('db-1');
  await one.leave();
  clock.leap(4 * minute);
  await one.back();
  await one.leave();
  clock.leap(4 * minute);
  await one.back();
  expect(await statuses()).toEqual([]);
  await one.leave();
  clock.leap(5 * minute + 1_000);
  await expect.poll(statuses).toEqual(['open']);
  await one.back();
  await expect.poll(statuses).toEqual(['resolved']);
  expect(await alerts()).toMatchObject([{ kind: 'offline', message: 'db-1 is offline', machine_id: one.id }]);
});

test('a failed run opens an alert; further failed and cancelled runs change nothing, and a successful run resolves it', async () => {
  const { rule, agent, client, statuses, alerts } = await startAlertSystem();
  await rule({ name: 'jobs', kind: 'schedule' });
  const { machineId: machine_id } = await agent({ name: 'db-1' });
  const { id: schedule_id } = await client.schedules.create({
    ...{ machine_id, name: 'backup', command: 'exit 3', cron: '@yearly' },
  });
  const ran = async (count: number): Promise<void> => {
    await client.schedules.run({ schedule_id });
    const ended = async () =>
      (await client.schedules.history({ schedule_id })).items.filter(({ status }) => status !== 'running')
        .length;
    await expect.poll(ended).toBe(count);
  };
  await ran(1);
  await expect.poll(statuses).toEqual(['open']);
  await ran(2);
  await client.schedules.update({ schedule_id, command: 'true' });
  await ran(3);
  await expect.poll(statuses).toEqual(['resolved']);
  expect(await alerts()).toMatchObject([
    { subject: schedule_id, machine_id, value: 3, message: 'schedule backup on db-1 failed: exit code 3' },
  ]);
});

test('a schedule with tags has an alert for each machine on which it fails', async () => {
  const { rule, alerts, client, agent } = await startAlertSystem();
  await rule({ name: 'jobs', kind: 'schedule' });
  const names = ['db-1', 'db-2'];
  const agents = [];
  for (const name of names) agents.push(await agent({ name, tags: 'db' }));
  const { id: schedule_id } = await client.schedules.create({
    ...{ name: 'backup', tags: ['db'], cron: '0 0 29 2 *', command: 'exit 3' },
  });
  await client.schedules.run({ schedule_id });
  const open = async () => (await alerts()).filter(({ status }) => status === 'open');
  await expect
    .poll(async () => (await open()).map(({ message }) => message).toSorted())
    .toEqual(names.map((name) => `schedule backup on ${name} failed: exit code 3`));
  // A machine that loses the tag leaves the schedule, so its alert is resolved.
  await client.machines.update({ machine_id: agents[0]?.machineId ?? '', tags: [] });
  await expect
    .poll(async () => (await open()).map(({ machine_id }) => machine_id))
    .toEqual([agents[1]?.machineId]);
  await client.schedules.update({ schedule_id, command: 'true' });
  await client.schedules.run({ schedule_id });
  await expect.poll(open).toEqual([]);
});

test('a schedule that failed before the rule existed opens an alert, until the schedule is removed', async () => {
  const { rule, agent, client, statuses, alerts } = await startAlertSystem();
  const { machineId: machine_id } = await agent();
  const { id: schedule_id } = await client.schedules.create({
    ...{ machine_id, name: 'backup', command: 'false', cron: '@yearly' },
  });
  await client.schedules.run({ schedule_id });
  await expect
    .poll(async () => (await client.schedules.history({ schedule_id })).items.map(({ status }) => status))
    .toEqual(['failed']);
  await rule({ name: 'jobs', kind: 'schedule' });
  await expect.poll(statuses).toEqual(['open']);
  await client.schedules.remove({ schedule_id });
  await expect.poll(statuses).toEqual(['resolved']);
  expect((await alerts())[0]?.reason).toBe('subject_removed');
});

test('a rule about schedules counts all earlier runs, whether or not other rules existed at that time', async () => {
  const { rule, agent, client, alerts } = await startAlertSystem();
  const { machineId: machine_id } = await agent();
  const create = async (name: string, command: string): Promise<string> =>
    (await client.schedules.create({ machine_id, name, command, cron: '0 0 29 2 *' })).id;
  const run = async (schedule_id: string): Promise<void> => {
    const total = async () => (await client.schedules.history({ schedule_id, until: new Date() })).total;
    const before = await total();
    await client.schedules.run({ schedule_id });
    await expect.poll(total).toBe(before + 1);
    await expect
      .poll(async () => (await client.schedules.get({ schedule_id })).last_run?.status)
      .not.toBe('running');
  };
  const [first, second] = [await create('first', 'false'), await create('second', 'true')];
  await run(first);
  await rule({ name: 'busy', kind: 'cpu', above: 50 });
  await run(second);
  const jobs = await rule({ name: 'jobs', kind: 'schedule' });
  const found = async () => (await alerts()).map(({ subject, status }) => [subject, status]);
  await expect.poll(found).toEqual([[first, 'open']]);
  for (const { id: rule_id } of (await client.alertRules.list()).items)
    await client.alertRules.remove({ rule_id });
  await expect.poll(found).toEqual([[first, 'resolved']]);
  expect((await alerts())[0]?.rule_id).toBe(jobs.id);
  // The broker does not evaluate the following runs, because no rule exists. A rule that is created later must still
  // consider them.
  await client.schedules.update({ schedule_id: first, command: 'true' });
  await client.schedules.update({ schedule_id: second, command: 'false' });
  for (const one of [first, second]) await run(one);
  await rule({ name: 'jobs', kind: 'schedule' });
  await expect.poll(found).toEqual([
    [first, 'resolved'],
    [second, 'open'],
  ]);
});

test('expiry dates are checked every hour, also while other documents change', async () => {
  const { rule, client, clock, statuses, machine } = await startAlertSystem();
  const { id: machine_id } = await machine();
  const expires_at = new Date(Date.now() + (14 * 24 + 1) * 60 * minute).toISOString();
  await client.keys.create({ name: 'deploy', scopes: ['files:read'], expires_at });
  await rule({ name: 'keys', kind: 'key' });
  for (const tag of ['a', 'b', 'c']) {
    clock.leap(40 * minute);
    await client.machines.update({ machine_id, tags: [tag] });
  }
  await expect.poll(statuses).toEqual(['open']);
});

test('an agent older than the broker opens an alert, and its upgrade resolves it', async () => {
  const { rule, machine, statuses, alerts } = await startAlertSystem();
  await rule({ name: 'old', kind: 'agent_outdated' });
  const hello = { agent_version: '0.1.0' };
  const one = await machine('web-1', hello);
  await expect.poll(statuses).toEqual(['open']);
  expect((await alerts())[0]?.message).toContain('version 0.1.0, which is older than');
  await one.leave();
  expect(await statuses()).toEqual(['open']);
  hello.agent_version = '99.0.0';
  await one.back();
  await expect.poll(statuses).toEqual(['resolved']);
});

test('a key that expires soon opens an alert without a machine, and a later expiry resolves it', async () => {
  const { rule, client, clock, statuses, alerts, call, keyed } = await startAlertSystem();
  const day = 24 * 60 * minute;
  const at = (days: number) => new Date(Date.now() + days * day).toISOString();
  const { id: key_id } = await client.keys.create({
    name: 'deploy',
    scopes: ['files:read'],
    expires_at: at(20),
  });
  await rule({ name: 'keys', kind: 'key' });
  expect(await statuses()).toEqual([]);
  clock.leap(7 * day);
  await expect.poll(statuses).toEqual(['open']);
  const [alert] = await alerts();
  expect(alert).toMatchObject({ machine_id: null, subject: key_id, kind: 'key' });
  const { key } = await keyed(['machines:read'], { tags: ['web'] });
  expect(refusalIn(await call('GET', `/alerts/${alert?.id}`, { key }))).toBe('403 forbidden');
  expect((await call('GET', '/alerts', { key })).body.data).toEqual([]);
  await client.keys.update({ key_id, expires_at: at(100) });
  await expect.poll(statuses).toEqual(['resolved']);
});

test('the certificate of the broker’s authority opens an alert before it expires', async () => {
  const { rule, client, clock, alerts } = await startAlertSystem();
  const year = 365 * 24 * 60 * minute;
  const { id: rule_id } = await rule({
    name: 'certificates',
    kind: 'certificate',
    before: 366 * 24 * 60 * minute,
  });
  clock.leap(19.5 * year);
  await expect.poll(async () => (await alerts()).map(({ subject }) => subject)).toEqual(['authority']);
  await client.alertRules.remove({ rule_id });
  await expect.poll(async () => (await alerts())[0]?.reason).toBe('rule_removed');
});

/** Starts a system with an open alert: the CPU usage of its machine is above the value of a rule. */
async function alerted(
  rule: object = {},
): Promise<AlertSystem & { one: AlertMachine; rule_id: string; alert_id: string }> {
  const system = await startAlertSystem();
  const one = await system.machine();
  const { id: rule_id } = await system.rule({ name: 'busy', kind: 'cpu', above: 50, for: 0, ...rule });
  await one.report({ cpu: 60 });
  await expect.poll(system.statuses).toEqual(['open']);
  const [alert] = await system.alerts();
  return { ...system, one, rule_id, alert_id: alert?.id ?? '' };
}

test('an alert repeats until it is acknowledged; another note is stored without a second event, and it resolves as before', async () => {
  const { clock, one, alert_id, client, steps, call, keyed } = await alerted({ repeat_every: 10 * minute });
  const later = async (minutes: number): Promise<void> => {
    for (let n = 0; n < minutes * 2; n += 1) {
      clock.leap(30_000);
      await one.report({ cpu: 70 });
    }
  };
  await later(9);
  expect(await steps()).toEqual(['opened']);
  await later(2);
  await expect.poll(steps).toEqual(['opened', 'repeated']);
  await later(10);
  await expect.poll(steps).toEqual(['opened', 'repeated', 'repeated']);
  const acknowledged = await client.alerts.acknowledge({ alert_id, acknowledged: true, note: 'on it' });
  expect(acknowledged).toMatchObject({ status: 'acknowledged', note: 'on it', repeats: 2 });
  const other = await keyed(['machines:read', 'machines:write']);
  for (const same of [{ note: 'on it' }, { note: null }, {}])
    expect(await other.client.alerts.acknowledge({ alert_id, acknowledged: true, ...same })).toEqual(
      acknowledged,
    );
  const again = await other.client.alerts.acknowledge({ alert_id, acknowledged: true, note: 'me too' });
  expect(again).toMatchObject({
    ...acknowledged,
    note: 'me too',
    acknowledged_at: again.acknowledged_at,
    acknowledged_by: again.acknowledged_by,
  });
  expect(again.acknowledged_by).not.toBe(acknowledged.acknowledged_by);
  expect(await client.alerts.get({ alert_id })).toEqual(again);
  await later(30);
  expect(await steps()).toEqual(['opened', 'repeated', 'repeated', 'acknowledged']);
  await one.report({ cpu: 1 });
  await expect.poll(steps).toEqual(['opened', 'repeated', 'repeated', 'acknowledged', 'resolved']);
  expect(refusalIn(await call('PATCH', `/alerts/${alert_id}`, { body: { acknowledged: true } }))).toBe(
    '409 conflict',
  );
});

test.each([
  [
    'disabled',
    'rule_changed',
    ({ client, rule_id }) => client.alertRules.update({ rule_id, enabled: false }),
  ],
  [
    'for other machines',
    'rule_changed',
    ({ client, rule_id }) => client.alertRules.update({ rule_id, tags: ['db'] }),
  ],
  ['removed', 'rule_removed', ({ client, rule_id }) => client.alertRules.remove({ rule_id })],
  [
    'of a removed machine',
    'subject_removed',
    ({ client, one }) => client.machines.remove({ machine_id: one.id }),
  ],
] satisfies [string, string, (system: Awaited<ReturnType<typeof alerted>>) => Promise<unknown>][])(
  'a rule that is %s resolves its alert, and the reason is %s',
  async (_what, reason, act) => {
    const system = await alerted();
    await act(system);
    await expect.poll(system.statuses).toEqual(['resolved']);
    expect((await system.alerts())[0]?.reason).toBe(reason);
    expect(await system.steps()).toEqual(['opened', 'resolved']);
  },
);

test('a rule whose limit changes keeps a recover value that was set, unless it is higher than the new limit', async () => {
  const { client, rule } = await startAlertSystem();
  const set = await rule({ name: 'set', kind: 'disk', above: 90, recover: 50 });
  const byDefault = await rule({ name: 'default', kind: 'disk', above: 90 });
  const recoverAt = async ({ id: rule_id }: { id: string }, above: number) =>
    (await client.alertRules.update({ rule_id, above })).recover;
  expect([await recoverAt(set, 80), await recoverAt(set, 50)]).toEqual([50, 50]);
  expect([await recoverAt(set, 40), await recoverAt(set, 80)]).toEqual([36, 72]);
  expect([await recoverAt(byDefault, 95), await recoverAt(byDefault, 70)]).toEqual([85.5, 63]);
});

test('a machine that gets the tag of a rule is compared with it at once', async () => {
  const { client, rule, machine, statuses } = await startAlertSystem();
  const one = await machine();
  await rule({ name: 'busy', kind: 'cpu', above: 50, for: 0, tags: ['web'] });
  await one.report({ cpu: 60 });
  expect(await statuses()).toEqual([]);
  await client.machines.update({ machine_id: one.id, tags: ['web'] });
  await expect.poll(statuses).toEqual(['open']);
});

test('a limited key creates rules only for its own machines, and sees only those and their alerts', async () => {
  const { rule, client, machine, statuses, keyed, call } = await startAlertSystem();
  const [mine, other] = [await machine('mine'), await machine('other')];
  await client.machines.update({ machine_id: mine.id, tags: ['web'] });
  const everywhere = await rule({ name: 'all', kind: 'cpu', above: 50, for: 0 });
  const { key, client: limited } = await keyed(['machines:read', 'machines:write', 'webhooks:write'], {
    tags: ['web'],
  });
  for (const body of [
    {},
    { tags: ['db'] },
    { machine_ids: [other.id] },
    { machine_ids: [mine.id, other.id] },
  ]) {
    const answer = await call('POST', '/alerts/rules', {
      key,
      body: { name: 'x', kind: 'offline', ...body },
    });
    expect(refusalIn(answer)).toBe('403 forbidden');
  }
  expect(refusalIn(await call('POST', '/alerts/rules', { key, body: { name: 'x', kind: 'key' } }))).toBe(
    '403 forbidden',
  );
  const { key: unlimited } = await keyed(['machines:read', 'webhooks:write']);
  for (const [kind, status] of [
    ['key', '403 forbidden'],
    ['schedule', '403 forbidden'],
    ['offline', '201'],
  ] as const) {
    const answer = await call('POST', '/alerts/rules', { key: unlimited, body: { name: kind, kind } });
    expect([kind, answer.status === 201 ? '201' : refusalIn(answer)]).toEqual([kind, status]);
  }
  const made = await limited.alertRules.create({
    name: 'web',
    kind: 'memory',
    above: 50,
    for: 0,
    tags: ['web'],
  });
  expect((await limited.alertRules.list()).items.map(({ id }) => id)).toEqual([made.id]);
  for (const [method, body] of [['GET'], ['PATCH', { tags: ['web'] }], ['DELETE']] as const) {
    const answer = await call(method, `/alerts/rules/${everywhere.id}`, { key, ...(body && { body }) });
    expect(refusalIn(answer)).toBe('403 forbidden');
  }
  expect(refusalIn(await call('PATCH', `/alerts/rules/${made.id}`, { key, body: { tags: null } }))).toBe(
    '403 forbidden',
  );
  for (const one of [mine, other]) await one.report({ cpu: 60, memory: 60 });
  await expect.poll(statuses).toEqual(['open', 'open', 'open']);
  const { items } = await limited.alerts.list({ sort: 'created_at' });
  expect(items.map(({ machine_id }) => machine_id)).toEqual([mine.id, mine.id]);
  const foreign = (await client.alerts.list({ machine_id: other.id })).items[0]?.id ?? '';
  expect(refusalIn(await call('PATCH', `/alerts/${foreign}`, { key, body: { acknowledged: true } }))).toBe(
    '403 forbidden',
  );
  const { items: events } = await limited.events.list({ type: 'alert.opened' });
  expect(new Set(events.map(({ data }) => data.machine_id))).toEqual(new Set([mine.id]));
});

test('an alert about the disk stays open while the machine cannot measure its disks', async () => {
  const { rule, machine, alerts, statuses } = await startAlertSystem();
  await rule({ name: 'full', kind: 'disk', above: 90, for: 0 });
  const one = await machine();
  await one.report({ disk: 97 });
  await expect.poll(statuses).toEqual(['open']);
  // An agent reports no disk while file systems hang.
  const space = { total: 10, used: 1, free: 9 };
  const metrics = {
    recorded_at_ms: 9_000,
    cpu_cores: 4,
    cpu_usage: 1,
    load_average: [0, 0, 0],
    memory: space,
    disks: [],
  };
  one.agent.send({ heartbeat: { metrics } });
  await one.report({ disk: 98 });
  expect(await alerts()).toHaveLength(1);
  expect(await statuses()).toEqual(['open']);
});

test('an alert about a schedule follows its last run, also if an earlier run ends after it', async () => {
  const { client, rule, agent, statuses } = await startAlertSystem();
  await rule({ name: 'jobs', kind: 'schedule' });
  const { machineId: machine_id } = await agent({ name: 'db-1' });
  const slow = gate();
  const { id: schedule_id } = await client.schedules.create({
    ...{ machine_id, name: 'backup', cron: '@yearly', command: slow.wait },
  });
  await client.schedules.run({ schedule_id });
  await client.schedules.update({ schedule_id, command: 'false' });
  await client.schedules.run({ schedule_id });
  await expect.poll(statuses).toEqual(['open']);
  slow.open();
  const ended = async () =>
    (await client.schedules.history({ schedule_id })).items.map(({ status }) => status);
  await expect.poll(ended).toEqual(['failed', 'completed']);
  // The end of a third run shows that the end of the first one was handled.
  await client.schedules.run({ schedule_id });
  await expect.poll(ended).toEqual(['failed', 'failed', 'completed']);
  expect(await statuses()).toEqual(['open']);
});

test('an open alert repeats after a restart of a broker whose clock was two days ahead', async () => {
  const system = await startAlertSystem();
  const { clock, rule, machine, statuses, dataDir, grpc } = system;
  clock.set(Date.now() + 2 * 24 * 60 * minute);
  const one = await machine();
  await rule({ name: 'busy', kind: 'cpu', above: 50, for: 0, repeat_every: 10 * minute });
  await one.report({ cpu: 60 });
  await expect.poll(statuses).toEqual(['open']);
  await system.broker.close();
  clock.set(Date.now());
  const again = await startFarhand({ dataDir, flags: ['--grpc', grpc], tuning: { alerts: soon } });
  clock.leap(11 * minute);
  await expect.poll(looksInto(again.client).steps).toEqual(['opened', 'repeated']);
});
