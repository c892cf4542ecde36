// Handles one route over HTTP: authenticates the client, reads the body once it is wanted, runs the handler, replies.
import type { IncomingMessage } from 'node:http';
import type { Context } from 'koa';
import type { Caller, Content, Handlers } from '../../shared/api/index.ts';
import type { Route } from '../../shared/api/route.ts';
import { AppError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Quota } from '../../shared/quota.ts';
import { authenticate, type Client, validKeyIn } from '../admission/authenticate.ts';
import {
  type AccessServices,
  AuthorizedRequest,
  guardOf,
  handlerOf,
  recallBy,
} from '../admission/authorize.ts';
import type { Idempotency } from '../admission/idempotency.ts';
import { queryOf, type RawInput } from '../admission/parse-request.ts';
import type { Rates } from '../admission/rate-limits.ts';
import { type Proxies, plainAddress } from '../client-address.ts';
import type { ConnectionLimiter } from '../connections.ts';
import type { Keys } from '../keys/index.ts';
import { localKey } from '../keys/rights.ts';
import { bytesOf, openForm, readJson, type Spool } from './body.ts';
import { isStreamed, sendReply } from './reply.ts';

export interface DispatchServices extends AccessServices {
  handlers: Handlers;
  idempotency: Idempotency;
  spool: Spool;
  /** Of large bodies that are being read or worked on. */
  bodies: Quota;
  log: Logger;
}

type Input = Record<string, unknown> & { content?: Content<unknown> };

const bodyLimit = 1024 * 1024;

/** Makes the koa handler of one route. */
export function dispatcher(
  { noun, operation, route }: { noun: string; operation: string; route: Route },
  rooms: DispatchServices,
  clients: Clients,
): (ctx: Context) => Promise<void> {
  const { handlers, idempotency, log } = rooms;
  const guard = guardOf(route, rooms);
  const recall = recallBy(handlers, noun, route.again ?? 'get', rooms);
  const handler = handlerOf(handlers, noun, operation);
  const lasts = route.accepts !== undefined || route.waits === true || isStreamed(route);
  return async (ctx) => {
    const client = route.access === 'everybody' ? clients.anonymous(ctx) : await clients.authenticate(ctx);
    const gone = new AbortController();
    ctx.res.once('close', () => {
      if (!ctx.res.writableFinished) gone.abort(new AppError('unavailable', 'the client went away'));
    });
    let content: Content<Record<string, string>> | undefined;
    const request = new AuthorizedRequest(guard, client, requestIdOf(ctx));
    const readRest = async (raw: RawInput): Promise<void> => {
      content = await readBody(ctx, route, raw, rooms, gone.signal);
    };
    const act = async (parsed: unknown, caller: Caller): Promise<void> => {
      // An object of the parts that the route names.
      const input = parsed as Input;
      if (content) {
        const { chunks, fields } = content;
        input.content = { chunks, fields: () => request.reparse(fields()) };
      }
      const { path, querystring: query } = ctx;
      const key = route.idempotency ? ctx.get('idempotency-key') : '';
      const run = () => handler(input, caller);
      const asked = {
        route,
        caller,
        key,
        path,
        query,
        body: request.body,
        content: input.content,
        run,
        recall,
      };
      // A refusal may have something to say in headers, too (RFC 9110 section 14.4).
      const reply = await idempotency.answer(asked).finally(() => ctx.res.setHeaders(caller.headers));
      // The key may have been revoked while it waited.
      if (route.waits) caller.signal.throwIfAborted();
      await sendReply({ ctx, route, input, caller, log }, reply);
    };
    const read = () => partsOf(ctx, route);
    try {
      await request.perform({ read, gone, lasts, act, ...(route.method !== 'GET' && { readRest }) });
    } finally {
      // Ends every stream, file and budget that was opened for it.
      gone.abort(over);
    }
  };
}

const over = new AppError('unavailable', 'the request is over');

/** The id that the first middleware gave this request. */
export function requestIdOf(ctx: Context): string {
  return String(ctx.state.requestId);
}

/** What a request has before its body, and of its headers those that the route names, with underscores. */
function partsOf(ctx: Context, route: Route): RawInput {
  const headers = Object.keys(route.headers).map((name) => [name, ctx.headers[name.replaceAll('_', '-')]]);
  return {
    // Set by the router from the path's parameters.
    params: ctx.params as Record<string, unknown>,
    // Not ctx.URL, which a Host header can bend.
    query: queryOf(ctx.querystring),
    headers: Object.fromEntries(headers) as Record<string, unknown>,
    body: undefined,
  };
}

/** Reads a JSON body, or the first fields of a form, into `raw`; the content of a file is only begun. */
async function readBody(
  ctx: Context,
  route: Route,
  raw: RawInput,
  { spool, bodies }: DispatchServices,
  signal: AbortSignal,
): Promise<Content<Record<string, string>> | undefined> {
  const { req } = ctx;
  // The client waits for this (RFC 9110 section 10.1.1).
  const ask = (): void => {
    if (ctx.get('expect').toLowerCase() === '100-continue') ctx.res.writeContinue();
  };
  if (route.accepts) assertPlainContent(ctx);
  // Asked for on first read: an upload that is refused before is not sent at all.
  if (route.accepts === 'bytes') return { chunks: bytesOf(req, signal, ask), fields: () => ({}) };
  ask();
  if (route.accepts === 'form') {
    const form = await openForm(req, spool, ({ path }) => (path ?? raw.query.path) !== undefined, signal);
    raw.body = form.fields();
    return form;
  }
  const body = await readJson(req, route.bodyLimit ?? bodyLimit, bodies, signal);
  if (route.body) raw.body = body;
  return undefined;
}

/** Content is taken as it is: neither compressed nor a part of something (RFC 9110 section 14.5). */
function assertPlainContent(ctx: Context): void {
  const coding = ctx.get('content-encoding') || 'identity';
  const transfer = ctx.get('transfer-encoding') || 'chunked';
  if (coding !== 'identity' || transfer.toLowerCase() !== 'chunked') {
    throw new AppError('invalid_request', 'send the content without Content-Encoding');
  }
  if (ctx.get('content-range')) {
    throw new AppError(
      'invalid_request',
      'a file can only be replaced as a whole: send it without Content-Range',
    );
  }
}

export interface ClientServices {
  keys: Keys;
  proxies: Proxies;
  rates: Rates;
}

/** Clients of one HTTP server: their address as far as proxies are believed, their key, and their rate limit. */
export class Clients {
  readonly #rooms: ClientServices;
  /** Undefined for the broker's own socket file, whose callers need no key and have no limit. */
  readonly #connections: ConnectionLimiter | undefined;

  constructor(rooms: ClientServices, connections: ConnectionLimiter | undefined) {
    this.#rooms = rooms;
    this.#connections = connections;
  }

  /** Whether a request that begins has a valid key, or needs none to be served at once. */
  hasKey({ headers }: IncomingMessage): boolean {
    return !this.#connections || validKeyIn(headers.authorization ?? '', this.#rooms.keys) !== undefined;
  }

  /** The client of a route that needs no key; what it presents is not looked at. */
  anonymous(ctx: Context): Client {
    const peer = plainAddress(ctx.req.socket.remoteAddress ?? '');
    const address = this.#connections ? this.#rooms.proxies.clientOf(peer, ctx.get('x-forwarded-for')) : '';
    return { address, key: localKey };
  }

  /** Throws unauthorized and rate_limited. */
  async authenticate(ctx: Context): Promise<Client> {
    const local = this.anonymous(ctx);
    if (!this.#connections) return local;
    const client = await authenticate(ctx.get('authorization'), local.address, this.#rooms);
    this.#connections.authenticate(ctx.req.socket);
    if (client.quota) {
      // Spec section 8.2.
      const { limit, remaining, reset } = client.quota;
      ctx.set('X-RateLimit-Limit', String(limit));
      ctx.set('X-RateLimit-Remaining', String(remaining));
      ctx.set('X-RateLimit-Reset', String(reset));
    }
    return client;
  }
}
