// Schedules that run when a path on a machine changes, from the changed file to the command.
import {
  appendFileSync,
  existsSync,
  mkdirSync,
  readFileSync,
  renameSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { describe, expect, onTestFinished, test } from 'vitest';
import { gate, soon } from './commands-fixture.ts';
import { storedRows } from './read-stored-state.ts';
import { startFarhand, startWithAgent, type TestSystem, temporaryFolder } from './start-farhand.ts';

type Creation = Partial<Parameters<TestSystem['client']['schedules']['create']>[0]>;

/** The shortest settle time that is allowed, so that the tests are quick. */
const settle = 1000;
const rights = ['schedules:read', 'schedules:write', 'commands:execute', 'files:read'] as const;

/**
 * A machine with an empty folder, and schedules whose runs append their changed paths to a file outside of that folder.
 */
async function watched(agentOptions: Parameters<TestSystem['agent']>[0] = {}) {
  const folder = temporaryFolder('watched');
  const log = join(temporaryFolder('log'), 'log');
  const { system, agent } = await startWithAgent(agentOptions);
  const { client } = system;
  const { machineId: machine_id } = agent;
  const command = `printf 'run %s.' "$FARHAND_CHANGED_PATHS" >> ${log}`;
  const make = (path: string, more: Creation = {}) =>
    client.schedules.create({
      ...{ name: 'x', machine_id, command, on_change: { path: join(folder, path), settle } },
      ...more,
    });
  const seen = (id: string) =>
    storedRows(
      system.dataDir,
      'SELECT seen FROM schedule_marks WHERE schedule_id = ? AND seen IS NOT NULL',
      id,
    );
  return {
    ...{ folder, system, agent, client, machine_id, make, command },
    file: (name: string) => join(folder, name),
    /** Creates a schedule. Resolves when its path is watched. */
    async making(path: string, more: Creation = {}) {
      const made = await make(path, more);
      await soon(() => seen(made.id)).toHaveLength(1);
      return made;
    },
    /** Returns what each run has written: its changed paths, relative to the folder. */
    logged: (): string[] => {
      const text = existsSync(log) ? readFileSync(log, 'utf8') : '';
      return text.replaceAll(`${folder}/`, '').split('.').slice(0, -1);
    },
    runs: async (schedule_id: string) =>
      (await client.schedules.history({ schedule_id, sort: 'started_at' })).items,
  };
}

describe('a schedule with on_change', () => {
  test('needs either cron or on_change, and on_change needs a path and a settle time within limits', async () => {
    const { system, machine_id, make, file } = await watched();
    const body = { name: 'x', machine_id, command: 'true' };
    const path = file('a');
    for (const wrong of [
      {},
      { cron: '@daily', on_change: { path } },
      { on_change: {} },
      { on_change: { path, settle: 10 } },
      { on_change: { path, more: 1 } },
    ]) {
      const answer = await system.call('POST', '/schedules', { body: { ...body, ...wrong } });
      expect([answer.status, answer.body.error?.code]).toEqual([422, 'validation_failed']);
    }
    const { id } = await make('a');
    const both = { cron: '@daily', on_change: { path } };
    expect((await system.call('PATCH', `/schedules/${id}`, { body: both })).status).toBe(422);
  });

  test('has no due times, and can be changed to cron and back', async () => {
    const { client, make, file } = await watched();
    const made = await make('a', { on_change: { path: file('a') } });
    expect(made).toMatchObject({
      ...{ cron: null, on_change: { path: file('a'), recursive: false, settle: 2000 } },
      ...{ next_run: null, next_runs: [], catch_up: 'last' },
    });
    const schedule_id = made.id;
    expect((await client.schedules.upcoming({ schedule_id })).runs).toEqual([]);
    const daily = await client.schedules.update({ schedule_id, cron: '@daily' });
    expect(daily).toMatchObject({ cron: '@daily', on_change: null, next_run: expect.any(String) });
    expect(daily.catch_up).toBe('none');
    const back = await client.schedules.update({ schedule_id, on_change: { path: file('b') } });
    expect(back).toMatchObject({
      cron: null,
      on_change: { path: file('b') },
      next_run: null,
      catch_up: 'last',
    });
    expect((await client.schedules.list({ sort: 'next_run' })).items).toHaveLength(1);
  });

  test('runs once after a burst of changes, and its command gets the changed paths', async () => {
    const { making, file, logged, runs, client } = await watched();
    writeFileSync(file('a'), '1');
    const { id } = await making('');
    writeFileSync(file('a'), '2');
    writeFileSync(file('b c'), '');
    rmSync(file('a'));
    await soon(logged).toEqual(['run a\nb c']);
    const [run, ...others] = await runs(id);
    expect(others).toEqual([]);
    expect(run).toMatchObject({ trigger: 'change', scheduled_for: null, machine_id: expect.any(String) });
    await soon(async () => (await client.schedules.get({ schedule_id: id })).last_run?.status).toBe(
      'completed',
    );
    writeFileSync(file('b c'), 'more');
    await soon(logged).toEqual(['run a\nb c', 'run b c']);
  });

  test('runs for a file below the directory only if it is recursive', async () => {
    const { making, file, logged } = await watched();
    mkdirSync(file('deep'));
    const flat = `echo -n 'flat.' >> ${file('../flat')}`;
    onTestFinished(() => rmSync(file('../flat'), { force: true }));
    await making('', { command: flat });
    await making('', { on_change: { path: file(''), recursive: true, settle } });
    writeFileSync(file('deep/a'), '');
    await soon(logged).toEqual(['run deep/a']);
    expect(existsSync(file('../flat'))).toBe(false);
  });

  test('waits for a path that does not exist, also if it becomes a directory', async () => {
    const { making, file, logged } = await watched();
    const { id } = await making('later', { on_change: { path: file('later'), recursive: true, settle } });
    expect(id).toBeTruthy();
    mkdirSync(file('later'));
    await soon(() => logged().length).toBe(1);
    writeFileSync(file('later/a'), '');
    await soon(() => logged().at(-1)).toBe('run later/a');
    rmSync(file('later'), { recursive: true });
    await soon(() => logged().length).toBe(3);
    mkdirSync(file('later'));
    await soon(() => logged().length).toBe(4);
  });

  test('runs while the path changes all the time, after ten times its settle time', async () => {
    const { making, file, logged } = await watched();
    await making('busy');
    const busy = setInterval(() => appendFileSync(file('busy'), 'x'), 200);
    onTestFinished(() => clearInterval(busy));
    await expect.poll(() => logged().length, { timeout: 20_000 }).toBe(1);
  });

  test('leaves the variable with the changed paths empty for names with line breaks, or for too many names', async () => {
    const { making, file, logged } = await watched();
    await making('');
    writeFileSync(file('one\ntwo'), '');
    writeFileSync(file('three'), '');
    await soon(logged).toEqual(['run ']);
    for (let n = 0; n < 1001; n += 1) writeFileSync(file(`n${n}`), '');
    await soon(logged).toEqual(['run ', 'run ']);
  });

  test('runs once after a run during which the path changed, and at once with overlap allow', async () => {
    const { making, file, runs, client } = await watched();
    const [slow, slower] = [gate(), gate()];
    const { id } = await making('a', { command: slow.wait });
    const { id: both } = await making('a', { command: slower.wait, overlap: 'allow' });
    const change = async (count: number) => {
      appendFileSync(file('a'), 'x');
      await soon(async () => (await runs(both)).length).toBe(count);
    };
    await change(1);
    await soon(async () => (await runs(id)).length).toBe(1);
    await change(2);
    await change(3);
    expect(await runs(id)).toHaveLength(1);
    const open = await client.schedules.history({ schedule_id: both, status: 'running' });
    expect(open.total).toBe(3);
    const statuses = async () => (await runs(id)).map(({ status }) => status);
    slow.open();
    await soon(statuses).toEqual(['completed', 'running']);
    slow.open();
    await soon(statuses).toEqual(['completed', 'completed']);
    for (const _ of [1, 2, 3]) slower.open();
    await soon(async () => new Set((await runs(both)).map(({ status }) => status))).toEqual(
      new Set(['completed']),
    );
  });

  test('runs after a run during which the path changed and another key edited the schedule', async () => {
    const { making, file, runs, system } = await watched();
    const slow = gate();
    const { id: schedule_id } = await making('a', { command: slow.wait, catch_up: 'none' });
    const { id: quick } = await making('a', { overlap: 'allow' });
    const statuses = async () => (await runs(schedule_id)).map(({ status }) => status);
    for (const count of [1, 2]) {
      appendFileSync(file('a'), 'x');
      await soon(async () => (await runs(quick)).length).toBe(count);
      await soon(statuses).toEqual(['running']);
    }
    const { client } = await system.keyed(['admin']);
    await client.schedules.update({ schedule_id, description: 'edited' });
    slow.open();
    await soon(statuses).toEqual(['completed', 'running']);
    slow.open();
    await soon(statuses).toEqual(['completed', 'completed']);
  });

  test('runs by hand, and after a change only while it is enabled', async () => {
    const { making, file, logged, client, system } = await watched();
    const { id: schedule_id } = await making('a');
    await client.schedules.update({ schedule_id, enabled: false });
    writeFileSync(file('a'), '1');
    await client.schedules.run({ schedule_id });
    await soon(logged).toEqual(['run ']);
    const seen = () => storedRows(system.dataDir, 'SELECT seen FROM schedule_marks');
    const before = await seen();
    await client.schedules.update({ schedule_id, enabled: true });
    await soon(async () => (await seen())[0]).not.toEqual(before[0]);
    writeFileSync(file('a'), '22');
    await soon(logged).toEqual(['run ', 'run a']);
  });

  test('with tags runs only on the machine whose path has changed', async () => {
    const { system, client, folder, file, make } = await watched({ tags: 'all' });
    const root = temporaryFolder('other');
    const other = await system.agent({ name: 'other', tags: 'all', flags: ['--root', root] });
    const { id: schedule_id } = await make('', { machine_id: undefined, tags: ['all'] });
    // The agent `other` has another root, so it refuses to watch the folder.
    const rows = async () => (await client.schedules.history({ schedule_id, sort: 'started_at' })).items;
    await soon(async () => (await rows()).length).toBe(1);
    const [refused] = await rows();
    expect(refused).toMatchObject({ machine_id: other.machineId, status: 'failed', trigger: 'change' });
    expect(refused?.stderr).toContain('permission_denied');
    writeFileSync(file('a'), '');
    await soon(async () => (await rows()).length).toBe(2);
    expect((await rows())[1]).toMatchObject({
      trigger: 'change',
      status: expect.stringMatching(/running|completed/),
    });
    expect(folder).toBeTruthy();
  });
});

describe('a change while the path is not watched', () => {
  test('starts one run when the machine is back, or is a missed run with catch_up none', async () => {
    const { making, file, logged, runs, agent, system, client } = await watched({ name: 'm' });
    for (const name of ['a', 'b', 'c']) writeFileSync(file(name), '1');
    const same = await making('c');
    const { id } = await making('a');
    const none = await making('b', { catch_up: 'none' });
    const gone = agent.linked(false);
    await agent.close();
    await gone;
    writeFileSync(file('a'), '2');
    writeFileSync(file('b'), '2');
    await system.agent({ dataDir: agent.dataDir });
    await soon(logged).toEqual(['run ']);
    await soon(async () => (await runs(id)).map((run) => [run.trigger, run.status])).toEqual([
      ['catch_up', 'completed'],
    ]);
    await soon(async () => (await runs(none.id)).map((run) => [run.trigger, run.status])).toEqual([
      ['change', 'missed'],
    ]);
    expect((await runs(none.id))[0]?.stderr).toContain('was not watched');
    expect((await client.schedules.get({ schedule_id: none.id })).last_run).toBe(null);
    expect(await runs(same.id)).toEqual([]);
  });

  test('is found after a restart of the broker, even if it only replaced a file in a tree with one of the same size', async () => {
    const { making, file, logged, agent, system } = await watched();
    mkdirSync(file('sub'));
    writeFileSync(file('sub/a'), '1');
    await making('', { on_change: { path: file(''), recursive: true, settle } });
    const gone = agent.linked(false);
    await system.broker.close();
    await gone;
    writeFileSync(file('sub/new'), '2');
    renameSync(file('sub/new'), file('sub/a'));
    const back = agent.linked(true);
    await startFarhand({ dataDir: system.dataDir, flags: ['--grpc', system.grpc] });
    await back;
    await soon(logged).toEqual(['run ']);
  });

  test('does not count while the schedule is disabled, or before its on_change path was edited', async () => {
    const { making, file, logged, client, system } = await watched();
    const { id: schedule_id } = await making('a');
    const seen = async () => (await storedRows(system.dataDir, 'SELECT seen FROM schedule_marks'))[0]?.seen;
    const first = await seen();
    await client.schedules.update({ schedule_id, enabled: false });
    writeFileSync(file('a'), '1');
    await client.schedules.update({ schedule_id, enabled: true });
    await soon(seen).not.toBe(first);
    const second = await seen();
    await client.schedules.update({ schedule_id, on_change: { path: file('b'), settle } });
    await soon(seen).not.toBe(second);
    writeFileSync(file('b'), '1');
    await soon(logged).toEqual(['run b']);
  });
});

describe('the rights of a schedule with on_change', () => {
  test('include files:read, when it is created and when it is changed', async () => {
    const { system, machine_id, make, file } = await watched();
    const { key } = await system.keyed(['schedules:read', 'schedules:write', 'commands:execute']);
    const on_change = { path: file('a') };
    const body = { name: 'x', machine_id, command: 'true', on_change };
    const { id } = await make('a');
    for (const [method, path, sent] of [
      ['POST', '/schedules', body],
      ['PATCH', `/schedules/${id}`, { on_change }],
      ['PATCH', `/schedules/${id}`, { name: 'y' }],
    ] as const) {
      const answer = await system.call(method, path, { key, body: sent });
      expect([answer.status, answer.body.error?.details?.required_scope]).toEqual([403, 'files:read']);
    }
  });

  test('a path outside of the roots, or in the data directory of the agent, is refused', async () => {
    const root = temporaryFolder('root');
    const { system, make, folder, agent, machine_id, client } = await watched({ flags: ['--root', root] });
    for (const path of [folder, join(agent.dataDir, 'identity.json')]) {
      const body = { name: 'x', machine_id, command: 'true', on_change: { path } };
      const answer = await system.call('POST', '/schedules', { body });
      expect([answer.status, answer.body.error?.code]).toEqual([403, 'permission_denied']);
    }
    const { id: schedule_id } = await make('', { on_change: { path: root, settle } });
    const change = client.schedules.update({ schedule_id, on_change: { path: folder } });
    await expect(change).rejects.toMatchObject({ code: 'permission_denied' });
  });

  test('once its key is revoked it no longer runs, and one row has the reason', async () => {
    const { system, making, file, logged, runs, client, machine_id, command } = await watched();
    const limited = await system.keyed([...rights], { machine_ids: [machine_id] });
    const { id: schedule_id, requested_by } = await limited.client.schedules.create({
      ...{ name: 'x', machine_id, command, on_change: { path: file('a'), settle } },
    });
    const { id: other } = await making('a', { command: 'true' });
    await soon(() =>
      storedRows(system.dataDir, 'SELECT 1 FROM schedule_marks WHERE seen IS NOT NULL'),
    ).toHaveLength(2);
    await client.keys.remove({ key_id: requested_by });
    await soon(async () => (await runs(schedule_id)).map(({ status }) => status)).toEqual(['failed']);
    expect((await runs(schedule_id))[0]?.stderr).toContain('key_revoked');
    writeFileSync(file('a'), '1');
    await soon(async () => (await runs(other)).length).toBe(1);
    expect(logged()).toEqual([]);
    expect(await runs(schedule_id)).toHaveLength(1);
    // After this update the schedule belongs to the key of `client`. It then runs for the change that was made after
    // its first key was removed.
    await client.schedules.update({ schedule_id, name: 'mine' });
    await soon(logged).toEqual(['run ']);
  });

  test('a path that can no longer be watched is a failed run once, and is watched again later', async () => {
    const { making, client, machine_id, runs, file, system, agent } = await watched();
    await making('a', { notify: { on_failure: true } });
    const root = temporaryFolder('root');
    const [{ id } = { id: '' }] = (await client.schedules.list()).items;
    const again = async (flags: string[]) => {
      await agent.close();
      return await system.agent({ dataDir: agent.dataDir, flags });
    };
    const narrow = await again(['--root', root]);
    await soon(async () => (await runs(id)).map(({ status }) => status)).toEqual(['failed']);
    await soon(async () => (await client.events.list({ type: 'schedule.failed' })).total).toBe(1);
    await narrow.close();
    writeFileSync(file('a'), '1');
    await again([]);
    await soon(async () => (await runs(id)).map(({ status }) => status)).toEqual(['failed', 'completed']);
    expect(machine_id).toBeTruthy();
  });

  test('at most 16 paths of a machine are watched', async () => {
    const { making, make, system, machine_id, file, client, logged } = await watched();
    for (let n = 0; n < 16; n += 1) await make(`f${n}`);
    const body = { name: 'x', machine_id, command: 'true', on_change: { path: file('more') } };
    const answer = await system.call('POST', '/schedules', { body });
    expect([answer.status, answer.body.error?.code]).toEqual([409, 'conflict']);
    const disabled = await system.call('POST', '/schedules', { body: { ...body, enabled: false } });
    const { id: schedule_id } = disabled.body.data;
    await expect(client.schedules.update({ schedule_id, enabled: true })).rejects.toMatchObject({
      code: 'conflict',
    });
    await client.machines.update({ machine_id, tags: ['t'] });
    const tagged = await make('tagged', { machine_id: undefined, tags: ['t'] });
    await soon(
      async () => (await client.schedules.history({ schedule_id: tagged.id })).items[0]?.stderr ?? '',
    ).toContain('unavailable');
    writeFileSync(file('f15'), '1');
    await soon(logged).toEqual(['run f15']);
    expect(making).toBeTruthy();
  });
});
