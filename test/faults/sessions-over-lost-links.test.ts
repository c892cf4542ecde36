// Sessions over lost links, restarts of either side, and removed machines.
import { once } from 'node:events';
import { join as joinPath } from 'node:path';
import { DatabaseSync } from 'node:sqlite';
import { expect, onTestFinished, test } from 'vitest';
import { withBroker } from '../../broker/cli/connect-to-broker.ts';
import { leapingClock, soon } from '../commands-fixture.ts';
import { freeAddress } from '../find-free-ports.ts';
import { joinScripted } from '../scripted-agent.ts';
import {
  attached,
  begin,
  bench,
  createPort,
  eventsOf,
  join,
  keeper,
  linkMachine,
  type Machine,
  ok,
  refuse,
  ticketIn,
} from '../sessions-fixture.ts';
import { startFarhand, temporaryFolder } from '../start-farhand.ts';
import { databaseFlags } from '../start-postgres.ts';
import { program } from '../start-processes.ts';

/** Cuts the machine's connection without a message. */
function cut({ agent }: Machine): void {
  agent.control.cancel();
}

test('a link that is back in time finds its terminal unchanged', async () => {
  const { system, machine, link } = await bench();
  const { session_id } = await begin({ system, machine });
  const get = () => system.client.sessions.get({ session_id });
  cut(machine);
  await soon(async () => (await get()).status).toBe('GRACE_PERIOD');
  expect((await get()).grace_period_started_at).not.toBeNull();
  const back = await link();
  const keep = await back.next('KeepTerminal');
  expect(keep.request).toEqual({ id: session_id });
  const kept = keeper(back, keep);
  kept.started();
  await soon(async () => (await get()).status).toBe('CONNECTED');
  expect((await get()).grace_period_started_at).toBeNull();
  kept.exit({ exit_code: 7 });
  await soon(get).toMatchObject({ status: 'DISCONNECTED', exit_code: 7 });
  expect(await eventsOf(system, session_id)).toEqual([
    'created PENDING',
    'connected CONNECTED',
    'grace_period GRACE_PERIOD',
    'connected CONNECTED',
    'disconnected DISCONNECTED',
  ]);
  expect(back.waiting('OpenTerminal')).toBe(0);
});

test('the terminal of an open session is neither ended nor acknowledged', async () => {
  const clock = leapingClock();
  const { system, machine, link } = await bench();
  const { session_id } = await begin({ system, machine });
  const back = await link({ process_ids: [session_id] });
  const kept = keeper(back, await back.next('KeepTerminal'));
  // A wrong KillProcess or ForgetProcesses for the open session would be sent within these 100 ms.
  clock.leap(100);
  const ended = system.client.sessions.end({ session_id });
  ok(back, await back.next('KillProcess'));
  expect([back.waiting('KillProcess'), back.waiting('ForgetProcesses')]).toEqual([0, 0]);
  kept.exit();
  expect(await ended).toMatchObject({ status: 'DISCONNECTED' });
});

test('a newer link takes a terminal over', async () => {
  const { system, machine, link } = await bench();
  const { session_id } = await begin({ system, machine });
  const newer = await link();
  keeper(newer, await newer.next('KeepTerminal')).started();
  await soon(async () => (await eventsOf(system, session_id)).slice(2)).toEqual([
    'grace_period GRACE_PERIOD',
    'connected CONNECTED',
  ]);
});

test('when a machine links again too late, its terminal is ended and acknowledged', async () => {
  const clock = leapingClock();
  const { system, machine, link } = await bench();
  const { session_id } = await begin({ system, machine }, { grace_period: 60_000 });
  const port = await join({ system, machine }, session_id);
  const get = () => system.client.sessions.get({ session_id });
  cut(machine);
  await soon(async () => (await get()).status).toBe('GRACE_PERIOD');
  clock.leap(59_000);
  expect((await get()).status).toBe('GRACE_PERIOD');
  clock.leap(1_000);
  await soon(get).toMatchObject({ status: 'DISCONNECTED', reason: 'grace_period_over', exit_code: null });
  expect(await port.parted()).toMatchObject({ why: 'ended', reason: 'grace_period_over' });
  const back = await link({ process_ids: [session_id] });
  const kill = await back.next('KillProcess');
  expect(kill.request.id).toBe(session_id);
  ok(back, kill);
  expect((await back.next('ForgetProcesses')).request.ids).toContain(session_id);
  expect(back.waiting('KeepTerminal')).toBe(0);
});

test('a terminal that its agent does not confirm in time is ended, also on the machine', async () => {
  const clock = leapingClock();
  const { system, machine, link } = await bench();
  const { session_id } = await begin({ system, machine }, { grace_period: 5_000 });
  cut(machine);
  const back = await link({ process_ids: [session_id] });
  await back.next('KeepTerminal');
  clock.leap(5_000);
  const get = () => system.client.sessions.get({ session_id });
  await soon(get).toMatchObject({ status: 'DISCONNECTED', reason: 'grace_period_over' });
  expect((await back.next('KillProcess')).request.id).toBe(session_id);
  expect((await back.next('ForgetProcesses')).request.ids).toEqual([session_id]);
});

test('a session ends even if its agent never reports its end', async () => {
  const clock = leapingClock();
  const { system, machine } = await bench();
  const { session_id } = await begin({ system, machine });
  const ended = system.client.sessions.end({ session_id });
  ok(machine, await machine.next('KillProcess'));
  clock.leap(10_000);
  expect((await ended).status).toBe('CONNECTED');
  clock.leap(5_000);
  const get = () => system.client.sessions.get({ session_id });
  await soon(get).toMatchObject({ status: 'DISCONNECTED', reason: 'ended', exit_code: null });
  expect((await machine.next('KillProcess')).request.id).toBe(session_id);
});

test.each([
  ['does not know the session', {}, { outcome: 'PROCESS_OUTCOME_EXPIRED', reason: 'unknown_id' }, 'lost'],
  ['was restarted', { instance_id: 'next' }, { outcome: 'PROCESS_OUTCOME_LOST' }, 'agent_restarted'],
])('a session whose agent %s is DISCONNECTED', async (_, hello, exit, reason) => {
  const { system, machine, link } = await bench();
  const { session_id } = await begin({ system, machine });
  cut(machine);
  const back = await link(hello);
  keeper(back, await back.next('KeepTerminal')).exit(exit);
  const get = () => system.client.sessions.get({ session_id });
  await soon(get).toMatchObject({ status: 'DISCONNECTED', reason, exit_code: null });
});

test.each(['range_not_satisfiable', 'session_not_found'])(
  'a client whose terminal died with its agent gets agent_restarted as the reason, although the agent answers %s',
  async (code) => {
    const clock = leapingClock();
    const one = await bench();
    const { session_id } = await begin(one);
    const client = await join(one, session_id);
    client.line.head();
    client.line.output(0, 'before');
    await client.gets(6);
    cut(one.machine);
    await client.status('GRACE_PERIOD');
    const back = await one.link({ instance_id: 'next' });
    // The database refuses to store the end of the session. Meanwhile the client requests the rest of the output.
    const history = new DatabaseSync(joinPath(one.system.dataDir, 'history.db'));
    onTestFinished(() => history.close());
    history.exec(`CREATE TRIGGER late BEFORE UPDATE ON sessions WHEN NEW.ended_at IS NOT NULL
      BEGIN SELECT RAISE(ABORT, 'not yet'); END`);
    keeper(back, await back.next('KeepTerminal')).exit({ outcome: 'PROCESS_OUTCOME_LOST' });
    refuse(back, await back.next('AttachTerminal'), code);
    history.exec('DROP TRIGGER late');
    clock.leap(5_000);
    expect(await client.parted()).toMatchObject({ why: 'ended', reason: 'agent_restarted' });
    expect(back.waiting('AttachTerminal')).toBe(0);
  },
);

test('a session is lost if its agent refuses to report on it; a busy agent is asked again', async () => {
  const { system, machine, link } = await bench();
  const { session_id } = await begin({ system, machine });
  cut(machine);
  const back = await link();
  refuse(back, await back.next('KeepTerminal'), 'unavailable');
  refuse(back, await back.next('KeepTerminal'), 'session_not_found');
  const get = () => system.client.sessions.get({ session_id });
  await soon(get).toMatchObject({ status: 'DISCONNECTED', reason: 'lost' });
});

test('a terminal whose opening was cut off is followed, and never opened twice', async () => {
  const { system, machine, machine_id, link } = await bench();
  const made = system.client.sessions.create({ machine_id });
  await machine.next('OpenTerminal');
  cut(machine);
  const session = await made;
  expect(session.status).toBe('GRACE_PERIOD');
  const back = await link();
  keeper(back, await back.next('KeepTerminal')).started();
  const get = () => system.client.sessions.get({ session_id: session.id });
  await soon(async () => (await get()).status).toBe('CONNECTED');
  expect(back.waiting('OpenTerminal')).toBe(0);
});

test('a client that attaches while the machine is offline waits for the machine', async () => {
  const { system, machine, link } = await bench();
  const { session_id } = await begin({ system, machine });
  cut(machine);
  await soon(async () => (await system.client.sessions.get({ session_id })).status).toBe('GRACE_PERIOD');
  const { stream_url } = await system.client.sessions.attach({ session_id });
  const port = createPort();
  void system.broker.sessions.redeem(ticketIn(stream_url))?.serve(port.port);
  await port.status('GRACE_PERIOD');
  const back = await link();
  keeper(back, await back.next('KeepTerminal')).started();
  const line = attached(back, await back.next('AttachTerminal'));
  line.head();
  line.output(0, 'hello');
  await port.gets(5);
  expect(port.notes.map((note) => ('status' in note ? note.status : note.type))).toEqual([
    'GRACE_PERIOD',
    'CONNECTED',
    'ready',
  ]);
});

test('a session can be ended while its machine is offline; the agent is notified on reconnect', async () => {
  const { system, machine, link } = await bench();
  const { session_id } = await begin({ system, machine });
  cut(machine);
  await soon(async () => (await system.client.sessions.get({ session_id })).status).toBe('GRACE_PERIOD');
  const ended = await system.client.sessions.end({ session_id });
  expect(ended).toMatchObject({ status: 'DISCONNECTED', reason: 'ended', exit_code: null });
  const back = await link({ process_ids: [session_id] });
  expect((await back.next('KillProcess')).request.id).toBe(session_id);
});

test('a session that is being ended is over when its link is lost', async () => {
  const { system, machine } = await bench();
  const { session_id } = await begin({ system, machine });
  const ended = system.client.sessions.end({ session_id });
  await machine.next('KillProcess');
  cut(machine);
  expect(await ended).toMatchObject({ status: 'DISCONNECTED', reason: 'ended' });
});

test('a session whose end could not be written goes on', async () => {
  const { system, machine, link } = await bench();
  const { session_id } = await begin({ system, machine });
  const history = new DatabaseSync(joinPath(system.dataDir, 'history.db'));
  onTestFinished(() => history.close());
  // Another program's transaction blocks the broker's writes (sqlite.org/lang_transaction.html).
  history.exec('BEGIN IMMEDIATE');
  await expect(system.client.sessions.end({ session_id })).rejects.toMatchObject({ code: 'unavailable' });
  history.exec('ROLLBACK');
  const back = await link();
  keeper(back, await back.next('KeepTerminal')).started();
  const get = () => system.client.sessions.get({ session_id });
  await soon(async () => (await get()).status).toBe('CONNECTED');
  expect(back.waiting('KillProcess')).toBe(0);
});

test('the sessions of a removed machine are ended', async () => {
  const one = await bench();
  const { session_id } = await begin(one);
  const limited = await one.system.keyed(['sessions:attach'], { machine_ids: [one.machine_id] });
  const port = await join(one, session_id, {}, limited.client);
  await one.system.client.machines.remove({ machine_id: one.machine_id });
  expect(await port.parted()).toMatchObject({ why: 'ended', reason: 'machine_removed' });
  expect((await eventsOf(one.system, session_id)).at(-2)).toBe('disconnected DISCONNECTED');
});

test('a restarted broker recovers its sessions: they wait for their machine, and their clients are detached', async () => {
  const first = await bench();
  const { session_id } = await begin(first);
  await join(first, session_id);
  await first.system.broker.close();
  const system = await startFarhand({ dataDir: first.system.dataDir, flags: ['--grpc', first.system.grpc] });
  const get = () => system.client.sessions.get({ session_id });
  await soon(get).toMatchObject({ status: 'GRACE_PERIOD', attached_count: 0 });
  const back = await first.link();
  keeper(back, await back.next('KeepTerminal')).started();
  await soon(async () => (await get()).status).toBe('CONNECTED');
  expect(await eventsOf(system, session_id)).toEqual([
    'created PENDING',
    'connected CONNECTED',
    'client_attached CONNECTED operator',
    'client_detached CONNECTED operator',
    'grace_period GRACE_PERIOD',
    'connected CONNECTED',
  ]);
});

test('after a restart, the broker reports to new clients which output an operator has got before', async () => {
  const first = await bench();
  const { session_id } = await begin(first);
  const { line, ...port } = await join(first, session_id);
  line.head();
  line.output(0, '\u001b[6n');
  await port.gets(4);
  await first.system.broker.close();
  const system = await startFarhand({ dataDir: first.system.dataDir, flags: ['--grpc', first.system.grpc] });
  const machine = await first.link();
  keeper(machine, await machine.next('KeepTerminal')).started();
  const again = await join({ system, machine }, session_id);
  again.line.head();
  expect(await again.note('ready')).toMatchObject({ offset: 0, answered: 4 });
});

test('after kill -9 a broker finds sessions and clients in its history', async () => {
  const dataDir = temporaryFolder('broker');
  const flags = ['--data-dir', dataDir, '--http', '127.0.0.1:0', '--grpc', await freeAddress()];
  const killed = program('broker/main.ts', [...flags, ...(await databaseFlags(dataDir))]);
  const grpc = String((await killed.line('broker is up')).grpc);
  const where = { dataDir, url: undefined, apiKey: undefined };
  const identity = await withBroker(where, (client) =>
    joinScripted({ grpc, joinToken: async () => (await client.joinTokens.create({})).token }),
  );
  const machine = await linkMachine(grpc, identity);
  const params = { machine_id: identity.machineId, grace_period: 3_600_000 };
  const sameKey = { idempotencyKey: 'one' };
  const [session_id, unanswered] = await withBroker(where, async (client) => {
    const made = client.sessions.create(params);
    keeper(machine, await machine.next('OpenTerminal')).started();
    const { id } = await made;
    await client.sessions.attach({ session_id: id, mode: 'observer' });
    // The broker is killed before it answers, so the request fails.
    client.sessions.create(params, sameKey).catch(() => undefined);
    const open = await machine.next('OpenTerminal');
    killed.kill('SIGKILL');
    await once(killed, 'exit');
    return [id, open.request.id];
  });
  const system = await startFarhand({ dataDir, flags: ['--grpc', grpc] });
  await soon(async () => (await eventsOf(system, session_id)).slice(2)).toEqual([
    'client_attached CONNECTED observer',
    'client_detached CONNECTED observer',
    'grace_period GRACE_PERIOD',
  ]);
  const again = await withBroker(where, (client) => client.sessions.create(params, sameKey));
  expect(again).toMatchObject({ id: unanswered, status: 'GRACE_PERIOD' });
  const back = await linkMachine(grpc, identity);
  for (const id of [session_id, unanswered]) {
    const keep = await back.next('KeepTerminal');
    expect(keep.request.id).toBe(id);
    keeper(back, keep).started();
    await soon(async () => (await system.client.sessions.get({ session_id: id })).status).toBe('CONNECTED');
  }
});
