// File calls that wait because their machine is busy: in order, for at most 10 s, and only while their client is
// connected.
import { mkdirSync, readdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import type { Call__Output } from '../proto/types/farhand/link/v1/Call.ts';
import { leapingClock } from './commands-fixture.ts';
import { type ScriptedAgent, scriptedMachine } from './scripted-agent.ts';
import { call as http, startFarhand, startWithAgent, temporaryFolder } from './start-farhand.ts';

const mostQueued = 256;

/** A scripted machine that accepts `openCalls` reads at once, and a function that requests a file from it. */
async function readableMachine(openCalls: number) {
  const system = await startFarhand({ tuning: { link: { openCalls } } });
  const agent = await scriptedMachine(system);
  const base = `/machines/${agent.identity.machineId}/files`;
  const read = (name: string | number, signal?: AbortSignal) =>
    http(`${system.url}/api/v1${base}/content?path=/${name}`, 'GET', {
      key: system.key,
      ...(signal && { signal }),
    });
  /** Resolves when all earlier requests have reached the machine's queue. */
  const arrived = async (): Promise<void> => {
    for (let n = 0; n < 3; n += 1) await system.client.machines.get({ machine_id: agent.identity.machineId });
  };
  return { system, agent, base, read, arrived };
}

const pathOf = (agent: ScriptedAgent, call: Call__Output): string =>
  String((agent.decode(call) as { path: Buffer }).path);

/** Answers a read with the requested path as the content. */
function answer(agent: ScriptedAgent, call: Call__Output): void {
  const path = Buffer.from(pathOf(agent, call));
  const entry = { name: path, path, size: path.length };
  const head = { head: { entry, etag: '"1"', length: path.length } };
  const messages = [agent.encode('ReadFile', head), agent.encode('ReadFile', { chunk: path })];
  agent.send({ reply: { call_id: call.call_id, messages: { messages } } });
}

/** Begins the answer to a read, and never ends it. */
function stall(agent: ScriptedAgent, call: Call__Output): void {
  const entry = { name: Buffer.from('a'), path: Buffer.from('/a'), size: 1 };
  agent
    .answer(call.call_id)
    .write({ message: agent.encode('ReadFile', { head: { entry, etag: '"1"', length: 1 } }) });
}

test.each([
  ['HEAD of a download', 'HEAD', (folder: string) => `/download?path=${folder}/big`, {}],
  ['HEAD of an archive', 'HEAD', (folder: string) => `/download?path=${folder}&archive=tar`, {}],
  ['HEAD of a list', 'HEAD', (folder: string) => `?path=${folder}`, {}],
  ['HEAD of a search', 'HEAD', (folder: string) => `/search?path=${folder}&name=*`, {}],
  [
    'a refused range',
    'GET',
    () => '/download?path=/sys/kernel/mm/transparent_hugepage/enabled',
    { range: 'bytes=0-1' },
  ],
] as const)(
  'a client that reads no content of an answer does not keep the machine busy: %s',
  async (_, method, of, headers) => {
    const system = await startFarhand({ tuning: { link: { openCalls: 1 } } });
    const { machineId } = await system.agent();
    const folder = temporaryFolder('half-read');
    writeFileSync(join(folder, 'big'), Buffer.alloc(3_000_000));
    const base = `${system.url}/api/v1/machines/${machineId}/files`;
    const authorization = `Bearer ${system.key}`;
    // One call of each concurrency class at a time: a second call waits until the first one has ended.
    for (let n = 0; n < 3; n += 1) {
      const response = await fetch(`${base}${of(folder)}`, {
        method,
        headers: { authorization, ...headers },
      });
      await response.text();
      const read = await fetch(`${base}/content?path=${folder}/big&length=1`, { headers: { authorization } });
      expect([response.status === 503, read.status]).toEqual([false, 200]);
    }
  },
);

test('a read that has waited 10 s is refused as unavailable, and is never sent', async () => {
  const clock = leapingClock();
  const { agent, read, arrived } = await readableMachine(1);
  const open = new AbortController();
  const first = read('first', open.signal).catch(() => undefined);
  stall(agent, await agent.next('call'));
  const second = read('second');
  await arrived();
  clock.leap(10_001);
  const refused = await second;
  expect([refused.status, refused.body.error.code]).toEqual([503, 'unavailable']);
  expect(refused.headers.get('retry-after')).toBe('5');
  const third = read('third');
  await arrived();
  open.abort();
  await first;
  const call = await agent.next('call');
  expect(pathOf(agent, call)).toBe('/third');
  answer(agent, call);
  expect((await third).status).toBe(200);
});

test('256 reads wait for one machine in order, one more is unavailable at once, and other machines are not delayed', async () => {
  const { system, agent, read, arrived } = await readableMachine(1);
  const first = read(0);
  const call = await agent.next('call');
  const waiting: ReturnType<typeof read>[] = [];
  for (let n = 1; n <= mostQueued; n += 1) {
    waiting.push(read(n));
    if (n % 16 === 0) await arrived();
  }
  const refused = await read('beyond');
  expect([refused.status, refused.body.error.code]).toEqual([503, 'unavailable']);
  const other = await system.agent();
  expect((await system.client.files.list({ machine_id: other.machineId, path: '/etc' })).path).toBe('/etc');
  answer(agent, call);
  const order: string[] = [];
  for (let n = 1; n <= mostQueued; n += 1) {
    const next = await agent.next('call');
    order.push(pathOf(agent, next));
    answer(agent, next);
  }
  for (const { status, body } of await Promise.all([first, ...waiting]))
    expect([status, body.data.content]).toEqual([200, body.data.path]);
  expect(order.toSorted()).toEqual(Array.from(waiting, (_, n) => `/${n + 1}`).toSorted());
  expect(order.slice(0, 16).toSorted()).toEqual(Array.from({ length: 16 }, (_, n) => `/${n + 1}`).toSorted());
});

test('a client that disconnects leaves the queue, and its read is never sent', async () => {
  const { agent, read, arrived } = await readableMachine(1);
  const first = read('first');
  const call = await agent.next('call');
  const gone = new AbortController();
  const left = read('left', gone.signal);
  await arrived();
  const last = read('last');
  await arrived();
  gone.abort();
  await expect(left).rejects.toThrow();
  await arrived();
  answer(agent, call);
  await first;
  const next = await agent.next('call');
  expect(pathOf(agent, next)).toBe('/last');
  answer(agent, next);
  expect((await last).status).toBe(200);
});

test('reads that wait are refused as machine_offline at once when the link is lost', async () => {
  const { agent, read, arrived } = await readableMachine(1);
  const first = read('first');
  await agent.next('call');
  const second = read('second');
  await arrived();
  agent.control.cancel();
  for (const { status, body } of await Promise.all([first, second]))
    expect([status, body.error.code]).toEqual([503, 'machine_offline']);
});

test('calls about single entries have their own concurrency class, and a kill waits for none of these calls', async () => {
  const { system, agent, base } = await readableMachine(32);
  const { id: command_id } = await system.client.commands.async({
    machine_id: agent.identity.machineId,
    command: 'true',
  });
  await agent.next('call');
  const stats = Array.from({ length: 70 }, () => system.call('GET', `${base}/stat?path=/a`));
  const calls: Call__Output[] = [];
  while (calls.length < 64) calls.push(await agent.next('call'));
  const cancelled = system.client.commands.cancel({ command_id });
  const kill = await agent.next('call');
  expect(kill.method).toBe('KillProcess');
  const error = { code: 'file_not_found', message: 'no', details: '{}' };
  for (let n = 0; n < 70; n += 1) {
    const call = calls[n] ?? (await agent.next('call'));
    agent.send({ reply: { call_id: call.call_id, error } });
  }
  for (const { status } of await Promise.all(stats)) expect(status).toBe(404);
  agent.control.cancel();
  await system.broker.close();
  await cancelled.catch(() => undefined);
});

test('200 reads, 200 moves and 100 uploads at once of a real machine all succeed', async () => {
  const { system, machine_id } = await startWithAgent();
  const folder = temporaryFolder('files');
  mkdirSync(join(folder, 'moved'));
  const names = Array.from({ length: 200 }, (_, n) => `file-${n}`);
  for (const name of names) writeFileSync(join(folder, name), name);
  const { files } = system.client;
  const contents = names.map((name) => files.read({ machine_id, path: join(folder, name) }));
  expect((await Promise.all(contents)).map(({ content }) => content)).toEqual(names);
  await Promise.all([
    ...names.map((name) =>
      files.move({ machine_id, source: join(folder, name), destination: join(folder, 'moved', name) }),
    ),
    ...names
      .slice(100)
      .map((name) => files.write({ machine_id, path: join(folder, name), content: `new ${name}` })),
  ]);
  expect(readdirSync(join(folder, 'moved'))).toHaveLength(200);
});

test('revoking a key with many open and waiting reads frees all their slots', async () => {
  const { system, agent, base, read, arrived } = await readableMachine(4);
  const { key } = await system.keyed(['files:read']);
  const reads = Array.from({ length: 12 }, (_, n) =>
    http(`${system.url}/api/v1${base}/content?path=/${n}`, 'GET', { key }),
  );
  for (let n = 0; n < 4; n += 1) stall(agent, await agent.next('call'));
  await arrived();
  const { items } = await system.client.keys.list();
  const key_id = items.find(({ name }) => name === 'limited')?.id ?? '';
  await system.client.keys.remove({ key_id });
  expect((await Promise.all(reads)).map(({ status }) => status)).toEqual(Array(12).fill(401));
  const next = read('next');
  const answered = (async () => {
    // Some of the calls that waited may have been sent before they were cancelled.
    let call = await agent.next('call');
    while (pathOf(agent, call) !== '/next') call = await agent.next('call');
    answer(agent, call);
  })();
  expect((await next).status).toBe(200);
  await answered;
});
