// Commands survive failures of broker, agent and link. No command runs twice, and each has a record of its
// outcome.
import { once } from 'node:events';
import { existsSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import type { Farhand } from '../../shared/sdk/index.ts';
import { startFarhand, temporaryFolder } from '../start-farhand.ts';
import { startBrokerProgram } from './broker-program.ts';

/** Starts a broker and an agent as separate processes. */
async function programs() {
  const broker = await startBrokerProgram();
  const agentDir = temporaryFolder('agent');
  const agent = await broker.agent(agentDir);
  const agentAgain = () => broker.agent(agentDir);
  return { ...broker, agent, agentAgain, machine_id: await broker.machineId() };
}

/** True if the process with this pid is running. A zombie counts as ended. */
function alive(pid: string): boolean {
  const stat = `/proc/${pid}/stat`;
  return existsSync(stat) && !readFileSync(stat, 'utf8').includes(') Z ');
}

const numbers = (count: number): string => Array.from({ length: count }, (_, n) => `${n + 1}\n`).join('');

async function textOf(client: Farhand, command_id: string): Promise<string> {
  return (await client.commands.output({ command_id })).text();
}

test('kill -9 of the broker while 20 commands run: all end, and each ran once', async () => {
  const { client, machine_id, kill, start, agent } = await programs();
  const folder = temporaryFolder('counters');
  const go = join(folder, 'go');
  const ids = await Promise.all(
    Array.from({ length: 20 }, async (_, n) => {
      const command = `echo ran >> ${folder}/ran-${n}; seq 1 3000; while [ ! -e ${go} ]; do sleep 0.05; done; seq 3001 6000`;
      return (await client.commands.async({ machine_id, command })).id;
    }),
  );
  await expect.poll(() => readdirSync(folder).length).toBe(20);
  await kill();
  writeFileSync(go, '');
  await start();
  await agent.line('linked');
  for (const command_id of ids) {
    await expect.poll(async () => (await client.commands.get({ command_id })).status).toBe('completed');
    expect(await textOf(client, command_id)).toBe(numbers(6000));
  }
  const counters = ids.map((_, n) => readFileSync(join(folder, `ran-${n}`), 'utf8'));
  expect(counters).toEqual(ids.map(() => 'ran\n'));
  const { items } = await client.events.list({ limit: 100 });
  const ends = items
    .filter(({ type }) => type === 'command.completed')
    .map(({ data }) => String(data.command_id));
  expect(ends.toSorted()).toEqual(ids.toSorted());
});

test('kill -9 of the agent: its command is lost with a reason, its output is available, and its process tree is killed', async () => {
  const { client, machine_id, agent, agentAgain } = await programs();
  const pids = join(temporaryFolder('tree'), 'pids');
  const command = `echo $$ >> ${pids}; (setsid sh -c 'echo $$ >> ${pids}; exec sleep 600' &); trap '' TERM; echo said; while :; do sleep 1; done`;
  const { id: command_id } = await client.commands.async({ machine_id, command });
  await expect.poll(async () => (await client.commands.get({ command_id })).stdout).toBe('said\n');
  await expect.poll(() => readFileSync(pids, 'utf8').trim().split('\n')).toHaveLength(2);
  agent.kill('SIGKILL');
  await once(agent, 'exit');
  await agentAgain();
  await expect
    .poll(async () => client.commands.get({ command_id }))
    .toMatchObject({ status: 'lost', reason: 'agent_restarted', exit_code: null, stdout: 'said\n' });
  expect(readFileSync(pids, 'utf8').trim().split('\n').filter(alive)).toEqual([]);
});

test('a cancel at the time of the exit ends a command once, with one event', async () => {
  const system = await startFarhand();
  const { machineId: machine_id } = await system.agent();
  const rounds = 100;
  const ended = new Map<string, string>();
  const lane = async (): Promise<void> => {
    while (ended.size < rounds) {
      const { id: command_id } = await system.client.commands.async({ machine_id, command: 'true' });
      ended.set(command_id, '');
      const [cancelled, got] = await Promise.all([
        system.client.commands.cancel({ command_id }),
        system.client.commands.get({ command_id }),
      ]);
      expect(['queued', 'running', cancelled.status]).toContain(got.status);
      ended.set(command_id, cancelled.status);
    }
  };
  await Promise.all([lane(), lane(), lane(), lane()]);
  for (const [command_id, status] of ended) {
    expect(['completed', 'cancelled']).toContain(status);
    expect((await system.client.commands.get({ command_id })).status).toBe(status);
  }
  const events = new Map<string, string[]>();
  for (let offset = 0; ; offset += 100) {
    const page = await system.client.events.list({ limit: 100, offset });
    for (const { type, data } of page.items) {
      if (!/command\.(completed|failed|timeout)/.test(type)) continue;
      events.set(String(data.command_id), [
        ...(events.get(String(data.command_id)) ?? []),
        String(data.status),
      ]);
    }
    if (!page.has_more) break;
  }
  expect(Object.fromEntries(events)).toEqual(
    Object.fromEntries([...ended].map(([id, status]) => [id, [status]])),
  );
});

test('a cancel also ends a command whose large start is still being sent', async () => {
  const system = await startFarhand();
  const { machineId: machine_id } = await system.agent();
  const stdin = 'x'.repeat(900_000);
  for (let n = 0; n < 5; n += 1) {
    const { id: command_id } = await system.client.commands.async({
      machine_id,
      command: 'sleep 600',
      stdin,
    });
    expect((await system.client.commands.cancel({ command_id })).status).toBe('cancelled');
  }
});

test('the output of a runaway command is limited, its record says so, and other commands are not slowed down', async () => {
  const system = await startFarhand();
  const { machineId: machine_id } = await system.agent();
  const { id: command_id } = await system.client.commands.async({ machine_id, command: 'yes' });
  const window = 64 * 1024 * 1024;
  await expect
    .poll(async () => (await system.client.commands.get({ command_id })).stdout_start)
    .toBeGreaterThan(window);
  for (let n = 0; n < 20; n += 1) {
    expect((await system.client.commands.create({ machine_id, command: 'true' })).status).toBe('completed');
  }
  const ended = await system.client.commands.cancel({ command_id });
  expect(ended).toMatchObject({ status: 'cancelled', stdout_truncated: true });
  expect(ended.stdout_bytes - ended.stdout_start).toBeLessThan(window * 1.1);
  expect(ended.stdout).toHaveLength(1024 * 1024);
  const gone = await system.call('GET', `/commands/${command_id}/output?offset=0`);
  expect([gone.status, gone.body.error.code]).toEqual([416, 'range_not_satisfiable']);
});

test('kill -9 of the broker while 300 commands wait: all end, and each ran once', async () => {
  const { client, machine_id, kill, start, agent } = await programs();
  const folder = temporaryFolder('counters');
  const go = join(folder, 'go');
  const running = Array.from({ length: 64 }, async () => {
    const command = `while [ ! -e ${go} ]; do sleep 0.1; done`;
    return (await client.commands.async({ machine_id, command })).id;
  });
  await Promise.all(running);
  const ids = await Promise.all(
    Array.from({ length: 300 }, async (_, n) => {
      const command = `echo ran >> ${folder}/ran-${n}; sleep 0.05`;
      return (await client.commands.async({ machine_id, command })).id;
    }),
  );
  writeFileSync(go, '');
  // By now some commands have ended, some run, some are being sent, and most of them wait.
  await expect.poll(() => readdirSync(folder).length, { interval: 5 }).toBeGreaterThan(40);
  await kill();
  expect(readdirSync(folder).length).toBeLessThan(300);
  await start();
  await agent.line('linked');
  for (const command_id of ids) {
    await expect.poll(async () => (await client.commands.get({ command_id })).status).toBe('completed');
  }
  const counters = ids.map((_, n) => readFileSync(join(folder, `ran-${n}`), 'utf8'));
  expect(counters).toEqual(ids.map(() => 'ran\n'));
}, 90_000);
