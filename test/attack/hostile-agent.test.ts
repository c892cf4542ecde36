// A hostile agent harms only itself. Whatever it sends or does not read, the broker serves another machine as before.
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { status as grpcStatus } from '@grpc/grpc-js';
import { expect, test } from 'vitest';
import type { AnswerStream } from '../../agent/link/dial.ts';
import type { Call__Output } from '../../proto/types/farhand/link/v1/Call.ts';
import { frameOf } from '../../shared/agent-rpcs.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import {
  connectScripted,
  joinScripted,
  type ScriptedAgent,
  scriptedMachine,
  statusOf,
} from '../scripted-agent.ts';
import { type AgentHandle, startFarhand, type TestSystem, temporaryFolder } from '../start-farhand.ts';

interface Bench {
  system: TestSystem;
  neighbour: AgentHandle;
  hostile: ScriptedAgent;
  /** Expects that the broker soon serves a file and a command of the other machine. */
  served(): Promise<void>;
}

async function bench(): Promise<Bench> {
  const system = await startFarhand();
  const neighbour = await system.agent({ name: 'neighbour' });
  const file = join(temporaryFolder('neighbour'), 'file');
  writeFileSync(file, 'as ever');
  const { machineId: machine_id } = neighbour;
  const served = async (): Promise<void> => {
    const begun = performance.now();
    const read = await system.call('GET', `/machines/${machine_id}/files/content?path=${file}`);
    expect(read.body.data.content).toBe('as ever');
    const ran = await system.call('POST', '/commands', { body: { machine_id, command: 'echo as ever' } });
    expect(ran.body.data).toMatchObject({ status: 'completed', stdout: 'as ever\n' });
    // The limit is generous: on an idle machine this takes a few milliseconds.
    expect(performance.now() - begun).toBeLessThan(10_000);
  };
  return { system, neighbour, hostile: await scriptedMachine(system), served };
}

const machineOf = ({ identity }: ScriptedAgent): string => identity.machineId;
const content = (agent: ScriptedAgent): string => `/machines/${machineOf(agent)}/files/content?path=/a`;
const execute = ({ system, hostile }: Bench, more = {}) =>
  system.call('POST', '/commands', { body: { machine_id: machineOf(hostile), command: 'x', ...more } });

const fileOf = (text: string) => ({
  entry: { name: Buffer.from('a'), path: Buffer.from('/a'), size: text.length },
  etag: '"1"',
  length: text.length,
});

/** Resolves when a stream accepts more data or has ended. */
function drained(stream: ScriptedAgent['control'] | AnswerStream): Promise<void> {
  return new Promise((resolve) => {
    const done = (): void => {
      for (const event of ['drain', 'close', 'status']) stream.off(event, done);
      resolve();
    };
    for (const event of ['drain', 'close', 'status']) stream.on(event, done);
  });
}

/** Returns the messages of a complete answer to ReadFile. */
function whole(agent: ScriptedAgent, text: string) {
  const chunk = { chunk: Buffer.from(text) };
  return { messages: [agent.encode('ReadFile', { head: fileOf(text) }), agent.encode('ReadFile', chunk)] };
}

test('an answer to a call of another machine or to an old call is ignored', async () => {
  const { system, hostile, served } = await bench();
  const victim = await scriptedMachine(system);
  const asked = system.call('GET', content(victim));
  const { call_id } = await victim.next('call');
  hostile.send({ reply: { call_id, messages: whole(hostile, 'forged') } });
  hostile.send({ reply: { call_id, error: { code: 'file_not_found', message: 'forged' } } });
  // The broker handles messages of a stream in order. So after this answer it has handled the forged messages.
  const own = system.call('GET', content(hostile));
  hostile.send({ reply: { call_id: (await hostile.next('call')).call_id, messages: whole(hostile, 'own') } });
  expect((await own).body.data.content).toBe('own');
  victim.send({ reply: { call_id, messages: whole(victim, 'true') } });
  expect((await asked).body.data.content).toBe('true');
  expect(await statusOf(hostile.answer(call_id))).toBe(grpcStatus.NOT_FOUND);
  victim.send({ reply: { call_id, messages: whole(victim, 'again') } });
  await served();
});

test('ids of another machine’s commands and sessions in a hello or a report change nothing there', async () => {
  const all = await bench();
  const { system, neighbour, hostile } = all;
  const { machineId: machine_id } = neighbour;
  const body = { machine_id, command: 'read line; echo "$line"', input: true };
  const { id } = (await system.call('POST', '/commands/async', { body })).body.data;
  const session = await system.client.sessions.create({ machine_id, shell: '/bin/sh' });
  const again = await connectScripted(system.grpc, hostile.identity, {
    process_ids: [id, session.id, `${id}x`, '../../etc', 'x'.repeat(10_000)],
  });
  await again.next('welcome');
  const asked = execute({ ...all, hostile: again });
  const call = await again.next('call');
  const started = again.encode('StartProcess', { event: { started: { pid: 1, started_at_ms: 1 } } });
  const exit = { outcome: 'PROCESS_OUTCOME_EXITED', started_at_ms: 1, finished_at_ms: 2 };
  const over = again.encode('StartProcess', { event: { exit } });
  again.send({ reply: { call_id: call.call_id, messages: { messages: [started, over] } } });
  expect((await asked).body.data).toMatchObject({ status: 'completed', machine_id: machineOf(hostile) });
  expect((await system.call('GET', `/commands/${id}`)).body.data.status).toBe('running');
  expect((await system.client.sessions.get({ session_id: session.id })).status).toBe('CONNECTED');
  await system.call('POST', `/commands/${id}/input`, { body: { data: 'mine\n', end: true } });
  await expect
    .poll(async () => (await system.call('GET', `/commands/${id}`)).body.data.stdout)
    .toBe('mine\n');
});

test('endless output is limited to its window, and the record says where the stored output starts', async () => {
  const all = await bench();
  const { system, hostile, served } = all;
  await served();
  const before = process.memoryUsage().rss;
  const running = execute(all, { wait: 0 });
  const { call_id } = await hostile.next('call');
  const { id } = (await running).body.data;
  const stream = hostile.answer(call_id);
  const data = Buffer.alloc(256 * 1024, 'x');
  let offset = 0;
  let over = false;
  const flooding = (async () => {
    while (!over) {
      const event = { output: { stream: 'OUTPUT_STREAM_STDOUT', offset, data } };
      offset += data.length;
      const frame = { message: hostile.encode('StartProcess', { event }) };
      if (!stream.write(frame)) await drained(stream);
    }
  })();
  let largest = 0;
  while (offset < 96 * 1024 * 1024) {
    await served();
    largest = Math.max(largest, process.memoryUsage().rss);
  }
  over = true;
  await flooding;
  const cancelled = system.call('DELETE', `/commands/${id}`);
  const exit = {
    outcome: 'PROCESS_OUTCOME_CANCELLED',
    started_at_ms: 1,
    finished_at_ms: 2,
    stdout_bytes: offset,
  };
  stream.write({ message: hostile.encode('StartProcess', { event: { exit } }) });
  stream.write({ end: {} });
  const record = (await cancelled).body.data;
  expect(record).toMatchObject({ status: 'cancelled', stdout_bytes: offset });
  expect(record.stdout_start).toBeGreaterThan(0);
  expect(largest - before).toBeLessThan(400 * 1024 * 1024);
});

test('an agent that never reads its calls gets only as many as may wait for it', async () => {
  const { system, hostile, served } = await bench();
  hostile.control.pause();
  const body = { path: `/${'x'.repeat(15_000)}` };
  const statuses: number[] = [];
  const asked = Array.from({ length: 900 }, async () => {
    const answer = await system.call('POST', `/machines/${machineOf(hostile)}/files/mkdir`, { body });
    statuses.push(answer.status);
  });
  // 64 calls are sent and 256 wait. All others are refused at once.
  await expect.poll(() => statuses.length).toBe(900 - 64 - 256);
  await served();
  expect(new Set(statuses)).toEqual(new Set([503]));
  await system.client.machines.remove({ machine_id: machineOf(hostile) });
  await Promise.all(asked);
});

test('a flood of reports, replies or heartbeats ends only its own link', async () => {
  const all = await bench();
  const { system, served } = all;
  const disks = Array.from({ length: 200 }, (_, index) => ({
    mount: `/${index}`,
    filesystem: 'x',
    space: {},
  }));
  const metrics = { recorded_at_ms: 1, cpu_cores: 1, memory: {}, disk: {}, disks };
  for (const message of [
    { heartbeat: { metrics } },
    { reply: { call_id: newId('call'), response: Buffer.alloc(1_000) } },
    {},
  ]) {
    const hostile = await connectScripted(system.grpc, await joinScripted(system));
    await hostile.next('welcome');
    let over = false;
    void hostile.ended.then(() => {
      over = true;
    });
    const flooding = (async () => {
      for (let sent = 0; sent < 20_000 && !over; sent += 1) {
        if (!hostile.control.write(message)) await Promise.race([drained(hostile.control), hostile.ended]);
      }
    })();
    await served();
    await Promise.all([hostile.ended, flooding]);
    await served();
  }
});

test('thousands of answers to calls that were never made are ignored', async () => {
  const { hostile, served } = await bench();
  const codes = new Set<number>();
  for (let round = 0; round < 10; round += 1) {
    const answers = Array.from({ length: 250 }, () => statusOf(hostile.answer(newId('call'))));
    if (round % 5 === 0) await served();
    const received = await Promise.all(answers);
    // Node ends a connection after more than 1,000 resets of streams in a burst. Then later answers do not get the
    // broker's own status. So only the statuses of the first three rounds are compared.
    if (round < 3) for (const code of received) codes.add(code);
  }
  expect([...codes]).toEqual([grpcStatus.NOT_FOUND]);
  await served();
});

test('a hello with impossible facts is refused, and the stored facts are not changed', async () => {
  const { system, hostile, served } = await bench();
  const host = { hostname: 'scripted', os: 'linux', arch: 'x64' };
  for (const hello of [
    { host: { ...host, hostname: 'a\u0000\u001b[2J' } },
    { host: { ...host, hostname: 'a'.repeat(100_000) } },
    { journal_id: 'x'.repeat(500_000) },
    { instance_id: '\u009b2J' },
    { capabilities: Array.from({ length: 10_000 }, (_, one) => `c${one}`) },
  ]) {
    const again = await connectScripted(system.grpc, hostile.identity, hello);
    expect(await again.ended).not.toBe(grpcStatus.OK);
  }
  const known = (await system.call('GET', `/machines/${machineOf(hostile)}`)).body.data;
  expect(known).toMatchObject({ hostname: 'scripted', name: 'scripted', capabilities: { length: 8 } });
  await served();
});

test('a machine cannot join with control characters in its name', async () => {
  const system = await startFarhand();
  for (const name of ['a\u001b[2J', 'a\u0000', '', 'x'.repeat(1_000)])
    await expect(joinScripted(system, name)).rejects.toThrow(/refused/);
  expect((await system.client.machines.list()).total).toBe(0);
});

test('a report with impossible values is ignored', async () => {
  const { system, hostile, served } = await bench();
  for (const wrong of [
    { cpu_usage: Number.NaN, uptime_s: Number.POSITIVE_INFINITY },
    { uptime_s: -1 },
    { recorded_at_ms: 9_400_000_000_000_000 },
    { disks: Array.from({ length: 300 }, () => ({ mount: 'x', filesystem: 'x' })) },
    { network: [{ name: 'x'.repeat(500_000) }] },
  ]) {
    const agent = await connectScripted(system.grpc, hostile.identity);
    await agent.next('welcome');
    agent.send({
      heartbeat: { metrics: { recorded_at_ms: 1, cpu_cores: 77, memory: {}, disk: {}, ...wrong } },
    });
    const asked = system.call('GET', content(agent));
    agent.send({ reply: { call_id: (await agent.next('call')).call_id, messages: whole(agent, 'x') } });
    await asked;
    const { status, body } = await system.call('GET', `/machines/${machineOf(hostile)}/status`);
    expect([status, body.data.cpu.cores]).toEqual([200, 1]);
  }
  await served();
});

/** Impossible answers of a machine about a file. */
const absurd: [what: string, answer: (agent: ScriptedAgent) => Buffer[]][] = [
  [
    'a size of 2^63',
    (agent) => [agent.encode('ReadFile', { head: { ...fileOf(''), length: '9223372036854775807' } })],
  ],
  ['a negative length', (agent) => [agent.encode('ReadFile', { head: { ...fileOf('x'), length: -1 } })]],
  ['a negative offset', (agent) => [agent.encode('ReadFile', { head: { ...fileOf('x'), offset: -5 } })]],
  ['no head', (agent) => [agent.encode('ReadFile', { chunk: Buffer.from('x') })]],
  [
    'more than it announced',
    (agent) => [
      agent.encode('ReadFile', { head: fileOf('x') }),
      agent.encode('ReadFile', { chunk: Buffer.alloc(50_000) }),
    ],
  ],
  [
    'an impossible time',
    (agent) => [
      agent.encode('ReadFile', {
        head: { ...fileOf(''), entry: { name: Buffer.from('a'), modified_at_ms: 1e300 } },
      }),
    ],
  ],
  [
    'an etag with line breaks',
    (agent) => [agent.encode('ReadFile', { head: { ...fileOf(''), etag: '"\r\nX: y"' } })],
  ],
  ['bytes that are no message', () => [Buffer.from([0xff, 0xff, 0xff, 0xff, 0xff, 0xff])]],
];

test('an impossible file is refused, cut off or passed on unchanged, and the link goes on', async () => {
  const { system, hostile, served } = await bench();
  for (const [what, answer] of absurd) {
    for (const path of [content(hostile), content(hostile).replace('content', 'download')]) {
      const asked = system.call('GET', path).catch(() => ({ status: 0 }));
      const messages = { messages: answer(hostile) };
      hostile.send({ reply: { call_id: (await hostile.next('call')).call_id, messages } });
      expect([what, [0, 200, 503].includes((await asked).status)]).toEqual([what, true]);
    }
  }
  await served();
  expect((await system.call('GET', `/machines/${machineOf(hostile)}`)).body.data.status).toBe('online');
});

test('an agent that announces several files in one answer uses up no memory of other machines', async () => {
  const { system, hostile, served } = await bench();
  for (const length of [10_000_000, 1_000_000, 100_000, 10_000, 1_000, 100, 10, 1]) {
    const asked = system.call('GET', content(hostile));
    const stream = hostile.answer((await hostile.next('call')).call_id);
    const head = hostile.encode('ReadFile', { head: { ...fileOf('x'), length } });
    for (let n = 0; n < 20; n += 1) stream.write({ message: head });
    stream.end();
    const { status, body } = await asked;
    expect([status, body.error.code]).toEqual([503, 'machine_error']);
  }
  await served();
});

test('an error with impossible details reaches the client in the envelope, with a usual Retry-After', async () => {
  const { system, hostile, served } = await bench();
  for (const details of ['{"retry_after":"a\\nb"}', '{"retry_after":{"a":1}}', '{"retry_after":"é€"}']) {
    const asked = system.call('GET', content(hostile));
    const { call_id } = await hostile.next('call');
    hostile.send({ reply: { call_id, error: { code: 'unavailable', message: 'no', details } } });
    const { status, headers, body } = await asked;
    expect([status, headers.get('retry-after'), body.error.code]).toEqual([503, '5', 'unavailable']);
  }
  await served();
});

test('an endless listing with impossible names affects only its own reader', async () => {
  const { system, hostile, served } = await bench();
  const asked = fetch(`${system.url}/api/v1/machines/${machineOf(hostile)}/files?path=/a`, {
    headers: { Authorization: `Bearer ${system.key}` },
  });
  const { call_id } = await hostile.next('call');
  const stream = hostile.answer(call_id);
  const head = { head: { path: Buffer.from('/a'), total: 1e15 } };
  stream.write({ message: hostile.encode('ListFiles', head) });
  const entries = Array.from({ length: 500 }, (_, one) => ({
    name: Buffer.from(`a\0/../${one}`),
    path: Buffer.from('\0'),
  }));
  const batch = { message: hostile.encode('ListFiles', { batch: { entries } }) };
  const ended = statusOf(stream);
  let over = false;
  void ended.then(() => {
    over = true;
  });
  const flooding = (async () => {
    for (let sent = 0; sent < 400 && !over; sent += 1)
      if (!stream.write(batch)) await Promise.race([drained(stream), ended]);
    stream.write({ end: {} });
  })();
  const answer = await asked;
  await served();
  await answer.body?.cancel();
  await Promise.all([flooding, ended]);
  await served();
});

const wrongEvents: [string, object][] = [
  ['a start in the year 300000', { started: { pid: 1, started_at_ms: 9_400_000_000_000_000 } }],
  ['a negative time', { exit: { outcome: 'PROCESS_OUTCOME_EXITED', started_at_ms: -1 } }],
  [
    'output at the last offset of all',
    { output: { stream: 'OUTPUT_STREAM_STDOUT', offset: '18446744073709551615', data: Buffer.from('x') } },
  ],
  ['output beyond every number', { output: { offset: '9223372036854775807', data: Buffer.from('x') } }],
  ['a signal of control characters', { exit: { outcome: 'PROCESS_OUTCOME_EXITED', signal: '\u001b[2J' } }],
  ['a reason without end', { exit: { outcome: 'PROCESS_OUTCOME_LOST', reason: 'x'.repeat(50_000) } }],
];

test('a command with an impossible report is lost, without other effects', async () => {
  const all = await bench();
  const { hostile, served } = all;
  for (const [what, event] of wrongEvents) {
    const asked = execute(all);
    const call = await calledFor(hostile, 'StartProcess');
    const messages = [hostile.encode('StartProcess', { event })];
    hostile.send({ reply: { call_id: call.call_id, messages: { messages } } });
    expect([what, (await asked).body.data]).toMatchObject([what, { status: 'lost', reason: 'bad_report' }]);
  }
  await served();
});

/** Resolves with the next call of a method. Calls of other methods, such as acknowledgements, get no answer. */
async function calledFor(agent: ScriptedAgent, method: string): Promise<Call__Output> {
  for (;;) {
    const call = await agent.next('call');
    if (call.method === method) return call;
  }
}

test('a frame that is too large ends one stream', async () => {
  const { system, hostile, served } = await bench();
  const asked = system.call('GET', content(hostile));
  const stream = hostile.answer((await hostile.next('call')).call_id);
  const status = statusOf(stream);
  // The frame is within the limit of this agent, but beyond the lower limit of the broker.
  stream.write(frameOf(Buffer.alloc(1_900_000)) as never);
  expect((await asked).status).toBe(503);
  expect(await status).not.toBe(grpcStatus.OK);
  await served();
});
