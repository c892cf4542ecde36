// The capabilities that a machine's owner allows. A scripted broker sends every call, and the agent permits only the
// allowed ones.
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, test } from 'vitest';
import { allCapabilities, type Capability, requiredCapabilities } from '../../agent/capabilities-by-rpc.ts';
import { type Method, methods } from '../../shared/agent-rpcs.ts';
import { type Ask, ask, everything, type Ids } from '../all-routes.ts';
import { type ScriptedBroker, scriptedBroker } from '../scripted-broker.ts';
import { startFarhand, temporaryFolder } from '../start-farhand.ts';

const all = [...methods.values()].map(({ name }): [Method, readonly Capability[]] => [
  name,
  requiredCapabilities[name],
]);
const nothing = '/nonexistent/anywhere';

/** A request that changes nothing. */
const harmless = {
  path: Buffer.from(nothing),
  source: Buffer.from(nothing),
  destination: Buffer.from(`${nothing}/b`),
  id: 'cmd_unknown',
  ids: ['cmd_unknown'],
  signal: 'SIGTERM',
};

/**
 * Calls each method. Returns the methods that the agent refuses, each with the missing capability that the error names.
 */
async function refusedBy(broker: ScriptedBroker, asked = all): Promise<[Method, unknown][]> {
  const outcomes = await Promise.all(
    asked.map(async ([method]) => [method, await broker.call(method, harmless)] as const),
  );
  return outcomes
    .filter(([, { details }]) => details.capability)
    .map(([method, { details }]) => [method, details.capability]);
}

describe('every rpc', () => {
  test.each(allCapabilities.map((one) => [one]))('with nothing but %s', async (one) => {
    const broker = await scriptedBroker();
    const { hello } = await broker.agent(['--allow', one]);
    expect(hello.capabilities).toEqual([one]);
    expect(hello.metrics !== null).toBe(one === 'metrics');
    const locked = all.filter(([, any]) => !any.includes(one)).map(([method, [first]]) => [method, first]);
    expect(await refusedBy(broker)).toEqual(locked);
  });

  test.each(allCapabilities.map((one) => [one]))('with everything but %s', async (one) => {
    const broker = await scriptedBroker();
    await broker.agent(['--allow', allCapabilities.filter((other) => other !== one).join(',')]);
    const locked = all
      .filter(([, any]) => any.every((each) => each === one))
      .map(([method]) => [method, one]);
    // An allowed GetInventory runs apt for seconds. So the test calls it only where the agent refuses it.
    const asked = all.filter(([method]) => one === 'inventory' || method !== 'GetInventory');
    expect(await refusedBy(broker, asked)).toEqual(locked);
  });

  test('each capability except user is required by at least one rpc', () => {
    const locking = new Set(all.flatMap(([, any]) => any));
    expect([...locking, 'user'].sort()).toEqual([...allCapabilities].sort());
  });
});

test('a large request and a streamed request are refused without being read, and the owner’s log has both', async () => {
  const broker = await scriptedBroker();
  const { agent, dataDir } = await broker.agent(['--allow', 'metrics']);
  const refused = { code: 'permission_denied', details: { capability: 'exec' } };
  expect(await broker.call('StartProcess', {}, { request_follows: true })).toEqual(refused);
  expect(await broker.call('AttachTerminal', {})).toMatchObject({ details: { capability: 'terminal' } });
  const caller = { key_id: 'key_x', key_name: 'n'.repeat(10_000) };
  expect(await broker.call('ReadFile', harmless, { caller })).toMatchObject({
    details: { capability: 'files:read' },
  });
  await agent.close();
  const lines = readFileSync(join(dataDir, 'activity.log'), 'utf8')
    .trim()
    .split('\n')
    .map((line) => JSON.parse(line));
  expect(lines.map(({ event, method, result }) => [event, method, result])).toEqual([
    ['end', 'StartProcess', 'permission_denied'],
    ['end', 'AttachTerminal', 'permission_denied'],
    ['end', 'ReadFile', 'permission_denied'],
  ]);
  expect(lines[2]).toMatchObject({ path: nothing, key_id: 'key_x', key_name: `${'n'.repeat(200)}…` });
});

test('a broker that asks for another user than the owner allows starts nothing', async () => {
  const broker = await scriptedBroker();
  const { agent, dataDir } = await broker.agent(['--allow', 'exec']);
  const marker = join(temporaryFolder('user'), 'ran');
  const spec = { command: `touch ${marker}`, user: 'nobody' };
  await broker.call('StartProcess', { id: 'cmd_1', spec });
  await agent.close();
  const log = readFileSync(join(dataDir, 'activity.log'), 'utf8');
  expect(log).toContain('"user":"nobody"');
  expect(log).toContain('"outcome":"not_started"');
});

describe('over REST', () => {
  test('each route of files, commands and terminals answers 403 and names the capability that is missing', async () => {
    const system = await startFarhand();
    const { machineId: machine_id } = await system.agent({ flags: ['--allow', 'metrics'] });
    const refusal = (capability: string) => ({
      status: 403,
      body: { error: { code: 'permission_denied', details: { capability } } },
    });
    // The cast is safe: routes of files have no other ids than those of machines.
    const there = { machine: machine_id } as Ids;
    const scene = { system, there, known: { path: nothing }, requestIds: [] };
    const files = everything.filter(({ route }) => route.path.startsWith('/machines/{machine_id}/files'));
    expect(files.length).toBeGreaterThanOrEqual(16);
    // Requests that need one of several fields.
    const more: Record<string, Ask> = {
      'files.change': { body: { path: nothing, mode: '0600' } },
      'files.search': { query: { name: 'x' } },
    };
    for (const { name, route } of files) {
      const answer = await ask(scene, route, more[name]);
      expect([name, answer]).toMatchObject([name, refusal(String(route.access))]);
    }
    const archive = `/machines/${machine_id}/files/download?path=/etc&archive=tar`;
    expect(await system.call('GET', archive)).toMatchObject(refusal('files:read'));
    const command = { machine_id, command: 'true' };
    expect(await system.call('POST', '/commands', { body: command })).toMatchObject(refusal('exec'));
    expect(await system.call('POST', '/sessions', { body: { machine_id } })).toMatchObject(
      refusal('terminal'),
    );
    expect((await system.call('GET', `/machines/${machine_id}/status`)).status).toBe(200);
  });

  test('a machine that loses the metrics capability reports no facts any more', async () => {
    const system = await startFarhand();
    const first = await system.agent();
    await first.close();
    const { machineId } = await system.agent({ dataDir: first.dataDir, flags: ['--allow', 'exec'] });
    expect(await system.call('GET', `/machines/${machineId}/status`)).toMatchObject({
      status: 403,
      body: { error: { code: 'permission_denied', details: { capability: 'metrics' } } },
    });
  });

  test('a command as another user needs the user capability, and changed capabilities are reported after a restart', async () => {
    const system = await startFarhand();
    const first = await system.agent({ flags: ['--allow', 'metrics,exec'] });
    const { machineId: machine_id, dataDir } = first;
    const body = { machine_id, command: 'true', user: 'root' };
    const refused = await system.call('POST', '/commands', { body });
    expect(refused).toMatchObject({ status: 403, body: { error: { details: { capability: 'user' } } } });
    const capabilities = async () =>
      (await system.call('GET', `/machines/${machine_id}`)).body.data.capabilities;
    expect(await capabilities()).toEqual(['metrics', 'exec']);
    await first.close();
    await system.agent({ dataDir, flags: ['--allow', 'files:read'] });
    expect(await capabilities()).toEqual(['files:read']);
  });

  test('a copy between machines needs files:read on one and files:write on the other', async () => {
    const system = await startFarhand();
    const folder = temporaryFolder('between');
    const reads = await system.agent({ name: 'reads', flags: ['--allow', 'files:read'] });
    const writes = await system.agent({ name: 'writes', flags: ['--allow', 'files:write'] });
    const copy = (from: string, to: string) =>
      system.call('POST', `/machines/${from}/files/copy`, {
        body: { source: '/etc/os-release', destination: join(folder, 'copy'), destination_machine_id: to },
      });
    expect((await copy(reads.machineId, writes.machineId)).status).toBeLessThan(300);
    expect(readFileSync(join(folder, 'copy'), 'utf8')).toBe(readFileSync('/etc/os-release', 'utf8'));
    expect(await copy(writes.machineId, reads.machineId)).toMatchObject({ status: 403 });
    const both = await system.agent({ name: 'both', flags: ['--allow', 'files:read,files:write'] });
    const onto = await copy(both.machineId, reads.machineId);
    expect(onto).toMatchObject({ status: 403, body: { error: { details: { capability: 'files:write' } } } });
    const from = await copy(writes.machineId, both.machineId);
    expect(from).toMatchObject({ status: 403, body: { error: { details: { capability: 'files:read' } } } });
  });
});
