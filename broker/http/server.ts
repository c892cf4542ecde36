// The HTTP server: its limits, the connections it accepts, and its answers to malformed requests.
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
import { type ConnectionLimiter, logAcceptErrors } from '../connection-limiter.ts';
import { type AppOptions, createApp, headersOfAll } from './app.ts';
import { createClients } from './dispatch.ts';
import { jsonType } from './reply.ts';
import { WebSocketUpgrades } from './websocket.ts';

/** Settings that differ between the broker's HTTP servers. */
export interface Port {
  /** Limits connections; undefined for the broker's own socket file, whose callers need no key. */
  connections?: ConnectionLimiter;
  /** Milliseconds within which the headers of the first request must arrive. */
  silentMs: number;
  /** Serves over TLS. */
  tls?: SecureContextOptions | undefined;
  /** Tells browsers to use only TLS from now on (HSTS). */
  hsts: boolean;
}

/** A client that neither reads nor sends for this long, while the broker waits for it, is cut. */
const stalledMs = 70_000;

/** Limits of Node's HTTP server, which cut clients that send nothing. */
const serverOptions: ServerOptions = {
  maxHeaderSize: 16 * 1024,
  // No limit here, because uploads may be slow; JSON bodies have their own limit, and stalled clients are
  // cut.
  requestTimeout: 0,
  // Larger pieces for uploads whose processing is slower than the client.
  highWaterMark: 256 * 1024,
  keepAliveTimeout: 65_000,
  // assertFraming() in app.ts answers a missing Host header, in the envelope.
  requireHostHeader: false,
};

/** Answers to requests that Node could not parse, by the code of Node's error. */
const refusals: Readonly<Record<string, readonly [status: string, code: string, message: string]>> = {
  HPE_HEADER_OVERFLOW: [
    '413 Content Too Large',
    'payload_too_large',
    'there must not be more than 100 headers, nor more than 16 KiB of them',
  ],
  ERR_SSL_HTTP_REQUEST: ['400 Bad Request', 'invalid_request', 'this port speaks TLS: call it as https://'],
  ERR_HTTP_REQUEST_TIMEOUT: ['400 Bad Request', 'invalid_request', 'the request did not arrive in time'],
};

/** Most requests without a key that begin in one turn of the event loop; each takes 0.1 ms. */
export const keylessPerTurn = 16;

/** Creates an HTTP server for all routes. */
export function createHttpServer(options: AppOptions, { connections, silentMs, tls, hsts }: Port): Server {
  const headers = headersOfAll(hsts);
  const clients = createClients(options, connections);
  const door = new WebSocketUpgrades(options);
  const handle = createApp(options, { clients, door, headers, local: !connections }).callback();
  const begin = beginKeyedFirst(handle, clients.hasKey);
  const take = (request: IncomingMessage, response: ServerResponse): void => {
    // The connection may have ended in the same packet as the request.
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
    // A ticket counts as authentication. The request of a WebSocket is never answered, so begin() is not
    // undone.
    connections?.authenticate(request.socket);
    connections?.begin(request.socket);
    door.take(request, socket, head);
  });
  // The dispatcher sends 100 Continue once the request is authorized.
  server.on('checkContinue', take);
  // An unknown Expect header may be ignored (RFC 9110 section 10.1.1).
  server.on('checkExpectation', take);
  server.maxHeadersCount = 100;
  server.timeout = stalledMs;
  server.on('clientError', refuse);
  server.on('connect', (_request, socket) => refuse(new Error('no tunnels here'), socket));
  return server;
}

/**
 * Begins requests with a valid key at once and others in small groups, so that a request with a key waits for
 * few others.
 */
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

/** Cuts a stalled client, but not a client that waits for the broker: a large copy may take long. */
function cutStalled({ req, socket, writableEnded }: ServerResponse): void {
  const ours = !writableEnded && req.complete && socket?.writableLength === 0;
  if (ours) socket?.setTimeout(stalledMs);
  else req.socket.destroy();
}

/** Answers malformed HTTP in the envelope; such a request never reaches koa. */
function refuseMalformed(
  error: NodeJS.ErrnoException,
  socket: Duplex,
  headers: Readonly<Record<string, string>>,
): void {
  // Node has removed its own error listener, and an unhandled error event would end the process.
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
