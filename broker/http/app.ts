// The koa application: request id, errors in the envelope, then the table of routes.
import {
  createServer,
  type IncomingMessage,
  type RequestListener,
  type Server,
  type ServerOptions,
  type ServerResponse,
} from 'node:http';
import { createServer as createTlsServer } from 'node:https';
import type { Socket } from 'node:net';
import { type Duplex, Readable } from 'node:stream';
import type { SecureContextOptions } from 'node:tls';
import Router from '@koa/router';
import Koa, { type Context, type Next } from 'koa';
import type { Handlers } from '../../shared/api/index.ts';
import { allRoutes } from '../../shared/api/index.ts';
import type { Route } from '../../shared/api/route.ts';
import { type Budget, openBudget } from '../../shared/budget.ts';
import { after, monotonic } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';
import type { Logger } from '../../shared/logger.ts';
import { holdsKey } from '../admission/access.ts';
import { requestIdFrom, toldFailure } from '../admission/failure.ts';
import { type ConnectionLimiter, logAcceptErrors } from '../connections.ts';
import { type DispatchRooms, dispatcher } from './dispatch.ts';
import { type Entering, type EnteringRooms, openEntering } from './entering.ts';
import { headersOfAll, jsonType } from './headers.ts';
import { beginner } from './keyless-turns.ts';
import { addLocalRoutes, type LocalRooms } from './local.ts';
import type { RequestMetrics } from './metrics.ts';
import { openSocketDoor, type SocketRooms } from './websocket.ts';

export interface AppOptions extends DispatchRooms, EnteringRooms, SocketRooms, LocalRooms {
  handlers: Handlers;
  metrics: RequestMetrics;
}

/** What one server has of its own. */
export interface Port {
  /** Absent for the broker's own socket file, whose callers need no key. */
  connections?: ConnectionLimiter;
  /** Time until a connection has said all headers of its first request. */
  silentMs: number;
  /** Serves over TLS. */
  tls?: SecureContextOptions | undefined;
  /** Browsers shall not come without TLS any more. */
  hsts: boolean;
}

/** Characters of JSON that may wait for their readers, all answers together. */
const maxHeldAnswers = 128 * 1024 * 1024;
/** A client that neither takes nor sends anything for this long, where it is its turn, is cut. */
const stalledMs = 70_000;
/** How long the rest of a refused body is read off a connection, so that its client hears the refusal. */
const lingerMs = 5_000;
/** What is said about a file, when an error is sent instead of it. */
const ofContent = [
  'ETag',
  'Last-Modified',
  'Accept-Ranges',
  'Content-Disposition',
  'Content-Length',
  'Content-Type',
];

/** Limits of the HTTP server itself: a silent or endless request is cut. */
const serverOptions: ServerOptions = {
  maxHeaderSize: 16 * 1024,
  // An upload takes its time; JSON bodies have a limit of their own, and whoever stalls is cut.
  requestTimeout: 0,
  // An upload that is slower than its client then goes on in larger pieces.
  highWaterMark: 256 * 1024,
  keepAliveTimeout: 65_000,
  // We answer that ourselves, in the envelope.
  requireHostHeader: false,
};

/** An HTTP server over the table. */
export function createHttpServer(options: AppOptions, port: Port): Server {
  const { handlers, log } = options;
  const { connections } = port;
  const entering = openEntering(options, connections);
  const headers = headersOfAll(port.hsts);
  const router = new Router({ strict: true, sensitive: true });
  /** Routes without parameters by method and path: what asks for one is not held against all patterns. */
  const plain = new Map<string, (ctx: Context) => Promise<void>>();
  const door = openSocketDoor(options);
  for (const { noun, operation, route } of allRoutes()) {
    const answer =
      route.kind === 'socket'
        ? (ctx: Context) => Promise.reject(door.refusal(ctx.req))
        : dispatcher(noun, operation, route, handlers, options, entering);
    const pattern = patternOf(route);
    router.register(pattern, [route.method], answer);
    if (!pattern.includes(':')) plain.set(`${route.method} ${pattern}`, answer);
  }
  if (!connections) addLocalRoutes(router, options);
  const app = new Koa();
  app.silent = true;
  app.use(envelope(log, options.metrics, headers));
  app.use((ctx, next) => {
    if (answerBrowser(ctx)) return;
    const answer = plain.get(`${ctx.method} ${ctx.path}`);
    if (!answer) return next();
    ctx._matchedRoute = ctx.path;
    ctx.params = {};
    return answer(ctx);
  });
  app.use(router.routes());
  app.use((ctx) => unknownRoute(ctx, router, options, entering));
  const hasKey = ({ headers }: IncomingMessage): boolean =>
    !connections || holdsKey(headers.authorization ?? '', options.keys);
  const { begin, answering } = beginner(app.callback(), hasKey);
  const take = (request: IncomingMessage, response: ServerResponse): void => {
    // What came in the same breath as the end of its connection.
    if (request.socket.destroyed) return;
    if (connections) {
      const answered = connections.begin(request.socket);
      if (!answered) return;
      response.once('close', answered);
    }
    begin(request, response);
  };
  const upgrading = { shouldUpgradeCallback: (request: IncomingMessage) => door.admits(request) };
  const server = serverOf(port, upgrading, take);
  server.on('connection', (socket) => connections?.accept(socket));
  logAcceptErrors(server, log);
  server.on('tlsClientError', (error: NodeJS.ErrnoException, socket: Socket) => {
    const below = connections?.below(socket);
    if (error.code === 'ERR_SSL_HTTP_REQUEST' && below) refuseMalformed(error, below, headers);
    else below?.destroy();
  });
  server.on('upgrade', (request, socket, head) => {
    // Its ticket was as good as a key, and it never has its last answer.
    connections?.authenticate(request.socket);
    connections?.begin(request.socket);
    door.take(request, socket, head);
  });
  // We ask for the body ourselves, once it is known to be wanted.
  server.on('checkContinue', take);
  // An expectation that nobody knows may be ignored (RFC 9110 section 10.1.1).
  server.on('checkExpectation', take);
  server.maxHeadersCount = 100;
  server.setTimeout(stalledMs, (socket) => cutStalled(socket, answering.get(socket)));
  server.on('clientError', (error, socket) => refuseMalformed(error, socket, headers));
  server.on('connect', (_request, socket) => refuseMalformed(new Error('no tunnels here'), socket, headers));
  return server;
}

/** A browser asks for the start page, which leads to the reference page, and by itself for an icon. */
function answerBrowser(ctx: Context): boolean {
  // The same answer as elsewhere, without a line in the log.
  if (ctx.path === '/favicon.ico' && !ctx.get('authorization'))
    throw new AppError('unauthorized', 'there is no icon without a key, nor with one');
  if (ctx.path !== '/' || ctx.method !== 'GET' || !/\btext\/html\b/i.test(ctx.get('accept'))) return false;
  ctx.redirect('/docs');
  return true;
}

/** A route's path as the router has it. */
function patternOf({ base, path }: Route): string {
  return `${base}${path.replaceAll(/\{(\w+)\}/g, ':$1')}`;
}

function serverOf({ silentMs, tls }: Port, own: ServerOptions, take: RequestListener): Server {
  const options = {
    ...serverOptions,
    ...own,
    headersTimeout: silentMs,
    connectionsCheckingInterval: Math.min(5_000, silentMs),
  };
  if (!tls) return createServer(options, take);
  const server = createTlsServer(
    { ...options, ...tls, ALPNProtocols: ['http/1.1'], handshakeTimeout: silentMs },
    take,
  );
  return server;
}

/** Where the client has sent all and has taken all, it is we who are slow: a large copy may be. */
function cutStalled(socket: Socket, response: ServerResponse | undefined): void {
  const ours = response && !response.writableEnded && response.req.complete && socket.writableLength === 0;
  if (!ours) return void socket.destroy();
  socket.setTimeout(stalledMs);
}

/** Names the request, times it, and turns whatever is thrown into the envelope. */
function envelope(log: Logger, metrics: RequestMetrics, headers: Readonly<Record<string, string>>) {
  const answers = openBudget(maxHeldAnswers, 'answers wait for slow readers');
  return async (ctx: Context, next: Next): Promise<void> => {
    const started = monotonic();
    const requestId = requestIdFrom(ctx.get('x-request-id'));
    ctx.state.requestId = requestId;
    ctx.set('X-Request-Id', requestId);
    ctx.set({ ...headers });
    try {
      if (!ctx.headers.host && ctx.req.httpVersion === '1.1') {
        throw new AppError('invalid_request', 'an HTTP/1.1 request needs a Host header');
      }
      refuseCoded(ctx.req);
      await next();
      if (isPlain(ctx.body)) sendJson(ctx, answers);
    } catch (error) {
      writeError(ctx, error, log);
    }
    if (!ctx.req.complete) linger(ctx.req);
    const ms = monotonic() - started;
    const { method, path, status } = ctx;
    const route = typeof ctx._matchedRoute === 'string' ? ctx._matchedRoute : 'none';
    // Once the answer has gone: nobody waits for this.
    setImmediate(() => {
      metrics.observe(method, route, status, ms);
      log.debug({ request_id: requestId, method, path, status, ms }, 'request');
    });
  };
}

/** Node undoes chunks and no other coding: what comes in one would be taken for what it holds. */
function refuseCoded({ headers }: IncomingMessage): void {
  const coding = headers['transfer-encoding']?.trim().toLowerCase() ?? 'chunked';
  if (coding !== 'chunked')
    throw new AppError('invalid_request', 'send the body as it is, or with Transfer-Encoding: chunked alone');
}

function linger(request: IncomingMessage): void {
  request.resume();
  const cut = after(lingerMs, () => request.socket.destroy());
  request.once('close', cut);
}

function isPlain(body: unknown): boolean {
  return typeof body === 'object' && body !== null && !Buffer.isBuffer(body) && !(body instanceof Readable);
}

/** Answers that wait for slow readers have a common limit: many of them must not fill the memory. */
function sendJson(ctx: Context, answers: Budget): void {
  const text = JSON.stringify(ctx.body);
  const release = answers.take(text.length);
  if (ctx.res.closed) release();
  else ctx.res.once('close', release);
  ctx.body = text;
}

function writeError(ctx: Context, error: unknown, log: Logger): void {
  const about = { request_id: String(ctx.state.requestId), path: ctx.path };
  const { code, message, details, status } = toldFailure(error, about, log);
  for (const header of ofContent) ctx.remove(header);
  if (status !== 416) ctx.remove('Content-Range');
  ctx.status = status;
  if (status === 401) ctx.set('WWW-Authenticate', 'Bearer');
  if (status === 503) ctx.set('Retry-After', '5');
  if (status === 429) ctx.set('Retry-After', String(details.retry_after));
  // The rest of an oversized body is not read: the connection cannot be used again.
  if (status === 413) ctx.set('Connection', 'close');
  ctx.body = { error: { code, message, details } };
}

/** 401 before anything is told about what exists; then 405 with Allow, or 404. */
async function unknownRoute(
  ctx: Context,
  router: Router,
  { keys }: AppOptions,
  entering: Entering,
): Promise<void> {
  const layers = router.match(ctx.path, ctx.method).path;
  const open = allRoutes().some(
    ({ route }) => route.access === 'everybody' && layers.some(({ path }) => path === patternOf(route)),
  );
  if (!open) {
    const { key, address, quota } = await entering.counted(ctx);
    keys.admit(key, address);
    if (quota?.refusal) throw quota.refusal;
  }
  const allowed = [...new Set(layers.flatMap((layer) => layer.methods))];
  if (allowed.length === 0)
    throw new AppError('route_not_found', 'there is nothing at this path; see /docs', { path: ctx.path });
  ctx.set('Allow', allowed.join(', '));
  throw new AppError('method_not_allowed', `${ctx.method} is not possible here`, { allowed });
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
  const [status, code, message] =
    error.code === 'HPE_HEADER_OVERFLOW'
      ? [
          '413 Content Too Large',
          'payload_too_large',
          'there must not be more than 100 headers, nor more than 16 KiB of them',
        ]
      : error.code === 'ERR_SSL_HTTP_REQUEST'
        ? ['400 Bad Request', 'invalid_request', 'this port speaks TLS: call it as https://']
        : error.code === 'ERR_HTTP_REQUEST_TIMEOUT'
          ? ['400 Bad Request', 'invalid_request', 'the request did not arrive in time']
          : ['400 Bad Request', 'invalid_request', 'this is not a valid HTTP request'];
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
