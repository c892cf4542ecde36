// Short answers to streaming calls. A machine may send such an answer as a reply on the control stream, or on a stream
// of its own.
import { once } from 'node:events';
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout } from 'node:timers/promises';
import { status as grpcStatus } from '@grpc/grpc-js';
import { expect, test } from 'vitest';
import { coalesce } from '../agent/link/coalesce-short-answer.ts';
import type { Reply } from '../proto/types/farhand/link/v1/Reply.ts';
import { frameOf, messageOf, toWire } from '../shared/agent-rpcs.ts';
import { AppError } from '../shared/errors.ts';
import { type ScriptedAgent, scriptedMachine, statusOf } from './scripted-agent.ts';
import { call as http, startFarhand, temporaryFolder } from './start-farhand.ts';

const content = ({ identity }: ScriptedAgent): string =>
  `/machines/${identity.machineId}/files/content?path=/a`;

const written = { path: '/a', content: 'x' };
const puts = ({ identity }: ScriptedAgent): string => `/machines/${identity.machineId}/files/content`;

/** Returns the messages of a complete answer to ReadFile. */
function whole(agent: ScriptedAgent, text: string): { messages: Buffer[] } {
  const entry = { name: Buffer.from('a'), path: Buffer.from('/a'), size: text.length };
  const head = { head: { entry, etag: '"1"', length: text.length } };
  return {
    messages: [agent.encode('ReadFile', head), agent.encode('ReadFile', { chunk: Buffer.from(text) })],
  };
}

test('an error in a reply ends a streaming call, also before its requests are read', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const error = { code: 'permission_denied', message: 'no', details: '{"why":"so"}' };
  for (const calling of [
    () => system.call('GET', content(agent)),
    () => system.call('PUT', puts(agent), { body: written }),
  ]) {
    const answer = calling();
    agent.send({ reply: { call_id: (await agent.next('call')).call_id, error } });
    expect(await answer).toMatchObject({ status: 403, body: { error: { details: { why: 'so' } } } });
  }
});

test('a reply of the wrong kind is machine_error, and the link goes on', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const { identity } = agent;
  const response = agent.encode('StatFile', { etag: '"1"' });
  const unasked = agent.encode('WriteFile', { path: Buffer.from('/a'), size: 1, etag: '"1"' });
  const refused = { status: 503, body: { error: { code: 'machine_error' } } };
  const wrong: [method: string, path: string, result: Reply][] = [
    ['GET', content(agent), { response }],
    ['GET', content(agent), {}],
    ['GET', content(agent), { messages: { messages: [Buffer.from([0xff, 0xff])] } }],
    ['GET', content(agent), { messages: { messages: [] } }],
    ['PUT', puts(agent), { messages: { messages: [unasked] } }],
    ['GET', `/machines/${identity.machineId}/files/stat?path=/a`, { messages: { messages: [response] } }],
    ['GET', `/machines/${identity.machineId}/files/stat?path=/a`, {}],
  ];
  for (const [method, path, result] of wrong) {
    const answer = system.call(method, path, method === 'PUT' ? { body: written } : {});
    agent.send({ reply: { call_id: (await agent.next('call')).call_id, ...result } });
    expect(await answer).toMatchObject(refused);
  }
  expect((await system.client.machines.get({ machine_id: identity.machineId })).status).toBe('online');
});

test('of two answers, by stream and by reply, the first one counts and the other finds no call', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const replied = system.call('GET', content(agent));
  const first = await agent.next('call');
  agent.send({ reply: { call_id: first.call_id, messages: whole(agent, 'reply') } });
  expect((await replied).body.data.content).toBe('reply');
  agent.send({ reply: { call_id: first.call_id, messages: whole(agent, 'again') } });
  expect(await statusOf(agent.answer(first.call_id))).toBe(grpcStatus.NOT_FOUND);

  const streamed = system.call('GET', content(agent));
  const { call_id } = await agent.next('call');
  const stream = agent.answer(call_id);
  // The broker's End frame proves that the stream has arrived.
  await once(stream, 'data');
  agent.send({ reply: { call_id, error: { code: 'io_error', message: 'too late', details: '{}' } } });
  for (const message of whole(agent, 'stream').messages) stream.write({ message });
  stream.write({ end: {} });
  stream.end();
  expect((await streamed).body.data.content).toBe('stream');
});

test('the agent is notified when a caller disconnects, and a later reply is ignored', async () => {
  const system = await startFarhand({ tuning: { link: { openCalls: 1 } } });
  const agent = await scriptedMachine(system);
  const gone = new AbortController();
  const path = `${system.url}/api/v1${content(agent)}`;
  const answer = http(path, 'GET', { key: system.key, signal: gone.signal });
  const { call_id } = await agent.next('call');
  gone.abort();
  await expect(answer).rejects.toThrow();
  expect(await agent.next('cancel')).toMatchObject({ call_id });
  agent.send({ reply: { call_id, messages: whole(agent, 'late') } });
  // The broker allows this machine one open call at a time. Call `one` proves that the cancelled call has ended, and
  // call `two` proves that the reply has ended call `one`.
  for (const text of ['one', 'two']) {
    const next = system.call('GET', content(agent));
    agent.send({ reply: { call_id: (await agent.next('call')).call_id, messages: whole(agent, text) } });
    expect((await next).body.data.content).toBe(text);
  }
});

test('a link that is lost before the reply results in machine_offline', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const answer = system.call('GET', content(agent));
  await agent.next('call');
  agent.close();
  agent.control.cancel();
  expect((await answer).body.error.code).toBe('machine_offline');
});

test('a watch that a distant machine refuses is refused, however late the refusal arrives', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const answer = system.call('GET', `/machines/${agent.identity.machineId}/files/watch?path=/a`);
  const { call_id } = await agent.next('call');
  // A stream of events usually waits at most 50 ms for its first event before the broker sends the head of the answer.
  // A watch must wait longer: for the refusal of the machine.
  await setTimeout(100);
  agent.send({ reply: { call_id, error: toWire(new AppError('file_not_found', 'no such file')) } });
  expect(await answer).toMatchObject({ status: 404, body: { error: { code: 'file_not_found' } } });
});

test('an answer that fails before its first frame throws; a later failure is part of the answer', async () => {
  const failure = new Error('broken');
  async function* failing(frames: number): AsyncGenerator<Buffer> {
    for (let n = 0; n < frames; n += 1) yield frameOf(Buffer.from('x'));
    throw failure;
  }
  await expect(coalesce(failing(0))).rejects.toBe(failure);
  const gathered = await coalesce(failing(1));
  if (Array.isArray(gathered)) throw new Error('a failed answer is never whole');
  expect((await gathered.next()).value).toEqual(frameOf(Buffer.from('x')));
  await expect(gathered.next()).rejects.toBe(failure);
});

test('answers with too many bytes or frames, or that take too long, use their own stream, and their source is closed', async () => {
  for (const [frames, bytes] of [
    [1, 61 * 1024],
    [100, 1],
    [4, 20_000],
  ] as const) {
    let closed = false;
    async function* source(): AsyncGenerator<Buffer> {
      try {
        for (let n = 0; n < frames; n += 1) yield frameOf(Buffer.alloc(bytes, n));
      } finally {
        closed = true;
      }
    }
    const gathered = await coalesce(source());
    if (Array.isArray(gathered)) throw new Error('it was taken for small');
    expect(closed).toBe(false);
    const seen: Buffer[] = [];
    for await (const frame of gathered) seen.push(messageOf(frame));
    expect(seen).toEqual(Array.from({ length: frames }, (_, n) => Buffer.alloc(bytes, n)));
    expect(closed).toBe(true);
  }
  const { promise, resolve } = Promise.withResolvers<Buffer>();
  async function* lasting(): AsyncGenerator<Buffer> {
    yield frameOf(Buffer.from('started'));
    yield await promise;
  }
  const gathered = await coalesce(lasting());
  if (Array.isArray(gathered)) throw new Error('it was taken for whole');
  expect((await gathered.next()).value).toEqual(frameOf(Buffer.from('started')));
  resolve(frameOf(Buffer.from('ended')));
  expect((await gathered.next()).value).toEqual(frameOf(Buffer.from('ended')));
  expect((await gathered.next()).done).toBe(true);
});

test('answers of a real agent are the same by reply and by stream: empty, small, at the limit and large', async () => {
  const system = await startFarhand();
  await system.agent();
  const { items } = await system.client.machines.list();
  const machine_id = items[0]?.id ?? '';
  const folder = temporaryFolder('content');
  for (const size of [0, 1, 1_000, 61_000, 61_440, 65_536, 300_000]) {
    const path = join(folder, String(size));
    writeFileSync(path, 'x'.repeat(size));
    const { body } = await system.call('GET', `/machines/${machine_id}/files/content?path=${path}`);
    expect([size, body.data.content.length, body.data.size]).toEqual([size, size, size]);
  }
  const missing = await system.call('GET', `/machines/${machine_id}/files/content?path=${folder}/none`);
  expect([missing.status, missing.body.error.code]).toEqual([404, 'file_not_found']);
});
