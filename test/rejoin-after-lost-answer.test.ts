// An agent that joins and does not get the broker's answer. It joins later, as the same machine or with another token.
import { expect, test } from 'vitest';
import { loadIdentity, markRemoved } from '../agent/join-or-load-identity.ts';
import { startFarhand, temporaryFolder } from './start-farhand.ts';
import { startProxy } from './tcp-proxy.ts';

/** Starts a broker, and a function that joins from one data directory by another address or with another token. */
async function started() {
  const system = await startFarhand();
  const directory = temporaryFolder('agent');
  const params = { broker: system.grpc, joinTokenFile: undefined, name: 'm', tags: [] };
  const join = (joinToken: string, broker = system.grpc) =>
    loadIdentity(directory, { ...params, broker, joinToken });
  /** Joins, and cuts the connection after the broker has stored the machine. */
  async function joinWithoutAnswer(joinToken: string): Promise<void> {
    const proxy = await startProxy(system.grpc, { delayMs: 300 });
    const joining = join(joinToken, proxy.address);
    const failed = expect(joining).rejects.toMatchObject({ code: 'unavailable' });
    await expect.poll(async () => (await system.client.machines.list()).total, { interval: 5 }).toBe(1);
    proxy.cut();
    await failed;
  }
  return { system, directory, join, joinWithoutAnswer };
}

test('a new machine joins as the same machine with the same token', async () => {
  const { system, join, joinWithoutAnswer } = await started();
  const token = await system.joinToken();
  await joinWithoutAnswer(token);
  await join(token);
  expect((await system.client.machines.list()).total).toBe(1);
});

test('a machine that was removed before joins as one new machine with the same token', async () => {
  const { system, directory, join, joinWithoutAnswer } = await started();
  const { machineId } = await join(await system.joinToken());
  await system.client.machines.remove({ machine_id: machineId });
  await markRemoved(directory);
  const token = await system.joinToken();
  await joinWithoutAnswer(token);
  const again = await join(token);
  expect((await system.client.machines.list()).items.map(({ id }) => id)).toEqual([again.machineId]);
});

test('a new machine joins with another token', async () => {
  const { system, join, joinWithoutAnswer } = await started();
  await joinWithoutAnswer(await system.joinToken());
  const { machineId } = await join(await system.joinToken());
  expect((await system.client.machines.list()).items.map(({ id }) => id)).toContain(machineId);
});
