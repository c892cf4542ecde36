// Machines over REST, from HTTP to a real agent and back.
import { readFileSync, writeFileSync } from 'node:fs';
import { cpus, hostname, totalmem } from 'node:os';
import { join } from 'node:path';
import { expect, onTestFinished, test } from 'vitest';
import { openHistory } from '../broker/history/open-sqlite-file.ts';
import { MachineFacts } from '../broker/presence/stored-facts-and-metrics.ts';
import { fakeClock } from './fake-clock.ts';
import { scriptedMachine } from './scripted-agent.ts';
import { quiet, startFarhand, startWithAgent, temporaryFolder } from './start-farhand.ts';

/** Returns a report of an agent, as the broker decodes it. */
function report(cpu_usage: number) {
  const space = { total: 100, used: 40, free: 60 };
  return {
    ...{ recorded_at_ms: 1, uptime_s: 1, cpu_usage, cpu_cores: 2, memory: space, disk: space },
    ...{ load_average: [0.5], disks: [], network: [], agent_rss: 1, agent_uptime_s: 1 },
  };
}

test('an id that names no machine is machine_not_found on every machine route', async () => {
  const system = await startFarhand();
  for (const [method, path] of [
    ['GET', '/machines/mach_none'],
    ['GET', '/machines/x/status'],
    ['GET', '/machines/mach_none/files'],
    ['PATCH', '/machines/mach_none'],
    ['DELETE', '/machines/mach_none'],
  ] as const) {
    const { status, body } = await system.call(
      method,
      path,
      method === 'PATCH' ? { body: { name: '' } } : {},
    );
    expect([method, path, status, body.error.code]).toEqual([method, path, 404, 'machine_not_found']);
  }
});

test.each([
  ['an empty name', { name: '' }],
  ['a name with a control character', { name: 'a\u0007b' }],
  ['a name with a lone surrogate', { name: 'a\ud800' }],
  ['a tag with a comma', { tags: ['a,b'] }],
  ['51 tags', { tags: Array.from({ length: 51 }, (_, n) => `t${n}`) }],
  ['an unknown field', { hostname: 'x' }],
])('PATCH refuses %s with validation_failed and changes nothing', async (_what, body) => {
  const { system, agent } = await startWithAgent({ name: 'web-1' });
  const answer = await system.call('PATCH', `/machines/${agent.machineId}`, { body });
  expect([answer.status, answer.body.error.code]).toEqual([422, 'validation_failed']);
  expect(answer.body.error.details.issues.length).toBeGreaterThan(0);
  expect((await system.client.machines.get({ machine_id: agent.machineId })).name).toBe('web-1');
});

test.each([
  'limit=0',
  'limit=101',
  'limit=x',
  'limit=',
  'offset=-1',
  'sort=ip',
  'status=up',
  'include=ip',
  'include=agent_version,ip',
  'limit=1&limit=2',
])('a list refuses ?%s with invalid_request', async (query) => {
  const system = await startFarhand();
  const { status, body } = await system.call('GET', `/machines?${query}`);
  expect([status, body.error.code]).toEqual([400, 'invalid_request']);
});

test('a list item has exactly the fields of the contract, the detail three more', async () => {
  const { system, agent } = await startWithAgent({ name: 'web-1', tags: 'prod,web' });
  const list = await system.call('GET', '/machines');
  expect(list.body.data).toEqual([
    {
      id: agent.machineId,
      name: 'web-1',
      status: 'online',
      os: 'linux',
      arch: process.arch,
      hostname: hostname(),
      tags: ['prod', 'web'],
      created_at: expect.stringMatching(/^\d{4}-.*Z$/),
      last_seen: expect.stringMatching(/^\d{4}-.*Z$/),
    },
  ]);
  expect(list.body.meta).toMatchObject({ total: 1, limit: 20, offset: 0, has_more: false });
  const detail = await system.call('GET', `/machines/${agent.machineId}`);
  expect(detail.body.data).toEqual({
    ...list.body.data[0],
    last_seen: expect.any(String),
    ip: '127.0.0.1',
    agent_version: expect.any(String),
    capabilities: expect.arrayContaining(['exec', 'files:read']),
  });
});

test('machines are filtered by status, all given tags and part of the name, sorted and paged', async () => {
  const system = await startFarhand();
  for (const [name, tags] of [
    ['web-b', 'web,prod'],
    ['db', 'prod'],
    ['web-a', 'web'],
  ] as const) {
    await system.agent({ name, tags });
  }
  const names = async (query: string): Promise<string[]> =>
    (await system.call('GET', `/machines?${query}`)).body.data.map((item: { name: string }) => item.name);
  expect(await names('sort=name')).toEqual(['db', 'web-a', 'web-b']);
  expect(await names('sort=-name')).toEqual(['web-b', 'web-a', 'db']);
  expect(await names('')).toEqual(['web-a', 'db', 'web-b']);
  expect(await names('tags=web,prod')).toEqual(['web-b']);
  expect(await names('search=WEB&sort=name')).toEqual(['web-a', 'web-b']);
  expect(await names('status=offline')).toEqual([]);
  const page = await system.call('GET', '/machines?sort=name&limit=1&offset=1');
  expect(page.body.data[0].name).toBe('web-a');
  expect(page.body.meta).toMatchObject({ total: 3, limit: 1, offset: 1, has_more: true });
  expect(page.headers.get('link')).toBe('</api/v1/machines?sort=name&limit=1&offset=2>; rel="next"');
});

test('a list follows every change of its machines and of its key at once', async () => {
  const system = await startFarhand();
  const web = await system.agent({ name: 'web', tags: 'web' });
  const { machineId } = await system.agent({ name: 'db', tags: 'db' });
  const limited = await system.client.keys.create({ name: 'web', scopes: ['machines:read'], tags: ['web'] });
  const names = async (query: string, key = system.key): Promise<string[]> =>
    (await system.call('GET', `/machines?${query}`, { key })).body.data.map(
      (item: { name: string }) => item.name,
    );
  const expectLists = async (all: string[], online: string[], allowed: string[]): Promise<void> => {
    expect(await names('sort=name')).toEqual(all);
    expect(await names('sort=name&status=online')).toEqual(online);
    expect(await names('sort=name', limited.key)).toEqual(allowed);
  };
  await expectLists(['db', 'web'], ['db', 'web'], ['web']);
  await system.client.machines.update({ machine_id: machineId, name: 'store', tags: ['web'] });
  await expectLists(['store', 'web'], ['store', 'web'], ['store', 'web']);
  await system.client.machines.update({ machine_id: web.machineId, tags: [] });
  await expectLists(['store', 'web'], ['store', 'web'], ['store']);
  await web.close();
  await expect.poll(() => names('status=offline')).toEqual(['web']);
  await expectLists(['store', 'web'], ['store'], ['store']);
  await system.client.machines.remove({ machine_id: machineId });
  await expectLists(['web'], [], []);
});

test('status reports the real CPU, memory and disk of the machine', async () => {
  const { system, machine_id } = await startWithAgent();
  const status = await system.client.machines.status({ machine_id });
  expect(status.connected).toBe(true);
  expect(status.cpu.cores).toBe(cpus().length);
  expect(status.memory.total).toBe(totalmem());
  expect(status.memory.used + status.memory.free).toBe(status.memory.total);
  expect(status.disk.total).toBeGreaterThan(1e6);
  expect(status.disk.used + status.disk.free).toBe(status.disk.total);
  expect(status.disk.available).toBeLessThanOrEqual(status.disk.free);
  expect(status.disks[0]?.available).toBe(status.disk.available);
  expect(status.uptime).toBeGreaterThan(0);
  expect(status.stale_ms).toBeLessThan(5_000);
});

test('the disks of an older agent have no available space', async () => {
  const system = await startFarhand();
  const space = { total: 100, used: 40, free: 60 };
  const disks = [{ mount: '/', filesystem: 'ext4', space }];
  const old = { recorded_at_ms: 1, cpu_cores: 1, memory: space, disk: space, disks };
  const { identity } = await scriptedMachine(system, { metrics: old });
  const status = await system.client.machines.status({ machine_id: identity.machineId });
  expect([status.disk, status.disks]).toEqual([space, [{ mount: '/', filesystem: 'ext4', ...space }]]);
});

test('list items have exactly the specified fields, and the agent’s version and clock only on request', async () => {
  const system = await startFarhand();
  await system.agent({ name: 'web-1' });
  await system.agent({ name: 'no-reports', flags: ['--allow', 'exec'] });
  const keys = async (query: string): Promise<string[][]> =>
    (await system.call('GET', `/machines?sort=-name&${query}`)).body.data.map(Object.keys);
  const plain = ['id', 'name', 'status', 'os', 'arch', 'hostname', 'tags', 'created_at', 'last_seen'];
  expect(await keys('')).toEqual([plain, plain]);
  expect(await keys('include=agent_version')).toEqual(Array(2).fill([...plain, 'agent_version']));
  expect(await keys('include=clock_offset_ms,agent_version')).toEqual([
    [...plain, 'agent_version', 'clock_offset_ms'],
    [...plain, 'agent_version'],
  ]);
});

test('a machine whose clock is far off is logged once until its clock is right, and has the offset in its status', async () => {
  const system = await startFarhand();
  const metrics = { cpu_cores: 1, memory: {}, disk: {} };
  const at = (offset: number) => ({ ...metrics, recorded_at_ms: Date.now() + offset });
  const agent = await scriptedMachine(system, { metrics: at(-86_400_000) });
  const { machineId: machine_id } = agent.identity;
  const offset = async (): Promise<number> =>
    (await system.client.machines.status({ machine_id })).clock_offset_ms ?? 0;
  const near = async (ms: number): Promise<void> =>
    await expect.poll(async () => Math.abs((await offset()) - ms) < 10_000).toBe(true);
  await near(-86_400_000);
  for (const ms of [-86_400_000, 0, 3_600_000]) {
    agent.send({ heartbeat: { metrics: at(ms) } });
    await near(ms);
  }
  const lines = system.log.filter((line) => line.includes('clock is')).map((line) => JSON.parse(line));
  expect(lines).toEqual([
    expect.objectContaining({
      level: 40,
      machine: 'scripted',
      machine_id,
      msg: expect.stringContaining('behind'),
    }),
    expect.objectContaining({
      level: 40,
      machine: 'scripted',
      machine_id,
      msg: expect.stringContaining('ahead'),
    }),
  ]);
});

test('an offline machine has its last known status with connected false', async () => {
  const { system, agent } = await startWithAgent();
  await agent.close();
  const status = await system.client.machines.status({ machine_id: agent.machineId });
  expect(status.connected).toBe(false);
  expect(status.memory.total).toBe(totalmem());
});

test('the history of metrics is averaged per step and bounded to 48 hours', async () => {
  const folder = temporaryFolder('metrics');
  const history = openHistory(join(folder, 'history.db'), 'install', quiet);
  const clock = fakeClock(1_800_000_000_000);
  const machineFacts = await MachineFacts.open(history);
  onTestFinished(async () => {
    await machineFacts.close();
    await history.close();
  });
  await machineFacts.hello(
    'mach_a',
    { hostname: 'a', os: 'linux', arch: 'x64', ip: '::1', agent_version: '1', capabilities: [] },
    null,
  );
  for (let minute = 0; minute <= 50 * 60; minute += 5) {
    machineFacts.heard('mach_a', report(minute % 10 === 0 ? 20 : 40));
    await clock.advance(300_000);
  }
  await history.prune();
  const points = await machineFacts.metrics('mach_a', 0, clock.now(), 600_000);
  expect(points.length).toBeGreaterThanOrEqual(48 * 6);
  expect(points.length).toBeLessThanOrEqual(48 * 6 + 1);
  expect(points.slice(1, -1).every(({ cpu_usage }) => cpu_usage === 30)).toBe(true);
});

test('metrics over REST refuse an invalid instant, and return the requested period', async () => {
  const { system, machine_id } = await startWithAgent();
  const bad = await system.call('GET', `/machines/${machine_id}/metrics?since=yesterday`);
  expect([bad.status, bad.body.error.code]).toEqual([400, 'invalid_request']);
  const good = await system.call('GET', `/machines/${machine_id}/metrics?since=2026-01-01T00:00:00Z&step=60`);
  expect(good.body.data).toMatchObject({ since: '2026-01-01T00:00:00.000Z', step: 60, points: [] });
});

test('PATCH changes name and tags, and only the fields that were sent', async () => {
  const { system, agent } = await startWithAgent({ name: 'old', tags: 'a' });
  const renamed = await system.client.machines.update({ machine_id: agent.machineId, name: 'new' });
  expect([renamed.name, renamed.tags]).toEqual(['new', ['a']]);
  const retagged = await system.client.machines.update({
    machine_id: agent.machineId,
    tags: ['x', 'y', 'x'],
  });
  expect([retagged.name, retagged.tags]).toEqual(['new', ['x', 'y']]);
});

test('a removed machine is gone at once, and its agent stops for good', async () => {
  const { system, agent } = await startWithAgent();
  const removed = await system.call('DELETE', `/machines/${agent.machineId}`);
  expect([removed.status, removed.body.data]).toEqual([200, { deleted: true }]);
  await expect(agent.ended).rejects.toMatchObject({ name: 'StartError', exitCode: 78 });
  expect((await system.call('GET', `/machines/${agent.machineId}`)).status).toBe(404);
});

test('an agent removed while it was offline stops when it reconnects', async () => {
  const { system, agent } = await startWithAgent();
  await agent.close();
  await system.client.machines.remove({ machine_id: agent.machineId });
  await expect(system.agent({ dataDir: agent.dataDir })).rejects.toMatchObject({ exitCode: 78 });
});

test('white space around tags is trimmed: in new tags, in those of version 0.1.0, in filters, keys and batches', async () => {
  const first = await startFarhand();
  const body = { tags: [' ', 'x'] };
  const agent = await first.agent({ tags: ' a , b ' });
  const { machineId: machine_id, dataDir } = agent;
  const refused = await first.call('PATCH', `/machines/${machine_id}`, { body });
  expect([refused.status, refused.body.error.details.issues[0].path]).toEqual([422, 'tags.0']);
  const { tags } = await first.client.machines.update({ machine_id, tags: [' a', 'b\u00a0', 'a ', 'c d'] });
  expect(tags).toEqual(['a', 'b', 'c d']);
  const key = await first.client.keys.create({ name: 'x', scopes: ['machines:read'], tags: [' a '] });
  expect(key.tags).toEqual(['a']);
  expect((await first.client.joinTokens.create({ tags: [' a '] })).tags).toEqual(['a']);
  await agent.close();
  await first.broker.close();

  const file = join(first.dataDir, 'state.json');
  const state = JSON.parse(readFileSync(file, 'utf8'));
  state.machines[0].tags = [' a', 'a', '  ', 'c d '];
  state.keys.find(({ id }: { id: string }) => id === key.id).tags = ['c d '];
  writeFileSync(file, JSON.stringify(state));
  const system = await startFarhand({ dataDir: first.dataDir, flags: ['--accept-state'] });
  await system.agent({ dataDir });
  const limited = { key: key.key };
  for (const wanted of ['a', ' a', 'c d', 'a, c d ']) {
    const answer = await system.call('GET', `/machines?tags=${encodeURIComponent(wanted)}`, limited);
    expect([wanted, answer.body.data.map((one: { tags: string[] }) => one.tags)]).toEqual([
      wanted,
      [['a', 'c d']],
    ]);
  }
  const { results } = await system.client.batches.create({ tags: [' a '], command: 'true' });
  expect(results.map((one) => one.machine_id)).toEqual([machine_id]);
});

test('tags that decide which machines a key may use are changed by admin only', async () => {
  const { system, agent } = await startWithAgent({ tags: 'dev' });
  const { client } = await system.keyed(['machines:read', 'machines:write']);
  await client.machines.update({ machine_id: agent.machineId, tags: ['dev', 'x'] });
  await system.keyed(['machines:read'], { tags: ['prod'] });
  await expect(client.machines.update({ machine_id: agent.machineId, tags: ['prod'] })).rejects.toMatchObject(
    {
      status: 403,
      details: { required_scope: 'admin' },
    },
  );
  await system.client.machines.update({ machine_id: agent.machineId, tags: ['prod'] });
});

test('a key limited by tag sees the machines with that tag and no others', async () => {
  const system = await startFarhand();
  await system.agent({ name: 'in', tags: 'team-a' });
  const outside = await system.agent({ name: 'out' });
  const { client } = await system.keyed(['machines:read'], { tags: ['team-a'] });
  const { items, total } = await client.machines.list();
  expect([items.map((item) => item.name), total]).toEqual([['in'], 1]);
  await expect(client.machines.get({ machine_id: outside.machineId })).rejects.toMatchObject({ status: 403 });
  await expect(client.machines.get({ machine_id: 'mach_none' })).rejects.toMatchObject({ status: 403 });
  const events = await client.events.list({ limit: 100 });
  expect(new Set(events.items.map(({ data }) => data.machine_name))).toEqual(new Set(['in']));
});

test('a key limited to some machines cannot use join tokens, not even with admin', async () => {
  const system = await startFarhand();
  const token = await system.client.joinTokens.create({});
  const { client } = await system.keyed(['admin'], { tags: ['team-a'] });
  const denied = { status: 403, code: 'forbidden' };
  await expect(client.joinTokens.create({ tags: ['team-a'] })).rejects.toMatchObject(denied);
  await expect(client.joinTokens.list()).rejects.toMatchObject(denied);
  await expect(client.joinTokens.remove({ join_token_id: token.id })).rejects.toMatchObject(denied);
});
