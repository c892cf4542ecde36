// One request of the table over HTTP: its client, its parts, its body when it is wanted, its handler and its reply.
import type { Context } from 'koa';
import type { Caller, Content, Handlers } from '../../shared/api/index.ts';
import type { Route } from '../../shared/api/route.ts';
import type { Budget } from '../../shared/budget.ts';
import { AppError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import {
  type AccessRooms,
  AuthorizedRequest,
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
import { bytesOf, openForm } from './upload.ts';

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
  handler: Handler;
  recall: Recall;
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
  const { handlers, log } = rooms;
  const guard = guardOf(route, rooms);
  const recall = recallBy(handlers, noun, route.again ?? 'get', rooms);
  const endpoint = { route, handler: handlerOf(handlers, noun, operation), recall, rooms };
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
      const reply = await answer(ctx, endpoint, request.body, input, caller);
      // The key may have been revoked while it waited.
      if (route.waits) caller.signal.throwIfAborted();
      await sendReply({ ctx, route, input, caller, log }, reply);
    };
    const read = () => partsOf(ctx, route);
    try {
      await request.perform({ read, gone, lasts, act, ...(route.method !== 'GET' && { readRest }) });
    } finally {
      // Whatever was opened for it ends with it.
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

/** What the handler answers; a repeat with an Idempotency-Key gets what the first request got. */
async function answer(
  ctx: Context,
  { route, handler, recall, rooms }: Endpoint,
  body: unknown,
  input: Input,
  caller: Caller,
): Promise<unknown> {
  const key = route.idempotency ? ctx.get('idempotency-key') : '';
  const run = () => handler(input, caller);
  try {
    const { path, querystring: query } = ctx;
    const { content } = input;
    return await rooms.idempotency.answer({ route, caller, key, path, query, body, content, run, recall });
  } finally {
    // A refusal may have something to say there, too (RFC 9110 section 14.4).
    ctx.res.setHeaders(caller.headers);
  }
}

/** Reads a JSON body, or the first fields of a form, into `raw`; the content of a file is only begun. */
async function readBody(
  ctx: Context,
  route: Route,
  raw: RawInput,
  { spool, bodies }: DispatchRooms,
  signal: AbortSignal,
): Promise<Content<Record<string, string>> | undefined> {
  const { req } = ctx;
  // The client waits for this (RFC 9110 section 10.1.1).
  const ask = (): void => {
    if (ctx.get('expect').toLowerCase() === '100-continue') ctx.res.writeContinue();
  };
  if (route.accepts) refuseCoded(ctx);
  // Only when somebody reads: an upload that is refused before is not sent at all.
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
