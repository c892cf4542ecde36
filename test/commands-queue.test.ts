// Commands that wait: for an offline machine, on a busy one, over restarts, and until they expire.
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test, vi } from 'vitest';
import { cancelWaitMs } from '../broker/commands/shared-by-open-commands.ts';
import type { Tuning } from '../broker/start/index.ts';
import {
  bench,
  commandsOn,
  gate,
  leapingClock,
  listen,
  nextCall,
  scriptedAway,
  soon,
} from './commands-fixture.ts';
import { storedRows } from './read-stored-state.ts';
import { joinScripted } from './scripted-agent.ts';
import { startFarhand, type TestSystem, temporaryFolder } from './start-farhand.ts';
import { waitFor } from './wait-for.ts';

const hour = 3_600_000;

/** Starts a machine and cuts its link, so that it is offline. */
async function away(system?: TestSystem) {
  const broker = system ?? (await startFarhand());
  const agent = await broker.agent();
  await agent.close();
  const back = (on: TestSystem = broker) => on.agent({ dataDir: agent.dataDir, joinToken: 'used' });
  return { system: broker, machine_id: agent.machineId, back, ...commandsOn(broker, agent.machineId) };
}

/** Reads a command's spec from the database. */
async function specOf(system: TestSystem, id: string): Promise<unknown> {
  const [row] = await storedRows(system.dataDir, 'SELECT spec FROM commands WHERE id = ?', id);
  return row?.spec;
}

async function failures({ client }: TestSystem, id: string) {
  const { items } = await client.events.list({ type: 'command.failed', limit: 100 });
  return items.filter(({ data }) => data.command_id === id).map(({ data }) => data.status);
}

test('without queue_for every request to run something on an offline machine is refused, and nothing is stored', async () => {
  const { system, machine_id } = await away();
  for (const path of ['/commands', '/commands/async']) {
    const { status, body } = await system.call('POST', path, { body: { machine_id, command: 'true' } });
    expect([status, body.error.code, body.error.details]).toEqual([503, 'machine_offline', { machine_id }]);
  }
  expect((await system.client.commands.list()).total).toBe(0);
});

test.each([0, -1, 1.5, 31 * 24 * hour + 1, '1h', null])('a queue_for of %j is refused', async (queue_for) => {
  const { system, machine_id } = await away();
  const { status, body } = await system.call('POST', '/commands', {
    body: { machine_id, command: 'true', queue_for },
  });
  expect([status, body.error.code]).toEqual([422, 'validation_failed']);
});

test('the longest queue_for is accepted, and does not expire at once', async () => {
  const { begin, get, back } = await away();
  const id = await begin('echo late', { queue_for: 31 * 24 * hour });
  await back();
  await soon(async () => (await get(id)).stdout).toBe('late\n');
});

test('a machine that was never online lets a command with queue_for wait, and refuses one without', async () => {
  const system = await startFarhand();
  const { machineId: machine_id } = await joinScripted(system);
  const refused = await system.call('POST', '/commands', { body: { machine_id, command: 'true' } });
  expect([refused.status, refused.body.error.code]).toEqual([503, 'machine_offline']);
  const waiting = await system.call('POST', '/commands/async', {
    body: { machine_id, command: 'true', queue_for: hour },
  });
  expect([waiting.status, waiting.body.data?.status]).toEqual([201, 'queued']);
});

test('with queue_for a command waits, reports its deadline, and runs once when the machine comes online', async () => {
  const { system, machine_id, back, ended } = await away();
  const file = join(temporaryFolder('once'), 'ran');
  const waiting = await system.call('POST', '/commands', {
    body: {
      machine_id,
      command: `echo ran >> ${file}; echo "$0 $WORD"; cat`,
      queue_for: hour,
      wait: 0,
      env: { WORD: 'w' },
      stdin: 'in',
    },
  });
  const { data } = waiting.body;
  expect([waiting.status, data.status, data.started_at]).toEqual([201, 'queued', null]);
  expect(Date.parse(data.queued_until) - Date.parse(data.created_at)).toBe(hour);
  expect((await system.client.commands.list({ status: 'queued' })).items.map(({ id }) => id)).toEqual([
    data.id,
  ]);
  expect((await system.client.commands.ofMachine({ machine_id, status: 'queued' })).total).toBe(1);
  await back();
  expect(await ended(data.id)).toMatchObject({
    status: 'completed',
    stdout: '/bin/sh w\nin',
    queued_until: null,
  });
  expect((await system.client.commands.list({ status: 'queued' })).total).toBe(0);
  expect(readFileSync(file, 'utf8')).toBe('ran\n');
});

test('waiting commands start in the order of their requests', async () => {
  const system = await startFarhand();
  const { begin, back } = await scriptedAway(system);
  const ids: string[] = [];
  for (let n = 0; n < 30; n += 1) ids.push(await begin(`echo ${n}`, { queue_for: hour }));
  const agent = await back();
  const started: string[] = [];
  for (const _ of ids) started.push((await nextCall(agent, 'StartProcess')).id);
  expect(started).toEqual(ids);
});

test('a command past its deadline is expired, reports that, and never runs', async () => {
  const clock = leapingClock();
  const { system, begin, back, ended, run } = await away();
  const file = join(temporaryFolder('expired'), 'ran');
  const id = await begin(`echo ran > ${file}`, { queue_for: 50_000 });
  const followed = listen(system, id);
  clock.leap(50_001);
  expect((await followed).events).toMatchObject([
    { event: 'exit', data: { status: 'expired', reason: 'queue_expired' } },
  ]);
  expect(await ended(id)).toMatchObject({
    ...{ status: 'expired', reason: 'queue_expired', exit_code: null, started_at: null, queued_until: null },
  });
  expect(await failures(system, id)).toEqual(['expired']);
  expect(await specOf(system, id)).toBeNull();
  await back();
  expect((await run(`test -e ${file}`)).exit_code).toBe(1);
});

test('a request that waits for a queued command is answered when the command ends', async () => {
  const { system, machine_id, back } = await away();
  const answer = system.call('POST', '/commands', {
    body: { machine_id, command: 'echo now', queue_for: hour, wait: 50_000 },
  });
  await soon(async () => (await system.client.commands.list({ status: 'queued' })).total).toBe(1);
  await back();
  expect(await answer).toMatchObject({
    status: 201,
    body: { data: { status: 'completed', stdout: 'now\n' } },
  });
});

test('DELETE cancels a waiting command at once and only once, and it never runs', async () => {
  const { system, begin, back, run } = await away();
  const file = join(temporaryFolder('cancelled'), 'ran');
  const id = await begin(`echo ran > ${file}`, { queue_for: hour });
  const { body } = await system.call('DELETE', `/commands/${id}`);
  expect(body.data).toMatchObject({ status: 'cancelled', started_at: null, reason: null });
  expect((await system.call('DELETE', `/commands/${id}`)).body.data).toEqual(body.data);
  expect(await failures(system, id)).toEqual(['cancelled']);
  expect(await specOf(system, id)).toBeNull();
  await back();
  expect((await run(`test -e ${file}`)).exit_code).toBe(1);
});

test('input and signals for a waiting command are a conflict', async () => {
  const { system, begin } = await away();
  const id = await begin('cat', { queue_for: hour, input: true });
  for (const [path, body] of [
    ['input', { data: 'x' }],
    ['signal', { signal: 'SIGTERM' }],
  ] as const) {
    const answer = await system.call('POST', `/commands/${id}/${path}`, { body });
    expect([answer.status, answer.body.error.code]).toEqual([409, 'conflict']);
  }
});

test('a purge cancels the commands that wait for its machine, and no others', async () => {
  const { system, machine_id, run, begin: beginHere } = await bench();
  const { wait, open } = gate();
  const running = await beginHere(wait);
  const there = await away(system);
  const waiting = [
    await there.begin('echo 1', { queue_for: hour }),
    await there.begin('echo 2', { queue_for: hour }),
  ];
  expect(await system.client.commands.purge({ machine_id })).toEqual({ cancelled: [] });
  const limited = await system.keyed(['commands:execute'], { machine_ids: [machine_id] });
  const refused = await system.call('DELETE', `/machines/${there.machine_id}/commands`, { key: limited.key });
  expect(refused.status).toBe(403);
  expect((await system.call('DELETE', '/machines/mach_none/commands')).status).toBe(404);
  expect(await system.client.commands.purge({ machine_id: there.machine_id })).toEqual({
    cancelled: waiting,
  });
  for (const id of waiting) expect((await there.get(id)).status).toBe('cancelled');
  open();
  expect((await listen(system, running)).events.at(-1)?.data).toMatchObject({ status: 'completed' });
  expect((await run('true')).status).toBe('completed');
});

test('when a machine is removed, its waiting commands expire and its running ones are lost', async () => {
  const { system, machine_id, begin, ended } = await away();
  const id = await begin('true', { queue_for: hour });
  await system.client.machines.remove({ machine_id });
  expect(await ended(id)).toMatchObject({ status: 'expired', reason: 'machine_removed' });
  expect(await specOf(system, id)).toBeNull();
});

test('waiting commands of a revoked key are cancelled at once; those of other keys are not', async () => {
  const { system, begin, ended, get, machine_id } = await away();
  const { client } = await system.keyed(['commands:execute', 'commands:read']);
  const theirs = await client.commands.async({ machine_id, command: 'true', queue_for: hour });
  const mine = await begin('true', { queue_for: hour });
  await system.client.keys.remove({ key_id: theirs.requested_by ?? '' });
  expect(await ended(theirs.id)).toMatchObject({ status: 'cancelled', reason: 'key_revoked' });
  expect((await get(mine)).status).toBe('queued');
});

test('a key that expires while its command waits starts nothing', async () => {
  const clock = leapingClock();
  const { system, machine_id, back, ended } = await away();
  const expires_at = new Date(Date.now() + hour).toISOString();
  const { key } = await system.client.keys.create({
    name: 'short',
    scopes: ['commands:execute'],
    expires_at,
  });
  const { body } = await system.call('POST', '/commands/async', {
    key,
    body: { machine_id, command: 'true', queue_for: 9 * hour },
  });
  clock.leap(hour + 1_000);
  await back();
  expect(await ended(body.data.id)).toMatchObject({ status: 'cancelled', reason: 'key_revoked' });
});

test('all waiting commands survive a restart of the broker, and each runs once', async () => {
  const { system, begin, back } = await away();
  const folder = temporaryFolder('restart');
  const spec = { env: { WORD: 'wörd' }, stdin: 'stdin\0!', cwd: folder, queue_for: hour };
  const ids = [
    await begin('sh', {
      ...spec,
      args: ['-c', 'echo "$1 $WORD"; cat; pwd; echo ran >> first', 'x', '--arg'],
    }),
    await begin('echo ran >> second; exit 4', spec),
  ];
  const cancelled = await begin('echo ran >> third', spec);
  await system.client.commands.cancel({ command_id: cancelled });
  const before = await system.client.commands.get({ command_id: ids[0]! });
  await system.broker.close();
  const again = await startFarhand({ dataDir: system.dataDir, flags: ['--grpc', system.grpc] });
  const { get, ended, run } = commandsOn(again, before.machine_id);
  expect(await get(before.id)).toEqual(before);
  const waiting = await again.client.commands.async({
    machine_id: before.machine_id,
    command: 'true',
    queue_for: hour,
  });
  expect(waiting.status).toBe('queued');
  await back(again);
  expect(await ended(ids[0]!)).toMatchObject({
    status: 'completed',
    stdout: `--arg wörd\nstdin\0!${folder}\n`,
  });
  expect(await ended(ids[1]!)).toMatchObject({ status: 'failed', exit_code: 4 });
  expect((await ended(waiting.id)).status).toBe('completed');
  expect((await run(`cd ${folder}; cat *; ls`)).stdout).toBe('ran\nran\nfirst\nsecond\n');
});

test('a command whose queue_for ended while no broker ran expires at the start, even if its machine comes online', async () => {
  const clock = leapingClock();
  const { system, machine_id, begin } = await away();
  const id = await begin('true', { queue_for: 60_000 });
  await system.broker.close();
  clock.leap(60_001);
  const again = await startFarhand({ dataDir: system.dataDir });
  expect(await commandsOn(again, machine_id).ended(id)).toMatchObject({
    status: 'expired',
    reason: 'queue_expired',
  });
});

test('secrets of a spec are in the database only while its command waits', async () => {
  const { system, begin, back, ended } = await away();
  const { wait, open } = gate();
  const id = await begin(`echo up; ${wait}`, { env: { TOKEN: 'hunter2' }, queue_for: hour });
  expect(await specOf(system, id)).toContain('hunter2');
  const up = listen(system, id, undefined, ({ stdout }) => stdout.length > 0);
  await back();
  await up;
  await soon(() => specOf(system, id)).toBeNull();
  open();
  await ended(id);
  const now = await begin('true', { env: { TOKEN: 'hunter3' } }).catch(() => '');
  expect(await specOf(system, now)).toBeNull();
});

test('a repeat with the same Idempotency-Key creates nothing, on each route that runs something, also after a restart', async () => {
  const { system, machine_id } = await away();
  const asked = [
    ['/commands', { machine_id, command: 'true', queue_for: hour, wait: 0 }],
    ['/commands/async', { machine_id, command: 'true', queue_for: hour }],
    ['/commands/batch', { machine_ids: [machine_id], command: 'true', queue_for: hour, wait: 0 }],
  ] as const;
  const first: unknown[] = [];
  for (const [n, [path, body]] of asked.entries()) {
    const headers = { 'Idempotency-Key': `k${n}` };
    const made = await system.call('POST', path, { body, headers });
    expect(made.status).toBe(201);
    first.push(made.body.data);
    expect((await system.call('POST', path, { body, headers })).body.data).toEqual(made.body.data);
    const other = await system.call('POST', path, { body: { ...body, command: 'false' }, headers });
    expect([other.status, other.body.error.code]).toEqual([422, 'idempotency_mismatch']);
  }
  await system.broker.close();
  const again = await startFarhand({ dataDir: system.dataDir });
  for (const [n, [path, body]] of asked.entries()) {
    const headers = { 'Idempotency-Key': `k${n}` };
    const repeat = await again.call('POST', path, { key: system.key, body, headers });
    expect([repeat.status, repeat.headers.get('idempotency-replayed')]).toEqual([201, 'true']);
    expect(repeat.body.data).toEqual(first[n]);
  }
  expect((await again.client.commands.list()).total).toBe(3);
});

test('the list of a machine has only its own commands, and a limited key sees only those of its machines', async () => {
  const system = await startFarhand();
  const [one, two] = [await away(system), await away(system)];
  const mine = await one.begin('true', { queue_for: hour });
  const other = await two.begin('true', { queue_for: hour });
  const { client } = await system.keyed(['commands:read'], { machine_ids: [one.machine_id] });
  const ids = async (list: Promise<{ items: { id: string }[] }>) => (await list).items.map(({ id }) => id);
  expect(await ids(system.client.commands.list({ sort: 'created_at' }))).toEqual([mine, other]);
  expect(await ids(system.client.commands.ofMachine({ machine_id: two.machine_id }))).toEqual([other]);
  expect(await ids(client.commands.list({ status: 'queued' }))).toEqual([mine]);
  await expect(client.commands.ofMachine({ machine_id: two.machine_id })).rejects.toMatchObject({
    status: 403,
  });
  const { status } = await system.call('GET', '/commands?status=waiting');
  expect(status).toBe(400);
});

test('the cancel of a waiting command is refused while it cannot be stored, and the command is cancelled later', async () => {
  const clock = leapingClock();
  const stores: Parameters<NonNullable<Tuning['onStores']>>[0][] = [];
  const system = await startFarhand({ tuning: { onStores: (opened) => void stores.push(opened) } });
  const { begin, get } = await scriptedAway(system);
  const id = await begin('true', { queue_for: hour });
  const writing = vi.spyOn(stores[0]!.history, 'write').mockRejectedValue(new Error('no space left'));
  const refused = system.call('DELETE', `/commands/${id}`);
  await expect.poll(() => writing.mock.calls.length).toBeGreaterThan(0);
  clock.leap(cancelWaitMs);
  expect((await refused).body.error).toMatchObject({ code: 'unavailable' });
  writing.mockRestore();
  await waitFor(async () => {
    clock.leap(5_000);
    expect((await get(id)).status).toBe('cancelled');
  });
});
