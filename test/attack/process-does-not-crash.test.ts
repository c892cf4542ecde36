// Failures that must not end a process: too many open files, a reset connection, standard error on a full disk.
import { execFile } from 'node:child_process';
import { once } from 'node:events';
import { readdirSync } from 'node:fs';
import { connect, createServer, type Socket } from 'node:net';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { expect, onTestFinished, test } from 'vitest';
import { connectionLimits, logAcceptErrors } from '../../broker/connection-limiter.ts';
import { createLogger } from '../../shared/logger.ts';
import { startBrokerProgram } from '../faults/broker-program.ts';
import { waitFor } from '../wait-for.ts';

const fileLimit = 256;
const limited = ['sh', '-c', `ulimit -n ${fileLimit}; exec "$@"`, 'sh'];

/** Starts a broker in a separate process with a limit of open files. */
const limitedBroker = () => startBrokerProgram({ under: limited });

function dial(address: string): Socket {
  const { hostname, port } = new URL(`tcp://${address}`);
  const socket = connect(Number(port), hostname);
  onTestFinished(() => void socket.destroy());
  return socket.on('error', () => undefined);
}

/** Runs a short program and returns its output. It may open 64 files, and its standard error goes to `stderr`. */
async function printed(lines: string, stderr = '/dev/null'): Promise<string> {
  const command = `ulimit -n 64; exec "$@" 2>${stderr}`;
  const node = [process.execPath, '--input-type=module-typescript', '-e', lines];
  return (await promisify(execFile)('sh', ['-c', command, 'sh', ...node])).stdout.trim();
}

const file = (path: string): string => JSON.stringify(join(import.meta.dirname, '../..', path));

test('a process that cannot open more files goes on without its memory usage', async () => {
  const said = await printed(`
    import { openSync } from 'node:fs';
    import { setTimeout } from 'node:timers/promises';
    import { collectAtRest, residentBytes } from ${file('shared/v8-garbage-collection.ts')};
    collectAtRest(10);
    await setTimeout(1);
    try { for (;;) openSync('/dev/null'); } catch {}
    await setTimeout(100);
    console.log(residentBytes());
  `);
  expect(said).toBe('undefined');
});

test('a process that cannot open more files goes on when it collects an inventory', async () => {
  const said = await printed(`
    import { openSync } from 'node:fs';
    import { setTimeout } from 'node:timers/promises';
    import { runProgram } from ${file('agent/inventory/run-program.ts')};
    try { for (;;) openSync('/dev/null'); } catch {}
    const run = async () => runProgram('true', [], { signal: new AbortController().signal });
    const reason = await run().catch(({ message }) => message);
    await setTimeout(1);
    console.log(reason);
  `);
  expect(said).toBe('true could not start');
});

test('a process whose standard error is on a full disk goes on', async () => {
  const said = await printed(
    `
    import { createLogger } from ${file('shared/logger.ts')};
    const log = createLogger('test', 'info');
    for (let n = 0; n < 100; n += 1) log.info('x'.repeat(50_000));
    console.log('alive');
  `,
    '/dev/full',
  );
  expect(said).toBe('alive');
});

test('errors of a listener are logged once a minute and end nothing', async () => {
  const lines: string[] = [];
  const log = Object.assign(Object.create(createLogger('test', 'silent')), {
    error: (_about: object, text: string) => lines.push(text),
  });
  const server = createServer();
  onTestFinished(() => void server.close());
  logAcceptErrors(server, log);
  await once(server.listen(0, '127.0.0.1'), 'listening');
  for (let n = 0; n < 3; n += 1) server.emit('error', new Error('accept EMFILE'));
  expect(lines).toEqual(['a connection could not be accepted; its client has to connect again']);
});

test.each([64, 256, 1_024, 20_000, 524_288])(
  'with %i files, the limit of connections leaves some to the broker',
  (files) => {
    const { http, grpc } = connectionLimits(files);
    expect(http.connections + grpc.connections).toBeLessThanOrEqual(files - Math.min(1_024, files / 4));
    for (const { connections, unauthenticated } of [http, grpc]) {
      expect(unauthenticated).toBeGreaterThan(0);
      expect(unauthenticated).toBeLessThan(connections);
    }
  },
);

test('a broker that may open 256 files outlives 800 connections without a key; its agent stays linked', async () => {
  const broker = await limitedBroker();
  const { http, grpc, client } = broker;
  const agent = await broker.agent();
  const machine_id = await broker.machineId();
  const sockets = [http, grpc].flatMap((address) => Array.from({ length: 400 }, () => dial(address)));
  await Promise.all(sockets.map((socket) => Promise.race([once(socket, 'connect'), once(socket, 'close')])));
  expect(await client.commands.create({ machine_id, command: 'echo here' })).toMatchObject({
    status: 'completed',
    stdout: 'here\n',
  });
  expect(readdirSync(`/proc/${broker.child().pid}/fd`).length).toBeLessThan(fileLimit - 32);
  for (const socket of sockets) socket.destroy();
  expect(await client.machines.get({ machine_id })).toMatchObject({ status: 'online' });
  const { items } = await client.events.list({ type: 'machine.offline' });
  expect(items).toEqual([]);
  expect([broker.child().exitCode, agent.exitCode]).toEqual([null, null]);
});

test('a CONNECT whose connection is reset before its refusal does not end the broker', async () => {
  const { child, http, client } = await limitedBroker();
  for (let n = 0; n < 100; n += 1) {
    const socket = dial(http);
    await once(socket, 'connect');
    await new Promise<void>((resolve) => {
      socket.write('CONNECT a:1 HTTP/1.1\r\nHost: b\r\n\r\n', () => resolve());
    });
    socket.resetAndDestroy();
  }
  await waitFor(async () => expect((await client.machines.list()).total).toBe(0));
  expect(child().exitCode).toBe(null);
});
