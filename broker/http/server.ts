// The HTTP server: its limits, the connections it accepts, and answers to what is not valid HTTP.
import {
  createServer,
  type IncomingMessage,
  type Server,
  type ServerOptions,
  type ServerResponse,
} from 'node:http';
import { createServer as createTlsServer } from 'node:https';
import type { Socket } from 'node:net';
import type { Duplex } from 'node:stream';
import type { SecureContextOptions } from 'node:tls';
import { newId } from '../../shared/ids.ts';
import { type ConnectionLimiter, logAcceptErrors } from '../connections.ts';
import { type AppOptions, createApp, headersOfAll } from './app.ts';
import { Clients } from './dispatch.ts';
import { jsonType } from './reply.ts';
import { WebSocketUpgrades } from './websocket.ts';

/** What one server has of its own. */
export interface Port {
  /** Absent for the broker's own socket file, whose callers need no key. */
  connections?: ConnectionLimiter;
  /** Milliseconds within which the headers of the first request must arrive. */
  silentMs: number;
  /** Serves over TLS. */
  tls?: SecureContextOptions | undefined;
  /** Makes browsers use only TLS from now on (HSTS). */
  hsts: boolean;
}

/** A client that neither reads nor sends for this long, while the broker waits for it, is cut. */
const stalledMs = 70_000;

/** Limits of the HTTP server itself: a silent or endless request is cut. */
const serverOptions: ServerOptions = {
  maxHeaderSize: 16 * 1024,
  // Uploads may be slow; JSON bodies have a limit of their own, and stalled clients are cut.
  requestTimeout: 0,
  // An upload that is slower than its client then goes on in larger pieces.
  highWaterMark: 256 * 1024,
  keepAliveTimeout: 65_000,
  // We answer that ourselves, in the envelope.
  requireHostHeader: false,
};

/** Refusals of what never becomes a request, by the code of Node's error. */
const refusals: Readonly<Record<string, readonly [status: string, code: string, message: string]>> = {
  HPE_HEADER_OVERFLOW: [
    '413 Content Too Large',
    'payload_too_large',
    'there must not be more than 100 headers, nor more than 16 KiB of them',
  ],
  ERR_SSL_HTTP_REQUEST: ['400 Bad Request', 'invalid_request', 'this port speaks TLS: call it as https://'],
  ERR_HTTP_REQUEST_TIMEOUT: ['400 Bad Request', 'invalid_request', 'the request did not arrive in time'],
};

/** Requests without a key that begin in one turn of the event loop; each takes 0.1 ms. */
export const keylessPerTurn = 16;

/** An HTTP server over the table. */
export function createHttpServer(options: AppOptions, { connections, silentMs, tls, hsts }: Port): Server {
  const headers = headersOfAll(hsts);
  const clients = new Clients(options, connections);
  const door = new WebSocketUpgrades(options);
  const handle = createApp(options, { clients, door, headers, local: !connections }).callback();
  const begin = beginKeyedFirst(handle, (request) => clients.hasKey(request));
  const take = (request: IncomingMessage, response: ServerResponse): void => {
    // It arrived together with the end of its connection.
    if (request.socket.destroyed) return;
    const answered = connections?.begin(request.socket);
    if (connections && !answered) return;
    if (answered) response.once('close', answered);
    response.on('timeout', () => cutStalled(response));
    begin(request, response);
  };
  const own = {
    ...serverOptions,
    headersTimeout: silentMs,
    connectionsCheckingInterval: Math.min(5_000, silentMs),
    shouldUpgradeCallback: (request: IncomingMessage) => door.admits(request),
  };
  const secure = { ...own, ...tls, ALPNProtocols: ['http/1.1'], handshakeTimeout: silentMs };
  const server = tls ? createTlsServer(secure, take) : createServer(own, take);
  const refuse = (error: NodeJS.ErrnoException, socket: Duplex): void =>
    refuseMalformed(error, socket, headers);
  server.on('connection', (socket: Socket) => connections?.accept(socket));
  logAcceptErrors(server, options.log);
  server.on('tlsClientError', (error: NodeJS.ErrnoException, socket: Socket) => {
    const below = connections?.below(socket);
    if (error.code === 'ERR_SSL_HTTP_REQUEST' && below) refuse(error, below);
    else below?.destroy();
  });
  server.on('upgrade', (request, socket, head) => {
    // Its ticket was as good as a key, and it never has its last answer.
    connections?.authenticate(request.socket);
    connections?.begin(request.socket);
    door.take(request, socket, head);
  });
  // dispatch asks for the body, once the request is authorized.
  server.on('checkContinue', take);
  // An unknown expectation may be ignored (RFC 9110 section 10.1.1).
  server.on('checkExpectation', take);
  server.maxHeadersCount = 100;
  server.timeout = stalledMs;
  server.on('clientError', refuse);
  server.on('connect', (_request, socket) => refuse(new Error('no tunnels here'), socket));
  return server;
}

/** Begins requests with a valid key at once, and of the others so many per turn: a request with a key waits for few. */
export function beginKeyedFirst(
  handle: (request: IncomingMessage, response: ServerResponse) => Promise<void>,
  hasKey: (request: IncomingMessage) => boolean,
): (request: IncomingMessage, response: ServerResponse) => void {
  const waiting: (() => void)[] = [];
  const turn = (): void => {
    const some = waiting.splice(0, keylessPerTurn);
    if (waiting.length > 0) setImmediate(turn);
    for (const begin of some) begin();
  };
  return (request, response) => {
    const begin = (): void => {
      if (!request.socket.destroyed) void handle(request, response);
    };
    if (hasKey(request)) begin();
    else if (waiting.push(begin) === 1) setImmediate(turn);
  };
}

/** Cuts a client that stalls, but not one that waits for us: a large copy may take long. */
function cutStalled({ req, socket, writableEnded }: ServerResponse): void {
  const ours = !writableEnded && req.complete && socket?.writableLength === 0;
  if (ours) socket?.setTimeout(stalledMs);
  else req.socket.destroy();
}

/** What is not HTTP never reaches koa; it still gets the envelope. */
function refuseMalformed(
  error: NodeJS.ErrnoException,
  socket: Duplex,
  headers: Readonly<Record<string, string>>,
): void {
  // Node has taken its own listener away, and an error without one ends the process.
  socket.on('error', () => socket.destroy());
  if (!socket.writable || error.code === 'ECONNRESET') return void socket.destroy();
  const [status, code, message] = refusals[error.code ?? ''] ?? [
    '400 Bad Request',
    'invalid_request',
    'this is not a valid HTTP request',
  ];
  const body = JSON.stringify({ error: { code, message, details: {} } });
  const head = {
    ...headers,
    'X-Request-Id': newId('request'),
    'Content-Type': jsonType,
    'Content-Length': String(Buffer.byteLength(body)),
    Connection: 'close',
  };
  const lines = Object.entries(head).map(([name, value]) => `${name}: ${value}\r\n`);
  socket.end(`HTTP/1.1 ${status}\r\n${lines.join('')}\r\n${body}`);
}
