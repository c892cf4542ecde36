// Requests of the table over HTTP: their parts out of koa's context, then admission, the noun's handler, and its answer.
import { Readable } from 'node:stream';
import type { Context } from 'koa';
import { z } from 'zod';
import type { Caller, Content, Handlers, RawReply } from '../../shared/api/index.ts';
import type { Route } from '../../shared/api/route.ts';
import type { Budget } from '../../shared/budget.ts';
import { iso } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import type { AccessRooms } from '../admission/access.ts';
import type { Idempotency } from '../admission/idempotency.ts';
import {
  entranceOf,
  type Handler,
  handlerOf,
  madeBy,
  type RawInput,
  type Visit,
} from '../admission/index.ts';
import { once } from '../admission/replay.ts';
import { readJson } from './body.ts';
import type { Entering } from './entering.ts';
import { jsonType } from './headers.ts';
import { headersOf, queryOf } from './query.ts';
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

type Input = Record<string, unknown> & { content?: Content<unknown> };

/** One request on its way through. */
interface Exchange {
  ctx: Context;
  input: Input;
  raw: RawInput;
  caller: Caller;
  /** Fires when nobody waits for the answer any more. */
  gone: AbortController;
}

const bodyLimit = 1024 * 1024;
const pieceBytes = 64 * 1024;

/** Makes the koa handler of one route. */
export function dispatcher(
  noun: string,
  operation: string,
  route: Route,
  handlers: Handlers,
  rooms: DispatchRooms,
  entering: Entering,
) {
  const entrance = entranceOf(route, rooms);
  const answer = answererOf(noun, operation, route, handlers, rooms);
  // Those that last are judged again while they do.
  const lasts = route.accepts !== undefined || route.waits === true || senderOf(route) !== undefined;
  return async (ctx: Context): Promise<void> => {
    const visitor = route.access === 'everybody' ? entering.anybody(ctx) : await entering.counted(ctx);
    const visit = entrance.knock(visitor, requestIdOf(ctx));
    try {
      await attend(ctx, visit);
    } catch (error) {
      await visit.settle(error);
      throw error;
    }
    await visit.settle();
  };

  async function attend(ctx: Context, visit: Visit<unknown>): Promise<void> {
    const raw = addressed(ctx, route);
    visit.identify(raw);
    const body = await readBody(ctx, route, raw, rooms);
    const client = departure(ctx);
    try {
      const { input, caller, leave } = visit.admit(raw, { gone: client.gone, lasts });
      // An object of the parts that the route names.
      const given = input as Input;
      if (body.incoming) given.content = contentOf(body.incoming, visit, raw);
      await answer({ ctx, input: given, raw, caller, gone: client.gone }).finally(leave);
    } finally {
      client.forget();
      body.close();
    }
  }
}

/** Fires when the client goes before it has its answer. */
function departure(ctx: Context) {
  const gone = new AbortController();
  const close = (): void => {
    if (!ctx.res.writableFinished) gone.abort(new AppError('unavailable', 'the client went away'));
  };
  ctx.res.once('close', close);
  return { gone, forget: () => void ctx.res.off('close', close) };
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
function contentOf(incoming: Incoming, visit: Visit<unknown>, raw: RawInput): Content<unknown> {
  return {
    chunks: incoming.chunks,
    fields: () => visit.reparse({ ...raw, body: incoming.fields() }),
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
  const made = madeBy(handlers, { noun, operation: route.again }, rooms);
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
    const reply = await once(rooms.idempotency, {
      route,
      caller,
      key,
      path: ctx.path,
      query: ctx.querystring,
      body: raw.body,
      content: input.content,
      run: () => handler(input, caller),
      made,
    });
    refuseLate(route, caller);
    sendObject(exchange, route, reply);
  };
}

/** The key may have been revoked while it waited. */
function refuseLate({ waits }: Route, { signal }: Caller): void {
  if (waits) signal.throwIfAborted();
}

async function stream(
  { ctx, input, caller, gone }: Exchange,
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
  const leave = (): void => gone.abort(new AppError('unavailable', 'nobody reads on'));
  await send({ ctx, caller, meta: metaOf(caller), log, leave }, reply);
}

function metaOf(caller: Caller) {
  return { request_id: caller.request_id, timestamp: iso() };
}

async function sendRaw({ ctx, input, caller }: Exchange, handler: Handler): Promise<void> {
  // Handlers of raw routes give RawReply.
  const reply = (await handler(input, caller)) as RawReply;
  ctx.status = reply.status ?? 200;
  ctx.set(Object.fromEntries(caller.headers));
  if (reply.etag) {
    ctx.set({ ETag: reply.etag, 'Cache-Control': 'no-cache' });
    if (ctx.get('if-none-match').includes(reply.etag)) {
      ctx.status = 304;
      return;
    }
  }
  const body = typeof reply.body === 'string' ? Buffer.from(reply.body) : viewOf(reply.body);
  // A piece at a time: a client that does not read holds no more than that.
  ctx.body = body.length > pieceBytes ? Readable.from(piecesOf(body)) : body;
  ctx.length = body.length;
  ctx.type = reply.type;
}

/** The same bytes, uncopied. */
function viewOf({ buffer, byteOffset, byteLength }: Uint8Array): Buffer {
  return Buffer.from(buffer, byteOffset, byteLength);
}

function* piecesOf(body: Buffer): Generator<Buffer> {
  for (let at = 0; at < body.length; at += pieceBytes) yield body.subarray(at, at + pieceBytes);
}

/** Parses the reply with the route's own schema, so that nothing leaves that the contract does not name. */
function sendObject({ ctx, input, caller }: Exchange, route: Route, reply: unknown): void {
  ctx.status = route.status;
  // Else koa searches its table of types for it.
  ctx.set('Content-Type', jsonType);
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
