// The statuses of many machines in one list, each with its last hour, and the tags of all machines.
import { join } from 'node:path';
import { expect, onTestFinished, test } from 'vitest';
import { openHistory } from '../broker/history/open-sqlite-file.ts';
import { LastHour } from '../broker/presence/metrics-last-hour.ts';
import { MachineFacts } from '../broker/presence/stored-facts-and-metrics.ts';
import { refusalIn } from './all-routes.ts';
import { fakeClock } from './fake-clock.ts';
import { scriptedMachine } from './scripted-agent.ts';
import { quiet, startFarhand, startWithAgent, temporaryFolder } from './start-farhand.ts';

test('a machine whose owner no longer allows metrics has no report in the list, and sorts last', async () => {
  const system = await startFarhand();
  const { machineId: open } = await system.agent({ name: 'open' });
  const before = await system.agent({ name: 'closed' });
  const { machineId: closed, dataDir } = before;
  await expect
    .poll(async () => (await system.client.machines.status({ machine_id: closed })).connected)
    .toBe(true);
  await before.close();
  const after = await system.agent({ dataDir, flags: ['--allow', 'files:read'] });
  for (const sort of ['memory', '-memory'] as const) {
    const { items } = await system.client.machines.statuses({ sort });
    expect(items.map(({ id, latest }) => [id, latest === null])).toEqual([
      [open, false],
      [closed, true],
    ]);
    expect(items[1]?.hour).toEqual({ cpu: Array(60).fill(null), memory: Array(60).fill(null) });
  }
  const status = async () => refusalIn(await system.call('GET', `/machines/${closed}/status`));
  expect(await status()).toBe('403 permission_denied');
  const past = await system.call('GET', `/machines/${closed}/metrics`);
  expect(refusalIn(past)).toBe('403 permission_denied');
  await after.close();
  await expect
    .poll(async () => (await system.client.machines.get({ machine_id: closed })).status)
    .toBe('offline');
  expect(await status()).toBe('403 permission_denied');
});

test('statuses are filtered, sorted and paged like machines, and also by load; a limited key gets its machines', async () => {
  const system = await startFarhand();
  const { machineId: web } = await system.agent({ name: 'web-1', tags: 'web,eu' });
  const { machineId: db } = await system.agent({ name: 'db-1', tags: 'db,eu' });
  const ids = async (query: object) =>
    (await system.client.machines.statuses(query)).items.map(({ id }) => id);
  expect(await ids({ sort: 'name' })).toEqual([db, web]);
  expect(await ids({ tags: 'eu', search: 'WEB' })).toEqual([web]);
  expect(await ids({ status: 'offline' })).toEqual([]);
  expect(await ids({ sort: 'name', limit: 1, offset: 1 })).toEqual([web]);
  for (const sort of ['cpu', '-memory', 'disk', '-last_seen'])
    expect(new Set(await ids({ sort }))).toEqual(new Set([db, web]));
  expect(refusalIn(await system.call('GET', '/machines/statuses?sort=load'))).toBe('400 invalid_request');
  expect(refusalIn(await system.call('GET', '/machines/statuses?limit=101'))).toBe('400 invalid_request');
  const { client } = await system.keyed(['machines:read'], { tags: ['db'] });
  expect((await client.machines.statuses()).items.map(({ id }) => id)).toEqual([db]);
  const { key: other } = await system.keyed(['files:read']);
  expect(refusalIn(await system.call('GET', '/machines/statuses', { key: other }))).toBe('403 forbidden');
});

test('an item has the values of the machine’s own status, and one point for its last minute', async () => {
  const { system, machine_id } = await startWithAgent();
  const [item] = (await system.client.machines.statuses()).items;
  const status = await system.client.machines.status({ machine_id });
  expect(item?.latest).toMatchObject({
    cpu: { cores: status.cpu.cores },
    memory: { total: status.memory.total },
  });
  expect(item?.latest).toMatchObject({
    disk: { total: status.disk.total },
    load_average: [expect.any(Number), expect.any(Number), expect.any(Number)],
  });
  expect([item?.hour.cpu.length, item?.hour.memory.length]).toEqual([60, 60]);
  const percent = Math.round((100 * status.memory.used) / status.memory.total);
  expect(Math.abs((item?.hour.memory.at(-1) ?? item?.hour.memory.at(-2) ?? 0) - percent)).toBeLessThan(10);
});

test('a machine with a file system of 8 EiB, as Amazon EFS reports it, has a status with all of its values', async () => {
  const system = await startFarhand();
  const [total, used] = [2 ** 63 - 2 ** 20, 2 ** 31];
  const space = { total, used, free: total - used, available: total - used };
  const disks = [{ mount: '/mnt/efs', filesystem: 'nfs4', space }];
  const memory = { total: 4, used: 1, free: 3 };
  const agent = await scriptedMachine(system, { metrics: { recorded_at_ms: 1, memory, disks } });
  const status = await system.client.machines.status({ machine_id: agent.identity.machineId });
  expect([status.memory, status.disks]).toMatchObject([memory, [{ mount: '/mnt/efs', ...space }]]);
});

test('the last hour has a point for each minute and drops older ones, also after hours without a report', async () => {
  const clock = fakeClock(0);
  const hour = new LastHour();
  for (let minute = 0; minute < 90; minute += 1) {
    hour.add('a', minute, 100 - minute);
    if (minute % 2 === 0) hour.add('b', 7, 8);
    await clock.advance(60_000);
  }
  const { cpu, memory } = hour.of('a');
  expect(cpu).toEqual([...Array.from({ length: 59 }, (_, n) => 31 + n), null]);
  expect(memory).toEqual([...Array.from({ length: 59 }, (_, n) => 69 - n), null]);
  expect(hour.of('b').cpu.filter((value) => value === 7).length).toBe(29);
  await clock.advance(7 * 3_600_000);
  expect(hour.of('a').cpu).toEqual(Array(60).fill(null));
  expect(hour.of('unknown')).toEqual({ cpu: Array(60).fill(null), memory: Array(60).fill(null) });
});

test('a removed machine has no last hour, and the others keep theirs', () => {
  const hour = new LastHour();
  for (const id of ['a', 'b', 'c']) hour.add(id, 50, 60);
  hour.remove('b');
  expect(hour.of('b').cpu.at(-1)).toBeNull();
  hour.add('d', 10, 20);
  hour.add('e', 30, 40);
  const last = ['a', 'b', 'c', 'd', 'e'].map((id) => [hour.of(id).cpu.at(-1), hour.of(id).memory.at(-1)]);
  expect(last).toEqual([
    [50, 60],
    [null, null],
    [50, 60],
    [10, 20],
    [30, 40],
  ]);
});

test('tags are listed with the number of their machines that the key may use', async () => {
  const { system, machine_id } = await startWithAgent({ tags: 'web,eu' });
  await system.agent({ tags: 'db,eu' });
  const list = async (client = system.client, query = {}) =>
    (await client.tags.list(query)).items.map(({ name, machines }) => [name, machines]);
  expect(await list()).toEqual([
    ['db', 1],
    ['eu', 2],
    ['web', 1],
  ]);
  expect(await list(system.client, { sort: '-machines', limit: 1 })).toEqual([['eu', 2]]);
  expect(await list(system.client, { search: 'E', offset: 1 })).toEqual([['web', 1]]);
  const { client } = await system.keyed(['machines:read'], { machine_ids: [machine_id] });
  expect(await list(client)).toEqual([
    ['eu', 1],
    ['web', 1],
  ]);
  const { key } = await system.keyed(['files:read']);
  expect(refusalIn(await system.call('GET', '/tags', { key }))).toBe('403 forbidden');
});

test('after a restart of the broker the last hour is read from the stored metrics', async () => {
  const history = openHistory(join(temporaryFolder('hour'), 'history.db'), 'install', quiet);
  const clock = fakeClock(1_800_000_000_000);
  const before = await MachineFacts.open(history);
  const host = { hostname: 'a', os: 'linux', arch: 'x64', ip: '::1', agent_version: '1' };
  await before.hello('mach_a', { ...host, capabilities: ['metrics'] }, null);
  for (const cpu_usage of [10, 20]) {
    before.heard('mach_a', reportWith(cpu_usage));
    await clock.advance(300_000);
  }
  await before.close();
  await clock.advance(120_000);
  const after = await MachineFacts.open(history);
  onTestFinished(async () => {
    await after.close();
    await history.close();
  });
  const { cpu, memory } = after.lastHour('mach_a');
  expect(cpu.slice(-13)).toEqual([null, ...Array(5).fill(10), ...Array(5).fill(20), null, null]);
  expect(memory.slice(-4)).toEqual([50, 50, null, null]);
});

test('facts whose write failed are written again, although the machine sends nothing more', async () => {
  const history = openHistory(join(temporaryFolder('facts'), 'history.db'), 'install', quiet);
  const clock = fakeClock(1_800_000_000_000);
  const facts = await MachineFacts.open(history);
  onTestFinished(async () => {
    await facts.close();
    await history.close();
  });
  const host = { hostname: 'a', os: 'linux', arch: 'x64', ip: '::1', agent_version: '1' };
  await facts.hello('mach_a', { ...host, capabilities: ['metrics'] }, null);
  const stored = async () => (await history.get('SELECT report FROM machine_facts'))?.report;
  const fail = "BEFORE INSERT ON machine_facts BEGIN SELECT RAISE(ABORT, 'the disk is full'); END";
  await history.write((transaction) => transaction.run(`CREATE TRIGGER failing ${fail}`));
  facts.heard('mach_a', reportWith(30));
  await clock.advance(60_000);
  expect(await stored()).toBeNull();
  await history.write((transaction) => transaction.run('DROP TRIGGER failing'));
  await clock.advance(60_000);
  expect(JSON.parse(String(await stored()))).toMatchObject({ cpu_usage: 30 });
});

const reportWith = (cpu_usage: number) => ({
  ...{ recorded_at_ms: 1_800_000_000_000, uptime_s: 1, cpu_usage, cpu_cores: 1, load_average: [1] },
  ...{ memory: { total: 4, used: 2, free: 2 }, disk: { total: 4, used: 1, free: 3 }, disks: [], network: [] },
  ...{ agent_rss: 1, agent_uptime_s: 1 },
});
