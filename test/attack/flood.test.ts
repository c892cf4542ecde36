// Floods of connections and requests at both ports: clients with keys are served, and memory does not grow.
import { once } from 'node:events';
import { IncomingMessage, ServerResponse } from 'node:http';
import { connect as connectHttp2 } from 'node:http2';
import { type AddressInfo, connect, createServer, Socket } from 'node:net';
import { text } from 'node:stream/consumers';
import { gzipSync } from 'node:zlib';
import { status as grpcStatus } from '@grpc/grpc-js';
import { expect, onTestFinished, test } from 'vitest';
import { ConnectionLimiter } from '../../broker/connection-limiter.ts';
import { beginKeyedFirst, keylessPerTurn } from '../../broker/http/server.ts';
import type { Tuning } from '../../broker/start/index.ts';
import { refusalOf, streamsOf } from '../grpc-fixture.ts';
import {
  callFields,
  endHeaders,
  type FrameClient,
  fields,
  frame,
  frameClient,
  kinds,
  messageHead,
} from '../http2-frames.ts';
import { startFarhand, type TestSystem, temporaryFolder } from '../start-farhand.ts';
import { waitFor } from '../wait-for.ts';

// ---- HTTP

async function dial(system: TestSystem): Promise<Socket> {
  const { hostname, port } = new URL(system.url);
  const socket = connect(Number(port), hostname);
  onTestFinished(() => void socket.destroy());
  socket.on('error', () => undefined);
  await once(socket, 'connect');
  return socket;
}

const closed = (socket: Socket): Promise<void> =>
  new Promise((resolve) => socket.resume().once('close', () => resolve()));

/** Sends a request with a key on an open connection. Resolves at the first bytes of the answer. */
async function askOn(socket: Socket, system: TestSystem, path: string): Promise<string> {
  socket.write(`GET /api/v1${path} HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer ${system.key}\r\n\r\n`);
  const [bytes] = await Promise.race([
    once(socket, 'data'),
    once(socket, 'close').then(() => [Buffer.from('cut')]),
  ]);
  return String(bytes).split('\r\n')[0] ?? '';
}

const ok = 'HTTP/1.1 200 OK';

test('a silent connection, and one that sends its headers too slowly, are cut in time', async () => {
  const system = await startFarhand({ tuning: { silentMs: 300 } });
  const silent = await dial(system);
  const slow = await dial(system);
  const dripping = setInterval(() => slow.write('X'), 50);
  onTestFinished(() => clearInterval(dripping));
  slow.write('GET /healthz HTTP/1.1\r\nHost: b\r\nX-Slow: ');
  const [nothing, answer] = await Promise.all([text(silent), text(slow).catch(() => '')]);
  expect(nothing).toBe('');
  expect(answer).toMatch(/^(HTTP\/1\.1 400 [\s\S]*did not arrive in time[\s\S]*)?$/);
  expect((await system.call('GET', '/machines')).status).toBe(200);
});

const connections: Tuning['connections'] = { connections: 12, unauthenticated: 6 };

test('unauthenticated connections are cut for new ones, the longest silent first; those with a key are not', async () => {
  const system = await startFarhand({ tuning: { connections } });
  // One connection with a key is idle, and the other follows events.
  const [idle, busy] = [await dial(system), await dial(system)];
  expect(await askOn(idle, system, '/machines')).toBe(ok);
  expect(await askOn(busy, system, '/events/stream')).toBe(ok);
  const strangers: Socket[] = [];
  const gone = new Set<number>();
  for (let n = 0; n < 20; n += 1) {
    const socket = await dial(system);
    void closed(socket).then(() => gone.add(n));
    strangers.push(socket);
  }
  await waitFor(() => expect(gone.size).toBe(14));
  expect([...gone].toSorted((a, b) => a - b)).toEqual(Array.from({ length: 14 }, (_, n) => n));
  expect([idle.destroyed, busy.destroyed]).toEqual([false, false]);
  expect(await askOn(idle, system, '/machines')).toBe(ok);
  expect((await system.call('GET', '/machines')).status).toBe(200);
});

test('a new connection is cut if all others have open requests with keys; an idle connection is cut for a new one', async () => {
  const system = await startFarhand({ tuning: { connections: { connections: 3, unauthenticated: 3 } } });
  const busy = [await dial(system), await dial(system)];
  for (const socket of busy) expect(await askOn(socket, system, '/events/stream')).toBe(ok);
  const idle = await dial(system);
  const idleGone = closed(idle);
  expect(await askOn(idle, system, '/machines')).toBe(ok);
  const next = await dial(system);
  await idleGone;
  expect(await askOn(next, system, '/events/stream')).toBe(ok);
  await closed(await dial(system));
  expect([...busy, next].map((socket) => socket.destroyed)).toEqual([false, false, false]);
  busy[0]?.destroy();
  await waitFor(async () => expect(await askOn(await dial(system), system, '/machines')).toBe(ok));
});

test('sixteen requests sent at once are answered in order; a connection that sends far more is closed', async () => {
  const system = await startFarhand();
  const one = (n: number) => `GET /healthz HTTP/1.1\r\nHost: b\r\nX-Request-Id: n${n}\r\n\r\n`;
  const breath = (count: number): string => Array.from({ length: count }, (_, n) => one(n)).join('');
  const socket = await dial(system);
  let heard = '';
  socket.on('data', (bytes) => {
    heard += String(bytes);
  });
  const ids = () => [...heard.matchAll(/X-Request-Id: n(\d+)/gi)].map(([, n]) => Number(n));
  socket.write(breath(16));
  const sixteen = Array.from({ length: 16 }, (_, n) => n);
  await waitFor(() => expect(ids()).toEqual(sixteen));
  socket.write(breath(16));
  await waitFor(() => expect(ids()).toEqual([...sixteen, ...sixteen]));
  const greedy = await dial(system);
  greedy.write(breath(1_500));
  await closed(greedy);
  expect((await system.call('GET', '/machines')).status).toBe(200);
});

test('connections that never read the reference page use little memory', async () => {
  const system = await startFarhand();
  const before = process.memoryUsage().arrayBuffers;
  const sockets = await Promise.all(Array.from({ length: 20 }, () => dial(system)));
  for (const socket of sockets) {
    socket.pause();
    socket.write('GET /docs/redoc.standalone.js HTTP/1.1\r\nHost: b\r\n\r\n'.repeat(16));
  }
  for (let n = 0; n < 50; n += 1) expect((await system.call('GET', '/machines')).status).toBe(200);
  expect(process.memoryUsage().arrayBuffers - before).toBeLessThan(64 * 1024 * 1024);
});

test('16 requests without a key begin in each turn of the event loop; one with a key begins at once', async () => {
  const begun: string[] = [];
  const handle = async ({ url = '' }: IncomingMessage): Promise<void> => void begun.push(url);
  const begin = beginKeyedFirst(handle, ({ headers }) => headers.authorization !== undefined);
  const ask = (url: string): void => {
    const request = Object.assign(new IncomingMessage(new Socket()), { url });
    if (url === 'keyed') request.headers.authorization = 'Bearer good';
    begin(request, new ServerResponse(request));
  };
  const turn = () => new Promise<void>((resolve) => setImmediate(resolve));
  for (let n = 0; n < 100; n += 1) ask('other');
  ask('keyed');
  expect(begun).toEqual(['keyed']);
  // The first group begins in the turn of its arrival, and the second one in the next turn.
  await turn();
  expect(begun).toHaveLength(1 + 2 * keylessPerTurn);
  ask('late');
  while (begun.length < 1 + 101) await turn();
  expect(begun.at(-1)).toBe('late');
});

test('one source may have a quarter of the connections without a key, and does not displace another', async () => {
  const limiter = new ConnectionLimiter({ connections: 100, unauthenticated: 8, isShared: () => false });
  const server = createServer((socket) => limiter.accept(socket));
  await once(server.listen(0, '127.0.0.1'), 'listening');
  onTestFinished(async () => {
    server.close();
    await limiter.close();
  });
  const { port } = server.address() as AddressInfo;
  const from = async (localAddress: string): Promise<Socket> => {
    const socket = connect({ port, host: '127.0.0.1', localAddress });
    onTestFinished(() => void socket.destroy());
    await once(socket, 'connect');
    return socket;
  };
  const quiet = await from('127.0.0.3');
  const greedy = [await from('127.0.0.2'), await from('127.0.0.2')];
  for (const oldest of greedy) {
    const gone = closed(oldest);
    await from('127.0.0.2');
    await gone;
  }
  expect(quiet.destroyed).toBe(false);
});

test('half a million invalid array elements are refused with a short answer', async () => {
  const system = await startFarhand();
  const tags = `[${'0,'.repeat(500_000)}0]`;
  const { status, body } = await system.call('POST', '/join-tokens', { body: `{"tags":${tags}}` });
  expect([status, body.error.code]).toEqual([422, 'validation_failed']);
  expect(JSON.stringify(body).length).toBeLessThan(20_000);
  expect((await system.call('GET', '/join-tokens')).body.meta.total).toBe(0);
});

test('every answer forbids browsers to store it, frame it or load anything from it', async () => {
  const system = await startFarhand();
  const socket = await dial(system);
  socket.write('nonsense\r\n\r\n');
  const [malformed] = await once(socket, 'data');
  const wanted = {
    'cache-control': 'no-store',
    'content-security-policy': "default-src 'none'; frame-ancestors 'none'",
    'cross-origin-resource-policy': 'same-origin',
    'referrer-policy': 'no-referrer',
    'x-content-type-options': 'nosniff',
    'x-frame-options': 'DENY',
  };
  for (const [name, value] of Object.entries(wanted)) {
    expect(String(malformed).toLowerCase()).toContain(`${name}: ${value.toLowerCase()}\r\n`);
  }
  for (const [method, path, key] of [
    ['GET', '/healthz', null],
    ['GET', '/docs', null],
    ['GET', '/docs/page.js', null],
    ['GET', '/api/v1/openapi.json', null],
    ['GET', '/api/v1/machines', null],
    ['GET', '/api/v1/machines', system.key],
    ['GET', '/api/v1/nothing', system.key],
    ['OPTIONS', '/api/v1/machines', system.key],
    ['POST', '/api/v1/join-tokens', system.key],
  ] as const) {
    const { headers } = await fetch(system.url + path, {
      method,
      headers: key === null ? {} : { Authorization: `Bearer ${key}` },
    });
    const page = path === '/docs';
    for (const [name, value] of Object.entries(wanted)) {
      // Browsers may store the page and its files, but must ask the broker each time whether they have changed.
      if (headers.has('etag') && name === 'cache-control') expect(headers.get(name)).toBe('no-cache');
      else if (page && name === 'content-security-policy') {
        expect(headers.get(name)).toMatch(/^default-src 'none';.*; frame-ancestors 'none';/);
      } else expect([path, name, headers.get(name)]).toEqual([path, name, value]);
    }
    for (const silent of [
      'server',
      'x-powered-by',
      'strict-transport-security',
      'access-control-allow-origin',
    ]) {
      expect([path, silent, headers.get(silent)]).toEqual([path, silent, null]);
    }
  }
});

test('a simple POST of a page of another origin has no effect', async () => {
  const system = await startFarhand();
  for (const type of ['text/plain', 'application/x-www-form-urlencoded', 'multipart/form-data; boundary=x']) {
    const headers = { 'Content-Type': type, Origin: 'https://evil.example' };
    const without = await system.call('POST', '/join-tokens', { key: null, body: '{"uses":1}', headers });
    const known = await system.call('POST', '/join-tokens', { body: '{"uses":1}', headers });
    expect([type, without.status, known.status]).toEqual([type, 401, 400]);
  }
  expect((await system.call('GET', '/join-tokens')).body.meta.total).toBe(0);
});

// ---- gRPC

const enrolPath = '/farhand.link.v1.Link/Enroll';

/** Starts a system with a machine. `standing` checks that the broker still answers requests. */
async function besieged(tuning: Tuning = {}) {
  const system = await startFarhand({ tuning });
  const { machineId: machine_id } = await system.agent();
  const folder = temporaryFolder('besieged');
  return {
    system,
    async standing(): Promise<void> {
      const listed = await system.client.files.list({ machine_id, path: folder });
      expect(listed).toBeTruthy();
      expect((await system.client.machines.get({ machine_id })).status).toBe('online');
    },
  };
}

/** Sends the frames of `next` up to `count` times, until the broker closes the connection. */
async function pour(client: FrameClient, count: number, next: (n: number) => Buffer[]): Promise<number> {
  let sent = 0;
  while (sent < count && !client.socket.destroyed) {
    const frames: Buffer[] = [];
    for (let n = 0; n < 100; n += 1, sent += 1) frames.push(...next(sent));
    await client.send(...frames);
    await new Promise((resolve) => setImmediate(resolve));
  }
  return sent;
}

test('streams that are opened and reset at once end their connection, without effect on other clients', async () => {
  const { system, standing } = await besieged();
  const client = await frameClient(system.grpc);
  const head = callFields(enrolPath);
  const cancel = Buffer.of(0, 0, 0, 8);
  await pour(client, 50_000, (n) => [
    frame(kinds.headers, endHeaders, 2 * n + 1, head),
    frame(kinds.reset, 0, 2 * n + 1, cancel),
  ]);
  await client.closed;
  await standing();
});

test('headers that never end are cut off', async () => {
  const { system, standing } = await besieged();
  const client = await frameClient(system.grpc);
  await client.send(frame(kinds.headers, 0, 1, callFields(enrolPath)));
  const more = fields({ 'x-more': 'x'.repeat(100) });
  const sent = await pour(client, 100_000, () => [frame(kinds.continuation, 0, 1, more)]);
  await client.closed;
  expect(sent).toBeLessThan(100_000);
  await standing();
});

test.each([
  ['pings', () => frame(kinds.ping, 0, 0, Buffer.alloc(8))],
  ['settings', () => frame(kinds.settings, 0, 0, Buffer.of(0, 4, 0, 0, 255, 255))],
  ['empty data', () => frame(kinds.data, 0, 1)],
])('a flood of %s ends, whether its answers are read or not', async (_what, next) => {
  const { system, standing } = await besieged({ proofMs: 1_500 });
  const reading = await frameClient(system.grpc);
  const deaf = await frameClient(system.grpc);
  deaf.socket.pause();
  await Promise.all(
    [reading, deaf].map(async (client) => {
      await client.send(frame(kinds.headers, endHeaders, 1, callFields(enrolPath)));
      await pour(client, 200_000, () => [next()]);
    }),
  );
  await standing();
  deaf.socket.resume();
  await Promise.all([reading.closed, deaf.closed]);
});

test('a connection without a key may make 32 calls, and the 33rd ends it; with a key it may have 512 at once', async () => {
  const { system, standing } = await besieged();
  const client = await frameClient(system.grpc);
  const open = (n: number) => frame(kinds.headers, endHeaders, 2 * n + 1, callFields(enrolPath));
  await client.send(...Array.from({ length: 32 }, (_, n) => open(n)));
  const pinged = once(client.socket, 'data');
  await client.send(frame(kinds.ping, 0, 0, Buffer.alloc(8)));
  await pinged;
  expect(client.socket.destroyed).toBe(false);
  await client.send(open(32));
  await client.closed;
  const session = connectHttp2(`https://${system.grpc}`, { rejectUnauthorized: false });
  onTestFinished(() => session.destroy());
  const settings = await new Promise<{ maxConcurrentStreams?: number }>((resolve) =>
    session.once('remoteSettings', resolve),
  );
  expect(settings.maxConcurrentStreams).toBe(512);
  // All calls are sent at once on a new connection. The limit of 32 calls applies only to connections without a key.
  // The key of the first call arrives before any message of another call.
  const streams = await streamsOf(system);
  const command_id = `cmd_${'0'.repeat(22)}`;
  const refusals = Array.from({ length: 100 }, () => refusalOf(streams.followCommand({ command_id })));
  const codes = (await Promise.all(refusals)).map(({ code }) => code);
  expect(new Set(codes)).toEqual(new Set(['command_not_found']));
  await standing();
});

test('messages of unauthenticated calls end their connection at 256 KiB', async () => {
  const { system, standing } = await besieged({ proofMs: 60_000 });
  const client = await frameClient(system.grpc);
  const chunk = Buffer.alloc(16 * 1024);
  await client.send(frame(kinds.headers, endHeaders, 1, callFields(enrolPath)));
  await client.send(frame(kinds.data, 0, 1, messageHead(1024 * 1024)));
  // After 15 chunks of 16 KiB (240 KiB in all) the connection is still open. Two more chunks exceed the limit of 256
  // KiB.
  const answered = async (): Promise<void> => {
    const data = once(client.socket, 'data');
    await client.send(frame(kinds.ping, 0, 0, Buffer.alloc(8)));
    await data;
  };
  for (let n = 0; n < 15; n += 1) await client.send(frame(kinds.data, 0, 1, chunk));
  await answered();
  expect(client.socket.destroyed).toBe(false);
  for (let n = 0; n < 2; n += 1) await client.send(frame(kinds.data, 0, 1, chunk));
  await client.closed;
  await standing();
});

const bomb = () => gzipSync(Buffer.alloc(64 * 1024 * 1024));

test('a connection without a key that sends compressed messages is cut before they are decompressed', async () => {
  const { system, standing } = await besieged({ proofMs: 60_000 });
  const client = await frameClient(system.grpc);
  await client.send(frame(kinds.headers, endHeaders, 1, callFields(enrolPath, { 'grpc-encoding': 'gzip' })));
  await client.closed;
  await standing();
});

test.each([
  ['a message whose head announces more than the limit', messageHead(0xffffffff), Buffer.alloc(0)],
  ['a message that is no protobuf', messageHead(4), Buffer.from('\xff\xff\xff\xff', 'latin1')],
  ['a small message that unpacks to 64 MiB, from a client with a key,', null, bomb()],
])('%s is refused without effect on other clients', async (_what, head, body) => {
  const { system, standing } = await besieged();
  const session = connectHttp2(`https://${system.grpc}`, { rejectUnauthorized: false });
  onTestFinished(() => session.destroy());
  const call = session.request({
    ':method': 'POST',
    ':path': enrolPath,
    'content-type': 'application/grpc',
    te: 'trailers',
    'grpc-encoding': head ? 'identity' : 'gzip',
    ...(!head && { authorization: `Bearer ${system.key}` }),
  });
  call.on('error', () => undefined);
  const status = new Promise<number>((resolve) => {
    for (const name of ['response', 'trailers'] as const) {
      call.on(name, (headers: Record<string, unknown>) => {
        if (headers['grpc-status'] !== undefined) resolve(Number(headers['grpc-status']));
      });
    }
  });
  call.resume();
  call.end(Buffer.concat([head ?? messageHead(body.length, true), body]));
  expect([grpcStatus.RESOURCE_EXHAUSTED, grpcStatus.INTERNAL, grpcStatus.INVALID_ARGUMENT]).toContain(
    await status,
  );
  await standing();
});

test('silent connections at the port of agents are cut in favour of an agent', async () => {
  const { system, standing } = await besieged();
  const [host = '', port = ''] = system.grpc.split(':');
  const sockets = Array.from({ length: 700 }, () => connect(Number(port), host));
  for (const socket of sockets) socket.on('error', () => undefined);
  onTestFinished(() => {
    for (const socket of sockets) socket.destroy();
  });
  await Promise.all(sockets.map((socket) => once(socket, 'connect').catch(() => undefined)));
  await system.agent({ name: 'late' });
  await standing();
});
