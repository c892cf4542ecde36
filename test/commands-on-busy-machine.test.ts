// Commands that wait because their machine is busy: in order, over restarts, and within limits.
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import {
  commandsOn,
  gate,
  leapingClock,
  nextCall,
  reporting,
  scriptedAway,
  soon,
} from './commands-fixture.ts';
import { storedRows } from './read-stored-state.ts';
import { type ScriptedAgent, scriptedMachine } from './scripted-agent.ts';
import { startFarhand, startWithAgent, type TestSystem, temporaryFolder } from './start-farhand.ts';

const atOnce = 64;
const waitingCommands = 1024;

/** A machine with as many running commands as it may have. Each function in `ends` ends one of them. */
async function busyMachine(system: TestSystem) {
  const agent = await scriptedMachine(system);
  const on = commandsOn(system, agent.identity.machineId);
  const ends = await fill(agent, on);
  return { agent, machine_id: agent.identity.machineId, ends, ...on };
}

async function fill(agent: ScriptedAgent, { begin }: Pick<ReturnType<typeof commandsOn>, 'begin'>) {
  const ends: (() => void)[] = [];
  for (let n = 0; n < atOnce; n += 1) {
    await begin(`echo ${n}`);
    ends.push(started(agent, await nextCall(agent, 'StartProcess')));
  }
  return ends;
}

/** Reports the start of a command. Returns a function that reports its completion. */
function started(agent: ScriptedAgent, { call_id }: { call_id: string }): () => void {
  const report = reporting(agent, call_id);
  report.started();
  return () => {
    report.exited(0);
    report.end();
  };
}

/**
 * Reads the `journal_id` of a command from the database: the journal of the agent to which the broker has sent the
 * command. It is empty until the broker sends the command.
 */
async function journalOf(system: TestSystem, id: string): Promise<unknown> {
  const [row] = await storedRows(system.dataDir, 'SELECT journal_id FROM commands WHERE id = ?', id);
  return row?.journal_id;
}

test('more than 1,024 waiting commands of one machine are refused before they are stored', async () => {
  const system = await startFarhand();
  const { begin, machine_id, agent, ends } = await busyMachine(system);
  for (let n = 0; n < waitingCommands / 64 - 1; n += 1)
    await Promise.all(Array.from({ length: 64 }, () => begin('true')));
  const last = await Promise.allSettled(Array.from({ length: 80 }, () => begin('true')));
  expect(last.filter(({ status }) => status === 'fulfilled')).toHaveLength(64);
  const body = { machine_id, command: 'true' };
  const refused = await system.call('POST', '/commands', { body });
  expect([refused.status, refused.body.error.code]).toEqual([503, 'unavailable']);
  expect(refused.headers.get('retry-after')).toBe('5');
  expect(refused.body.error.details).toEqual({ machine_id, limit: waitingCommands });
  const other = await scriptedMachine(system);
  await system.client.commands.async({ ...body, machine_id: other.identity.machineId });
  expect((await system.client.commands.list()).total).toBe(atOnce + waitingCommands + 1);
  ends[0]!();
  await nextCall(agent, 'StartProcess');
  await begin('true');
});

test('200 commands at once on a busy machine all complete, and each runs once', async () => {
  const { system, machine_id } = await startWithAgent();
  const { begin, ended } = commandsOn(system, machine_id);
  const file = join(temporaryFolder('counter'), 'ran');
  const { wait, open } = gate();
  for (let n = 0; n < atOnce; n += 1) await begin(wait);
  const ids = await Promise.all(
    Array.from({ length: 200 }, () => begin(`echo $FARHAND_COMMAND_ID >> ${file}`)),
  );
  await soon(async () => (await system.client.commands.list({ status: 'queued' })).total).toBe(200);
  for (let n = 0; n < atOnce; n += 1) open();
  for (const id of ids) expect(await ended(id)).toMatchObject({ status: 'completed', queued_until: null });
  expect(readFileSync(file, 'utf8').trim().split('\n').toSorted()).toEqual(ids.toSorted());
});

test('waiting commands start in order, one for each that ends, and before all later commands', async () => {
  const system = await startFarhand();
  const { begin, get, agent, ends } = await busyMachine(system);
  const waiting: string[] = [];
  for (let n = 0; n < 20; n += 1) waiting.push(await begin(`echo waiting ${n}`));
  expect(await get(waiting[0]!)).toMatchObject({ status: 'queued', started_at: null, queued_until: null });
  const order: string[] = [];
  for (const end of ends.slice(0, 10)) {
    end();
    waiting.push(await begin('echo later'));
    order.push((await nextCall(agent, 'StartProcess')).id);
  }
  for (const end of ends.slice(10, 30)) end();
  while (order.length < 30) order.push((await nextCall(agent, 'StartProcess')).id);
  expect(order).toEqual(waiting);
});

test('`wait` counts from the request and `timeout` from the start', async () => {
  const system = await startFarhand();
  const { agent, ends, machine_id, ended } = await busyMachine(system);
  const body = { machine_id, command: 'true', wait: 300, timeout: 400 };
  const asked = performance.now();
  const { status, body: answer } = await system.call('POST', '/commands', { body });
  expect([status, answer.data.status]).toEqual([201, 'queued']);
  expect(performance.now() - asked).toBeGreaterThanOrEqual(299);
  ends[0]!();
  // The timeout does not include the time that the command has waited.
  const start = await nextCall(agent, 'StartProcess');
  expect(start).toMatchObject({ id: answer.data.id, spec: { timeout_ms: 400 } });
  started(agent, start)();
  expect(await ended(answer.data.id)).toMatchObject({ status: 'completed' });
});

test('a request with `wait` is answered when its queued command has run and ended', async () => {
  const system = await startFarhand();
  const { agent, ends, machine_id } = await busyMachine(system);
  const answer = system.call('POST', '/commands', { body: { machine_id, command: 'true' } });
  await soon(async () => (await system.client.commands.list()).total).toBe(atOnce + 1);
  ends[0]!();
  started(agent, await nextCall(agent, 'StartProcess'))();
  expect((await answer).body.data).toMatchObject({ status: 'completed' });
});

test('DELETE and a purge cancel waiting commands, which then never run', async () => {
  const system = await startFarhand();
  const { begin, agent, ends, machine_id } = await busyMachine(system);
  const [first, second, third] = [await begin('echo 1'), await begin('echo 2'), await begin('echo 3')];
  expect(await system.client.commands.cancel({ command_id: first })).toMatchObject({
    ...{ status: 'cancelled', started_at: null, reason: null },
  });
  ends[0]!();
  expect((await nextCall(agent, 'StartProcess')).id).toBe(second);
  expect(await system.client.commands.purge({ machine_id })).toEqual({ cancelled: [third] });
});

test('a command that waits on a busy machine expires when queue_for is over', async () => {
  const clock = leapingClock();
  const system = await startFarhand();
  const { begin, ended, get } = await busyMachine(system);
  const hasty = await begin('true', { queue_for: 5_000 });
  const patient = await begin('true');
  clock.leap(5_001);
  expect(await ended(hasty)).toMatchObject({ status: 'expired', reason: 'queue_expired' });
  expect((await get(patient)).status).toBe('queued');
});

test('waiting commands survive a minute while their machine is offline, and then expire', async () => {
  const clock = leapingClock();
  const system = await startFarhand();
  const { back, leave, begin, get, ended } = await scriptedAway(system);
  let agent = await back();
  await fill(agent, { begin });
  const id = await begin('echo waited');
  await leave(agent);
  clock.leap(59_000);
  expect((await get(id)).status).toBe('queued');
  agent = await back();
  const follow = await nextCall(agent, 'FollowProcess');
  for (let n = 1; n < atOnce; n += 1) await nextCall(agent, 'FollowProcess');
  started(agent, follow)();
  expect((await nextCall(agent, 'StartProcess')).id).toBe(id);
  const last = await begin('echo too late');
  await leave(agent);
  clock.leap(60_001);
  expect(await ended(last)).toMatchObject({ status: 'expired', reason: 'machine_offline' });
});

test('a waiting command whose start is refused is sent again for a minute, and then fails', async () => {
  const clock = leapingClock();
  const system = await startFarhand();
  const { begin, get, ended, agent, ends } = await busyMachine(system);
  const id = await begin('echo waited');
  ends[0]!();
  reporting(agent, (await nextCall(agent, 'StartProcess')).call_id).refused('unavailable');
  // Each round takes less than 10 s. If a call had no answer for 10 s, it would time out, and the broker would not send
  // the command again.
  for (let n = 1; n <= 7; n += 1) {
    const again = await nextCall(agent, 'StartProcess');
    expect([n, again.id, (await get(id)).status]).toEqual([n, id, 'queued']);
    clock.leap(8_500);
    agent.send({ heartbeat: {} });
    reporting(agent, again.call_id).refused('unavailable');
  }
  expect(await ended(id)).toMatchObject({ status: 'failed', reason: 'unavailable: no' });
  const locked = await begin('echo locked');
  reporting(agent, (await nextCall(agent, 'StartProcess')).call_id).refused('permission_denied');
  expect(await ended(locked)).toMatchObject({ status: 'failed', reason: 'permission_denied: no' });
});

test('a command whose start is sent again comes before those that were accepted after it', async () => {
  const system = await startFarhand();
  const { begin, agent, ends } = await busyMachine(system);
  const first = await begin('echo first');
  ends[0]!();
  reporting(agent, (await nextCall(agent, 'StartProcess')).call_id).refused('unavailable');
  await soon(() => journalOf(system, first)).toBe('');
  const second = await begin('echo second');
  const again = await nextCall(agent, 'StartProcess');
  expect([again.id, (await system.client.commands.get({ command_id: second })).status]).toEqual([
    first,
    'queued',
  ]);
});

test('members of batches wait in the same order as single commands', async () => {
  const system = await startFarhand();
  const { begin, agent, ends, machine_id } = await busyMachine(system);
  const { client } = system;
  const first = await begin('echo 1');
  const { results } = await client.batches.create({ machine_ids: [machine_id], command: 'true', wait: 0 });
  const last = await begin('echo 3');
  for (const end of ends.slice(0, 3)) end();
  const order: string[] = [];
  for (let n = 0; n < 3; n += 1) order.push((await nextCall(agent, 'StartProcess')).id);
  expect(order).toEqual([first, results[0]?.id, last]);
});

test('a restart of the broker keeps the order of waiting commands', async () => {
  const system = await startFarhand();
  const { back, leave, begin, machine_id } = await scriptedAway(system);
  let agent = await back();
  await fill(agent, { begin });
  const waiting: string[] = [];
  for (let n = 0; n < 40; n += 1) waiting.push(await begin(`echo ${n}`, { env: { N: `${n}` } }));
  await leave(agent);
  await system.broker.close();
  const again = await startFarhand({ dataDir: system.dataDir, flags: ['--grpc', system.grpc] });
  expect((await commandsOn(again, machine_id).get(waiting[39]!)).status).toBe('queued');
  agent = await back();
  const followed: Awaited<ReturnType<typeof nextCall>>[] = [];
  while (followed.length < atOnce) followed.push(await nextCall(agent, 'FollowProcess'));
  for (const call of followed) started(agent, call)();
  const starts: { id: string; spec?: object }[] = [];
  while (starts.length < 40) starts.push(await nextCall(agent, 'StartProcess'));
  expect(starts.map(({ id }) => id)).toEqual(waiting);
  expect(starts[39]?.spec).toMatchObject({ env: { N: '39' } });
});

test('a restart of the agent loses no waiting command', async () => {
  const { system, agent } = await startWithAgent();
  const { begin, ended, get } = commandsOn(system, agent.machineId);
  const file = join(temporaryFolder('counter'), 'ran');
  for (let n = 0; n < atOnce; n += 1) await begin('exec sleep 600');
  const waiting = await Promise.all(Array.from({ length: 100 }, () => begin(`echo ran >> ${file}`)));
  await agent.close();
  expect((await get(waiting[99]!)).status).toBe('queued');
  await system.agent({ dataDir: agent.dataDir, joinToken: 'used' });
  for (const id of waiting) expect((await ended(id)).status).toBe('completed');
  expect(readFileSync(file, 'utf8')).toBe('ran\n'.repeat(100));
});
