// Machines for Prometheus: the list of targets to scrape, and the last report of each machine as text.
import { expect, test } from 'vitest';
import { soon } from './commands-fixture.ts';
import { joinScripted } from './scripted-agent.ts';
import { startFarhand, startWithAgent, type TestSystem } from './start-farhand.ts';

async function read(system: TestSystem, path: string, key = system.key): Promise<[number, string, string]> {
  const answer = await fetch(`${system.url}${path}`, { headers: { Authorization: `Bearer ${key}` } });
  return [answer.status, answer.headers.get('content-type') ?? '', await answer.text()];
}

test('a request without a key is refused, and so is a machine beyond the key’s limit', async () => {
  const system = await startFarhand();
  const [mine, other] = [await joinScripted(system), await joinScripted(system)];
  expect((await fetch(`${system.url}/metrics/targets`)).status).toBe(401);
  const limited = await system.keyed(['machines:read'], { machine_ids: [mine.machineId] });
  expect((await read(system, `/metrics/machines/${other.machineId}`, limited.key))[0]).toBe(403);
  expect((await read(system, '/metrics/machines/mach_none'))[0]).toBe(404);
  expect((await read(system, '/metrics/targets?port=0'))[0]).toBe(400);
  const [status, , text] = await read(system, '/metrics/targets', limited.key);
  const ids = JSON.parse(text).map((group: { labels: object }) => Reflect.get(group.labels, 'machine_id'));
  expect([status, ids]).toEqual([200, [mine.machineId]]);
});

test('each target is the path of a machine at the broker, whose answer is its last report', async () => {
  const { system, machine_id } = await startWithAgent({ name: 'web-1', tags: 'web,eu' });
  await soon(
    async () => (await system.client.machines.status({ machine_id })).memory?.total ?? 0,
  ).toBeGreaterThan(0);
  const [, type, text] = await read(system, '/metrics/targets?tags=web');
  expect(type).toContain('application/json');
  const { host, protocol } = new URL(system.url);
  const path = `/metrics/machines/${machine_id}`;
  expect(JSON.parse(text)).toEqual([
    {
      targets: [host],
      labels: {
        ...{ __scheme__: protocol.slice(0, -1), __metrics_path__: path },
        ...{ instance: 'web-1', machine_id, __meta_farhand_tags: ',web,eu,' },
      },
    },
  ]);
  expect(JSON.parse((await read(system, '/metrics/targets?tags=web,db'))[2])).toEqual([]);
  // As in the list of machines, an empty list of tags does not limit the targets.
  expect((await read(system, '/metrics/targets?tags='))[2]).toBe(text);
  const [status, kind, report] = await read(system, path);
  expect([status, kind]).toEqual([200, 'text/plain; version=0.0.4; charset=utf-8']);
  for (const line of report.trim().split('\n'))
    expect(line).toMatch(
      /^(# (HELP|TYPE) farhand_machine_\w+ .+|farhand_machine_\w+(\{\w+="[^"]*"\})? [\d.e+-]+)$/,
    );
  expect(report).toMatch(/^farhand_machine_up 1$/m);
  expect(report).toMatch(/^farhand_machine_memory_total_bytes [1-9]\d+$/m);
  expect(report).toMatch(/^farhand_machine_filesystem_used_bytes\{mount="\/"\} \d+$/m);
});

test('with a port the targets are the machines themselves; an offline machine is down', async () => {
  const system = await startFarhand();
  const away = await joinScripted(system);
  const agent = await system.agent({ name: 'web-1' });
  const { hostname } = await system.client.machines.get({ machine_id: agent.machineId });
  const groups = JSON.parse((await read(system, '/metrics/targets?port=9100'))[2]);
  expect(groups.map(({ targets }: { targets: string[] }) => targets[0])).toContain(`${hostname}:9100`);
  const [, , text] = await read(system, `/metrics/machines/${away.machineId}`);
  expect(text.trim().split('\n').at(-1)).toBe('farhand_machine_up 0');
});
