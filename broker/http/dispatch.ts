// One request of the table over HTTP: authenticate, authorize, parse, idempotency, handler, audit, reply.
import type { Context } from 'koa';
import type { Caller, Content, Handlers } from '../../shared/api/index.ts';
import type { Route } from '../../shared/api/route.ts';
import type { Budget } from '../../shared/budget.ts';
import { AppError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import {
  type AccessRooms,
  AuthorizedRequest,
  type Guard,
  guardOf,
  type Handler,
  handlerOf,
  recallBy,
} from '../admission/authorize.ts';
import type { Idempotency, Recall } from '../admission/idempotency.ts';
import { queryOf, type RawInput } from '../admission/parse-request.ts';
import { readJson } from './body.ts';
import type { Clients } from './clients.ts';
import { isStreamed, sendReply } from './reply.ts';
import type { Spool } from './spool.ts';
import { type Incoming, openBytes, openForm } from './upload.ts';

export interface DispatchRooms extends AccessRooms {
  handlers: Handlers;
  idempotency: Idempotency;
  spool: Spool;
  /** Of large bodies that are being read or worked on. */
  bodies: Budget;
  log: Logger;
}

interface Endpoint {
  route: Route;
  guard: Guard<Route>;
  handler: Handler;
  recall: Recall;
  /** Its requests last: the key is judged again meanwhile. */
  lasts: boolean;
  rooms: DispatchRooms;
}

type Input = Record<string, unknown> & { content?: Content<unknown> };

const bodyLimit = 1024 * 1024;

/** Makes the koa handler of one route. */
export function dispatcher(
  { noun, operation, route }: { noun: string; operation: string; route: Route },
  rooms: DispatchRooms,
  clients: Clients,
): (ctx: Context) => Promise<void> {
  const { handlers } = rooms;
  const endpoint: Endpoint = {
    route,
    guard: guardOf(route, rooms),
    handler: handlerOf(handlers, noun, operation),
    recall: recallBy(handlers, noun, route.again ?? 'get', rooms),
    lasts: route.accepts !== undefined || route.waits === true || isStreamed(route),
    rooms,
  };
  return async (ctx) => {
    const client = route.access === 'everybody' ? clients.anonymous(ctx) : await clients.authenticate(ctx);
    const request = new AuthorizedRequest(endpoint.guard, client, requestIdOf(ctx));
    try {
      await serve(ctx, request, endpoint);
    } catch (error) {
      await request.settle(error);
      throw error;
    }
    await request.settle();
  };
}

/** The id that the first middleware gave this request. */
export function requestIdOf(ctx: Context): string {
  return String(ctx.state.requestId);
}

async function serve(ctx: Context, request: AuthorizedRequest<Route>, endpoint: Endpoint): Promise<void> {
  const { route, lasts, rooms } = endpoint;
  const raw: RawInput = {
    // Set by the router from the path's parameters.
    params: ctx.params as Record<string, unknown>,
    // Not ctx.URL, which a Host header can bend.
    query: queryOf(ctx.querystring),
    headers: headersOf(ctx, route),
    body: undefined,
  };
  request.identify(raw);
  const body = await readBody(ctx, route, raw, rooms);
  const gone = new AbortController();
  const leave = (): void => {
    if (!ctx.res.writableFinished) gone.abort(new AppError('unavailable', 'the client went away'));
  };
  ctx.res.once('close', leave);
  try {
    const { caller, ...admitted } = request.admit(raw, gone, lasts);
    // An object of the parts that the route names.
    const input = admitted.input as Input;
    const { incoming } = body;
    if (incoming) {
      const fields = () => request.reparse({ ...raw, body: incoming.fields() });
      input.content = { chunks: incoming.chunks, fields };
    }
    const reply = await answer(ctx, endpoint, raw, input, caller);
    // The key may have been revoked while it waited.
    if (route.waits) caller.signal.throwIfAborted();
    await sendReply({ ctx, route, input, caller, gone, log: rooms.log }, reply);
  } finally {
    ctx.res.off('close', leave);
    body.close();
  }
}

/** The headers a route names, by their names with underscores. */
function headersOf({ headers }: Context, route: Route): Record<string, unknown> {
  const given = Object.keys(route.headers).map((name): [string, unknown] => [
    name,
    headers[name.replaceAll('_', '-')],
  ]);
  return Object.fromEntries(given.filter(([, value]) => value !== undefined));
}

/** What the handler answers; a repeat with an Idempotency-Key gets what the first request got. */
async function answer(
  ctx: Context,
  { route, handler, recall, rooms }: Endpoint,
  { body }: RawInput,
  input: Input,
  caller: Caller,
): Promise<unknown> {
  const key = route.idempotency ? ctx.get('idempotency-key') : '';
  const run = () => handler(input, caller);
  try {
    if (key === '') return await run();
    const { path, querystring: query } = ctx;
    const { content } = input;
    return await rooms.idempotency.answer({ route, caller, key, path, query, body, content, run, recall });
  } finally {
    // A refusal may have something to say there, too (RFC 9110 section 14.4).
    ctx.res.setHeaders(caller.headers);
  }
}

interface Body {
  incoming?: Incoming;
  close(): void;
}

/** Reads a JSON body into `raw`; one that is not JSON is only begun. */
async function readBody(ctx: Context, route: Route, raw: RawInput, rooms: DispatchRooms): Promise<Body> {
  if (route.method === 'GET') return { close: () => {} };
  if (route.accepts) {
    refuseCoded(ctx);
    const incoming = await openContent(ctx, route, raw, rooms.spool);
    return { incoming, close: () => incoming.close() };
  }
  askForBody(ctx);
  const { body, close } = await readJson(ctx.req, route.bodyLimit ?? bodyLimit, rooms.bodies);
  if (route.body) raw.body = body;
  return { close };
}

async function openContent(ctx: Context, route: Route, raw: RawInput, spool: Spool): Promise<Incoming> {
  // Only when somebody reads: an upload that is refused before is not sent at all.
  if (route.accepts === 'bytes') return openBytes(ctx.req, () => askForBody(ctx));
  askForBody(ctx);
  const incoming = await openForm(ctx.req, spool, ({ path }) => (path ?? raw.query.path) !== undefined);
  raw.body = incoming.fields();
  return incoming;
}

/** The client waits for this (RFC 9110 section 10.1.1). */
function askForBody(ctx: Context): void {
  if (ctx.get('expect').toLowerCase() === '100-continue') ctx.res.writeContinue();
}

/** Content is taken as it is: neither compressed nor a part of something (RFC 9110 section 14.5). */
function refuseCoded(ctx: Context): void {
  const coding = ctx.get('content-encoding') || 'identity';
  const transfer = ctx.get('transfer-encoding') || 'chunked';
  if (coding !== 'identity' || transfer.toLowerCase() !== 'chunked') {
    throw new AppError('invalid_request', 'send the content as it is, without Content-Encoding');
  }
  if (ctx.get('content-range')) {
    throw new AppError('invalid_request', 'a file can only be replaced whole: send it without Content-Range');
  }
}
