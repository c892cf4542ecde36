// Schedules that run on every machine with certain tags. The machines are looked up when a run is due.
import { Script } from 'node:vm';
import { describe, expect, onTestFinished, test, vi } from 'vitest';
import { gate, soon } from './commands-fixture.ts';
import { storedRows } from './read-stored-state.ts';
import { type Run, systemAt } from './schedules-fixture.ts';
import { startFarhand, temporaryFolder } from './start-farhand.ts';

/** A cron expression that is not due during a test. */
const yearly = '0 0 29 2 *';
/** Orders rows by their text. */
const byText = (a: readonly unknown[], b: readonly unknown[]): number => a.join().localeCompare(b.join());
const rights = ['schedules:read', 'schedules:write', 'commands:execute', 'commands:read'] as const;

/** A system with machines m0, m1, … Each has the tag `all` and its own name as a tag. */
async function tagged(count: number) {
  const system = await startFarhand();
  const agents = [];
  for (let n = 0; n < count; n += 1) agents.push(await system.agent({ name: `m${n}`, tags: `all,m${n}` }));
  const ids = agents.map(({ machineId }) => machineId);
  const make = (more: object = {}) =>
    system.client.schedules.create({
      tags: ['all'],
      name: 'nightly',
      command: 'true',
      cron: yearly,
      ...more,
    });
  return { system, client: system.client, ids, agents, make };
}

test('a schedule names either a machine or tags', async () => {
  const { system, ids, make } = await tagged(1);
  const body = { name: 'x', command: 'true', cron: yearly };
  for (const target of [{}, { machine_id: ids[0], tags: ['all'] }, { tags: [] }]) {
    const answer = await system.call('POST', '/schedules', { body: { ...body, ...target } });
    expect([answer.status, answer.body.error?.code]).toEqual([422, 'validation_failed']);
  }
  const { id } = await make();
  const both = { machine_id: ids[0], tags: ['all'] };
  expect((await system.call('PATCH', `/schedules/${id}`, { body: both })).status).toBe(422);
});

test('with tags machine_id is null, and a change to a machine removes the tags, and back', async () => {
  const { client, ids, make } = await tagged(1);
  const [machine_id = ''] = ids;
  const made = await make();
  expect(made).toMatchObject({ machine_id: null, tags: ['all'], next_run: expect.any(String) });
  const schedule_id = made.id;
  expect(await client.schedules.update({ schedule_id, machine_id })).toMatchObject({
    machine_id,
    tags: null,
  });
  const back = await client.schedules.update({ schedule_id, tags: ['all'] });
  expect(back).toMatchObject({ machine_id: null, tags: ['all'] });
});

test('a schedule can be changed while no machine has its tags', async () => {
  const { system, client, ids, make } = await tagged(1);
  const [machine_id = ''] = ids;
  const made = await make({ tags: ['none'], cron: '0 3 * * *' });
  const { id: schedule_id } = await make({ cron: '0 3 * * *' });
  await client.machines.update({ machine_id, tags: [] });
  for (const id of [made.id, schedule_id]) {
    for (const body of [{ cron: '0 4 * * *' }, { timezone: 'Asia/Tokyo' }, { enabled: false }]) {
      expect((await system.call('PATCH', `/schedules/${id}`, { body })).status).toBe(200);
    }
  }
});

test('a run by hand is a batch on each machine with all tags, and each has a row in history', async () => {
  const { client, ids, make } = await tagged(3);
  const { id: schedule_id } = await make({ command: 'echo here' });
  const { batch_id, command_id, status } = await client.schedules.run({ schedule_id });
  expect(status).toBe('running');
  const read = () => client.batches.get({ batch_id: batch_id ?? '' });
  await soon(async () => (await read()).status).toBe('completed');
  const { results } = await read();
  expect(results[0]?.id).toBe(command_id);
  expect(new Set(results.map(({ machine_id }) => machine_id))).toEqual(new Set(ids));
  expect(results.every((one) => one.schedule_id === schedule_id)).toBe(true);
  const { items } = await client.schedules.history({ schedule_id });
  expect(new Set(items.map(({ machine_id }) => machine_id))).toEqual(new Set(ids));
  for (const run of items)
    expect(run).toMatchObject({ batch_id, status: 'completed', trigger: 'manual', stdout: 'here\n' });
  const [, second = ''] = ids;
  expect((await client.schedules.history({ schedule_id, machine_id: second })).total).toBe(1);
  expect((await client.schedules.history({ schedule_id, batch_id: batch_id ?? '' })).total).toBe(3);
});

test('last_run is the worst run of the latest due time, not the one that ended last', async () => {
  const { client, make } = await tagged(2);
  const slow = gate();
  // Only one machine can create the folder. Its run fails at once, and the run of the other machine succeeds later.
  const command = `mkdir ${temporaryFolder('first')}/first && exit 7; ${slow.wait}`;
  const { id: schedule_id } = await make({ command });
  await client.schedules.run({ schedule_id });
  const total = async (status: 'failed' | 'completed') =>
    (await client.schedules.history({ schedule_id, status })).total;
  await soon(() => total('failed')).toBe(1);
  slow.open();
  await soon(() => total('completed')).toBe(1);
  const { last_run } = await client.schedules.get({ schedule_id });
  expect(last_run).toMatchObject({ status: 'failed', exit_code: 7 });
});

test('a run by hand without a machine that has the tags is a conflict', async () => {
  const { system, make } = await tagged(1);
  const { id } = await make({ tags: ['nowhere'] });
  const answer = await system.call('POST', `/schedules/${id}/run`);
  expect([answer.status, answer.body.error.code]).toEqual([409, 'conflict']);
  expect(answer.body.error.message).toContain('nowhere');
});

test('each due time has a row for each machine that has the tags at that time', async () => {
  const all = await systemAt('10:00:00');
  const { machine_id, away, system } = all;
  const { client } = system;
  await client.machines.update({ machine_id, tags: ['all'] });
  const { id } = await all.make('tagged', '* * * * *', { machine_id: undefined, tags: ['all'] });
  await all.until('10:01:30');
  await client.machines.update({ machine_id: away, tags: ['all'] });
  await all.until('10:02:30');
  await client.machines.update({ machine_id, tags: [] });
  await all.until('10:03:30');
  await client.machines.update({ machine_id, tags: ['all', 'more'] });
  await all.until('10:04:30');
  const rows = (await all.runs(id)).map((run: Run) => [
    run.scheduled_for?.slice(11, 16),
    run.machine_id === machine_id ? 'here' : 'away',
    run.status,
  ]);
  const times = [
    ['10:01', 'here', 'completed'],
    ['10:02', 'away', 'failed'],
    ['10:02', 'here', 'completed'],
    ['10:03', 'away', 'failed'],
    ['10:04', 'away', 'failed'],
    ['10:04', 'here', 'completed'],
  ];
  expect(rows.toSorted(byText)).toEqual(times);
  expect(all.counted('tagged')).toBe(3);
});

test('a due time while the broker was down is missed once on each machine that had the tags when the broker stopped', async () => {
  const all = await systemAt('10:00:00');
  const { machine_id, away } = all;
  await all.system.client.machines.update({ machine_id, tags: ['all'] });
  const tags = { machine_id: undefined, tags: ['all'] };
  const { id } = await all.make('none', '* * * * *', tags);
  const caught = await all.make('last', '* * * * *', { ...tags, catch_up: 'last' });
  await all.until('10:02:30');
  await all.system.client.machines.update({ machine_id: away, tags: ['all'] });
  await soon(() =>
    storedRows(all.system.dataDir, 'SELECT 1 FROM schedule_marks WHERE machine_id = ?', away),
  ).toHaveLength(2);
  await all.down();
  all.clock.leap(120_000);
  await all.up();
  // A minute after its start, the broker gives up on the run of the machine that is not back.
  await all.pass(60_000, 2);
  await all.until('10:06:30');
  const fates = async (schedule_id: string, machine: string): Promise<string[]> =>
    (await all.runs(schedule_id))
      .filter((run: Run) => run.machine_id === machine)
      .map((run: Run) => `${run.scheduled_for?.slice(11, 16)} ${run.trigger} ${run.status}`);
  expect(await fates(id, machine_id)).toEqual([
    '10:01 cron completed',
    '10:02 cron completed',
    '10:03 cron missed',
    '10:04 cron missed',
    '10:05 cron completed',
    '10:06 cron completed',
  ]);
  expect(await fates(id, away)).toEqual([
    '10:03 cron missed',
    '10:04 cron missed',
    '10:05 cron missed',
    '10:06 cron failed',
  ]);
  expect(await fates(caught.id, machine_id)).toContain('10:04 catch_up completed');
  expect(all.counted('none')).toBe(4);
});

test('when the clock is set back, no due time that has run runs again on any machine', async () => {
  const all = await systemAt('10:00:00');
  const { machine_id, away } = all;
  for (const one of [machine_id, away])
    await all.system.client.machines.update({ machine_id: one, tags: ['all'] });
  const { id } = await all.make('back', '*/2 * * * *', { machine_id: undefined, tags: ['all'] });
  await all.until('10:04:30');
  all.clock.leap(-180_000);
  await all.until('10:06:30');
  const mine = (await all.runs(id)).filter((run: Run) => run.machine_id === machine_id);
  expect(mine.map((run: Run) => `${run.scheduled_for?.slice(11, 16)} ${run.status}`)).toEqual([
    ...['10:02 completed', '10:04 completed', '10:06 completed'],
  ]);
  expect(all.counted('back')).toBe(3);
  const others = (await all.runs(id)).filter((run: Run) => run.machine_id === away);
  expect(others.map((run: Run) => run.scheduled_for?.slice(11, 16))).toEqual(['10:02', '10:04', '10:06']);
});

test('while a run has not ended, only its own machine skips due times', async () => {
  const { client, ids, make } = await tagged(2);
  // The first command of an agent starts its spawner, and could take longer than a second.
  for (const machine_id of ids) await client.commands.create({ machine_id, command: 'true' });
  const slow = gate();
  // Only one machine can create the folder. Its run waits at the gate, and the runs of the other machine fail.
  const command = `mkdir ${temporaryFolder('slow')}/first && ${slow.wait}`;
  const { id: schedule_id } = await make({ command, cron: '* * * * * *' });
  const rowsOf = async (machine_id: string) => {
    const { items } = await client.schedules.history({ schedule_id, machine_id, sort: 'started_at' });
    return items.map(({ status }) => status).slice(0, 3);
  };
  const rows = async () => (await Promise.all(ids.map(rowsOf))).toSorted(byText);
  await soon(rows).toEqual([
    ['failed', 'failed', 'failed'],
    ['running', 'skipped', 'skipped'],
  ]);
  await client.schedules.update({ schedule_id, enabled: false });
  slow.open();
});

test('a schedule of a limited key runs only on machines of that key, and other keys see only runs on their own machines', async () => {
  const { system, client, ids } = await tagged(3);
  const limited = await system.keyed([...rights], { tags: ['m0', 'm1'] });
  const made = await limited.client.schedules.create({
    tags: ['all'],
    name: 'x',
    command: 'true',
    cron: yearly,
  });
  const schedule_id = made.id;
  const machinesOf = async (run: { batch_id: string | null }): Promise<string[]> => {
    const { results } = await client.batches.get({ batch_id: run.batch_id ?? '' });
    return results.map(({ machine_id }) => machine_id).toSorted();
  };
  expect(await machinesOf(await client.schedules.run({ schedule_id }))).toEqual(ids.slice(0, 2).toSorted());

  // A key limited to one machine sees the schedule, and runs it only there.
  const narrow = await system.keyed([...rights], { tags: ['m1'] });
  expect((await narrow.client.schedules.list()).items.map(({ id }) => id)).toEqual([schedule_id]);
  expect(await machinesOf(await narrow.client.schedules.run({ schedule_id }))).toEqual([ids[1]]);
  const history = await narrow.client.schedules.history({ schedule_id });
  expect(new Set(history.items.map(({ machine_id }) => machine_id))).toEqual(new Set([ids[1]]));
  for (const call of [
    () => narrow.client.schedules.update({ schedule_id, command: 'env' }),
    () => narrow.client.schedules.remove({ schedule_id }),
  ])
    await expect(call()).rejects.toMatchObject({ code: 'forbidden' });

  // A key that may use none of the machines does not see the schedule.
  const outside = await system.keyed([...rights], { tags: ['m2'] });
  expect((await outside.client.schedules.list()).total).toBe(0);
  await expect(outside.client.schedules.get({ schedule_id })).rejects.toMatchObject({ code: 'forbidden' });
  await expect(outside.client.schedules.run({ schedule_id })).rejects.toMatchObject({ code: 'forbidden' });
  expect((await client.schedules.list({ machine_id: ids[2] ?? '' })).total).toBe(0);
  expect((await client.schedules.list({ machine_id: ids[0] ?? '' })).total).toBe(1);
});

test('a limited key sees its own schedule while no machine has the tags', async () => {
  const { system } = await tagged(1);
  const limited = await system.keyed([...rights], { tags: ['m0'] });
  const other = await system.keyed([...rights], { tags: ['m0'] });
  const { id: schedule_id } = await limited.client.schedules.create({
    ...{ tags: ['later'], name: 'x', command: 'true', cron: yearly },
  });
  expect((await limited.client.schedules.get({ schedule_id })).tags).toEqual(['later']);
  expect((await limited.client.schedules.list()).total).toBe(1);
  await expect(other.client.schedules.get({ schedule_id })).rejects.toMatchObject({ code: 'forbidden' });
  expect(await limited.client.schedules.remove({ schedule_id })).toEqual({ deleted: true });
});

test('a manual run repeated with the same Idempotency-Key starts no second batch', async () => {
  const { system, client, make } = await tagged(2);
  const { id } = await make();
  const headers = { 'Idempotency-Key': 'once' };
  const first = await system.call('POST', `/schedules/${id}/run`, { headers });
  const again = await system.call('POST', `/schedules/${id}/run`, { headers });
  expect(again.body.data).toEqual(first.body.data);
  expect((await client.batches.list()).total).toBe(1);
});

test('removing a machine ends the schedule there, and the schedule itself stays', async () => {
  const { client, ids, make } = await tagged(2);
  const { id: schedule_id } = await make();
  await client.machines.remove({ machine_id: ids[0] ?? '' });
  const { batch_id } = await client.schedules.run({ schedule_id });
  const { results } = await client.batches.get({ batch_id: batch_id ?? '' });
  expect(results.map(({ machine_id }) => machine_id)).toEqual([ids[1]]);
});

test.each(['revoked', 'expired'])(
  'after its key %s a schedule stays unknown to keys for other machines, and runs on no more machines',
  async (how) => {
    const { system, client, ids } = await tagged(2);
    const limited = await system.keyed([...rights], { tags: ['m0'] });
    const secret = { env: { PASSWORD: 'hunter2' } };
    const spec = { name: 'x', tags: ['all'], command: 'true', cron: yearly, ...secret };
    const { id: schedule_id, requested_by: key_id } = await limited.client.schedules.create(spec);
    const outside = await system.keyed([...rights], { tags: ['m1'] });
    if (how === 'was revoked') await client.keys.remove({ key_id });
    else await client.keys.update({ key_id, expires_at: new Date(Date.now() + 200).toISOString() });
    const refused = () => limited.client.schedules.list().catch(({ status }) => status);
    await expect.poll(refused).toBe(401);
    expect((await outside.client.schedules.list()).total).toBe(0);
    await expect(outside.client.schedules.get({ schedule_id })).rejects.toMatchObject({ code: 'forbidden' });
    await expect(outside.client.schedules.run({ schedule_id })).rejects.toMatchObject({ code: 'forbidden' });
    expect(await client.schedules.get({ schedule_id })).toMatchObject(secret);
    const { batch_id } = await client.schedules.run({ schedule_id });
    const { results } = await client.batches.get({ batch_id: batch_id ?? '' });
    expect(results.map(({ machine_id }) => machine_id)).toEqual([ids[0]]);
  },
);

describe('a change by a stronger key', () => {
  /** A schedule for both machines. It was created by a key that is limited to the first one. */
  async function ofLimitedKey() {
    const all = await tagged(2);
    const limited = await all.system.keyed([...rights], { machine_ids: [all.ids[0] ?? ''] });
    const { id: schedule_id, requested_by } = await limited.client.schedules.create({
      ...{ name: 'x', tags: ['all'], command: 'true', cron: yearly },
    });
    const machines = async () => {
      const { batch_id } = await all.client.schedules.run({ schedule_id });
      return (await all.client.batches.get({ batch_id: batch_id ?? '' })).results.length;
    };
    return { ...all, schedule_id, requested_by, machines };
  }

  test.each([
    { cron: '@daily' },
    { name: 'y', enabled: false },
    { timeout: 1000, notify: { on_failure: true } },
  ])('of %o leaves the schedule on the machines of its key', async (changes) => {
    const { client, schedule_id, requested_by, machines } = await ofLimitedKey();
    expect(await client.schedules.update({ schedule_id, ...changes })).toMatchObject({ requested_by });
    expect(await machines()).toBe(1);
  });

  test.each([{ command: 'id' }, { tags: ['all'] }, { env: null }, { user: null }, { cwd: null }])(
    'of %o gives the schedule the rights of that key',
    async (changes) => {
      const { client, schedule_id, machines } = await ofLimitedKey();
      const { id } = await client.keys.me();
      expect(await client.schedules.update({ schedule_id, ...changes })).toMatchObject({ requested_by: id });
      expect(await machines()).toBe(2);
    },
  );

  test('must set both command and tags if the key of the schedule is revoked; else it can only disable the schedule', async () => {
    const { client, system, schedule_id, requested_by } = await ofLimitedKey();
    await client.keys.remove({ key_id: requested_by });
    for (const body of [{ cron: '@daily' }, { tags: ['all'] }, { command: 'id' }, { enabled: true }]) {
      const answer = await system.call('PATCH', `/schedules/${schedule_id}`, { body });
      expect([body, answer.status, answer.body.error?.code]).toEqual([body, 409, 'conflict']);
    }
    const disabled = await client.schedules.update({ schedule_id, enabled: false });
    expect(disabled).toMatchObject({ enabled: false, requested_by });
    const both = { tags: ['all'], command: 'id', enabled: true };
    const { id } = await client.keys.me();
    expect(await client.schedules.update({ schedule_id, ...both })).toMatchObject({ requested_by: id });
  });
});

test('only a key with admin adds and removes tags that decide where a schedule runs', async () => {
  const { system, client, ids, make } = await tagged(1);
  const [machine_id = ''] = ids;
  await make({ tags: ['nightly'], env: { SECRET: 'a' } });
  const { key } = await system.keyed(['machines:write', 'machines:read']);
  const change = async (tags: string[]) => {
    const answer = await system.call('PATCH', `/machines/${machine_id}`, { key, body: { tags } });
    return [answer.status, answer.body.error?.details.required_scope];
  };
  expect(await change(['all', 'nightly'])).toEqual([403, 'admin']);
  expect(await change(['all', 'other'])).toEqual([200, undefined]);
  await client.machines.update({ machine_id, tags: ['all', 'nightly'] });
  expect(await change(['all'])).toEqual([403, 'admin']);
  expect(await change(['nightly'])).toEqual([200, undefined]);
});

test('the patterns of a saved command are checked once for a due time, not once for each machine', async () => {
  const { client, make } = await tagged(4);
  const parameters = [{ name: 'x', type: 'string' as const, pattern: 'a*a*b|a*' }];
  const { id: saved_command_id } = await client.savedCommands.create({
    name: 's',
    argv: ['true'],
    parameters,
  });
  const compared = vi.spyOn(Script.prototype, 'runInContext');
  onTestFinished(() => compared.mockRestore());
  const { id: schedule_id } = await make({
    ...{ command: undefined, saved_command_id, parameters: { x: 'aaa' }, cron: '* * * * * *' },
  });
  await soon(async () => (await client.schedules.history({ schedule_id })).total).toBeGreaterThan(3);
  expect(compared.mock.calls.length).toBeLessThan(4);
});
