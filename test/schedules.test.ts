// Schedules over REST with a real machine: creating them, manual runs, history and events.
import { expect, test } from 'vitest';
import { bench, gate, nextCall, reporting, soon } from './commands-fixture.ts';
import { storedState } from './read-stored-state.ts';
import { joinScripted, scriptedMachine } from './scripted-agent.ts';
import { startFarhand, temporaryFolder } from './start-farhand.ts';

/** A cron expression that is not due during a test. */
const yearly = '0 0 29 2 *';

/** A system with one machine, and functions for schedules on it. */
async function scheduled() {
  const { system, machine_id, agent } = await bench();
  const { client } = system;
  return {
    ...{ system, client, agent, machine_id },
    make: (more: object = {}) =>
      client.schedules.create({ machine_id, name: 'nightly', command: 'true', cron: yearly, ...more }),
    runsOf: async (schedule_id: string) => (await client.schedules.history({ schedule_id })).items,
    /** Runs a schedule by hand, and waits for the end. */
    async ranOnce(schedule_id: string) {
      const { command_id } = await client.schedules.run({ schedule_id });
      await soon(async () => (await client.commands.get({ command_id })).finished_at).not.toBeNull();
      const { items } = await client.schedules.history({ schedule_id });
      return items.find((run) => run.command_id === command_id);
    },
  };
}

const bad: [field: string, params: object][] = [
  ['cron', { cron: '' }],
  ['cron', { cron: '60 * * * *' }],
  ['cron', { cron: '0 0 31 2 *' }],
  ['cron', { cron: 'x'.repeat(100_000) }],
  ['cron', { cron: 5 }],
  ['cron', { cron: 'constructor' }],
  ['cron', { cron: '__proto__' }],
  ['timezone', { timezone: 'Nowhere/City' }],
  ['timezone', { timezone: '' }],
  ['name', { name: '' }],
  ['name', { name: 'a\nb' }],
  ['command', { command: '' }],
  ['command', { command: 'a\0b' }],
  ['timeout', { timeout: 0 }],
  ['timeout', { timeout: 1.5 }],
  ['overlap', { overlap: 'queue' }],
  ['catch_up', { catch_up: true }],
  ['catch_up_window', { catch_up_window: 0 }],
  ['notify', { notify: { on_everything: true } }],
  ['enabled', { enabled: 'yes' }],
  ['env', { env: { 'A B': '' } }],
];

test('a bad field is 422 with its name, on create and on update', async () => {
  const { system, machine_id, make } = await scheduled();
  const { id } = await make();
  const before = await system.client.schedules.get({ schedule_id: id });
  for (const [field, params] of bad) {
    const body = { machine_id, name: 'x', command: 'true', cron: yearly, ...params };
    for (const answer of [
      await system.call('POST', '/schedules', { body }),
      await system.call('PATCH', `/schedules/${id}`, { body: params }),
    ]) {
      const { code, details } = answer.body.error;
      expect([answer.status, code, details?.issues[0].path]).toEqual([
        422,
        'validation_failed',
        expect.stringContaining(field),
      ]);
    }
  }
  expect((await system.client.schedules.list()).total).toBe(1);
  expect(await system.client.schedules.get({ schedule_id: id })).toEqual(before);
});

test('an expression of 100,000 letters is refused in 50 ms of CPU time', async () => {
  const { system, machine_id } = await scheduled();
  const took: number[] = [];
  for (const cron of ['* '.repeat(50_000), '1,'.repeat(50_000), `*/${'9'.repeat(100_000)} * * * *`]) {
    for (let round = 0; round < 5; round += 1) {
      const before = process.threadCpuUsage();
      const body = { machine_id, name: 'x', command: 'true', cron };
      expect((await system.call('POST', '/schedules', { body })).status).toBe(422);
      took.push(process.threadCpuUsage(before).user / 1000);
    }
  }
  // A busy machine delays requests, so only CPU time counts. It includes the client: 10 ms on a slow machine.
  expect(Math.min(...took)).toBeLessThan(50);
});

test('a schedule without a required field is 422, on an unknown machine 404', async () => {
  const { system, machine_id } = await scheduled();
  for (const field of ['machine_id', 'name', 'command', 'cron']) {
    const body = { machine_id, name: 'x', command: 'true', cron: yearly, [field]: undefined };
    const { status, body: answer } = await system.call('POST', '/schedules', { body });
    expect([status, answer.error.details.issues[0].path]).toEqual([422, field]);
  }
  const body = { machine_id: 'mach_none', name: 'x', command: 'true', cron: yearly };
  const { status, body: answer } = await system.call('POST', '/schedules', { body });
  expect([status, answer.error.code]).toEqual([404, 'machine_not_found']);
});

test('creating, changing or running a schedule needs a key that may run commands', async () => {
  const { system, machine_id, make } = await scheduled();
  const { key } = await system.keyed(['schedules:write', 'schedules:read']);
  const { id } = await make();
  const body = { machine_id, name: 'x', command: 'true', cron: yearly };
  for (const answer of [
    await system.call('POST', '/schedules', { key, body }),
    await system.call('PATCH', `/schedules/${id}`, { key, body: { enabled: false } }),
    await system.call('POST', `/schedules/${id}/run`, { key }),
  ]) {
    const { code, details } = answer.body.error;
    expect([answer.status, code, details]).toEqual([
      403,
      'forbidden',
      { required_scope: 'commands:execute' },
    ]);
  }
  expect((await system.call('DELETE', `/schedules/${id}`, { key })).body.data).toEqual({ deleted: true });
});

test('a key limited to one machine sees and moves only schedules on that machine', async () => {
  const { system, client, machine_id, make } = await scheduled();
  const other = await system.agent();
  const [here, there] = [
    await make({ name: 'here' }),
    await make({ name: 'there', machine_id: other.machineId }),
  ];
  const limited = await system.keyed(['schedules:read', 'schedules:write', 'commands:execute'], {
    machine_ids: [other.machineId],
  });
  const seen = await limited.client.schedules.list();
  expect([seen.total, seen.items.map(({ name }) => name)]).toEqual([1, ['there']]);
  await expect(limited.client.schedules.get({ schedule_id: here.id })).rejects.toMatchObject({
    code: 'forbidden',
  });
  await expect(limited.client.schedules.update({ schedule_id: there.id, machine_id })).rejects.toMatchObject({
    code: 'forbidden',
  });
  const moved = await client.schedules.update({ schedule_id: there.id, machine_id });
  expect(moved.machine_id).toBe(machine_id);
});

test('a key sees only those runs of a moved schedule that were on machines that it may use', async () => {
  const { system, client, make, ranOnce, machine_id, runsOf } = await scheduled();
  const { machineId: other } = await system.agent();
  const { id: schedule_id } = await make({ command: 'echo secret' });
  const there = await ranOnce(schedule_id);
  await client.schedules.update({ schedule_id, machine_id: other });
  const limited = (machine: string) =>
    system.keyed(['schedules:read', 'schedules:write', 'commands:execute'], { machine_ids: [machine] });
  const { client: moved } = await limited(other);
  expect(await moved.schedules.history({ schedule_id })).toMatchObject({ total: 0, items: [] });
  expect((await moved.schedules.get({ schedule_id })).last_run).toBeNull();
  expect((await moved.schedules.list()).items).toMatchObject([{ last_run: null }]);
  expect((await moved.schedules.update({ schedule_id, name: 'mine' })).last_run).toBeNull();
  const here = await ranOnce(schedule_id);
  expect((await moved.schedules.history({ schedule_id })).items).toEqual([here]);
  expect((await moved.schedules.get({ schedule_id })).last_run).not.toBeNull();
  expect(await runsOf(schedule_id)).toEqual([here, there]);
  expect(there?.machine_id).toBe(machine_id);
});

test('the clock of a machine affects neither the order of runs, nor since, nor the last run', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const { client } = system;
  const params = { machine_id: agent.identity.machineId, name: 'x', command: 'true', cron: yearly };
  const { id: schedule_id } = await client.schedules.create(params);
  const begun = new Date().toISOString();
  const day = 86_400_000;
  // In the first run the machine's clock is a day ahead; in the second run it is a year behind.
  for (const [off, exit_code] of [
    [day, 1],
    [-365 * day, 2],
  ] as const) {
    const run = client.schedules.run({ schedule_id });
    const { call_id } = await nextCall(agent, 'StartProcess');
    const at = Date.now() + off;
    const exit = { outcome: 'PROCESS_OUTCOME_EXITED', exit_code, started_at_ms: at, finished_at_ms: at + 5 };
    const report = reporting(agent, call_id);
    report.send({ started: { pid: 1, started_at_ms: at } });
    report.send({ exit });
    report.end();
    await run;
    await soon(async () => (await client.schedules.history({ schedule_id, status: 'failed' })).total).toBe(
      exit_code,
    );
  }
  const { items } = await client.schedules.history({ schedule_id, since: begun });
  expect(items.map(({ exit_code }) => exit_code)).toEqual([2, 1]);
  expect(items.map(({ started_at }) => started_at > begun)).toEqual([false, true]);
  expect((await client.schedules.get({ schedule_id })).last_run).toMatchObject({ exit_code: 2 });
});

test('a schedule has the specified fields, and fewer of them in a list', async () => {
  const { client, machine_id, make } = await scheduled();
  const made = await make({
    timezone: 'Europe/Berlin',
    cron: '30 2 1 1 *',
    description: 'what it does',
    timeout: 5000,
  });
  const id = expect.stringMatching(/^sched_[0-9A-Za-z]{22}$/);
  const time = expect.stringMatching(/^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$/);
  const listed = {
    ...{ id, name: 'nightly', machine_id, command: 'true', cron: '30 2 1 1 *', timezone: 'Europe/Berlin' },
    ...{ saved_command_id: null, parameters: null, on_change: null },
    ...{ tags: null, enabled: true, next_run: time, last_run: null, created_at: time },
  };
  expect(made).toEqual({
    ...listed,
    ...{ description: 'what it does', timeout: 5000, notify: null, overlap: 'skip', catch_up: 'none' },
    ...{ catch_up_window: 86_400_000, user: null, cwd: null, env: null, updated_at: time },
    ...{ next_runs: [time, time, time, time, time], requested_by: expect.stringMatching(/^key_/) },
  });
  expect(made.next_run).toMatch(/-01-01T01:30:00.000Z$/);
  expect(made.next_runs[0]).toBe(made.next_run);
  expect((await client.schedules.list()).items).toEqual([listed]);
  expect(await client.schedules.get({ schedule_id: made.id })).toEqual(made);
});

test('lists filter by machine and by enabled, and sort by name and by the next run', async () => {
  const { system, client, machine_id, make } = await scheduled();
  const { machineId: other } = await joinScripted(system);
  await make({ name: 'c', cron: '0 0 1 1 *', timezone: 'UTC' });
  await make({ name: 'a', enabled: false });
  await make({ name: 'b', machine_id: other, cron: '0 0 2 1 *' });
  const names = async (query: object): Promise<string[]> =>
    (await client.schedules.list(query)).items.map(({ name }) => name);
  expect(await names({})).toEqual(['b', 'a', 'c']);
  expect(await names({ sort: 'name' })).toEqual(['a', 'b', 'c']);
  // The disabled schedule has no next run.
  expect(await names({ sort: 'next_run' })).toEqual(['c', 'b', 'a']);
  expect(await names({ sort: '-next_run' })).toEqual(['b', 'c', 'a']);
  expect(await names({ sort: 'next_run', limit: 1, offset: 2 })).toEqual(['a']);
  expect(await names({ machine_id })).toEqual(['a', 'c']);
  expect(await names({ enabled: 'true' })).toEqual(['b', 'c']);
  expect(await names({ enabled: 'false', machine_id: other })).toEqual([]);
  expect((await system.call('GET', '/schedules?enabled=1')).status).toBe(400);
  expect((await system.call('GET', '/schedules?machine_id=mach_none')).status).toBe(404);
});

test('an update changes only the fields it names; a disabled schedule has no next run', async () => {
  const { client, make } = await scheduled();
  const { id: schedule_id, ...before } = await make({
    notify: { on_failure: true },
    description: 'x',
    timeout: 9,
  });
  const off = await client.schedules.update({ schedule_id, enabled: false, description: null });
  expect(off).toMatchObject({ enabled: false, next_run: null, next_runs: [], description: null, timeout: 9 });
  expect(Date.parse(off.updated_at)).toBeGreaterThan(Date.parse(before.updated_at));
  const on = await client.schedules.update({ schedule_id, enabled: true, notify: { on_success: true } });
  expect(on).toMatchObject({ next_run: before.next_run, notify: { on_success: true, on_failure: true } });
  expect(await client.schedules.update({ schedule_id, notify: null })).toMatchObject({ notify: null });
  const moved = await client.schedules.update({ schedule_id, cron: '@daily', timezone: 'Asia/Tokyo' });
  expect(moved.next_run).toMatch(/T15:00:00.000Z$/);
});

test('an update to the present values changes nothing, but the same command sent again takes the schedule over', async () => {
  const { system, client, make } = await scheduled();
  const before = await make({ timeout: 9 });
  const { id: schedule_id, timezone, enabled, name } = before;
  const other = await system.keyed(['schedules:write', 'schedules:read', 'commands:execute']);
  const same = await other.client.schedules.update({ schedule_id, timezone, enabled, name, timeout: 9 });
  expect(same).toEqual(await client.schedules.get({ schedule_id }));
  expect(same).toMatchObject({ requested_by: before.requested_by, updated_at: before.updated_at });
  const taken = await other.client.schedules.update({ schedule_id, command: before.command ?? '' });
  expect(taken.requested_by).not.toBe(before.requested_by);
});

test('a preview has the next times and the expression in words', async () => {
  const { system, client } = await scheduled();
  const from = '2026-03-07T12:00:00Z';
  expect(
    await client.schedules.preview({ cron: '30 2 * * *', timezone: 'America/New_York', count: '2', from }),
  ).toEqual({
    ...{ cron: '30 2 * * *', timezone: 'America/New_York', description: 'At 02:30' },
    next_runs: ['2026-03-08T07:00:00.000Z', '2026-03-09T06:30:00.000Z'],
  });
  expect((await client.schedules.preview({ cron: '@hourly' })).next_runs).toHaveLength(5);
  const never = await system.call('GET', `/schedules/preview?cron=${encodeURIComponent('0 0 31 2 *')}`);
  expect([never.status, never.body.error.details.issues[0].path]).toEqual([422, 'cron']);
  const nowhere = await system.call('GET', '/schedules/preview?cron=@daily&timezone=Mars');
  expect([nowhere.status, nowhere.body.error.details.issues[0].path]).toEqual([422, 'timezone']);
  expect((await system.call('GET', '/schedules/preview?cron=@daily&count=101')).status).toBe(400);
  expect((await system.call('GET', '/schedules/preview?cron=@daily&from=2026-02-30T00:00:00Z')).status).toBe(
    400,
  );
  const early = await client.schedules.preview({ cron: '@yearly', count: '1', from: '0001-01-01T00:00:00Z' });
  expect(early.next_runs).toEqual(['1971-01-01T00:00:00.000Z']);
});

test('a manual run is answered as running, and then in history with its output', async () => {
  const { system, client, machine_id, make, runsOf } = await scheduled();
  const { wait, open } = gate();
  const folder = temporaryFolder('cwd');
  const { id: schedule_id } = await make({
    ...{ command: `pwd; echo $NAME; ${wait}; echo bad >&2; exit 3`, cwd: folder, env: { NAME: 'Ada' } },
    ...{ enabled: false },
  });
  const { status, body } = await system.call('POST', `/schedules/${schedule_id}/run`);
  const { command_id } = body.data;
  expect([status, body.data]).toEqual([
    200,
    { command_id: expect.stringMatching(/^cmd_/), status: 'running', batch_id: null },
  ]);
  const running = await runsOf(schedule_id);
  expect(running).toMatchObject([
    { command_id, status: 'running', trigger: 'manual', finished_at: null, exit_code: null, duration: null },
  ]);
  // A manual run starts although an earlier run has not ended.
  const second = await client.schedules.run({ schedule_id });
  expect(second.status).toBe('running');
  open();
  open();
  await soon(async () => (await runsOf(schedule_id)).every(({ finished_at }) => finished_at !== null)).toBe(
    true,
  );
  const rows = await runsOf(schedule_id);
  const row = rows.find((one) => one.command_id === command_id);
  expect(rows).toHaveLength(2);
  expect(row).toEqual({
    ...{ id: expect.stringMatching(/^run_[0-9A-Za-z]{22}$/), schedule_id, machine_id, command_id },
    ...{
      status: 'failed',
      trigger: 'manual',
      batch_id: null,
      scheduled_for: null,
      exit_code: 3,
      reason: null,
    },
    ...{ started_at: expect.any(String), finished_at: expect.any(String), duration: expect.any(Number) },
    ...{ stdout: `${folder}\nAda\n`, stderr: 'bad\n' },
  });
  expect(await client.schedules.getRun({ run_id: row?.id ?? '' })).toEqual(row);
  const command = await client.commands.get({ command_id });
  expect(command).toMatchObject({ schedule_id, duration: row?.duration, started_at: row?.started_at });
  const ofSchedule = await client.commands.list({ schedule_id });
  expect(new Set(ofSchedule.items.map(({ id }) => id))).toEqual(new Set([command_id, second.command_id]));
  const last = (await client.schedules.get({ schedule_id })).last_run;
  expect(last).toMatchObject({ exit_code: 3, status: 'failed', duration: expect.any(Number) });
});

test('a request repeated with the same Idempotency-Key runs nothing twice', async () => {
  const { system, make, runsOf } = await scheduled();
  const { id } = await make();
  const headers = { 'Idempotency-Key': 'once' };
  const [first, again] = [
    await system.call('POST', `/schedules/${id}/run`, { headers }),
    await system.call('POST', `/schedules/${id}/run`, { headers }),
  ];
  expect(again.body.data).toEqual(first.body.data);
  expect(again.headers.get('idempotency-replayed')).toBe('true');
  expect(await runsOf(id)).toHaveLength(1);
});

test('a request repeated with the same Idempotency-Key gets the run whose answer was lost', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const params = { machine_id: agent.identity.machineId, name: 'slow', command: 'true', cron: yearly };
  const { id: schedule_id } = await system.client.schedules.create(params);
  const headers = { 'Idempotency-Key': 'lost' };
  const leaving = new AbortController();
  const call = () =>
    system.call('POST', `/schedules/${schedule_id}/run`, { headers, signal: leaving.signal });
  const first = expect(call()).rejects.toThrow();
  const { id: command_id } = await nextCall(agent, 'StartProcess');
  leaving.abort();
  await first;
  const again = () => system.call('POST', `/schedules/${schedule_id}/run`, { headers });
  await soon(async () => (await again()).body.data).toEqual({
    ...{ command_id, status: 'running', batch_id: null },
  });
  expect((await system.client.schedules.history({ schedule_id })).total).toBe(1);
});

test('a manual run on an offline machine: 503, a row with the reason, and the event', async () => {
  const { system, client, make, runsOf } = await scheduled();
  const { machineId: machine_id } = await joinScripted(system, 'away');
  const { id } = await make({ machine_id, notify: { on_failure: true } });
  const answer = await system.call('POST', `/schedules/${id}/run`);
  expect([answer.status, answer.body.error.code]).toEqual([503, 'machine_offline']);
  const [row, ...more] = await runsOf(id);
  expect(row).toMatchObject({
    ...{ status: 'failed', trigger: 'manual', command_id: null, exit_code: -1, duration: 0, stdout: '' },
    ...{ stderr: expect.stringContaining('machine_offline'), started_at: row?.finished_at },
  });
  expect(more).toEqual([]);
  expect((await client.commands.list({ machine_id })).total).toBe(0);
  const { items } = await client.events.list({ type: 'schedule.failed' });
  expect(items.map(({ data }) => data)).toEqual([
    {
      ...{ machine_id, machine_name: 'away', schedule_id: id, name: 'nightly', run_id: row?.id },
      ...{ command_id: null, exit_code: -1, duration: 0, status: 'failed' },
    },
  ]);
});

test('a command that the machine does not allow has a row in history', async () => {
  const { system, make, runsOf } = await scheduled();
  const locked = await system.agent({ flags: ['--allow', 'metrics'] });
  const { id } = await make({ machine_id: locked.machineId });
  expect((await system.call('POST', `/schedules/${id}/run`)).status).toBe(403);
  expect(await runsOf(id)).toMatchObject([
    { status: 'failed', exit_code: -1, stderr: expect.stringContaining('permission_denied') },
  ]);
});

test('a command that cannot start is a failed run with the reason', async () => {
  const { make, ranOnce } = await scheduled();
  const { id } = await make({ cwd: '/nowhere/at/all' });
  expect(await ranOnce(id)).toMatchObject({
    ...{ status: 'failed', exit_code: -1, duration: 0, stdout: '' },
    stderr: expect.stringContaining('/nowhere/at/all'),
  });
});

test('ends of runs cause the events that notify selects, in the same transaction', async () => {
  const { client, make, ranOnce, machine_id } = await scheduled();
  const loud = await make({ name: 'loud', notify: { on_success: true, on_failure: true } });
  const quiet = await make({ name: 'quiet', notify: { on_success: false } });
  const slow = await make({ name: 'slow', command: 'sleep 60', timeout: 50, notify: { on_failure: true } });
  const good = await ranOnce(loud.id);
  await ranOnce(quiet.id);
  await client.schedules.update({ schedule_id: loud.id, command: 'exit 7' });
  const bad = await ranOnce(loud.id);
  const late = await ranOnce(slow.id);
  expect([good?.status, bad?.status, late?.status]).toEqual(['completed', 'failed', 'timeout']);
  const received = (await client.events.list({ sort: 'created_at', limit: 100 })).items
    .filter(({ type }) => type.startsWith('schedule.'))
    .map(({ type, data }) => [type, data.name, data.status, data.exit_code, data.run_id, data.machine_id]);
  expect(received).toEqual([
    ['schedule.completed', 'loud', 'completed', 0, good?.id, machine_id],
    ['schedule.failed', 'loud', 'failed', 7, bad?.id, machine_id],
    ['schedule.failed', 'slow', 'timeout', late?.exit_code, late?.id, machine_id],
  ]);
});

test('history filters by status and since, page by page, newest first', async () => {
  const { system, client, make, ranOnce } = await scheduled();
  const { id: schedule_id } = await make();
  const first = await ranOnce(schedule_id);
  await client.schedules.update({ schedule_id, command: 'false' });
  const second = await ranOnce(schedule_id);
  const since = new Date().toISOString();
  const third = await ranOnce(schedule_id);
  const ids = async (query: object): Promise<(string | undefined)[]> =>
    (await client.schedules.history({ schedule_id, ...query })).items.map(({ id }) => id);
  expect(await ids({})).toEqual([third?.id, second?.id, first?.id]);
  expect(await ids({ status: 'failed' })).toEqual([third?.id, second?.id]);
  expect(await ids({ since })).toEqual([third?.id]);
  expect(await ids({ limit: 1, offset: 1, sort: 'started_at' })).toEqual([second?.id]);
  expect((await system.call('GET', `/schedules/${schedule_id}/history?status=queued`)).status).toBe(400);
});

test('the schedules of a removed machine are removed in the same commit; their history is not', async () => {
  const { system, client, make, ranOnce, machine_id } = await scheduled();
  const { machineId: other } = await joinScripted(system);
  const [{ id }, kept] = [await make(), await make({ machine_id: other })];
  const run = await ranOnce(id);
  const stateOf = () => storedState(system.dataDir);
  const { generation } = await stateOf();
  await client.machines.remove({ machine_id });
  const after = await stateOf();
  expect(after.generation).toBe(generation + 1);
  expect(after.schedules.map((one: { id: string }) => one.id)).toEqual([kept.id]);
  await expect(client.schedules.get({ schedule_id: id })).rejects.toMatchObject({
    code: 'schedule_not_found',
  });
  expect((await client.schedules.history({ schedule_id: id })).items.map((one) => one.id)).toEqual([run?.id]);
});

test('removing a schedule leaves its running command running', async () => {
  const { system, client, make } = await scheduled();
  const { wait, open } = gate();
  const { id: schedule_id } = await make({ command: wait });
  const { command_id } = await client.schedules.run({ schedule_id });
  expect(await client.schedules.remove({ schedule_id })).toEqual({ deleted: true });
  open();
  await soon(async () => (await client.commands.get({ command_id })).status).toBe('completed');
  expect((await client.schedules.history({ schedule_id })).items).toMatchObject([{ status: 'completed' }]);
  expect((await system.call('DELETE', `/schedules/${schedule_id}`)).status).toBe(404);
  expect((await system.call('POST', `/schedules/${schedule_id}/run`)).status).toBe(404);
});

test('schedules and their history survive a restart of the broker', async () => {
  const { system, client, make, ranOnce } = await scheduled();
  const { id } = await make({ notify: { on_failure: true }, env: { A: 'b' } });
  const run = await ranOnce(id);
  const before = await client.schedules.get({ schedule_id: id });
  await system.broker.close();
  const again = await startFarhand({ dataDir: system.dataDir });
  expect(await again.client.schedules.get({ schedule_id: id })).toEqual(before);
  expect((await again.client.schedules.history({ schedule_id: id })).items).toEqual([run]);
});
