// Limits for peers that connect or link again and again, or that send messages without a call. The number of log lines,
// events and hellos is limited.

import { once } from 'node:events';
import { connect, createServer } from 'node:net';
import { text } from 'node:stream/consumers';
import { status as grpcStatus } from '@grpc/grpc-js';
import { expect, onTestFinished, test } from 'vitest';
import { brokerSettings } from '../../broker/settings-schema.ts';
import { startBroker } from '../../broker/start/index.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import { readSettings } from '../../shared/read-settings.ts';
import { connectScripted, joinScripted, scriptedMachine } from '../scripted-agent.ts';
import { quiet, startFarhand, type TestSystem, temporaryFolder } from '../start-farhand.ts';

const linesOf = ({ log }: TestSystem, text: string): string[] => log.filter((line) => line.includes(text));

test('an impossible machine id is refused without a line in the log', async () => {
  const system = await startFarhand();
  const identity = await joinScripted(system);
  for (const machine_id of ['\u0001'.repeat(230_000), 'mach_short', 'toString', '']) {
    const stranger = await connectScripted(system.grpc, identity, { machine_id });
    expect(await stranger.ended).toBe(grpcStatus.INVALID_ARGUMENT);
  }
  expect(linesOf(system, 'its machine is not registered')).toEqual([]);
});

test('unauthenticated connections of one address are logged ten times a minute, then counted', async () => {
  const system = await startFarhand();
  const identity = await joinScripted(system);
  const knock = (hello: object) => connectScripted(system.grpc, identity, hello).then(({ ended }) => ended);
  for (let n = 0; n < 8; n += 1) {
    await knock({ machine_id: newId('machine') });
    await knock({ signature: Buffer.alloc(64) });
  }
  const received = () => [
    ...linesOf(system, 'its machine is not registered'),
    ...linesOf(system, 'did not prove that it has'),
  ];
  expect(received()).toHaveLength(10);
  expect(received()[0]).toContain('"address":"127.0.0.1"');
  await system.broker.close();
  expect(linesOf(system, 'did not authenticate')).toEqual([expect.stringContaining('"more":6')]);
});

test('two agents with one identity cause one event a minute and few log lines, and then have to wait', async () => {
  const system = await startFarhand();
  const identity = await joinScripted(system);
  const codes: unknown[] = [];
  for (let n = 0; n < 62; n += 1) {
    const agent = await connectScripted(system.grpc, identity, { instance_id: `one ${n}` });
    codes.push(await Promise.race([agent.next('welcome').then(() => 'welcome'), agent.ended]).catch(String));
  }
  expect(codes.slice(0, 60)).toEqual(Array.from({ length: 60 }, () => 'welcome'));
  expect(codes.slice(60)).toEqual([grpcStatus.RESOURCE_EXHAUSTED, grpcStatus.RESOURCE_EXHAUSTED]);
  expect((await system.client.events.list({ type: 'machine.fenced' })).total).toBe(1);
  expect(linesOf(system, 'machine_id').filter((line) => line.includes('link_id'))).toHaveLength(30);
  await system.broker.close();
  const again = await startFarhand({ dataDir: system.dataDir });
  const { items } = await again.client.events.list({ type: 'machine.fenced' });
  expect(items.map(({ data }) => data.more)).toEqual(expect.arrayContaining([58, undefined]));
});

test('a hello with impossible facts closes its connection, with one log line', async () => {
  const system = await startFarhand();
  const { identity } = await scriptedMachine(system);
  const capabilities = Array.from({ length: 20_000 }, () => 'x\n');
  const agent = await connectScripted(system.grpc, identity, { capabilities });
  expect(await agent.ended).toBe(grpcStatus.INTERNAL);
  const [line = '', ...others] = linesOf(system, 'the connection of an agent failed');
  expect(others).toEqual([]);
  expect(line.length).toBeLessThan(32_000);
});

test('a start on a port that is in use fails, and leaves the data directory free', async () => {
  const taken = createServer().listen(0, '127.0.0.1');
  await once(taken, 'listening');
  onTestFinished(() => void taken.close());
  const { port } = taken.address() as { port: number };
  const dataDir = temporaryFolder('broker');
  const argv = ['--http', '127.0.0.1:0', '--grpc', `127.0.0.1:${port}`, '--data-dir', dataDir];
  await expect(startBroker(readSettings(brokerSettings, { argv, env: {} }), quiet)).rejects.toThrow(
    /already in use/,
  );
  await startFarhand({ dataDir });
});

test('an unsupported compression is refused, and the error for too many headers says so', async () => {
  const system = await startFarhand();
  const { hostname, port } = new URL(system.url);
  const say = (request: string): Promise<string> => {
    const socket = connect(Number(port), hostname);
    onTestFinished(() => void socket.destroy());
    socket.write(request);
    return text(socket);
  };
  const head = `POST /api/v1/join-tokens HTTP/1.1\r\nHost: b\r\nConnection: close\r\nAuthorization: Bearer ${system.key}\r\n`;
  const coded = `${head}Content-Type: application/json\r\nTransfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n`;
  expect(await say(coded)).toMatch(/^HTTP\/1\.1 400 [\s\S]*Transfer-Encoding/);
  expect((await system.call('GET', '/join-tokens')).body.meta.total).toBe(0);
  const many = Array.from({ length: 120 }, (_, n) => `X-${n}: 1\r\n`).join('');
  expect(await say(`${head}${many}\r\n`)).toMatch(/^HTTP\/1\.1 413 [\s\S]*at most 100, of at most 16 KiB/);
});
