// The Koa application of an HTTP server: adds a request id, timing, headers and the error envelope to every
// request, then runs its route.
import type { IncomingMessage } from 'node:http';
import { Readable } from 'node:stream';
import { finished } from 'node:stream/promises';
import Router from '@koa/router';
import Koa, { type Context, type Next } from 'koa';
import type { Route } from '../../shared/api/route.ts';
import { allRoutes } from '../../shared/api/route-table.ts';
import { after, monotonic } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { requestIdFrom } from '../../shared/ids-and-secrets.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Backups } from '../backup.ts';
import { hasDatabasePath } from '../cluster/hand-over-when-cut-off.ts';
import type { ConnectionLimiter } from '../connection-limiter.ts';
import { found } from '../find-or-not-found.ts';
import { databaseUnavailable } from '../history/group-commit.ts';
import { publicError } from '../request-checks/public-error.ts';
import { serveConsole } from './console-files.ts';
import { type Clients, type DispatchServices, dispatcher, requestIdOf } from './handle-route-request.ts';
import type { RequestMetrics } from './info-health-metrics-and-docs.ts';
import { jsonType } from './reply.ts';
import type { WebSocketServices, WebSocketUpgrades } from './terminal-websocket-upgrades.ts';

export interface AppOptions extends DispatchServices, WebSocketServices {
  metrics: RequestMetrics;
  backups: Backups;
  consoleDirectory: string;
}

/** Settings of one server that decide which routes it has besides those of the API. */
export interface AppPort {
  /**
   * Limits connections. Undefined for the server of the broker's own socket file, whose callers need no key. Only that
   * server has the routes /local/….
   */
  connections?: ConnectionLimiter;
  /** Finds out whether this broker can reach the database. Set only for the peer port, where other brokers ask. */
  hasDatabase?: (() => Promise<boolean>) | undefined;
}

export type Headers = Readonly<Record<string, string>>;

/**
 * Maximum time in milliseconds for which the broker keeps reading a body that it has refused. If it closed the
 * connection at the refusal, the client could lose the answer.
 */
const lingerMs = 5_000;
/** Headers about a file. They are removed if an error is sent in place of the file. */
const ofContent = [
  'ETag',
  'Last-Modified',
  'Accept-Ranges',
  'Content-Disposition',
  'Content-Length',
  'Content-Type',
];

/** Security headers of every answer. */
const always = {
  'X-Content-Type-Options': 'nosniff',
  'Cache-Control': 'no-store',
  // Browsers load nothing for an answer, and display it in no frame.
  'Content-Security-Policy': "default-src 'none'; frame-ancestors 'none'",
  'Cross-Origin-Resource-Policy': 'same-origin',
  'Referrer-Policy': 'no-referrer',
  'X-Frame-Options': 'DENY',
};

/** Returns the headers of every answer. Set `hsts` only for a certificate that browsers trust. */
export function headersOfAll(hsts: boolean): Headers {
  return hsts ? { ...always, 'Strict-Transport-Security': 'max-age=31536000' } : always;
}

/** Creates the Koa application of one server. `headers` are sent with every answer. */
export function createApp(
  options: AppOptions,
  clients: Clients,
  upgrades: WebSocketUpgrades,
  headers: Headers,
  { connections, hasDatabase }: AppPort,
): Koa {
  const router = new Router({ strict: true, sensitive: true });
  for (const place of allRoutes()) {
    const { route } = place;
    const answer =
      route.kind === 'socket'
        ? (ctx: Context) => Promise.reject(upgrades.refusal(ctx.req))
        : dispatcher(place, options, clients);
    router.register(patternOf(route), [route.method], answer);
  }
  if (hasDatabase)
    router.get(hasDatabasePath, async (ctx) => {
      if (!(await hasDatabase())) throw databaseUnavailable();
      ctx.status = 204;
    });
  if (!connections) {
    // These routes are not part of the API. They exist only on the broker's own socket file.
    router.post('/local/backup', async (ctx) => {
      ctx.body = { data: await options.backups.make(), meta: { request_id: requestIdOf(ctx) } };
    });
    // A ticket can give the rights of any key, so only callers of the socket file may make one.
    router.post('/local/login-tickets/:key_id', (ctx) => {
      const { key_id } = ctx.params;
      const key = found(options.state.keys, 'key', key_id ?? '');
      ctx.body = {
        data: { ticket: options.logins.tickets.make(key.id) },
        meta: { request_id: requestIdOf(ctx) },
      };
    });
  }
  const app = new Koa();
  app.silent = true;
  app.use(envelope(options, headers));
  app.use(serveConsole(options.consoleDirectory));
  app.use(router.routes());
  app.use((ctx) => unknownRoute(ctx, router, clients));
  return app;
}

/** A route's path in the router's syntax: `{id}` becomes `:id`. */
function patternOf({ base, path }: Route): string {
  return `${base}${path.replaceAll(/\{(\w+)\}/g, ':$1')}`;
}

/** Gives the request an id, measures its time, and turns any thrown error into the error envelope. */
function envelope({ log, metrics, cluster }: AppOptions, headers: Headers) {
  return async (ctx: Context, next: Next): Promise<void> => {
    const started = monotonic();
    const requestId = requestIdFrom(ctx.get('x-request-id'));
    ctx.state.requestId = requestId;
    ctx.set({ 'X-Request-Id': requestId, ...headers });
    try {
      assertFraming(ctx.req);
      await next();
    } catch (error) {
      writeError(ctx, error, log);
      // This broker cannot reach the database. The closed connection makes the client connect again, perhaps to a
      // broker that can reach it.
      if (ctx.status === 503 && cluster?.isAlive === false) ctx.set('Connection', 'close');
    }
    if (!ctx.req.complete) readRest(ctx);
    const ms = monotonic() - started;
    const { method, path, status } = ctx;
    const route = typeof ctx._matchedRoute === 'string' ? ctx._matchedRoute : 'none';
    // Metrics and log are written after the answer was sent, so that they do not delay it.
    setImmediate(() => {
      metrics.observe(method, route, status, ms);
      log.debug({ request_id: requestId, method, path, status, ms }, 'request');
    });
  };
}

function assertFraming({ headers, httpVersion }: IncomingMessage): void {
  if (!headers.host && httpVersion === '1.1')
    throw new AppError('invalid_request', 'the request lacks the header Host, which HTTP/1.1 requires');
  // Node decodes only the coding chunked. A body in another transfer coding would be stored undecoded.
  const coding = headers['transfer-encoding']?.trim().toLowerCase() ?? 'chunked';
  if (coding !== 'chunked')
    throw new AppError(
      'invalid_request',
      'the header Transfer-Encoding may only be chunked: send the body in this coding, or without the header',
    );
}

/** Reads the rest of a refused body, for at most `lingerMs`, so that the client does not lose the answer. */
function readRest(ctx: Context): void {
  const { req: request } = ctx;
  request.resume();
  const cut = after(lingerMs, () => request.socket.destroy());
  request.once('close', cut);
  const isLast =
    ctx.response.get('connection') === 'close' ||
    request.httpVersion === '1.0' ||
    /\bclose\b/i.test(ctx.get('connection'));
  if (!isLast || ctx.status < 400 || ctx.respond === false) return;
  const answer = Buffer.from(JSON.stringify(ctx.body));
  ctx.type = jsonType;
  ctx.body = Readable.from(thenRest(answer, request));
  ctx.length = answer.length;
}

/**
 * Yields the connection's last answer, then waits for the rest of the request. Closing earlier could make the client
 * lose the answer (RFC 9112 section 9.6).
 */
async function* thenRest(answer: Buffer, request: IncomingMessage): AsyncGenerator<Buffer> {
  yield answer;
  // Half-closes the connection: the client learns that no further answer follows, and can still send the rest of the
  // request.
  request.socket.end();
  await finished(request).catch(() => undefined);
}

function writeError(ctx: Context, error: unknown, log: Logger): void {
  const about = { request_id: requestIdOf(ctx), path: ctx.path };
  const { code, message, details, status } = publicError(error, about, log);
  for (const header of ofContent) ctx.remove(header);
  if (status !== 416) ctx.remove('Content-Range');
  ctx.status = status;
  if (status === 401) ctx.set('WWW-Authenticate', 'Bearer');
  ctx.set(retryHeaders({ status, details }));
  // No request can follow an oversized body on the same connection, because the broker does not read the whole body.
  if (status === 413) ctx.set('Connection', 'close');
  ctx.body = { error: { code, message, details } };
}

/**
 * Returns the header Retry-After for the status 503 or 429, otherwise no header. The header says after how many seconds
 * the client may repeat the request. This number is `retry_after` in the details of the error, or 5 without it.
 */
export function retryHeaders({ status, details }: Pick<AppError, 'status' | 'details'>): Headers {
  // An agent can send any details.
  const seconds = typeof details.retry_after === 'number' ? details.retry_after : 5;
  return status === 503 || status === 429 ? { 'Retry-After': String(seconds) } : {};
}

/**
 * Answers a request that matches no route: 405 with Allow if its path has other methods, otherwise 404. If a route with
 * this path needs no key, the key is not checked. Otherwise a request without a valid key gets 401, which does not
 * reveal whether the path exists.
 */
async function unknownRoute(ctx: Context, router: Router, clients: Clients): Promise<void> {
  // Browsers request this path by themselves, without a key. Refusing it here causes no warning in the log.
  if (ctx.path === '/favicon.ico' && !ctx.get('authorization'))
    throw new AppError('unauthorized', 'this broker has no icon');
  const layers = router.match(ctx.path, ctx.method).path;
  const open = allRoutes().some(
    ({ route }) => route.access === 'everybody' && layers.some(({ path }) => path === patternOf(route)),
  );
  if (!open) {
    const { quota } = await clients.identify(ctx);
    if (quota?.refusal) throw quota.refusal;
  }
  const allowed = [...new Set(layers.flatMap((layer) => layer.methods))];
  if (allowed.length === 0)
    throw new AppError('route_not_found', 'no route has this path: see /docs', {
      path: ctx.path,
    });
  ctx.set('Allow', allowed.join(', '));
  const message = `${ctx.path} has no method ${ctx.method}; it has ${allowed.join(', ')}`;
  throw new AppError('method_not_allowed', message, { allowed });
}
