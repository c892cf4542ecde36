// The link: authentication, the end of calls, and limits for agents that break the protocol.
import { generateKeyPairSync } from 'node:crypto';
import { once } from 'node:events';
import { connect } from 'node:net';
import { connect as tlsConnect } from 'node:tls';
import { status as grpcStatus } from '@grpc/grpc-js';
import { expect, test } from 'vitest';
import { loadIdentity } from '../agent/join-or-load-identity.ts';
import { signProof } from '../shared/identity-proof.ts';
import { connectScripted, joinScripted, linkScripted, scriptedMachine, statusOf } from './scripted-agent.ts';
import { call as http, startFarhand, temporaryFolder } from './start-farhand.ts';
import { startProxy } from './tcp-proxy.ts';

const files = (machineId: string): string => `/machines/${machineId}/files/content?path=/etc/os-release`;

test('a broker with another certificate authority is refused before anything is sent to it', async () => {
  const [system, other] = [await startFarhand(), await startFarhand()];
  const joinToken = await system.joinToken();
  const joining = loadIdentity(temporaryFolder('agent'), {
    broker: other.grpc,
    joinToken,
    name: 'a',
    tags: [],
  });
  await expect(joining).rejects.toMatchObject({ name: 'StartError', exitCode: 78 });
  expect((await other.client.machines.list()).total).toBe(0);
});

test('an agent that joined one broker does not link to another', async () => {
  const [system, other] = [await startFarhand(), await startFarhand()];
  const identity = await joinScripted(system);
  await expect(connectScripted(other.grpc, identity)).rejects.toThrow(/before a challenge/);
});

test('a join token works once, and a machine id alone gives no access', async () => {
  const system = await startFarhand();
  const joinToken = await system.joinToken();
  const params = { broker: system.grpc, joinToken, name: 'a', tags: [] };
  await loadIdentity(temporaryFolder('agent'), params);
  await expect(loadIdentity(temporaryFolder('agent'), params)).rejects.toMatchObject({ name: 'StartError' });
  expect((await system.client.machines.list()).total).toBe(1);
});

test('a hello signed with another key is refused as unauthenticated, and the machine stays offline', async () => {
  const system = await startFarhand();
  const identity = await joinScripted(system);
  const thief = { ...identity, privateKey: generateKeyPairSync('ed25519').privateKey };
  const agent = await connectScripted(system.grpc, thief);
  expect(await agent.ended).toBe(grpcStatus.UNAUTHENTICATED);
  expect((await system.client.machines.get({ machine_id: identity.machineId })).status).toBe('offline');
});

test('a signature for another nonce is refused', async () => {
  const system = await startFarhand();
  const identity = await joinScripted(system);
  const old = { nonce: Buffer.alloc(32), machine_id: identity.machineId, fingerprint: identity.fingerprint };
  const agent = await connectScripted(system.grpc, identity, {
    signature: signProof(old, identity.privateKey),
  });
  expect(await agent.ended).toBe(grpcStatus.UNAUTHENTICATED);
});

test('a first message that is no hello ends the stream', async () => {
  const system = await startFarhand();
  const agent = await connectScripted(system.grpc, await joinScripted(system), null);
  agent.send({ heartbeat: {} });
  expect(await agent.ended).toBe(grpcStatus.INVALID_ARGUMENT);
});

test('a connection that does not authenticate in time is cut: silent, after TLS, and after the challenge', async () => {
  const system = await startFarhand({ tuning: { proofMs: 300 } });
  const [host = '', port = ''] = system.grpc.split(':');
  const silent = connect(Number(port), host);
  silent.on('error', () => undefined);
  const silentEnd = once(silent.resume(), 'close');
  const secured = tlsConnect({ host, port: Number(port), rejectUnauthorized: false, ALPNProtocols: ['h2'] });
  secured.on('error', () => undefined);
  const securedEnd = once(secured.resume(), 'close');
  const identity = await joinScripted(system);
  const challenged = await connectScripted(system.grpc, identity, null);
  await Promise.all([silentEnd, securedEnd, challenged.ended]);
  // A connection that has authenticated in time is not cut.
  await linkScripted(system.grpc, identity);
  const late = connect(Number(port), host);
  late.on('error', () => undefined);
  await once(late.resume(), 'close');
  expect(await system.client.machines.get({ machine_id: identity.machineId })).toMatchObject({
    status: 'online',
  });
});

test('an unknown call id opens no stream', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const stream = agent.answer('call_0000000000000000000000');
  expect(await statusOf(stream)).toBe(grpcStatus.NOT_FOUND);
});

test('an older agent answers not_supported instead of hanging', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system, { methods: ['ListFiles'] });
  const { status, body } = await system.call('GET', files(agent.identity.machineId));
  expect([status, body.error.code]).toEqual([501, 'not_supported']);
});

test('a refusal of the agent keeps its code, and an unknown code becomes machine_error', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  for (const [code, status, seen] of [
    ['file_not_found', 404, 'file_not_found'],
    ['toString', 503, 'machine_error'],
  ] as const) {
    const answer = system.call('GET', files(agent.identity.machineId));
    const stream = agent.answer((await agent.next('call')).call_id);
    stream.write({ error: { code, message: 'x', details: 'not json' } });
    stream.end();
    expect(await answer).toMatchObject({
      status,
      body: { error: { code: seen, details: expect.any(Object) } },
    });
  }
});

test('an answer that stops without End is a failure, however it stops', async () => {
  const system = await startFarhand();
  const proxy = await startProxy(system.grpc);
  for (const how of ['half-close', 'cancel', 'connection'] as const) {
    const agent = await linkScripted(proxy.address, await joinScripted(system));
    const answer = system.call('GET', files(agent.identity.machineId));
    const stream = agent.answer((await agent.next('call')).call_id);
    const entry = { name: Buffer.from('a'), path: Buffer.from('/a'), size: 10 };
    stream.write({ message: agent.encode('ReadFile', { head: { entry, etag: '"1"', length: 10 } }) });
    stream.write({ message: agent.encode('ReadFile', { chunk: Buffer.from('half ') }) });
    // The End frame from the broker proves that the stream has reached the broker.
    await once(stream, 'data');
    if (how === 'half-close') stream.end();
    if (how === 'cancel') stream.cancel();
    if (how === 'connection') proxy.cut();
    const { status, body } = await answer;
    expect([how, status, body.error.code]).toEqual([how, 503, 'machine_offline']);
  }
});

test('bytes that are no message of the method are machine_error, and the link goes on', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const answer = system.call('GET', files(agent.identity.machineId));
  const stream = agent.answer((await agent.next('call')).call_id);
  stream.write({ message: Buffer.from([0xff, 0xff, 0xff]) });
  expect((await answer).body.error.code).toBe('machine_error');
  expect(await system.client.machines.get({ machine_id: agent.identity.machineId })).toMatchObject({
    status: 'online',
  });
});

test('answering one call twice changes nothing: the second stream finds no call', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const answer = system.call('GET', files(agent.identity.machineId));
  const { call_id } = await agent.next('call');
  const first = agent.answer(call_id);
  const entry = { name: Buffer.from('a'), path: Buffer.from('/a'), size: 2 };
  first.write({ message: agent.encode('ReadFile', { head: { entry, etag: '"1"', length: 2 } }) });
  first.write({ message: agent.encode('ReadFile', { chunk: Buffer.from('ok') }) });
  const second = agent.answer(call_id);
  expect(await statusOf(second)).toBe(grpcStatus.NOT_FOUND);
  const ended = statusOf(first);
  first.write({ end: {} });
  first.end();
  expect((await answer).body.data.content).toBe('ok');
  expect(await ended).toBe(grpcStatus.OK);
});

test('a caller who disconnects before the agent answers ends the call on the agent', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const gone = new AbortController();
  const answer = http(`${system.url}/api/v1${files(agent.identity.machineId)}`, 'GET', {
    key: system.key,
    signal: gone.signal,
  });
  const { call_id } = await agent.next('call');
  gone.abort();
  await expect(answer).rejects.toThrow();
  expect(await agent.next('cancel')).toMatchObject({ call_id });
  // The agent opens its answer stream too late: the broker finds no call for the stream.
  expect(await statusOf(agent.answer(call_id))).toBe(grpcStatus.NOT_FOUND);
});

test('a client that disconnects during a file ends the stream on the agent', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const gone = new AbortController();
  const answer = http(`${system.url}/api/v1${files(agent.identity.machineId)}`, 'GET', {
    key: system.key,
    signal: gone.signal,
  });
  const { call_id } = await agent.next('call');
  const stream = agent.answer(call_id);
  const ended = statusOf(stream);
  const entry = { name: Buffer.from('a'), path: Buffer.from('/a'), size: 10 };
  stream.write({ message: agent.encode('ReadFile', { head: { entry, etag: '"1"', length: 10 } }) });
  gone.abort();
  await expect(answer).rejects.toThrow();
  expect(await ended).toBe(grpcStatus.CANCELLED);
});

test('a silent link is ended, and its machine is offline', async () => {
  const system = await startFarhand({ tuning: { link: { heartbeatMs: 50, silenceMs: 200 } } });
  const agent = await scriptedMachine(system);
  await agent.next('heartbeat');
  await agent.ended;
  expect(await system.client.machines.get({ machine_id: agent.identity.machineId })).toMatchObject({
    status: 'offline',
  });
});

test('two agents with one identity: the newer replaces the older, frames of the older are ignored, an event reports it', async () => {
  const system = await startFarhand();
  const identity = await joinScripted(system);
  const older = await linkScripted(system.grpc, identity, { instance_id: 'one' });
  const newer = await linkScripted(system.grpc, identity, { instance_id: 'two' });
  await older.next('fenced');
  const answer = system.call('GET', files(identity.machineId));
  const { call_id } = await newer.next('call');
  older.send({ reply: { call_id, error: { code: 'file_not_found', message: 'a lie' } } });
  const stream = newer.answer(call_id);
  stream.write({ error: { code: 'io_error', message: 'the truth', details: '{}' } });
  stream.end();
  expect((await answer).body.error.code).toBe('io_error');
  const events = await system.client.events.list({ type: 'machine.fenced' });
  expect(events.items.map(({ data }) => data.machine_id)).toEqual([identity.machineId]);
});

test('an invalid report is ignored, and the last valid one is retained', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  agent.send({ heartbeat: { metrics: { cpu_usage: 1e9, recorded_at_ms: 2 } } });
  agent.send({ heartbeat: { metrics: { cpu_usage: 7, recorded_at_ms: 3 } } });
  agent.send({ heartbeat: { metrics: { cpu_usage: Number.NaN, recorded_at_ms: 4 } } });
  // The broker handles messages of a link in order, so this answer comes after the reports.
  const answer = system.call('GET', files(agent.identity.machineId));
  const stream = agent.answer((await agent.next('call')).call_id);
  stream.write({ error: { code: 'io_error', message: '', details: '' } });
  stream.end();
  await answer;
  const status = await system.client.machines.status({ machine_id: agent.identity.machineId });
  expect(status.cpu.usage).toBe(7);
});

test('an agent that sends an endless answer causes one refusal, and does not fill the broker’s memory', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const entry = { name: Buffer.from('a'), path: Buffer.from('/a'), size: 10 };
  const chunk = agent.encode('ReadFile', { chunk: Buffer.alloc(1_000_000) });
  const reading = system.call('GET', files(agent.identity.machineId));
  const file = agent.answer((await agent.next('call')).call_id);
  const fileEnded = statusOf(file);
  file.write({ message: agent.encode('ReadFile', { head: { entry, etag: '"1"' } }) });
  for (let n = 0; n < 12; n += 1) file.write({ message: chunk });
  expect(await reading).toMatchObject({ status: 503, body: { error: { code: 'machine_error' } } });
  expect(await fileEnded).toBe(grpcStatus.CANCELLED);

  const batch = agent.encode('ListFiles', { batch: { entries: [entry, entry] } });
  const listing = system.call('GET', `/machines/${agent.identity.machineId}/files?limit=1`);
  const call = await agent.nextCallOf('ListFiles');
  const directory = agent.answer(call.call_id);
  const directoryEnded = statusOf(directory);
  directory.write({ message: batch });
  expect(await listing).toMatchObject({ status: 503, body: { error: { code: 'machine_error' } } });
  expect(await directoryEnded).toBe(grpcStatus.CANCELLED);
});

test('the connection of a fenced link is closed, and an authenticated one without a new hello is cut', async () => {
  const system = await startFarhand();
  const identity = await joinScripted(system);
  const older = await linkScripted(system.grpc, identity);
  await linkScripted(system.grpc, identity);
  await older.next('fenced');
  // The connection of the older agent is closed, so none of its streams works any more.
  expect(await statusOf(older.answer('call_x'))).toBeGreaterThan(0);
  expect(await system.client.machines.get({ machine_id: identity.machineId })).toMatchObject({
    status: 'online',
  });
});
