// The limit of open commands on a machine, and commands whose start was lost before it reached the agent.
import { expect, test } from 'vitest';
import {
  commandsOn,
  leapingClock,
  listen,
  nextCall,
  reporting,
  scriptedAway,
  soon,
} from '../commands-fixture.ts';
import { storedRows } from '../read-stored-state.ts';
import { scriptedMachine } from '../scripted-agent.ts';
import { startFarhand, type TestSystem } from '../start-farhand.ts';

const hour = 3_600_000;

async function cancelOf(system: TestSystem, id: string): Promise<unknown> {
  const [row] = await storedRows(system.dataDir, 'SELECT cancel FROM commands WHERE id = ?', id);
  return row?.cancel;
}

test('of many simultaneous commands a machine gets 64 at once, and each further command when a slot is free', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const { begin, get } = commandsOn(system, agent.identity.machineId);
  // Opens 80 connections first. The commands then arrive at the same time, and the limit must hold for them as well.
  await Promise.all(Array.from({ length: 80 }, () => system.client.commands.list()));
  const ids = new Set(await Promise.all(Array.from({ length: 80 }, (_, n) => begin(`echo ${n}`))));
  const calls: { id: string; call_id: string }[] = [];
  for (let n = 0; n < 64; n += 1) calls.push(await nextCall(agent, 'StartProcess'));
  for (const { id } of calls) ids.delete(id);
  expect(ids.size).toBe(16);
  const waiting = await begin('echo waited', { queue_for: hour });
  expect((await get(waiting)).status).toBe('queued');
  for (let n = 0; n < 17; n += 1) {
    const report = reporting(agent, calls[n]!.call_id);
    report.started();
    report.exited(0);
    report.end();
    const { id } = await nextCall(agent, 'StartProcess');
    expect(n < 16 ? ids.delete(id) : id === waiting).toBe(true);
  }
});

test('a slot is free only when its call has ended, and a slow end does not expire waiting commands', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const { begin, get } = commandsOn(system, agent.identity.machineId);
  const calls: { id: string; call_id: string }[] = [];
  for (let n = 0; n < 64; n += 1) {
    await begin(`echo ${n}`);
    calls.push(await nextCall(agent, 'StartProcess'));
  }
  const waiting = await begin('echo waited', { queue_for: hour });
  for (const { call_id } of calls) {
    const report = reporting(agent, call_id);
    report.started();
    report.exited(0);
  }
  expect((await nextCall(agent, 'StartProcess')).id).toBe(waiting);
  expect((await get(waiting)).status).toBe('queued');
});

test('at most 1,024 commands wait for one offline machine, and one more is refused before it is stored', async () => {
  const system = await startFarhand();
  const { begin, machine_id } = await scriptedAway(system);
  for (let n = 0; n < 10; n += 1)
    await Promise.all(Array.from({ length: 101 }, () => begin('true', { queue_for: hour })));
  const last = await Promise.allSettled(Array.from({ length: 20 }, () => begin('true', { queue_for: hour })));
  expect(last.filter(({ status }) => status === 'fulfilled')).toHaveLength(14);
  await expect(begin('true', { queue_for: hour })).rejects.toMatchObject({
    status: 503,
    code: 'unavailable',
  });
  expect((await system.client.commands.list()).total).toBe(1_024);
  const { cancelled } = await system.client.commands.purge({ machine_id });
  expect(cancelled).toHaveLength(1_024);
});

test('a start that was lost in transit is sent again only while the command may wait', async () => {
  const system = await startFarhand();
  const { begin, back, leave, ended, get } = await scriptedAway(system);
  let agent = await back();
  const patient = await begin('echo patient', { queue_for: hour, env: { A: 'b' } });
  expect((await nextCall(agent, 'StartProcess')).id).toBe(patient);
  const hasty = await begin('echo hasty');
  expect((await nextCall(agent, 'StartProcess')).id).toBe(hasty);
  await leave(agent);
  agent = await back();
  for (const id of [patient, hasty]) {
    const follow = await nextCall(agent, 'FollowProcess');
    expect(follow.id).toBe(id);
    const report = reporting(agent, follow.call_id);
    report.unknown();
    report.end();
  }
  expect(await ended(hasty)).toMatchObject({ status: 'expired', reason: 'unknown_id' });
  const again = await nextCall(agent, 'StartProcess');
  expect(again).toMatchObject({ id: patient, spec: { command: 'echo patient', env: { A: 'b' } } });
  const report = reporting(agent, again.call_id);
  report.started();
  report.exited(0);
  expect(await ended(patient)).toMatchObject({ status: 'completed' });
  expect((await get(patient)).queued_until).toBeNull();
});

test('a start that is sent again is followed once, even if the earlier answer ends late', async () => {
  const clock = leapingClock();
  const system = await startFarhand();
  const { begin, back, leave, ended } = await scriptedAway(system);
  let agent = await back();
  const id = await begin('echo again', { queue_for: hour });
  await nextCall(agent, 'StartProcess');
  await leave(agent);
  agent = await back();
  const old = reporting(agent, (await nextCall(agent, 'FollowProcess')).call_id);
  old.unknown();
  const report = reporting(agent, (await nextCall(agent, 'StartProcess')).call_id);
  report.started();
  report.stdout(0, 'once');
  await listen(system, id, undefined, ({ stdout }) => stdout.length > 0);
  // The agent repeats its earlier report that it does not know the command. Meanwhile it has started the command.
  old.unknown();
  old.end();
  // If the broker had lost track of the command, it would now send another call for it.
  await system.client.commands.list();
  clock.leap(2_000);
  const end = ended(id);
  const next = await begin('echo next');
  expect((await nextCall(agent, 'StartProcess')).id).toBe(next);
  report.exited(4);
  expect(await end).toMatchObject({ status: 'completed', stdout: 'once' });
});

test('a start that was dropped or refused is sent again while the command may wait', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const { begin, ended } = commandsOn(system, agent.identity.machineId);
  const id = await begin('echo at last', { queue_for: hour });
  const first = reporting(agent, (await nextCall(agent, 'StartProcess')).call_id);
  first.unknown('dropped');
  first.end();
  const second = reporting(agent, (await nextCall(agent, 'StartProcess')).call_id);
  second.refused('unavailable');
  const third = reporting(agent, (await nextCall(agent, 'StartProcess')).call_id);
  third.started();
  third.exited(0);
  third.end();
  expect(await ended(id)).toMatchObject({ status: 'completed' });
  const impatient = await begin('echo never');
  const only = reporting(agent, (await nextCall(agent, 'StartProcess')).call_id);
  only.unknown('dropped');
  only.end();
  expect(await ended(impatient)).toMatchObject({ status: 'expired', reason: 'dropped' });
});

test('a command is lost if its agent refuses to report on it; a busy agent is asked again', async () => {
  const system = await startFarhand();
  const { begin, back, leave, ended } = await scriptedAway(system);
  let agent = await back();
  const id = await begin('true');
  await nextCall(agent, 'StartProcess');
  await leave(agent);
  agent = await back();
  reporting(agent, (await nextCall(agent, 'FollowProcess')).call_id).refused('unavailable');
  reporting(agent, (await nextCall(agent, 'FollowProcess')).call_id).refused('permission_denied');
  expect(await ended(id)).toMatchObject({ status: 'lost', reason: 'permission_denied: no' });
});

test('a command that was running is lost, not expired, if its agent no longer knows it', async () => {
  const system = await startFarhand();
  const { begin, back, leave, ended, get } = await scriptedAway(system);
  let agent = await back();
  const id = await begin('true', { queue_for: hour });
  reporting(agent, (await nextCall(agent, 'StartProcess')).call_id).started();
  await soon(async () => (await get(id)).status).toBe('running');
  await leave(agent);
  agent = await back();
  const report = reporting(agent, (await nextCall(agent, 'FollowProcess')).call_id);
  report.unknown();
  report.end();
  expect(await ended(id)).toMatchObject({ status: 'lost', reason: 'no_report' });
});

test('a start that the agent does not know is expired after its deadline, and not sent again', async () => {
  const clock = leapingClock();
  const system = await startFarhand();
  const { begin, back, leave, ended } = await scriptedAway(system);
  let agent = await back();
  const id = await begin('true', { queue_for: 5_000 });
  await nextCall(agent, 'StartProcess');
  await leave(agent);
  clock.leap(5_001);
  agent = await back();
  const report = reporting(agent, (await nextCall(agent, 'FollowProcess')).call_id);
  report.unknown();
  report.end();
  expect(await ended(id)).toMatchObject({ status: 'expired', reason: 'unknown_id' });
});

test('a command cancelled while its start is unconfirmed is not sent again', async () => {
  const system = await startFarhand();
  const { begin, back, leave, ended } = await scriptedAway(system);
  let agent = await back();
  const id = await begin('true', { queue_for: hour });
  await nextCall(agent, 'StartProcess');
  await leave(agent);
  const cancelling = system.call('DELETE', `/commands/${id}`);
  await soon(() => cancelOf(system, id)).toBe(1);
  agent = await back();
  const report = reporting(agent, (await nextCall(agent, 'FollowProcess')).call_id);
  expect((await nextCall(agent, 'KillProcess')).id).toBe(id);
  report.unknown();
  report.end();
  expect((await ended(id)).status).toBe('cancelled');
  expect((await cancelling).body.data.status).toBe('cancelled');
});
