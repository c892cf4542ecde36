// The HTTP server: its limits, the connections that it accepts, and the answers to malformed requests. Well-formed
// requests are answered by the Koa application.
import {
  createServer,
  type IncomingMessage,
  type Server,
  type ServerOptions,
  type ServerResponse,
  STATUS_CODES,
} from 'node:http';
import { createServer as createTlsServer } from 'node:https';
import { Socket } from 'node:net';
import type { Duplex } from 'node:stream';
import type { SecureContextOptions } from 'node:tls';
import { AppError } from '../../shared/errors.ts';
import { newId, requestIdFrom } from '../../shared/ids-and-secrets.ts';
import type { Logger } from '../../shared/logger.ts';
import { logAcceptErrors } from '../connection-limiter.ts';
import { TurnLimit } from '../event-loop-turn-limit.ts';
import type { Client } from '../request-checks/authenticate.ts';
import { publicError } from '../request-checks/public-error.ts';
import {
  type AppOptions,
  type AppPort,
  createApp,
  type Headers,
  headersOfAll,
  retryHeaders,
} from './application.ts';
import { createClients } from './handle-route-request.ts';
import { jsonType } from './reply.ts';
import { WebSocketUpgrades } from './terminal-websocket-upgrades.ts';

/** Settings that differ between the broker's HTTP servers. */
export interface Port extends AppPort {
  /**
   * Finds the client of a request that another broker forwarded. That broker has authenticated the client. Set only for
   * the peer port.
   */
  forwardedClient?: (request: IncomingMessage) => Promise<Client>;
  /** Timeout in milliseconds for the headers of a request, and for the TLS handshake. */
  silentMs: number;
  /** Certificate and private key; undefined for a server without TLS. */
  tls?: SecureContextOptions | undefined;
  /** True if answers have the header Strict-Transport-Security. Browsers that received it connect only with TLS. */
  hsts: boolean;
}

/**
 * Milliseconds after which a stalled client is disconnected. A client is stalled if the broker waits for it, but it
 * neither reads nor sends.
 */
const stalledMs = 70_000;

/** Options of Node's HTTP server. `keepAliveTimeout` disconnects clients that send no further request. */
const serverOptions: ServerOptions = {
  maxHeaderSize: 16 * 1024,
  // Requests have no time limit here, because uploads may be slow. JSON bodies have a limit of their own, and
  // stalled clients are disconnected.
  requestTimeout: 0,
  // Number of bytes that a socket buffers for its reader. It is large, because an upload can arrive faster than it is
  // processed.
  highWaterMark: 256 * 1024,
  keepAliveTimeout: 65_000,
  // This is off, because assertFraming() refuses requests without a Host header, with an error in the form of the
  // API.
  requireHostHeader: false,
};

/** Limits for the headers of a request from another broker, which adds its own headers to those of the client. */
const forwardedHeaderBytes = 20 * 1024;
const forwardedHeaders = 110;

/** Messages for requests that Node could not parse, by the code of Node's error. */
const refusals: Readonly<Record<string, string>> = {
  HPE_HEADER_OVERFLOW: 'the request has too many headers: send at most 100, of at most 16 KiB in all',
  ERR_SSL_HTTP_REQUEST: 'the request is plain HTTP, but this port expects TLS: use https://',
  ERR_HTTP_REQUEST_TIMEOUT: 'the headers of the request did not arrive in time: send the request again',
};

/** Maximum number of requests without a key that begin in one turn of the event loop; each takes 0.1 ms. */
export const keylessPerTurn = 16;

export function createHttpServer(options: AppOptions, port: Port): Server {
  const { connections, forwardedClient, silentMs, tls, hsts } = port;
  const headers = headersOfAll(hsts);
  const clients = createClients(options, port);
  const upgrades = new WebSocketUpgrades(options, forwardedClient !== undefined);
  const handle = createApp(options, clients, upgrades, headers, port).callback();
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
    ...(forwardedClient && { maxHeaderSize: forwardedHeaderBytes }),
    headersTimeout: silentMs,
    connectionsCheckingInterval: Math.min(5_000, silentMs),
    shouldUpgradeCallback: (request: IncomingMessage) => upgrades.admits(request),
  };
  const secure = { ...own, ...tls, ALPNProtocols: ['http/1.1'], handshakeTimeout: silentMs };
  const server = tls ? createTlsServer(secure, take) : createServer(own, take);
  const refuse = (error: NodeJS.ErrnoException, socket: Duplex): void =>
    refuseMalformed(error, socket, headers);
  if (!forwardedClient) server.on('connection', (socket: Socket) => connections?.accept(socket));
  logAcceptErrors(server, options.log);
  server.on('tlsClientError', (error: NodeJS.ErrnoException, socket: Socket) => {
    const below = connections?.tcpSocketBelow(socket);
    if (error.code === 'ERR_SSL_HTTP_REQUEST' && below) refuse(error, below);
    else below?.destroy();
  });
  server.on('upgrade', (request, socket, head) => {
    // The ticket in the URL authenticates the connection of a WebSocket.
    const authenticate = (): void => connections?.authenticate(request.socket);
    // The function that begin() returns is not called: a WebSocket counts as a request until its connection closes.
    connections?.begin(request.socket);
    const forwarding = upgrades.forward(request, socket, head);
    if (forwarding)
      forwarding.then(
        (opened) => opened && authenticate(),
        (error: unknown) => refuseUpgrade(error, request, socket, options.log, headers),
      );
    else {
      authenticate();
      upgrades.take(request, socket, head);
    }
  });
  // The dispatcher sends 100 Continue once the request is authorized.
  server.on('checkContinue', take);
  // An unknown Expect header may be ignored (RFC 9110 section 10.1.1).
  server.on('checkExpectation', take);
  server.maxHeadersCount = forwardedClient ? forwardedHeaders : 100;
  server.timeout = stalledMs;
  server.on('clientError', refuse);
  server.on('connect', (_request, socket) => refuse(new Error('CONNECT is not supported'), socket));
  return server;
}

/**
 * Begins a request with a valid key immediately. All other requests begin in small groups, one group per turn of the
 * event loop. A request with a key thus waits for few others.
 */
export function beginKeyedFirst(
  handle: (request: IncomingMessage, response: ServerResponse) => Promise<void>,
  hasKey: (request: IncomingMessage) => boolean,
): (request: IncomingMessage, response: ServerResponse) => void {
  const keyless = new TurnLimit(keylessPerTurn);
  return (request, response) => {
    const begin = (): void => {
      if (!request.socket.destroyed) void handle(request, response);
    };
    if (hasKey(request)) begin();
    else void keyless.enter().then(begin);
  };
}

/**
 * Called if no data was transferred for `stalledMs`. Disconnects the client, unless it waits for the broker: an
 * operation such as a large copy may take longer.
 */
function cutStalled({ req, socket, writableEnded }: ServerResponse): void {
  const ours = !writableEnded && req.complete && socket?.writableLength === 0;
  if (ours) socket?.setTimeout(stalledMs);
  else req.socket.destroy();
}

/** Answers malformed HTTP in the envelope; koa gets only well-formed requests. */
function refuseMalformed(error: NodeJS.ErrnoException, socket: Duplex, headers: Headers): void {
  // Node has removed its own listener, and an error event without a listener would end the process.
  socket.on('error', () => socket.destroy());
  if (!socket.writable || error.code === 'ECONNRESET' || isUnused(socket)) return void socket.destroy();
  const message = refusals[error.code ?? ''] ?? 'the request is not valid HTTP';
  const tooLarge = error.code === 'HPE_HEADER_OVERFLOW';
  const code = tooLarge ? 'payload_too_large' : 'invalid_request';
  endWithError(socket, new AppError(code, message), { ...headers, 'X-Request-Id': newId('request') });
}

/**
 * True if nothing has arrived on a connection. Browsers open connections in advance, and would take an error here for
 * the answer to their first request.
 */
const isUnused = (socket: Duplex): boolean => socket instanceof Socket && socket.bytesRead === 0;

/** Answers a request for a WebSocket that could not be forwarded. */
function refuseUpgrade(
  error: unknown,
  request: IncomingMessage,
  socket: Duplex,
  log: Logger,
  headers: Headers,
): void {
  const request_id = requestIdFrom(String(request.headers['x-request-id'] ?? ''));
  const refusal = publicError(error, { request_id, path: request.url ?? '' }, log);
  endWithError(socket, refusal, { ...headers, ...retryHeaders(refusal), 'X-Request-Id': request_id });
}

/** Sends an error in the envelope over a bare socket, and ends the connection. */
function endWithError(socket: Duplex, error: AppError, headers: Headers): void {
  const { status, code, message, details } = error;
  const body = JSON.stringify({ error: { code, message, details } });
  const head = {
    ...headers,
    'Content-Type': jsonType,
    'Content-Length': String(Buffer.byteLength(body)),
    Connection: 'close',
  };
  const lines = Object.entries(head).map(([name, value]) => `${name}: ${value}\r\n`);
  socket.end(`HTTP/1.1 ${status} ${STATUS_CODES[status]}\r\n${lines.join('')}\r\n${body}`);
}
