// Handles a request to one route: authenticates the client, reads the body, runs the handler, and sends the
// reply.
import type { IncomingMessage } from 'node:http';
import type { Context } from 'koa';
import { logins as loginRoutes } from '../../shared/api/logins.ts';
import type { Route } from '../../shared/api/route.ts';
import type { Caller, Content, Handlers } from '../../shared/api/route-table.ts';
import { AppError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Quota } from '../../shared/quota.ts';
import { plainAddress } from '../client-address.ts';
import type { Peers } from '../cluster/peers/route-to-owner.ts';
import type { ConnectionLimiter } from '../connection-limiter.ts';
import { localKey } from '../keys/rights.ts';
import { secretIn } from '../logins/cookie.ts';
import type { Logins } from '../logins/index.ts';
import { isTicket } from '../logins/local-login-tickets.ts';
import { authenticate, authenticateLogin, type Client } from '../request-checks/authenticate.ts';
import {
  type AccessServices,
  AuthorizedRequest,
  createRecall,
  guardOf,
  handlerOf,
} from '../request-checks/authorize-and-perform.ts';
import type { Idempotency } from '../request-checks/idempotency.ts';
import { queryOf, type RawInput } from '../request-checks/parse-api-request.ts';
import type { Rates } from '../request-checks/rate-limits.ts';
import { bodyChunks, type JsonBody, parseJsonBody, readForm, type Spool } from './body.ts';
import { assertOwnPage, isForwarded, isPrivate, type OriginServices } from './csrf-check.ts';
import { createForwarder } from './forward-to-owner.ts';
import { isStreamed, sendReply } from './reply.ts';

export interface DispatchServices extends AccessServices, OriginServices {
  logins: Logins;
  rates: Rates;
  handlers: Handlers;
  idempotency: Idempotency;
  spool: Spool;
  /** Memory quota of large bodies that are being read or processed. */
  bodies: Quota;
  /** Forwards requests to the brokers that own their machines; undefined if this broker runs alone. */
  peers?: Peers | undefined;
  log: Logger;
}

type Input = Record<string, unknown> & { content?: Content<unknown> };

const bodyLimit = 1024 * 1024;

/** Creates the koa handler of one route. */
export function dispatcher(
  { noun, operation, route }: { noun: string; operation: string; route: Route },
  services: DispatchServices,
  clients: Clients,
): (ctx: Context) => Promise<void> {
  const { handlers, idempotency, log } = services;
  const guard = guardOf(route, services);
  const recall = createRecall(handlers, noun, route.again ?? 'get', services);
  const handler = handlerOf(handlers, noun, operation);
  const lasts = route.accepts !== undefined || route.waits === true || isStreamed(route);
  const forward = services.peers && createForwarder(guard, services.peers);
  return async (ctx) => {
    const client = await clients.identify(ctx, route);
    const gone = new AbortController();
    ctx.res.once('close', () => {
      if (!ctx.res.writableFinished) gone.abort(new AppError('unavailable', 'the client disconnected'));
    });
    const request = new AuthorizedRequest(guard, client, requestIdOf(ctx));
    let content: Content<Record<string, string>> | undefined;
    let body: Promise<JsonBody | undefined> | undefined;
    const readJson = (): Promise<JsonBody | undefined> => {
      body ??= parseJsonBody(ctx, route.bodyLimit ?? bodyLimit, services.bodies, gone.signal);
      return body;
    };
    const readRest = async (raw: RawInput): Promise<void> => {
      content = await readBody(ctx, route, raw, services.spool, readJson, gone.signal);
    };
    const act = async (parsed: unknown, caller: Caller): Promise<void> => {
      // The cast is safe: the schema of every part of a request is an object, so the parsed parts form one object.
      const input = parsed as Input;
      if (content) {
        const { chunks, fields } = content;
        input.content = { chunks, fields: () => request.reparse(fields()) };
      }
      const answered = idempotency.answer({
        ...{ route, caller, recall, body: request.body, content: input.content },
        ...{ path: ctx.path, query: ctx.querystring },
        key: route.idempotency ? ctx.req.headers['idempotency-key']?.toString() : undefined,
        run: () => handler(input, caller),
      });
      // The headers are set even if the handler throws, because an error may have headers, e.g. Content-Range (RFC 9110
      // section 14.4).
      const reply = await answered.finally(() => ctx.res.setHeaders(caller.headers));
      // The key may have been revoked while the handler waited.
      if (route.waits) caller.signal.throwIfAborted();
      await sendReply({ ctx, route, input, caller, log }, reply);
    };
    const read = () => partsOf(ctx, route);
    try {
      if (await forward?.(ctx, client, { read, readJson })) return;
      await request.perform({ read, gone, lasts, act, ...(route.method !== 'GET' && { readRest }) });
    } finally {
      // Closes every stream and file, and releases every quota, of this request.
      gone.abort(over);
    }
  };
}

const over = new AppError('unavailable', 'the request has ended');

/** The id that the envelope middleware gave this request. */
export function requestIdOf(ctx: Context): string {
  return String(ctx.state.requestId);
}

/**
 * Returns all parts of a request except its body. Of the headers, returns only those that the route defines, with `_`
 * in place of `-` in their names.
 */
function partsOf(ctx: Context, route: Route): RawInput {
  const headers = Object.keys(route.headers).map((name) => [name, ctx.headers[name.replaceAll('_', '-')]]);
  return {
    // The router sets params from the path.
    params: ctx.params as Record<string, unknown>,
    // ctx.URL is not used, because a Host header could change how it is parsed.
    query: queryOf(ctx.querystring),
    headers: Object.fromEntries(headers) as Record<string, unknown>,
    body: undefined,
  };
}

/** Reads a JSON body, or the first fields of a form, into `raw`; the content of a file is not read yet. */
async function readBody(
  ctx: Context,
  route: Route,
  raw: RawInput,
  spool: Spool,
  readJson: () => Promise<JsonBody | undefined>,
  signal: AbortSignal,
): Promise<Content<Record<string, string>> | undefined> {
  if (route.accepts) assertPlainContent(ctx);
  if (route.accepts === 'bytes') return { chunks: bodyChunks(ctx, signal), fields: () => ({}) };
  if (route.accepts === 'form') {
    const form = await readForm(ctx, spool, ({ path }) => (path ?? raw.query.path) !== undefined, signal);
    raw.body = form.firstFields;
    return form;
  }
  const body = await readJson();
  if (route.body) raw.body = body?.value;
  else assertNoFields(body?.value);
  return undefined;
}

/** Throws validation_failed if a route that takes no body gets one. An empty object counts as no body. */
function assertNoFields(value: unknown): void {
  if (value === undefined || JSON.stringify(value) === '{}') return;
  const message = 'this route takes no fields: send the request without a body';
  throw new AppError('validation_failed', message, { issues: [{ path: 'body', message }] });
}

/** Refuses compressed or partial content, because content is stored as it arrives (RFC 9110 section 14.5). */
function assertPlainContent(ctx: Context): void {
  if ((ctx.get('content-encoding') || 'identity') !== 'identity')
    throw new AppError(
      'invalid_request',
      'the content has a Content-Encoding: send it uncompressed, without this header',
    );
  if (!ctx.get('content-range')) return;
  const message = 'a file can only be replaced as a whole: send the whole file without Content-Range';
  throw new AppError('invalid_request', message);
}

const forwardedTicket = new AppError(
  'forbidden',
  'a login ticket is valid only on the broker’s own machine, but this request came through a proxy that is not trusted, so the client may be on another machine; log in with an API key, or open the broker’s own address',
);

export type Clients = ReturnType<typeof createClients>;

/** The settings by which the clients of an HTTP server are identified. */
interface ClientsOf {
  /** The connection limiter of the port; undefined for the broker's own socket file, whose clients need no key. */
  connections?: ConnectionLimiter | undefined;
  /** Finds the client of a request that another broker forwarded; only on the peer port. */
  forwardedClient?: ((request: IncomingMessage) => Promise<Client>) | undefined;
}

/** Returns functions that identify the clients of one HTTP server: their address, key or login, and rate limit. */
export function createClients(services: DispatchServices, { connections, forwardedClient }: ClientsOf) {
  const { keys, logins, proxies } = services;
  /**
   * Authenticates the client by the header Authorization, or else by the cookie of its login. The header has a key, or
   * a ticket if the client logs in.
   */
  async function authenticated(ctx: Context, address: string, route?: Route): Promise<Client> {
    const authorization = ctx.get('authorization');
    const secret = authorization === '' ? secretIn(ctx.get('cookie')) : '';
    if (secret !== '') {
      assertOwnPage(ctx.req, services);
      return authenticateLogin(secret, address, services);
    }
    if (route !== loginRoutes.create) return authenticate(authorization, address, services);
    if (isTicket(authorization) && isForwarded(ctx.req, proxies)) throw forwardedTicket;
    const key_id = logins.tickets.redeem(authorization, address);
    const key = key_id && services.state.keys.get(key_id);
    if (key) return { address, key: keys.admit(key, address) };
    const client = await authenticate(authorization, address, services);
    return { ...client, secret_hash: keys.hashIn(authorization) };
  }
  return {
    /**
     * True if a request has a valid key or login, came over the socket file, or was checked by the broker that
     * forwarded it.
     */
    hasKey: ({ headers }: IncomingMessage): boolean =>
      !connections ||
      forwardedClient !== undefined ||
      keys.accepts(headers.authorization ?? '') ||
      logins.find(secretIn(headers.cookie)) !== undefined,
    /**
     * Returns the client of a request and sets the rate limit headers. Throws unauthorized and rate_limited, and
     * forbidden if the request may not use its cookie.
     */
    async identify(ctx: Context, route?: Route): Promise<Client> {
      if (!connections) return { address: '', key: localKey, secure: true };
      if (forwardedClient) return forwardedClient(ctx.req);
      const { socket } = ctx.req;
      const peer = plainAddress(socket.remoteAddress ?? '');
      const address = proxies.clientOf(peer, ctx.get('x-forwarded-for'));
      if (route?.access === 'everybody') return { address, key: localKey };
      const client = await authenticated(ctx, address, route);
      connections.authenticate(socket);
      if (client.quota) {
        const { limit, remaining, reset } = client.quota;
        ctx.set('X-RateLimit-Limit', String(limit));
        ctx.set('X-RateLimit-Remaining', String(remaining));
        ctx.set('X-RateLimit-Reset', String(reset));
      }
      return route === loginRoutes.create ? { ...client, secure: isPrivate(ctx.req, proxies) } : client;
    },
  };
}
