// Agents with the addresses of several brokers, and agents whose broker sends them new addresses.
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, onTestFinished, test } from 'vitest';
import { BrokerAddresses } from '../agent/link/broker-addresses.ts';
import { agentSettings } from '../agent/settings-schema.ts';
import { readSettings } from '../shared/read-settings.ts';
import { freeAddress } from './find-free-ports.ts';
import { quiet, startFarhand, temporaryFolder } from './start-farhand.ts';
import { startProxy } from './tcp-proxy.ts';

const settingsOf = (argv: string[], env = {}) => readSettings(agentSettings, { argv, env }).broker;

test('addresses are a list with commas or repeated flags, and a wrong one is refused', () => {
  expect(settingsOf(['--broker', 'a:1'])).toEqual(['a:1']);
  expect(settingsOf(['--broker', 'a:1, [::1]:2', '--broker', 'c:3'])).toEqual(['a:1', '[::1]:2', 'c:3']);
  expect(settingsOf([], { FARHAND_BROKER: 'a:1,b:2' })).toEqual(['a:1', 'b:2']);
  expect(() => settingsOf(['--broker', 'a:1,b'])).toThrow('must be HOST:PORT');
  expect(() => settingsOf(['--broker', ''])).toThrow('--broker');
});

test('new addresses that never worked are forgotten when the broker sends the earlier ones again', async () => {
  const directory = temporaryFolder('addresses');
  const brokers = await BrokerAddresses.open(directory, ['old:1'], quiet);
  for (const sent of ['old:1', 'wrong:1', 'old:1']) await brokers.linked('old:1', [sent]);
  expect(JSON.parse(readFileSync(join(directory, 'brokers.json'), 'utf8'))).toEqual({
    offered: [],
    proven: ['old:1'],
  });
});

test('an agent joins and links at whichever of its addresses answers, and changes to another one', async () => {
  const { grpc, agent, client } = await startFarhand();
  const [one, two] = [await startProxy(grpc), await startProxy(grpc)];
  onTestFinished(() => Promise.all([one.close(), two.close()]).then(() => {}));
  one.forbid();
  const linked = await agent({ through: `${await freeAddress()},${one.address},${two.address}` });
  for (const [up, down] of [
    [one, two],
    [two, one],
  ] as const) {
    up.allow();
    down.forbid();
    const back = linked.linked(true);
    down.cut();
    await back;
    expect((await client.machines.get({ machine_id: linked.machineId })).status).toBe('online');
  }
}, 60_000);

test('an agent that has lost its link tries its other addresses first', async () => {
  const { grpc, agent } = await startFarhand();
  const proxies = [await startProxy(grpc), await startProxy(grpc)];
  onTestFinished(() => Promise.all(proxies.map((one) => one.close())).then(() => {}));
  const linked = await agent({ through: proxies.map(({ address }) => address).join(',') });
  const links = 8;
  for (let n = 1; n < links; n += 1) {
    const back = linked.linked(true);
    for (const proxy of proxies) proxy.cut();
    await back;
  }
  const used = linked.logged.flatMap((line) => {
    const { msg, broker } = JSON.parse(line) as { msg: string; broker: string };
    return msg === 'linked' ? [broker] : [];
  });
  expect(used).toHaveLength(links);
  expect(used.filter((one, n) => one === used[n - 1])).toEqual([]);
}, 60_000);

test('addresses that a broker sends replace the old ones only after the agent has linked through a new one', async () => {
  const dataDir = temporaryFolder('broker');
  const first = await startFarhand({ dataDir });
  const old = await startProxy(first.grpc);
  onTestFinished(() => old.close());
  const moved = await startProxy(first.grpc);
  onTestFinished(() => moved.close());
  const agent = await first.agent({ through: old.address });
  const file = join(agent.dataDir, 'brokers.json');
  const read = (): unknown => JSON.parse(readFileSync(file, 'utf8'));
  const restart = async (brokers: string): Promise<void> => {
    const back = agent.linked(true);
    await last.broker.close();
    last = await startFarhand({ dataDir, flags: ['--agent-brokers', brokers] });
    old.aim(last.grpc);
    moved.aim(last.grpc);
    await back;
  };
  let last = first;
  // Nothing answers at the new address, so the agent stays at the old one.
  const nowhere = await freeAddress();
  await restart(nowhere);
  await expect.poll(read).toEqual({ offered: [nowhere], proven: [] });
  old.cut();
  await agent.linked(true);
  await restart(moved.address);
  await expect.poll(read).toEqual({ offered: [moved.address], proven: [] });
  const back = agent.linked(true);
  old.cut();
  await back;
  await expect.poll(read).toEqual({ offered: [], proven: [moved.address] });
  // The old address now refuses connections, so the agent must use the new one.
  old.forbid();
  const again = agent.linked(true);
  moved.cut();
  await again;
  expect((await last.client.machines.get({ machine_id: agent.machineId })).status).toBe('online');
}, 60_000);
