// Reconnecting after a cut, a stall, and kill -9 of either side.
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { expect, onTestFinished, test } from 'vitest';
import type { Farhand } from '../../shared/sdk/index.ts';
import { startFarhand, temporaryFolder } from '../start-farhand.ts';
import { program } from '../start-processes.ts';
import { startProxy } from '../tcp-proxy.ts';
import { startBrokerProgram } from './broker-program.ts';

type Presence = 'machine.online' | 'machine.offline';

async function events(client: Farhand, type: Presence, name: string) {
  const { items } = await client.events.list({ type });
  return items.filter(({ data }) => data.machine_name === name);
}

/** Waits until the event log has one event of this type about the machine with this name. */
async function eventually(client: Farhand, type: Presence, name: string) {
  return expect.poll(() => events(client, type, name)).toHaveLength(1);
}

test('after kill -9 of an agent its machine is offline at once, an event is recorded, and it returns with the same id', async () => {
  const system = await startFarhand();
  const other = await system.agent({ name: 'other' });
  const dataDir = temporaryFolder('agent');
  const args = ['--broker', system.grpc, '--data-dir', dataDir, '--name', 'victim'];
  const first = program('agent/main.ts', [...args, '--join-token', await system.joinToken()]);
  await first.line('linked');
  const { items } = await system.client.machines.list({ search: 'victim' });
  const machine_id = items[0]?.id ?? '';
  await eventually(system.client, 'machine.online', 'victim');

  first.kill('SIGKILL');
  await once(first, 'exit');
  await expect
    .poll(async () => (await system.client.machines.get({ machine_id })).status, {
      // The broker notices the closed connection at once. It would notice the machine's silence only after 45 s.
      timeout: 10_000,
      interval: 5,
    })
    .toBe('offline');
  await eventually(system.client, 'machine.offline', 'victim');
  expect((await events(system.client, 'machine.offline', 'victim'))[0]?.data).toMatchObject({
    machine_id,
    machine_name: 'victim',
    last_seen: expect.any(String),
  });
  expect((await system.client.machines.get({ machine_id: other.machineId })).status).toBe('online');

  const second = program('agent/main.ts', args);
  await second.line('linked');
  expect((await system.client.machines.get({ machine_id })).status).toBe('online');
  expect((await system.client.machines.list()).total).toBe(2);
});

// Node loses the error of some writes to a broken connection, and then never reports the end of this connection. On a
// busy machine, about every second kill has this effect. So the test starts four processes that keep the CPUs busy.
test('after kill -9 of an agent during a burst of commands its machine is soon offline, also on a busy machine', async () => {
  const system = await startFarhand();
  const { client } = system;
  const dataDir = temporaryFolder('agent');
  const args = ['--broker', system.grpc, '--data-dir', dataDir, '--name', 'victim'];
  const busy = Array.from({ length: 4 }, () => spawn(process.execPath, ['-e', 'for (;;) {}']));
  onTestFinished(() => {
    for (const one of busy) one.kill('SIGKILL');
  });
  for (let round = 0; round < 4; round += 1) {
    const token = round === 0 ? ['--join-token', await system.joinToken()] : [];
    const agent = program('agent/main.ts', [...args, ...token]);
    await agent.line('linked');
    const [machine] = (await client.machines.list()).items;
    const machine_id = machine?.id ?? '';
    const status = async () => (await client.machines.get({ machine_id })).status;
    await expect.poll(status).toBe('online');
    await client.sessions.create({ machine_id, shell: '/bin/sh' });
    let accepted = 0;
    const commands = Array.from({ length: 40 }, (_, n) =>
      client.commands.async({ machine_id, command: `sleep 0.${n % 10}` }).then(
        () => {
          accepted += 1;
          if (accepted === 10 + round) agent.kill('SIGKILL');
        },
        () => undefined,
      ),
    );
    await Promise.all(commands);
    await expect.poll(status, { timeout: 15_000 }).toBe('offline');
  }
}, 120_000);

test('an agent logs one line for each failed attempt to link', async () => {
  const system = await startFarhand();
  const agent = await system.agent();
  const before = agent.logged.length;
  await system.broker.close();
  const next = 'not linked to the broker; trying again';
  const lines = () =>
    agent.logged
      .slice(before)
      .map((line): { level: number; msg: string } => JSON.parse(line))
      .filter(({ level }) => level >= 30);
  await expect
    .poll(() => lines().filter(({ msg, level }) => msg === next && level === 40).length)
    .toBeGreaterThan(1);
  expect(lines().filter(({ msg }) => msg !== next)).toEqual([]);
  expect(lines().at(-1)).toMatchObject({
    broker: system.grpc,
    reason: expect.any(String),
    retry_ms: expect.any(Number),
  });
});

test('kill -9 of the broker: agents link again by themselves, and their machines are unchanged', async () => {
  const broker = await startBrokerProgram();
  const agents = await Promise.all([0, 1].map((n) => broker.agent(undefined, ['--name', `m${n}`])));
  const list = () => broker.client.machines.list({ sort: 'name' });
  const before = await list();
  expect(before.items.map(({ name, status }) => [name, status])).toEqual([
    ['m0', 'online'],
    ['m1', 'online'],
  ]);

  await broker.kill();
  await broker.start();
  for (const agent of agents) await agent.line('linked');
  const after = await list();
  expect(after.items.map(({ last_seen: _, ...item }) => item)).toEqual(
    before.items.map(({ last_seen: _, ...item }) => item),
  );
});

test('a cut connection is restored, and a quick return causes no event', async () => {
  const system = await startFarhand();
  const proxy = await startProxy(system.grpc);
  onTestFinished(() => proxy.close());
  const agent = await system.agent({ through: proxy.address, name: 'cut' });
  await eventually(system.client, 'machine.online', 'cut');
  const back = agent.linked(true);
  proxy.cut();
  await agent.linked(false);
  await back;
  expect((await system.client.machines.get({ machine_id: agent.machineId })).status).toBe('online');
  expect(await events(system.client, 'machine.offline', 'cut')).toHaveLength(0);
});

test('both sides notice a stalled connection by its silence, and the machine reconnects when data flows again', async () => {
  const system = await startFarhand({ tuning: { link: { heartbeatMs: 100, silenceMs: 1_000 } } });
  const proxy = await startProxy(system.grpc);
  onTestFinished(() => proxy.close());
  const agent = await system.agent({ through: proxy.address });
  const lost = agent.linked(false);
  proxy.stall();
  await lost;
  const back = agent.linked(true);
  proxy.cut();
  proxy.resume();
  await back;
  expect((await system.client.machines.get({ machine_id: agent.machineId })).status).toBe('online');
});

test('SIGTERM ends both programs with 0, and the broker asks its agents to reconnect', async () => {
  const broker = await startBrokerProgram();
  const agent = await broker.agent();
  expect(await broker.kill('SIGTERM')).toBe(0);
  const { retry_ms } = await agent.line('not linked to the broker; trying again');
  expect(retry_ms).toBeLessThanOrEqual(5_000);
  agent.kill('SIGTERM');
  expect((await once(agent, 'exit'))[0]).toBe(0);
});
