// What happens to every request of the table: who, may they, does it exist, is it well-formed - then the noun's handler.
import type { Context } from 'koa';
import { z } from 'zod';
import {
  allRoutes,
  type Caller,
  type Content,
  type Handlers,
  type RawReply,
} from '../../shared/api/index.ts';
import type { Route } from '../../shared/api/route.ts';
import type { Budget } from '../../shared/budget.ts';
import { iso } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import { holds, localKey, reachable, reaches } from '../keys.ts';
import type { Key, State } from '../state/index.ts';
import {
  type AccessRooms,
  authenticate,
  checkIds,
  implyMachine,
  judgeAgain,
  requireScope,
} from './access.ts';
import { readJson } from './body.ts';
import type { Idempotency } from './idempotency.ts';
import { headersOf, queryOf, type RawInput, type Reader, readerOf } from './input.ts';
import { once } from './replay.ts';
import type { Spool } from './spool.ts';
import { type Sender, senderOf } from './streams.ts';
import { type Incoming, openBytes, openForm } from './upload.ts';

export interface DispatchRooms extends AccessRooms {
  idempotency: Idempotency;
  spool: Spool;
  /** Of large bodies that are being read or worked on. */
  bodies: Budget;
  log: Logger;
}

type Handler = (input: unknown, caller: Caller) => unknown;
type Input = Record<string, unknown> & { content?: Content<unknown> };

/** One request on its way through. */
interface Exchange {
  ctx: Context;
  input: Input;
  raw: RawInput;
  caller: Caller;
}

const bodyLimit = 1024 * 1024;

/** Makes the koa handler of one route. `local`: the request came over the broker's own socket file. */
export function dispatcher(
  noun: string,
  operation: string,
  route: Route,
  handlers: Handlers,
  rooms: DispatchRooms,
  local: boolean,
) {
  const reader = readerOf(route);
  const answer = answererOf(noun, operation, route, handlers, rooms);
  // Those that last are judged again while they do.
  const lasts = route.accepts !== undefined || route.waits || senderOf(route) !== undefined;
  return async (ctx: Context): Promise<void> => {
    const key = route.access === 'everybody' ? undefined : authenticate(ctx, rooms.keys, local);
    if (key) requireScope(key, route);
    const raw = addressed(ctx, route);
    if (key) checkIds(reader, raw, key, rooms);
    const body = await readBody(ctx, route, raw, rooms);
    const judge = (): Key => {
      const current = authenticate(ctx, rooms.keys, local);
      requireScope(current, route);
      checkIds(reader, raw, current, rooms);
      return current;
    };
    try {
      // A body may take its time: the key may have been revoked meanwhile.
      const current = key && route.method !== 'GET' ? judge() : (key ?? localKey);
      if (route.impliesMachine) implyMachine(raw, current, rooms);
      const input: Input = reader.parse(raw);
      if (body.incoming) input.content = contentOf(body.incoming, reader, raw);
      const { caller, end, forget } = callerOf(ctx, current, rooms.state);
      const stop = key && lasts ? judgeAgain(current, rooms.state, judge, ender(route, end)) : () => {};
      try {
        await answer({ ctx, input, raw, caller });
      } finally {
        stop();
        forget();
      }
    } finally {
      body.close();
    }
  };
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

/** The content as its handler takes it; the fields that came late are parsed as the first ones were. */
function contentOf(incoming: Incoming, reader: Reader, raw: RawInput): Content<unknown> {
  return {
    chunks: incoming.chunks,
    fields: () => reader.parse({ ...raw, body: incoming.fields() }),
  };
}

/** Everything of a request but its body, which is read only once these allow it. */
function addressed(ctx: Context, route: Route): RawInput {
  return {
    // Set by the router from the path's parameters.
    params: ctx.params as Record<string, unknown>,
    // Not ctx.URL, which a Host header can bend.
    query: queryOf(ctx.querystring),
    headers: headersOf(ctx.headers, route.headers),
    body: undefined,
  };
}

/** The id that the first middleware gave this request. */
function requestIdOf(ctx: Context): string {
  return String(ctx.state.requestId);
}

function callerOf(ctx: Context, key: Key, state: State) {
  const gone = new AbortController();
  const close = (): void => {
    if (!ctx.res.writableFinished) gone.abort(new AppError('unavailable', 'the client went away'));
  };
  ctx.res.once('close', close);
  const caller: Caller = {
    key_id: key.id,
    key_name: key.name,
    request_id: requestIdOf(ctx),
    signal: gone.signal,
    headers: new Headers(),
    may: (scope) => holds(key, scope),
    reaches: (machine) => reaches(key, machine, state),
    reachable: () => reachable(key, state),
    made: () => {},
  };
  return {
    caller,
    end: (reason: unknown) => gone.abort(reason),
    forget: () => void ctx.res.off('close', close),
  };
}

/** Runs the handler and sends what it gives, in the way of the route's kind. */
function answererOf(
  noun: string,
  operation: string,
  route: Route,
  handlers: Handlers,
  rooms: DispatchRooms,
): (exchange: Exchange) => Promise<void> {
  const handler = handlerOf(handlers, noun, operation);
  const send = senderOf(route);
  const { again = 'get' } = route;
  if (route.kind === 'raw') return (exchange) => sendRaw(exchange, handler);
  if (send) return (exchange) => stream(exchange, send, handler, rooms.log);
  return async (exchange) => {
    const { ctx, input, raw, caller } = exchange;
    const key = route.idempotency ? ctx.get('idempotency-key') : '';
    if (key === '') {
      const reply = await handler(input, caller);
      refuseLate(route, caller);
      return sendObject(exchange, route, reply);
    }
    const { reply, replayed } = await once(rooms.idempotency, {
      route,
      caller,
      key,
      path: ctx.path,
      query: ctx.querystring,
      body: raw.body,
      content: input.content,
      run: () => handler(input, caller),
      get: (id) => handlerOf(handlers, noun, again)({ [idParamOf(noun, again)]: id }, caller),
    });
    refuseLate(route, caller);
    if (replayed) ctx.set('Idempotency-Replayed', 'true');
    sendObject(exchange, route, reply);
  };
}

/** What was made stays, and is told of, though its machine has gone meanwhile; who may not know ends the wait. */
function ender({ waits }: Route, end: (reason: unknown) => void): (reason: unknown) => void {
  return (reason) => {
    const refused = reason instanceof AppError && ['unauthorized', 'forbidden'].includes(reason.code);
    if (!waits || refused) end(reason);
  };
}

/** The key may have been revoked while it waited. */
function refuseLate({ waits }: Route, { signal }: Caller): void {
  if (waits) signal.throwIfAborted();
}

/** What the route that gets one of a noun calls its id. */
function idParamOf(noun: string, operation: string): string {
  const get = allRoutes().find((one) => one.noun === noun && one.operation === operation);
  const [name] = Object.keys(get?.route.params ?? {});
  if (name === undefined) throw new Error(`no ${noun}.${operation} to answer a repeat with`);
  return name;
}

async function stream(
  { ctx, input, caller }: Exchange,
  send: Sender,
  handler: Handler,
  log: Logger,
): Promise<void> {
  let reply: unknown;
  try {
    reply = await handler(input, caller);
  } finally {
    // A refusal may have something to say there, too (RFC 9110 section 14.4).
    ctx.set(Object.fromEntries(caller.headers));
  }
  await send({ ctx, caller, meta: metaOf(caller), log }, reply);
}

function metaOf(caller: Caller) {
  return { request_id: caller.request_id, timestamp: iso() };
}

async function sendRaw({ ctx, input, caller }: Exchange, handler: Handler): Promise<void> {
  // Handlers of raw routes give RawReply.
  const reply = (await handler(input, caller)) as RawReply;
  ctx.status = reply.status ?? 200;
  ctx.set(Object.fromEntries(caller.headers));
  ctx.body = typeof reply.body === 'string' ? reply.body : Buffer.from(reply.body);
  ctx.type = reply.type;
}

/** Parses the reply with the route's own schema, so that nothing leaves that the contract does not name. */
function sendObject({ ctx, input, caller }: Exchange, route: Route, reply: unknown): void {
  ctx.status = route.status;
  ctx.set(Object.fromEntries(caller.headers));
  const meta = metaOf(caller);
  if (route.kind !== 'list') {
    ctx.body = { data: route.reply.parse(reply), meta };
    return;
  }
  const { items, total } = page.parse(reply);
  const { limit, offset } = paging.parse(input);
  const has_more = offset + items.length < total;
  if (has_more) ctx.set('Link', `<${nextPage(ctx, limit, offset)}>; rel="next"`);
  ctx.body = {
    data: items.map((item) => route.reply.parse(item)),
    meta: { ...meta, total, limit, offset, has_more },
  };
}

const page = z.object({ items: z.array(z.unknown()), total: z.number() });
const paging = z.object({ limit: z.number(), offset: z.number() });

function nextPage(ctx: Context, limit: number, offset: number): string {
  const query = new URLSearchParams(ctx.querystring);
  query.set('limit', String(limit));
  query.set('offset', String(offset + limit));
  return `${ctx.path}?${query.toString()}`;
}

function handlerOf(handlers: Handlers, noun: string, operation: string): Handler {
  // The table of handlers has the shape of the table of routes: the compiler saw to that.
  const operations = handlers[noun as keyof Handlers] as Record<string, Handler>;
  const handler = operations[operation];
  if (!handler) throw new Error(`no handler for ${noun}.${operation}`);
  return handler;
}
