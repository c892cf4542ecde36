// Filters of lists: every route checks its parameters, every filter selects the right items, and the history of a
// removed machine is found by its id.
import { expect, test, vi } from 'vitest';
import type { History } from '../broker/history/history-database.ts';
import { ask, type Named, refusalIn, type Scene, startScene, table } from './all-routes.ts';
import { shared } from './close-after-tests.ts';
import { startFarhand, startWithAgent, type TestSystem } from './start-farhand.ts';
import { waitFor } from './wait-for.ts';

// Many requests take long on a busy machine.
vi.setConfig({ testTimeout: 60_000 });

type Item = Record<string, unknown> & { id: string };

// These lists are left out of the tests. Tags, packages of inventories and machines of upgrades have no id of their
// own. The lists of other brokers and of agent packages may be empty.
const withoutIds = ['brokers.list', 'tags.list', 'inventory.list', 'upgrades.machines', 'packages.list'];
const lists = table.filter(({ name, route }) => route.kind === 'list' && !withoutIds.includes(name));
/** Returns the time that lists compare with `since` and `until`. */
const timeOf = (item: Item): string => String(item.created_at ?? item.at ?? item.timestamp);

/** A system whose items differ in all fields by which lists can be filtered. */
async function startVariedScene(): Promise<Scene> {
  const scene = await startScene();
  const { client } = scene.system;
  const { machine: machine_id } = scene.here;
  await client.webhooks.create({ url: 'https://example.org/', events: ['*'], enabled: false });
  await client.commands.create({ machine_id, command: 'head -c 9000 /dev/zero' });
  await client.commands.create({ machine_id, command: 'false' });
  await client.batches.create({ machine_ids: [machine_id], command: 'false' });
  const { id: schedule_id } = await client.schedules.create({
    ...{ machine_id, name: 'off', command: 'true', cron: '@daily' },
    ...{ enabled: false, overlap: 'allow', catch_up: 'all' },
  });
  await client.schedules.run({ schedule_id });
  // Waits for the events machine.online, which are recorded two seconds after the machines have linked. Without
  // requests, no event follows them.
  const online = async () => (await client.events.list({ type: 'machine.online' })).total;
  await expect.poll(online, { interval: 50 }).toBe(2);
  return scene;
}

// Tests share this system and add batches and keys, so each test must search for its own.
const anyScene = shared(startScene);

test('every route refuses unknown parameters, and names its own', async () => {
  const scene = await anyScene();
  for (const { name, route } of table) {
    const answer = await ask(scene, route, { ids: scene.here, query: { Limit: '1', no_such: 'x' } });
    expect([name, refusalIn(answer)]).toEqual([name, '400 invalid_request']);
    const { message, details } = answer.body.error;
    const known = Object.keys(route.query).join(', ');
    const instead = known === '' ? 'this route has no parameters' : `this route has: ${known}`;
    expect([name, message]).toEqual([name, `query: unknown parameters "Limit", "no_such"; ${instead}`]);
    expect(details.issues.map(({ path }: { path: string }) => path)).toEqual(['Limit', 'no_such']);
  }
});

async function page(
  { system, here }: Scene,
  { route }: Named,
  query: Record<string, string>,
): Promise<Item[]> {
  // Uses only the required parameters and the given ones.
  const path = route.path.replaceAll(/\{(\w+)_id\}/g, (_, noun: string) => here[noun as 'machine']);
  const search = new URLSearchParams({ limit: '100', ...query });
  const { status, body } = await system.call('GET', `${path}?${search.toString()}`);
  expect([path, query, status, body.error]).toEqual([path, query, 200, undefined]);
  expect(body.meta.total).toBe(body.data.length);
  return body.data;
}

const idsOf = (items: Item[]): string[] => items.map(({ id }) => id);

/** Returns the items with this field. Requests single items if the list leaves the field out. */
async function withField({ system }: Scene, name: string, items: Item[]): Promise<Item[]> {
  if (items[0] && name in items[0]) return items;
  const whole = items.map(({ id }) => system.client.schedules.get({ schedule_id: id }));
  return (await Promise.all(whole)).map((one) => ({ ...one }));
}

test('every list is filtered by its fields, and by since (inclusive) and until (exclusive)', async () => {
  const scene = await startVariedScene();
  for (const named of lists) {
    const { name: list, route } = named;
    const found = async (query: Record<string, string>) => idsOf(await page(scene, named, query));
    const all = await page(scene, named, {});
    expect([list, all.length > 0]).toEqual([list, true]);
    for (const name of route.filters?.filter((one) => one in route.query) ?? []) {
      const whole = await withField(scene, name, all);
      const values = [...new Set(whole.map((item) => item[name]))].filter((value) => value !== null);
      for (const value of values.slice(0, 3)) {
        const expected = whole.filter((item) => item[name] === value);
        expect([list, name, await found({ [name]: `${value as string | boolean}` })]).toEqual([
          list,
          name,
          idsOf(expected),
        ]);
      }
    }
    expect([list, await found({ id: 'none' })]).toEqual([list, []]);
    expect([list, await found({ since: '2100-01-01T00:00:00Z' })]).toEqual([list, []]);
    expect([list, await found({ until: '2001-01-01T00:00:00Z' })]).toEqual([list, []]);
    const always = { since: '2001-01-01T00:00:00Z', until: '2100-01-01T00:00:00Z' };
    expect([list, await found(always)]).toEqual([list, idsOf(all)]);
    // Leaves out the history of schedules: it is filtered by `decided_at`, a stored time that the API does not return.
    if (list === 'schedules.history') continue;
    const middle = all.map(timeOf).toSorted()[Math.floor(all.length / 2)]!;
    const [later, before] = [await found({ since: middle }), await found({ until: middle })];
    expect([list, later]).toEqual([list, idsOf(all.filter((item) => timeOf(item) >= middle))]);
    expect([list, before]).toEqual([list, idsOf(all.filter((item) => timeOf(item) < middle))]);
  }
});

test('every list has its filters: id, since and until, and each field whose name or kind makes it a filter', () => {
  expect(lists.map(({ name, route }) => [name, Object.keys(route.query).toSorted().join(' ')])).toEqual([
    ['machines.list', 'arch hostname id include limit name offset os search since sort status tags until'],
    ['machines.statuses', 'arch hostname id limit name offset os search since sort status tags until'],
    ['joinTokens.list', 'id limit name offset since sort until'],
    [
      'commands.list',
      'batch_id id limit machine_id offset schedule_id since sort status stderr_truncated stdout_truncated until',
    ],
    [
      'commands.ofMachine',
      'batch_id id limit offset schedule_id since sort status stderr_truncated stdout_truncated until',
    ],
    ['batches.list', 'id limit machine_id offset since sort status until'],
    ['savedCommands.list', 'id limit name offset since sort until'],
    ['upgrades.list', 'id limit machine_id offset since sort status until'],
    [
      'schedules.list',
      'catch_up enabled id limit machine_id name offset overlap saved_command_id since sort until',
    ],
    ['schedules.history', 'batch_id command_id id limit machine_id offset since sort status trigger until'],
    ['sessions.list', 'id limit machine_hostname machine_id offset session_id since sort status until'],
    ['events.list', 'id limit machine_id offset since sort type until'],
    ['keys.list', 'id limit name offset since sort until'],
    ['logins.list', 'id key_id key_name limit name offset since sort until'],
    ['webhooks.list', 'disabled_reason enabled id limit offset since sort until'],
    ['webhooks.deliveries', 'event_id id limit offset since sort status type until'],
    ['alertRules.list', 'enabled id kind limit name offset since sort until'],
    ['alertChannels.list', 'disabled_reason enabled id limit name offset since sort type until'],
    ['alertChannels.deliveries', 'event_id id limit offset since sort status type until'],
    ['maintenanceWindows.list', 'id limit name offset since sort until'],
    ['alerts.list', 'id kind limit machine_id name offset reason rule_id since sort status until window_id'],
    [
      'audit.list',
      'action id key key_id key_name limit login_id machine_id offset request_id since sort until',
    ],
  ]);
});

test('batches and events are filtered by their machines, and the audit also by a revoked key', async () => {
  const scene = await anyScene();
  const { client } = scene.system;
  const { here, there } = scene;
  const of = async (machine_id: string) =>
    (await client.batches.list({ machine_id })).items.map(({ id }) => id);
  const before = await of(there.machine);
  expect(before).toContain(there.batch);
  const both = await client.batches.create({ machine_ids: [here.machine, there.machine], command: 'true' });
  expect(await of(there.machine)).toEqual([both.id, ...before]);
  expect(await of(here.machine)).toEqual(expect.arrayContaining([both.id, here.batch]));
  expect(await of(here.machine)).not.toContain(there.batch);
  const { items } = await client.events.list({ machine_id: there.machine, limit: 100 });
  expect(new Set(items.map(({ data }) => data.machine_id))).toEqual(new Set([there.machine]));
  const { id: key_id } = await client.keys.create({ name: 'gone', scopes: ['commands:read'] });
  await client.keys.remove({ key_id });
  const me = await client.keys.me();
  expect((await client.audit.list({ key_id: me.id })).total).toBeGreaterThan(0);
  expect((await client.audit.list({ key_id })).total).toBe(0);
  expect((await client.audit.list({ key: key_id, key_id: me.id })).total).toBe(0);
});

test('the status of a batch, also as a filter, counts only machines that the key may use', async () => {
  const scene = await anyScene();
  const { client, keyed } = scene.system;
  const half = await client.batches.create({
    ...{
      machine_ids: [scene.here.machine, scene.there.machine],
      command: 'test "$FARHAND_COMMAND_ID" = no',
    },
  });
  expect(half.status).toBe('failed');
  const limited = (await keyed(['commands:read'], { machine_ids: [scene.there.machine] })).client;
  for (const one of [client, limited]) {
    const { items } = await one.batches.list({ limit: 100 });
    for (const status of ['running', 'completed', 'failed', 'cancelled'] as const) {
      const expected = items.filter((item) => item.status === status).map(({ id }) => id);
      const found = await one.batches.list({ status, limit: 100 });
      expect([status, found.items.map(({ id }) => id)]).toEqual([status, expected]);
    }
  }
});

// ---- A machine that was removed

const filtered = ['audit', 'commands', 'events', 'sessions', 'schedules', 'batches'];

interface Past {
  system: TestSystem;
  machine: string;
  /**
   * Keys with different limits: `named` to the removed machine and another one, `elsewhere` to that other machine, and
   * `tagged` to machines with the tag of the removed machine.
   */
  keys: Record<'named' | 'elsewhere' | 'tagged', string>;
}

async function createPast(): Promise<Past> {
  const system = await startFarhand();
  const [gone, stays] = [
    await system.agent({ name: 'gone', tags: 'web' }),
    await system.agent({ name: 'stays' }),
  ];
  const machine = gone.machineId;
  await system.client.commands.create({ machine_id: machine, command: 'true' });
  await system.client.batches.create({ machine_ids: [machine], command: 'true' });
  await system.client.sessions.create({ machine_id: machine, shell: 'cat' });
  const limited = async (limits: { machine_ids?: string[]; tags?: string[] }) =>
    (await system.keyed(['admin'], limits)).key;
  const keys = {
    named: await limited({ machine_ids: [machine, stays.machineId] }),
    elsewhere: await limited({ machine_ids: [stays.machineId] }),
    tagged: await limited({ tags: ['web'] }),
  };
  await system.client.machines.remove({ machine_id: machine });
  // The agent stops for good, so this promise rejects with the reason.
  await gone.ended.catch(() => undefined);
  return { system, machine, keys };
}

const aPast = shared(createPast);

test('the history of a removed machine is found by its id; an id that never existed is 404', async () => {
  const { system, machine, keys } = await aPast();
  const received = async (path: string, key: string) => {
    const { status, body } = await system.call('GET', path, { key });
    return status === 200 ? body.meta.total > 0 : refusalIn({ status, body, headers: new Headers() });
  };
  for (const noun of filtered) {
    const path = `/${noun}?machine_id=`;
    // Only schedules are not found: removing a machine also removes its schedules.
    const some = noun !== 'schedules';
    for (const key of [system.key, keys.named])
      expect([path, await received(path + machine, key)]).toEqual([path, some]);
    for (const key of [keys.elsewhere, keys.tagged]) {
      const { status } = await system.call('GET', path + machine, { key });
      expect([path, status]).toEqual([path, 403]);
    }
    const { status, body } = await system.call('GET', `${path}mach_never`);
    expect([path, status, body.error?.code]).toEqual([path, 404, 'machine_not_found']);
  }
});

test('a run is listed by its command, even after the command was deleted; other keys and ids are refused', async () => {
  const stores: { history: History }[] = [];
  const system = await startFarhand({ tuning: { onStores: (opened) => void stores.push(opened) } });
  const [machine, other] = [await system.agent(), await system.agent()];
  const schedule = { machine_id: machine.machineId, name: 'x', command: 'true', cron: '@yearly' };
  const { id: schedule_id } = await system.client.schedules.create(schedule);
  const { command_id } = await system.client.schedules.run({ schedule_id });
  await waitFor(async () =>
    expect((await system.client.commands.get({ command_id })).status).toBe('completed'),
  );
  await stores[0]?.history.write((transaction) => transaction.run('DELETE FROM commands'));
  const elsewhere = await system.keyed(['schedules:read'], { machine_ids: [other.machineId] });
  const path = `/schedules/${schedule_id}/history?command_id=`;
  expect((await system.call('GET', path + command_id, { key: elsewhere.key })).status).toBe(403);
  expect((await system.call('GET', `${path}cmd_never`)).body.error?.code).toBe('command_not_found');
  const { body } = await system.call('GET', path + command_id);
  expect(body.data).toMatchObject([{ command_id, status: 'completed', stdout: '' }]);
});

test('requests that need a machine are 404 once it is removed: its own paths, files, and bodies', async () => {
  const { system, machine } = await aPast();
  const asked: [method: string, path: string, body?: object][] = [
    ['GET', `/machines/${machine}`],
    ['GET', `/machines/${machine}/commands`],
    ['GET', `/machines/${machine}/metrics`],
    ['GET', `/files?machine_id=${machine}`],
    ['POST', '/commands', { machine_id: machine, command: 'true' }],
    ['POST', '/sessions', { machine_id: machine }],
    ['POST', '/schedules', { machine_id: machine, name: 'x', command: 'true', cron: '@daily' }],
  ];
  for (const [method, path, body] of asked) {
    const answer = await system.call(method, path, body && { body });
    expect([method, path, answer.body.error?.code]).toEqual([method, path, 'machine_not_found']);
  }
});

test('a stream of events about a machine goes on when the machine is removed, and reports the removal', async () => {
  const { system, machine_id } = await startWithAgent();
  const received: string[] = [];
  const enough = new AbortController();
  const stream = await system.client.events.stream({ machine_id }, { signal: enough.signal });
  await system.client.machines.remove({ machine_id });
  for await (const { event } of stream) {
    received.push(event);
    if (event === 'machine.removed') break;
  }
  expect(received.at(-1)).toBe('machine.removed');
});
