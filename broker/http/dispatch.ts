// What happens to every request of the table: who, may they, does it exist, is it well-formed - then the noun's handler.
import type { Context } from 'koa';
import { z } from 'zod';
import type { Caller, Handlers, RawReply } from '../../shared/api/index.ts';
import type { IdNoun, MachineId, Route } from '../../shared/api/route.ts';
import { iso } from '../../shared/clock.ts';
import { AppError, type Code } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import { holds, type Keys, localKey, reachable, reaches } from '../keys.ts';
import type { Key, State } from '../state/index.ts';
import { readJson } from './body.ts';
import { type Sender, senderOf } from './download.ts';
import type { Attempt, Idempotency } from './idempotency.ts';
import { headersOf, queryOf, type RawInput, type Reader, readerOf } from './input.ts';
import type { Spool } from './spool.ts';
import { type Incoming, openBytes, openForm } from './upload.ts';

/** For each noun with ids: whether one names something, and the machine behind it. */
export type Lookups = Record<IdNoun, (id: string) => { machine?: MachineId } | undefined>;

export interface DispatchRooms {
  state: State;
  keys: Keys;
  lookups: Lookups;
  idempotency: Idempotency;
  spool: Spool;
  log: Logger;
}

type Handler = (input: unknown, caller: Caller) => unknown;

const bodyLimit = 1024 * 1024;
const bearer = /^Bearer ([\x21-\x7e]+)$/i;

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
  const handler = handlerOf(handlers, noun, operation);
  const send = senderOf(route);
  return async (ctx: Context): Promise<void> => {
    const key = route.access === 'everybody' ? undefined : authenticate(ctx, rooms.keys, local);
    if (key) requireScope(key, route);
    const raw = addressed(ctx, route);
    if (key) checkIds(reader, raw, key, rooms);
    const content = await readBody(ctx, route, raw, rooms.spool);
    try {
      // A body may take its time: the key may have been revoked meanwhile.
      if (key && route.method !== 'GET') checkIds(reader, raw, authenticate(ctx, rooms.keys, local), rooms);
      const input = reader.parse(raw);
      if (content) input.content = contentOf(content, reader, raw);
      const { caller, forget } = callerOf(ctx, key ?? localKey, rooms.state);
      try {
        if (route.kind === 'raw') await sendRaw(ctx, handler, input, caller);
        else if (send) await stream(ctx, send, handler, input, caller, rooms.log);
        else await answer(ctx, route, raw, input, caller, handler, handlers, noun, rooms.idempotency);
      } finally {
        forget();
      }
    } finally {
      content?.close();
    }
  };
}

/** Reads a JSON body into `raw`; one that is not JSON is only begun. */
async function readBody(
  ctx: Context,
  route: Route,
  raw: RawInput,
  spool: Spool,
): Promise<Incoming | undefined> {
  if (route.method === 'GET') return undefined;
  // Asked for only now, so that a refused upload is not sent at all (RFC 9110 section 10.1.1).
  if (ctx.get('expect').toLowerCase() === '100-continue') ctx.res.writeContinue();
  if (route.accepts === 'bytes') return openBytes(ctx.req);
  if (route.accepts === 'form') {
    const incoming = await openForm(ctx.req, spool, ({ path }) => (path ?? raw.query.path) !== undefined);
    raw.body = incoming.fields();
    return incoming;
  }
  const body = await readJson(ctx.req, route.bodyLimit ?? bodyLimit);
  if (route.body) raw.body = body;
  return undefined;
}

/** The content as its handler takes it; the fields that came late are parsed as the first ones were. */
function contentOf(incoming: Incoming, reader: Reader, raw: RawInput) {
  return {
    chunks: incoming.chunks,
    fields: () => reader.parse({ ...raw, body: incoming.fields() }),
  };
}

/** The key of a request. Throws unauthorized. */
export function authenticate(ctx: Context, keys: Keys, local: boolean): Key {
  if (local) return localKey;
  const presented = bearer.exec(ctx.get('authorization'))?.[1];
  const key = presented === undefined ? undefined : keys.authenticate(presented);
  if (key) return key;
  ctx.set('WWW-Authenticate', 'Bearer');
  throw new AppError('unauthorized', 'send a valid API key: Authorization: Bearer service_apikey_…');
}

function requireScope(key: Key, { access }: Route): void {
  if (access === 'everybody' || access === 'any key' || holds(key, access)) return;
  throw new AppError('forbidden', `this needs a key with the scope ${access}`, { required_scope: access });
}

/** Everything of a request but its body, which is read only once these allow it. */
function addressed(ctx: Context, route: Route): RawInput {
  return {
    // Set by the router from the path's parameters.
    params: ctx.params as Record<string, unknown>,
    // Not ctx.URL, which a Host header can bend.
    query: queryOf(new URLSearchParams(ctx.querystring)),
    headers: headersOf(ctx.headers, route.headers),
    body: undefined,
  };
}

/** First whether the key reaches every machine behind every id, then whether each id names something. */
function checkIds(reader: Reader, raw: RawInput, key: Key, { state, lookups }: DispatchRooms): void {
  const found = reader.ids(raw).map(({ noun, id }) => ({ noun, id, names: lookups[noun](id) }));
  for (const { noun, id, names } of found) {
    // A machine's id counts whether it names one or not: an outsider learns nothing.
    const machine = noun === 'machine' ? (id as MachineId) : names?.machine;
    if (machine !== undefined && !reaches(key, machine, state)) {
      throw new AppError('forbidden', 'this key does not reach that machine', { [`${noun}_id`]: id });
    }
  }
  const missing = found.find(({ names }) => names === undefined);
  if (missing) {
    const code: Code = `${missing.noun}_not_found`;
    throw new AppError(code, `no such ${missing.noun.replace('_', ' ')}`, {
      [`${missing.noun}_id`]: missing.id,
    });
  }
}

/** The id that the first middleware gave this request. */
function requestIdOf(ctx: Context): string {
  return String(ctx.state.requestId);
}

function callerOf(ctx: Context, key: Key, state: State): { caller: Caller; forget(): void } {
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
  return { caller, forget: () => ctx.res.off('close', close) };
}

async function stream(
  ctx: Context,
  send: Sender,
  handler: Handler,
  input: unknown,
  caller: Caller,
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

async function sendRaw(ctx: Context, handler: Handler, input: unknown, caller: Caller): Promise<void> {
  // Handlers of raw routes give RawReply.
  const reply = (await handler(input, caller)) as RawReply;
  ctx.status = reply.status ?? 200;
  ctx.set(Object.fromEntries(caller.headers));
  ctx.body = typeof reply.body === 'string' ? reply.body : Buffer.from(reply.body);
  ctx.type = reply.type;
}

async function answer(
  ctx: Context,
  route: Route,
  raw: RawInput,
  input: Record<string, unknown>,
  caller: Caller,
  handler: Handler,
  handlers: Handlers,
  noun: string,
  idempotency: Idempotency,
): Promise<void> {
  const key = route.idempotency ? ctx.get('idempotency-key') : '';
  if (key === '') return send(ctx, route, input, caller, await handler(input, caller));
  const request = { method: route.method, path: ctx.path, body: raw.body ?? null, ...sizeOf(ctx, route) };
  const outcome = await idempotency.begin(caller.key_id, key, request);
  if ('attempt' in outcome) {
    const reply = await attempt(outcome.attempt, caller, () => handler(input, caller), route);
    return send(ctx, route, input, caller, reply);
  }
  ctx.set('Idempotency-Replayed', 'true');
  if ('answer' in outcome) return send(ctx, route, input, caller, outcome.answer);
  if (route.idempotency === 'secret') {
    throw new AppError('conflict', 'this was made already, and its secret is shown once only', {
      id: outcome.madeId,
    });
  }
  // A crash came between the commit and the answer: tell how what was made is now.
  const get = handlerOf(handlers, noun, 'get');
  return send(
    ctx,
    route,
    input,
    caller,
    await get({ [`${noun.replace(/s$/, '')}_id`]: outcome.madeId }, caller),
  );
}

/** What stands for a body that is never kept, and the query that says what it is for. */
function sizeOf(ctx: Context, route: Route) {
  return route.accepts && { query: ctx.querystring, length: ctx.get('content-length') };
}

async function attempt(attempt: Attempt, caller: Caller, run: () => unknown, route: Route): Promise<unknown> {
  caller.made = attempt.made;
  try {
    const reply = await run();
    if (route.idempotency === 'replay') await attempt.answered(reply);
    else await attempt.released();
    return reply;
  } catch (error) {
    await attempt.released();
    throw error;
  }
}

/** Parses the reply with the route's own schema, so that nothing leaves that the contract does not name. */
function send(
  ctx: Context,
  route: Route,
  input: Record<string, unknown>,
  caller: Caller,
  reply: unknown,
): void {
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
