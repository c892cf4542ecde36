// Streams and requests of a key that loses its rights: each is closed within a second, over every transport.
import { mkdirSync, readdirSync, writeFileSync } from 'node:fs';
import { request } from 'node:http';
import { join } from 'node:path';
import { expect, onTestFinished, test } from 'vitest';
import type { Scope } from '../../shared/api/route.ts';
import { Farhand } from '../../shared/sdk/index.ts';
import { leapingClock, soon } from '../commands-fixture.ts';
import { all, line, refusalOf, streamsOf } from '../grpc-fixture.ts';
import { scriptedMachine } from '../scripted-agent.ts';
import { startFarhand, temporaryFolder } from '../start-farhand.ts';

const needed: Scope[] = [
  ...(['machines:read', 'files:read', 'files:write', 'commands:read', 'commands:execute'] as const),
  ...(['sessions:read', 'sessions:attach'] as const),
];
const hour = 3_600_000;

/**
 * Opens streams and requests of every kind with one key. Returns the key, and for each of them a promise that resolves
 * when it is closed.
 */
async function holding() {
  const system = await startFarhand();
  const { machineId: machine_id } = await system.agent({ tags: 'ours' });
  const made = await system.client.keys.create({
    ...{ name: 'holder', scopes: needed, tags: ['ours'] },
    expires_at: new Date(Date.now() + hour).toISOString(),
  });
  const client = new Farhand({ baseUrl: system.url, apiKey: made.key });
  const folder = temporaryFolder('held');
  const { id: command_id } = await client.commands.async({ machine_id, command: 'sleep 300' });
  const grpc = await streamsOf(system, made.key);
  const asked = line<object>({ start: { machine_id, command: 'cat' } });
  const { id: session_id } = await client.sessions.create({ machine_id, shell: 'cat' });
  const terminal = await client.sessions.terminal(await client.sessions.attach({ session_id }));
  const upload = begunUpload(system.url, machine_id, join(folder, 'a'), made.key);
  const open: Record<string, Promise<unknown>> = {
    events: overOf(client.events.stream({})),
    'a command’s events': overOf(client.commands.stream({ command_id })),
    'a command’s output': bytesOver(client.commands.output({ command_id, follow: true })),
    'changes of files': overOf(client.files.watch({ machine_id, path: folder })),
    'a call that waits': client.commands
      .create({ machine_id, command: 'sleep 300', wait: 50_000 })
      .catch(String),
    exec: refusalOf(grpc.exec(asked.requests)),
    'events over gRPC': refusalOf(grpc.events({})),
    'a command over gRPC': refusalOf(grpc.followCommand({ command_id })),
    'a terminal': terminal.ended,
    'an upload': upload,
  };
  await soon(async () => (await system.client.commands.list({ status: 'running' })).total).toBe(3);
  await soon(() => readdirSync(folder).length).toBe(1);
  return { system, machine_id, key_id: made.id, key: made.key, open, folder };
}

async function overOf(stream: Promise<AsyncIterable<unknown>>): Promise<void> {
  try {
    for await (const _ of await stream);
  } catch {
    // The watch of the test was cut, as expected.
  }
}

async function bytesOver(answer: Promise<Response>): Promise<void> {
  await (await answer).text().catch(() => '');
}

function begunUpload(url: string, machine_id: string, path: string, key: string): Promise<unknown> {
  const to = `${url}/api/v1/machines/${machine_id}/files/raw?path=${path}`;
  const headers = { Authorization: `Bearer ${key}`, 'Content-Length': '10' };
  const sent = request(to, { method: 'PUT', headers });
  onTestFinished(() => void sent.destroy());
  sent.write('01234');
  return new Promise((resolve) => {
    sent.once('response', (response) => resolve(response.statusCode));
    sent.once('error', resolve);
  });
}

/** Returns the names of the streams and requests that are still open after a second. */
async function leftOf(open: Record<string, Promise<unknown>>): Promise<string[]> {
  const closed = new Set<string>();
  for (const [name, over] of Object.entries(open)) void over.then(() => closed.add(name));
  const names = Object.keys(open);
  const all = Promise.all(Object.values(open));
  await Promise.race([all, new Promise((resolve) => setTimeout(resolve, 1_000))]);
  return names.filter((name) => !closed.has(name));
}

test.each(['revoked', 'without its scopes', 'limited to others', 'expired', 'retagged away'])(
  'a key that is %s has nothing open a second later, and writes nothing of an upload',
  async (how) => {
    const clock = leapingClock();
    const { system, machine_id, key_id, open, folder } = await holding();
    const { keys, machines } = system.client;
    if (how === 'revoked') await keys.remove({ key_id });
    if (how === 'without its scopes') await keys.update({ key_id, scopes: ['schedules:read'] });
    if (how === 'limited to others') await keys.update({ key_id, tags: ['others'] });
    if (how === 'retagged away') await machines.update({ machine_id, tags: [] });
    if (how === 'expired') clock.leap(hour);
    // A stream of events goes on without the events of machines that the key may no longer use.
    const stays = ['limited to others', 'retagged away'].includes(how) ? ['events', 'events over gRPC'] : [];
    expect(await leftOf(open)).toEqual(stays);
    expect(readdirSync(folder)).not.toContain('a');
  },
);

test('a new secret ends nothing that the key has open: its id and rights are the same', async () => {
  const { system, key_id, key, open } = await holding();
  await system.client.keys.rotate({ key_id });
  expect((await system.call('GET', '/auth/me', { key })).status).toBe(401);
  expect(await leftOf(open)).toEqual(Object.keys(open));
  // The broker still checks the rights of the open streams: revoking the key closes them.
  await system.client.keys.remove({ key_id });
  expect(await leftOf(open)).toEqual([]);
});

test('a call goes on after its key gets a new secret: its signals are delivered', async () => {
  const system = await startFarhand();
  const { machineId: machine_id } = await system.agent();
  const { id: key_id, key } = await system.client.keys.create({ name: 'ci', scopes: ['commands:execute'] });
  const asked = line<object>({ start: { machine_id, command: 'cat' } });
  const heard = all((await streamsOf(system, key)).exec(asked.requests));
  await soon(async () => (await system.client.commands.list({ status: 'running' })).total).toBe(1);
  await system.client.keys.rotate({ key_id });
  asked.send({ signal: 'SIGTERM' });
  expect((await heard).at(-1)).toMatchObject({ end: { signal: 'SIGTERM' } });
});

test('a stream of events has fewer events when its key is limited', async () => {
  const system = await startFarhand();
  const [gone, left] = [await system.agent({ tags: 'gone' }), await system.agent({ tags: 'left' })];
  const { client } = await system.keyed(['machines:read', 'commands:read'], { tags: ['gone', 'left'] });
  const { id: key_id } = await client.keys.me();
  const events = await client.events.stream({ types: 'command.completed' });
  const first = events[Symbol.asyncIterator]().next();
  await system.client.keys.update({ key_id, tags: ['left'] });
  for (const { machineId } of [gone, left])
    await system.client.commands.create({ machine_id: machineId, command: 'true' });
  expect((await first).value?.data.data.machine_id).toBe(left.machineId);
});

test('an operation on files is aborted on its machine, and answered with 401, when its key is revoked', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const { key, client } = await system.keyed(['files:read', 'files:write']);
  const { id: key_id } = await client.keys.me();
  const two = { source: '/a', destination: '/b' };
  const asked: [string, string, string, unknown?][] = [
    ['CopyFile', 'POST', 'files/copy', two],
    ['MoveFile', 'POST', 'files/move', two],
    ['RemoveFile', 'DELETE', 'files?path=/a&recursive=true'],
    ['WriteFile', 'PUT', 'files/content', { path: '/a', content: '' }],
    ['StatFile', 'GET', 'files/stat?path=/a&checksum=sha256'],
    ['ReadFile', 'GET', 'files/content?path=/a'],
  ];
  const answers: Promise<{ status: number }>[] = [];
  const calls: string[] = [];
  for (const [name, method, path, body] of asked) {
    answers.push(system.call(method, `/machines/${agent.identity.machineId}/${path}`, { key, body }));
    const call = await agent.next('call');
    expect(call.method).toBe(name);
    calls.push(call.call_id);
  }
  await system.client.keys.remove({ key_id });
  const statuses = (await Promise.all(answers)).map(({ status }) => status);
  expect(statuses).toEqual(asked.map(() => 401));
  const cancelled: string[] = [];
  for (const _ of calls) cancelled.push((await agent.next('cancel')).call_id);
  expect(cancelled.sort()).toEqual(calls.sort());
});

test.each(['on its machine', 'to another machine'])(
  'a copy of many files %s ends with its key within a second, and leaves nothing',
  async (where) => {
    const system = await startFarhand();
    const [{ machineId: machine_id }, other] = [await system.agent(), await system.agent()];
    const { key, client } = await system.keyed(['files:read', 'files:write']);
    const { id: key_id } = await client.keys.me();
    const [from, to] = [temporaryFolder('many'), temporaryFolder('copied')];
    mkdirSync(join(from, 'tree'));
    for (let n = 0; n < 4_000; n += 1) writeFileSync(join(from, 'tree', String(n)), 'x');
    const across = where === 'on its machine' ? {} : { destination_machine_id: other.machineId };
    const body = { source: join(from, 'tree'), destination: join(to, 'tree'), ...across };
    const copy = system.call('POST', `/machines/${machine_id}/files/copy`, { key, body });
    await soon(() => readdirSync(to).length).toBe(1);
    await system.client.keys.remove({ key_id });
    const left = await leftOf({ copy });
    expect([left, (await copy).status]).toEqual([[], 401]);
    await soon(() => readdirSync(to)).toEqual([]);
  },
);
