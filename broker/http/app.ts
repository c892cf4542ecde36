// The Koa application: adds a request id, timing and the error envelope to every request, then runs its
// route.
import type { IncomingMessage } from 'node:http';
import Router from '@koa/router';
import Koa, { type Context, type Next } from 'koa';
import type { Route } from '../../shared/api/route.ts';
import { allRoutes } from '../../shared/api/route-table.ts';
import { after, monotonic } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { requestIdFrom } from '../../shared/ids.ts';
import type { Logger } from '../../shared/logger.ts';
import { publicError } from '../admission/public-error.ts';
import type { Backups } from '../backup.ts';
import type { RequestMetrics } from './about-routes.ts';
import {
  type ClientServices,
  type Clients,
  type DispatchServices,
  dispatcher,
  requestIdOf,
} from './dispatch.ts';
import type { WebSocketServices, WebSocketUpgrades } from './websocket.ts';

export interface AppOptions extends DispatchServices, ClientServices, WebSocketServices {
  metrics: RequestMetrics;
  backups: Backups;
}

/** The properties of the server that an application belongs to. */
interface Serving {
  clients: Clients;
  door: WebSocketUpgrades;
  /** Headers of every answer. */
  headers: Readonly<Record<string, string>>;
  /** True for the broker's own socket file. */
  local: boolean;
}

/** Longest time to read and drop the rest of a refused body, so that its client receives the refusal. */
const lingerMs = 5_000;
/** Headers about a file, removed when an error is sent instead of the file. */
const ofContent = [
  'ETag',
  'Last-Modified',
  'Accept-Ranges',
  'Content-Disposition',
  'Content-Length',
  'Content-Type',
];

/**
 * Browsers trust the declared type, store, load and frame nothing, and let no other origin read an answer.
 */
const always = {
  'X-Content-Type-Options': 'nosniff',
  'Cache-Control': 'no-store',
  'Content-Security-Policy': "default-src 'none'; frame-ancestors 'none'",
  'Cross-Origin-Resource-Policy': 'same-origin',
  'Referrer-Policy': 'no-referrer',
  'X-Frame-Options': 'DENY',
};

/**
 * Headers of every answer. `hsts` makes browsers use only TLS, so it needs a certificate that browsers trust.
 */
export function headersOfAll(hsts: boolean): Readonly<Record<string, string>> {
  return hsts ? { ...always, 'Strict-Transport-Security': 'max-age=31536000' } : always;
}

export function createApp(options: AppOptions, { clients, door, headers, local }: Serving): Koa {
  const router = new Router({ strict: true, sensitive: true });
  for (const place of allRoutes()) {
    const { route } = place;
    const answer =
      route.kind === 'socket'
        ? (ctx: Context) => Promise.reject(door.refusal(ctx.req))
        : dispatcher(place, options, clients);
    router.register(patternOf(route), [route.method], answer);
  }
  if (local) {
    // This route is not part of the API: it exists only on the broker's own socket file.
    router.post('/local/backup', async (ctx) => {
      ctx.body = { data: await options.backups.make(), meta: { request_id: requestIdOf(ctx) } };
    });
  }
  const app = new Koa();
  app.silent = true;
  app.use(envelope(options.log, options.metrics, headers));
  app.use(answerBrowser);
  app.use(router.routes());
  app.use((ctx) => unknownRoute(ctx, router, clients));
  return app;
}

/** Redirects a browser from the start page to the reference page, and answers its request for an icon. */
async function answerBrowser(ctx: Context, next: Next): Promise<void> {
  // A request without a key gets unauthorized, as on any other path, but without a line in the log.
  if (ctx.path === '/favicon.ico' && !ctx.get('authorization'))
    throw new AppError('unauthorized', 'there is no icon');
  const page = ctx.path === '/' && ctx.method === 'GET' && /\btext\/html\b/i.test(ctx.get('accept'));
  if (page) ctx.redirect('/docs');
  else await next();
}

/** A route's path in the router's syntax: `{id}` becomes `:id`. */
function patternOf({ base, path }: Route): string {
  return `${base}${path.replaceAll(/\{(\w+)\}/g, ':$1')}`;
}

/** Gives the request an id, measures its time, and turns any thrown error into the error envelope. */
function envelope(log: Logger, metrics: RequestMetrics, headers: Readonly<Record<string, string>>) {
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
    }
    if (!ctx.req.complete) linger(ctx.req);
    const ms = monotonic() - started;
    const { method, path, status } = ctx;
    const route = typeof ctx._matchedRoute === 'string' ? ctx._matchedRoute : 'none';
    // Metrics and log are written after the answer, which does not wait for them.
    setImmediate(() => {
      metrics.observe(method, route, status, ms);
      log.debug({ request_id: requestId, method, path, status, ms }, 'request');
    });
  };
}

function assertFraming({ headers, httpVersion }: IncomingMessage): void {
  if (!headers.host && httpVersion === '1.1')
    throw new AppError('invalid_request', 'an HTTP/1.1 request needs a Host header');
  // Node decodes only chunked: a body in another transfer coding would be stored undecoded.
  const coding = headers['transfer-encoding']?.trim().toLowerCase() ?? 'chunked';
  if (coding !== 'chunked')
    throw new AppError('invalid_request', 'send the body as it is, or with Transfer-Encoding: chunked alone');
}

function linger(request: IncomingMessage): void {
  request.resume();
  const cut = after(lingerMs, () => request.socket.destroy());
  request.once('close', cut);
}

function writeError(ctx: Context, error: unknown, log: Logger): void {
  const about = { request_id: requestIdOf(ctx), path: ctx.path };
  const { code, message, details, status } = publicError(error, about, log);
  for (const header of ofContent) ctx.remove(header);
  if (status !== 416) ctx.remove('Content-Range');
  ctx.status = status;
  if (status === 401) ctx.set('WWW-Authenticate', 'Bearer');
  if (status === 503) ctx.set('Retry-After', '5');
  if (status === 429) ctx.set('Retry-After', String(details.retry_after));
  // The connection is closed after an oversized body, because the rest of the body is not read.
  if (status === 413) ctx.set('Connection', 'close');
  ctx.body = { error: { code, message, details } };
}

/** Refuses a caller without a key first (401), so it learns nothing; then 405 with Allow, or 404. */
async function unknownRoute(ctx: Context, router: Router, clients: Clients): Promise<void> {
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
    throw new AppError('route_not_found', 'no route has this path; see /docs', { path: ctx.path });
  ctx.set('Allow', allowed.join(', '));
  throw new AppError(
    'method_not_allowed',
    `this path does not take ${ctx.method}; it takes ${allowed.join(', ')}`,
    { allowed },
  );
}
