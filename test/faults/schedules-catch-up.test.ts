// Schedules at changes of daylight saving time, and due times that passed while the broker was down. The brokers are
// real, and the test sets their clock.
import { cpSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { withSocket } from '../../broker/cli/call-or-start-local-broker.ts';
import { now } from '../../shared/clock.ts';
import { gate, nextCall, reporting } from '../commands-fixture.ts';
import { minutes, type Run, systemAt } from '../schedules-fixture.ts';
import { connectScripted } from '../scripted-agent.ts';
import { temporaryFolder } from '../start-farhand.ts';

test('over a spring gap a daily time runs once, right after the gap, and an hourly one follows the clock', async () => {
  const { make, until, fates, counted, system } = await systemAt('06:58:00', '2026-03-08');
  const timezone = 'America/New_York';
  const daily = await make('daily', '0,30 2 * * *', { timezone });
  const hourly = await make('hourly', '*/10 * * * *', { timezone });
  expect(daily.next_run).toBe('2026-03-08T07:00:00.000Z');
  await until('07:11:00');
  expect(await fates(daily.id)).toEqual(['07:00 cron completed']);
  expect(await fates(hourly.id)).toEqual(['07:00 cron completed', '07:10 cron completed']);
  expect([counted('daily'), counted('hourly')]).toEqual([1, 2]);
  const { next_run } = await system.client.schedules.get({ schedule_id: daily.id });
  expect(next_run).toBe('2026-03-09T06:00:00.000Z');
});

test('over an autumn overlap a daily time runs once, and an hourly one both times', async () => {
  // The time zone of Lord Howe Island changes by half an hour only.
  const { make, until, fates, counted } = await systemAt('14:44:00', '2026-04-04');
  const timezone = 'Australia/Lord_Howe';
  const daily = await make('daily', '45 1 * * *', { timezone });
  const hourly = await make('hourly', '45 * * * *', { timezone });
  await until('15:16:00');
  expect(await fates(daily.id)).toEqual(['14:45 cron completed']);
  expect(await fates(hourly.id)).toEqual(['14:45 cron completed', '15:15 cron completed']);
  expect([counted('daily'), counted('hourly')]).toEqual([1, 2]);
});

test.each([
  [1, '12:01:06'],
  [3, '12:03:06'],
  [120, '14:00:06'],
])(
  'after a broker was down over %i due times, none of them, the last or all run, as catch_up of the schedule says',
  async (count, back) => {
    const { clock, at, make, down, up, until, fates, runs, counted } = await systemAt('12:00:30');
    const [none, last, all, some] = [
      await make('none', '* * * * *'),
      await make('last', '* * * * *', { catch_up: 'last' }),
      await make('all', '* * * * *', { catch_up: 'all' }),
      await make('some', '* * * * *', { catch_up: 'all', catch_up_window: 115_000 }),
    ];
    const off = await make('off', '* * * * *', { enabled: false, catch_up: 'all' });
    await down();
    clock.set(at(back));
    await up();
    // All missed times run, one after another.
    await expect.poll(() => counted('all')).toBe(count);
    const times = minutes('12:01:00', count);
    expect(await fates(none.id)).toEqual(times.map((time) => `${time} cron missed`));
    const missed = times.map((time) => `${time} cron missed`);
    const caught = times.map((time) => `${time} catch_up completed`);
    expect(await fates(last.id)).toEqual([...missed.slice(0, -1), ...caught.slice(-1)]);
    expect(await fates(all.id)).toEqual(caught);
    const ends = (await runs(all.id)).flatMap(({ started_at, finished_at }) => [
      started_at,
      finished_at ?? '',
    ]);
    expect(ends).toEqual(ends.toSorted((a, b) => (a < b ? -1 : 1)));
    expect(await fates(some.id)).toEqual([...missed.slice(0, -2), ...caught.slice(-2)]);
    expect(await fates(off.id)).toEqual([]);
    expect(['none', 'last', 'all', 'some'].map(counted)).toEqual([0, 1, count, Math.min(2, count)]);
    const [first] = await runs(none.id);
    expect(first).toMatchObject({ exit_code: -1, duration: 0, command_id: null, stdout: '' });
    expect(first?.stderr).toContain('broker');
    expect(first?.started_at).toBe(first?.finished_at);
    const next = new Date(Math.ceil(now() / 60_000) * 60_000 + 1000).toISOString();
    await until(next.slice(11, 19));
    expect((await fates(none.id)).at(-1)).toBe(`${next.slice(11, 16)} cron completed`);
  },
);

test.each([
  ['lost', ['--new-history'], 6, []],
  ['restored', ['--old-history'], 6, minutes('12:01:00', 3)],
  ['restored', [], 10, minutes('12:01:00', 7)],
])('with a history that was %s, started with %j: %i runs in all', async (how, flags, count, rows) => {
  const { system, clock, at, make, down, up, until, fates, counted } = await systemAt('12:00:30');
  const { dataDir } = system;
  const { id } = await make('all', '* * * * *', { catch_up: 'all' });
  await until('12:03:30');
  const copy = temporaryFolder('copy');
  await withSocket(dataDir, async (_client, post) => {
    cpSync((await post<{ directory: string }>('/local/backup')).directory, copy, { recursive: true });
  });
  await until('12:05:30');
  await down();
  rmSync(join(dataDir, 'history.db'));
  if (how === 'restored') cpSync(copy, dataDir, { recursive: true });
  clock.set(at('12:07:30'));
  await up(flags);
  await until('12:08:10');
  await expect.poll(() => counted('all')).toBe(count);
  expect((await fates(id)).map((fate) => fate.slice(0, 5))).toEqual([...rows, '12:08']);
});

test('a thousand missed times have a row each, and all others share one row', async () => {
  const { clock, at, make, down, up, runs } = await systemAt('12:00:00');
  const { id } = await make('each', '* 0-29 12 * * *');
  const missed = async (): Promise<Run[]> => (await runs(id)).filter(({ status }) => status === 'missed');
  await down();
  clock.set(at('12:31:05'));
  await up();
  await expect.poll(async () => (await missed()).length).toBe(1001);
  const rows = await missed();
  const times = rows.map(({ scheduled_for }) => Date.parse(scheduled_for ?? ''));
  const [first = 0] = times;
  expect(times.slice(0, 1000)).toEqual(Array.from({ length: 1000 }, (_, index) => first + index * 1000));
  expect(times[1000]).toBe(at('12:29:59'));
  const from = new Date(first + 1_000_000).toISOString();
  expect(rows[1000]?.stderr).toContain(
    `more than 200 due times, from ${from} to ${rows[1000]?.scheduled_for}`,
  );
});

/**
 * Starts a broker with a schedule that missed three due times while the broker was down: 12:01, 12:02 and 12:03. The
 * schedule now runs for each of them, one after another. The first run waits for open().
 */
async function catchingUp() {
  const bench = await systemAt('12:00:30');
  const { wait, open } = gate();
  const { id: schedule_id } = await bench.make('each', '* * * * *', { catch_up: 'all', command: wait });
  await bench.down();
  bench.clock.set(bench.at('12:03:40'));
  await bench.up();
  const { client } = bench.system;
  const statuses = async (): Promise<string[]> =>
    (await client.schedules.history({ schedule_id })).items.map(({ status }) => status);
  await expect.poll(statuses).toEqual(['running']);
  return { bench, client, schedule_id, open, statuses };
}

test('a change of the name does not affect due times; after a change of cron the due times that still wait are skipped', async () => {
  const { bench, client, schedule_id, open, statuses } = await catchingUp();
  await client.schedules.update({ schedule_id, name: 'renamed' });
  open();
  await expect.poll(statuses).toEqual(['running', 'completed']);
  await client.schedules.update({ schedule_id, cron: '30 * * * *' });
  open();
  await bench.until('12:05:00');
  expect(await bench.fates(schedule_id)).toEqual([
    ...['12:01 catch_up completed', '12:02 catch_up completed', '12:03 cron skipped'],
  ]);
  const [row] = (await client.schedules.history({ schedule_id, status: 'skipped' })).items;
  expect(row?.stderr).toContain('the schedule was changed');
});

test('after a schedule is disabled the due times that still wait are skipped, and later ones have no row', async () => {
  const { bench, client, schedule_id, open } = await catchingUp();
  await client.schedules.update({ schedule_id, enabled: false });
  open();
  await bench.until('12:05:00');
  expect(await bench.fates(schedule_id)).toEqual([
    ...['12:01 catch_up completed', '12:02 cron skipped', '12:03 cron skipped'],
  ]);
  await client.schedules.update({ schedule_id, enabled: true });
  open();
  await bench.until('12:06:30');
  expect((await bench.fates(schedule_id)).slice(3)).toEqual(['12:06 cron completed']);
});

test('while a run has not ended the next time is skipped, or runs in parallel if overlap allows it', async () => {
  const { make, until, fates, system } = await systemAt('12:00:30');
  const [one, two] = [gate(), gate()];
  const skip = await make('skip', '* * * * *', { command: one.wait, notify: { on_failure: true } });
  const allow = await make('allow', '* * * * *', { command: two.wait, overlap: 'allow' });
  const statuses = async (schedule_id: string): Promise<string[]> =>
    (await system.client.schedules.history({ schedule_id })).items.map(({ status }) => status);
  // The clock must not leap during a start, or the start would count as hung.
  const started = async (): Promise<number> =>
    (await system.client.commands.list({})).items.filter((one) => one.started_at && one.command !== 'true')
      .length;
  await until('12:01:01', 2);
  await expect.poll(() => statuses(skip.id)).toEqual(['running']);
  await expect.poll(() => statuses(allow.id)).toEqual(['running']);
  await expect.poll(started).toBe(2);
  await until('12:02:01', 3);
  await expect.poll(started).toBe(3);
  await expect.poll(() => statuses(skip.id)).toEqual(['skipped', 'running']);
  await expect.poll(() => statuses(allow.id)).toEqual(['running', 'running']);
  one.open();
  two.open();
  two.open();
  await fates(skip.id);
  await until('12:03:10', 2);
  one.open();
  two.open();
  expect(await fates(skip.id)).toEqual([
    '12:01 cron completed',
    '12:02 cron skipped',
    '12:03 cron completed',
  ]);
  expect(await fates(allow.id)).toEqual([
    '12:01 cron completed',
    '12:02 cron completed',
    '12:03 cron completed',
  ]);
  const { items } = await system.client.schedules.history({ schedule_id: skip.id, status: 'skipped' });
  expect(items).toMatchObject([
    { exit_code: -1, duration: 0, command_id: null, stderr: expect.stringContaining('had not ended') },
  ]);
  // Skipped runs cause no event, because the setting `overlap` of this schedule is `skip`, the default.
  expect((await system.client.events.list({ type: 'schedule.failed' })).total).toBe(0);
});

test('a run waits for a machine that reconnects after the start of the broker; later the machine counts as offline', async () => {
  const { clock, at, away, make, down, up, until, fates, runs } = await systemAt('12:00:30');
  const near = await make('near', '* * * * *', { catch_up: 'last' });
  const far = await make('far', '* * * * *', {
    machine_id: away,
    overlap: 'allow',
    notify: { on_failure: true },
  });
  await down();
  clock.set(at('12:01:30'));
  await up();
  await until('12:01:50');
  await until('12:03:30', 1);
  expect((await fates(near.id)).slice(0, 2)).toEqual(['12:01 catch_up completed', '12:02 cron completed']);
  expect(await fates(far.id)).toEqual(['12:01 cron missed', '12:02 cron missed', '12:03 cron failed']);
  const [, waited, offline] = await runs(far.id);
  expect([waited?.stderr, waited?.exit_code]).toEqual(['queue_expired', -1]);
  expect(offline?.stderr).toContain('machine_offline');
  expect(offline?.command_id).toBeNull();
});

test('a run that ended while the broker was down does not count as an overlap', async () => {
  const bench = await systemAt('12:00:30');
  const gates = [gate(), gate(), gate()];
  const [one, two, three] = gates;
  const none = await bench.make('none', '* * * * *', { command: one?.wait });
  const last = await bench.make('last', '1 * * * * *', { command: two?.wait, catch_up: 'last' });
  const held = await bench.make('held', '1 * * * * *', { command: three?.wait, catch_up: 'last' });
  await bench.until('12:01:10', 3);
  const { commands } = bench.system.client;
  await expect.poll(async () => (await commands.list({ status: 'running' })).total).toBe(3);
  await bench.down();
  for (const ended of [one, two]) {
    for (let times = 0; times < 3; times += 1) ended?.open();
  }
  bench.clock.set(bench.at('12:02:58'));
  await bench.up();
  const statuses = async (schedule_id: string): Promise<string[]> =>
    (await bench.system.client.schedules.history({ schedule_id })).items
      .toSorted((a, b) => ((a.scheduled_for ?? '') < (b.scheduled_for ?? '') ? -1 : 1))
      .map(({ scheduled_for, status }) => `${scheduled_for?.slice(11, 16)} ${status}`);
  await expect.poll(async () => (await statuses(none.id))[0]).toBe('12:01 completed');
  await expect.poll(async () => (await statuses(last.id))[0]).toBe('12:01 completed');
  await bench.until('12:03:30', 1);
  await expect.poll(() => statuses(none.id)).toEqual(['12:01 completed', '12:02 missed', '12:03 completed']);
  expect((await statuses(last.id)).filter((text) => text.endsWith('completed'))).toHaveLength(2);
  expect(await statuses(last.id)).not.toContainEqual(expect.stringContaining('skipped'));
  expect((await statuses(held.id))[0]).toBe('12:01 running');
  expect((await statuses(held.id)).at(-1)).toBe('12:03 skipped');
  three?.open();
});

test('on an offline machine a run fails, also while an earlier run there has not ended', async () => {
  const { make, until, system, identity, clock } = await systemAt('12:00:30');
  const agent = await connectScripted(system.grpc, identity);
  await agent.next('welcome');
  const { id } = await make('far', '* * * * *', {
    machine_id: identity.machineId,
    notify: { on_failure: true },
  });
  clock.leap(30_000);
  reporting(agent, (await nextCall(agent, 'StartProcess')).call_id).started();
  agent.control.cancel();
  await agent.ended;
  await until('12:02:30', 1);
  const { items } = await system.client.schedules.history({ schedule_id: id });
  expect(items.map(({ status }) => status)).toEqual(['failed', 'running']);
  expect(items[0]?.stderr).toContain('machine_offline');
  const received = await system.client.events.list({ type: 'schedule.failed' });
  expect(received.items.map(({ data }) => data.run_id)).toEqual([items[0]?.id]);
});

test('a run on a machine that went offline does not stop the schedule after it was moved to another machine', async () => {
  const { make, until, system, identity, clock, machine_id } = await systemAt('12:00:30');
  const agent = await connectScripted(system.grpc, identity);
  await agent.next('welcome');
  const { id: schedule_id } = await make('moved', '* * * * *', { machine_id: identity.machineId });
  clock.leap(30_000);
  reporting(agent, (await nextCall(agent, 'StartProcess')).call_id).started();
  agent.control.cancel();
  await agent.ended;
  await system.client.schedules.update({ schedule_id, machine_id });
  await until('12:02:30', 1);
  const { items } = await system.client.schedules.history({ schedule_id });
  expect(items.map(({ status }) => status)).toEqual(['completed', 'running']);
});

test('with catch_up all, the newest due time waits until earlier ones are caught up', async () => {
  const bench = await systemAt('12:00:30');
  const { wait, open } = gate();
  const { id } = await bench.make('all', '* * * * *', { catch_up: 'all', command: wait });
  await bench.down();
  bench.clock.set(bench.at('12:01:40'));
  await bench.up();
  await bench.until('12:02:20', 1);
  expect((await bench.system.client.schedules.history({ schedule_id: id })).total).toBe(1);
  open();
  open();
  await expect
    .poll(() => bench.fates(id))
    .toEqual(['12:01 catch_up completed', expect.stringMatching(/^12:02 \w+ completed$/)]);
});

test('schedules of a revoked key fail until another key changes them', async () => {
  const { make, until, fates, runs, system, counted } = await systemAt('12:00:30');
  const { client } = await system.keyed(['schedules:write', 'schedules:read', 'commands:execute']);
  const { id: schedule_id } = await make('taken', '* * * * *');
  const { requested_by } = await client.schedules.update({ schedule_id, notify: { on_failure: true } });
  await until('12:01:10');
  const gone = await system.client.keys.remove({ key_id: requested_by });
  expect(gone).toEqual({
    deleted: true,
    schedules: [schedule_id],
    webhooks: [],
    alert_channels: [],
    saved_commands: [],
  });
  await until('12:02:10');
  expect(await fates(schedule_id)).toEqual(['12:01 cron completed', '12:02 cron failed']);
  const [first, second] = await runs(schedule_id);
  expect((await system.client.commands.get({ command_id: first?.command_id ?? '' })).requested_by).toBe(
    requested_by,
  );
  expect(second).toMatchObject({
    exit_code: -1,
    command_id: null,
    stderr: expect.stringContaining('key_revoked'),
  });
  const { items } = await system.client.events.list({ type: 'schedule.failed' });
  expect(items.map(({ data }) => data.run_id)).toEqual([second?.id]);
  await system.client.schedules.update({ schedule_id, name: 'mine now' });
  await until('12:03:10');
  expect((await fates(schedule_id)).at(-1)).toBe('12:03 cron completed');
  expect(counted('taken')).toBe(2);
});
