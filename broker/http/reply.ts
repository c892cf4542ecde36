// Sends replies: an object in the JSON envelope, or a stream at the reader's pace. A failure after the first byte cuts
// the connection.
import { Readable } from 'node:stream';
import { pipeline } from 'node:stream/promises';
import type { Context } from 'koa';
import mime from 'mime';
import { z } from 'zod';
import type { Route } from '../../shared/api/route.ts';
import type { BytesReply, Caller, GrowingReply, RawReply, SentEvent } from '../../shared/api/route-table.ts';
import { endsWithin, iso, pausesInLongWork } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import { Quota } from '../../shared/quota.ts';

/** Content type of every answer in the JSON envelope. */
export const jsonType = 'application/json; charset=utf-8';

/** A request and the facts needed to send the reply of its handler. */
interface Exchange {
  ctx: Context;
  route: Route;
  input: unknown;
  caller: Caller;
  log: Logger;
}

/** The first item of a `quiet` stream may come late. The headers wait for it at most this number of milliseconds. */
const headMs = 50;
/**
 * If a stream has no event for this number of milliseconds, the client gets a comment line (`beat`). Otherwise a proxy
 * could close the idle connection.
 */
const quietMs = 15_000;
const beat = ':\n\n';
const pieceBytes = 64 * 1024;
/** Content types that override the mime library, which takes TypeScript files for videos. */
const types: Readonly<Record<string, string>> = { ts: 'text/plain', mts: 'text/plain' };
/**
 * Limits the memory of all objects and lists that are not fully sent yet, because clients may read slowly. Counts the
 * characters of their JSON, or `itemBytes` for each item of a long array.
 */
const answers = new Quota(
  128 * 1024 * 1024,
  'too many answers wait for clients that read slowly; try again later',
);
/** Maximum number of items of an array that are checked and written in one turn of the event loop. */
const mostItems = 100;
/** Estimated bytes of memory for each item of a long array while its answer is sent. */
const itemBytes = 1_000;
const page = z.object({ items: z.array(z.unknown()), total: z.number() });
const paging = z.object({ limit: z.number(), offset: z.number() });

export function isStreamed({ kind }: Route): boolean {
  return ['bytes', 'lines', 'events', 'growing'].includes(kind);
}

/** Sends a handler's reply. The casts are safe: the types of Handlers tie each reply to its route's kind. */
export async function sendReply(exchange: Exchange, reply: unknown): Promise<void> {
  const { route, caller } = exchange;
  const { kind, status } = route;
  if (kind === 'bytes') return sendBytes(exchange, reply as BytesReply);
  if (kind === 'lines') {
    const lines = linesOf(reply as AsyncIterable<unknown>, route);
    return send(exchange, lines, { status, headers: { 'Content-Type': 'application/x-ndjson' } });
  }
  if (kind === 'events') {
    // nginx buffers events unless this header is set.
    const headers = { 'Content-Type': 'text/event-stream', 'X-Accel-Buffering': 'no' };
    const events = eventsOf(reply as AsyncIterable<SentEvent<unknown>>, route);
    return send(exchange, events, { status, headers, quiet: true });
  }
  if (kind === 'growing') {
    const growing = reply as GrowingReply<Record<string, unknown>, string>;
    if (growing.meta.has_more) setLink(exchange.ctx, growing.meta);
    const text = growingOf(growing, route, metaOf(caller));
    return send(exchange, text, { status, headers: { 'Content-Type': jsonType } });
  }
  if (kind === 'raw') return sendRaw(exchange.ctx, reply as RawReply);
  const long = route.parts && longReply(route, reply);
  if (!long) return sendObject(exchange, reply);
  occupyMemory(exchange.ctx, long.count * itemBytes);
  return send(exchange, growingOf(long, route, metaOf(caller)), {
    status,
    headers: { 'Content-Type': jsonType },
  });
}

type GrowingParts = Omit<GrowingReply<Record<string, unknown>, string>, 'meta'> & { meta?: object };

/**
 * Splits a reply whose array is too long to be checked in one turn of the event loop. Returns the array in slices, and
 * the other fields of the reply; undefined if no split is needed.
 */
function longReply({ grows = '' }: Route, reply: unknown): (GrowingParts & { count: number }) | undefined {
  // The cast is safe: a route with `parts` replies with an object, and `grows` is the name of an array in that object.
  const { [grows]: items, ...head } = reply as Record<string, unknown> & { [grows: string]: unknown[] };
  const count = items?.length ?? 0;
  return items && count > mostItems ? { head, items: slicesOf(items), count } : undefined;
}

async function* slicesOf(items: unknown[]): AsyncGenerator<unknown[]> {
  const pause = pausesInLongWork();
  for (let at = 0; at < items.length; at += mostItems) {
    yield items.slice(at, at + mostItems);
    await pause();
  }
}

function metaOf(caller: Caller) {
  return { request_id: caller.request_id, timestamp: iso() };
}

/** Names the next page of a list in the header Link (RFC 8288). */
function setLink(ctx: Context, { limit, offset }: { limit: number; offset: number }): void {
  const query = new URLSearchParams(ctx.querystring);
  query.set('limit', String(limit));
  query.set('offset', String(offset + limit));
  ctx.set('Link', `<${ctx.path}?${query.toString()}>; rel="next"`);
}

/** Sends an object or a list, parsed by the route's schema, so that only documented fields leave the broker. */
function sendObject({ ctx, route, input, caller }: Exchange, reply: unknown): void {
  let data: unknown;
  let meta: object = metaOf(caller);
  if (route.kind === 'list') {
    const { items, total } = page.parse(reply);
    const { limit, offset } = paging.parse(input);
    const has_more = offset + items.length < total;
    if (has_more) setLink(ctx, { limit, offset });
    data = items.map((item) => route.reply.parse(item));
    meta = { ...meta, total, limit, offset, has_more, ...route.listMeta?.parse(reply) };
  } else data = route.reply.parse(reply);
  const text = JSON.stringify({ data, meta });
  // Without a quota, answers that wait for slow readers could fill the memory.
  occupyMemory(ctx, text.length);
  ctx.status = route.status;
  // The type is set here, because koa would search its table of types for each answer.
  ctx.set('Content-Type', jsonType);
  ctx.body = text;
}

/** Reserves memory for an answer in the quota `answers`, until the answer is sent. */
function occupyMemory({ res }: Context, bytes: number): void {
  const release = answers.take(bytes);
  if (res.closed) release();
  else res.once('close', release);
}

/**
 * Sends bytes from memory. Several answers may share these bytes. A large body is sent in pieces, so that only one
 * piece at a time waits for a slow reader.
 */
export function sendRaw(ctx: Context, { type, body, etag }: RawReply): void {
  ctx.status = 200;
  if (etag) {
    ctx.set({ ETag: etag, 'Cache-Control': 'no-cache' });
    if (ctx.get('if-none-match').includes(etag)) {
      ctx.status = 304;
      return;
    }
  }
  // Bytes are sent without copying them, because the API reference page is large.
  const bytes =
    typeof body === 'string' ? Buffer.from(body) : Buffer.from(body.buffer, body.byteOffset, body.byteLength);
  ctx.body = bytes.length > pieceBytes ? Readable.from(piecesOf(bytes)) : bytes;
  ctx.length = bytes.length;
  ctx.type = type;
}

function* piecesOf(body: Buffer): Generator<Buffer> {
  for (let at = 0; at < body.length; at += pieceBytes) yield body.subarray(at, at + pieceBytes);
}

/** Sends a file. For a HEAD request, sends only the headers of the answer. */
async function sendBytes(
  exchange: Exchange,
  { status = 200, filename, length, bytes, quiet = false }: BytesReply,
): Promise<void> {
  const { ctx } = exchange;
  const headers: Record<string, string> = { 'Cache-Control': 'private, no-cache' };
  if (status !== 304) {
    // biome-ignore lint/suspicious/noControlCharactersInRegex: no header may contain them
    const name = filename.replaceAll(/[\u0000-\u001f\u007f]/g, '_');
    // Non-ASCII characters are sent only in filename* (RFC 6266, section 4.3), because programs may decode the Latin-1
    // text of `filename` as UTF-8.
    ctx.attachment(name, { fallback: name.replaceAll(/[^ -~]/g, '?') });
    const ending = filename.slice(filename.lastIndexOf('.') + 1).toLowerCase();
    const type = Object.hasOwn(types, ending) ? types[ending] : mime.getType(filename);
    headers['Content-Type'] = type ?? 'application/octet-stream';
    if (length !== undefined) headers['Content-Length'] = String(length);
  }
  await send(exchange, ctx.method === 'HEAD' ? undefined : bytes, { status, headers, length, quiet });
}

async function* linesOf(items: AsyncIterable<unknown>, { reply }: Route): AsyncGenerator<string> {
  for await (const item of items) yield `${JSON.stringify(reply.parse(item))}\n`;
}

/**
 * Formats server-sent events (WHATWG HTML, section 9.2). JSON has no raw line breaks, so the data is one
 * line.
 */
async function* eventsOf(
  events: AsyncIterable<SentEvent<unknown>>,
  { reply }: Route,
): AsyncGenerator<string> {
  const iterator = events[Symbol.asyncIterator]();
  try {
    for (let next = iterator.next(); ; ) {
      if (!(await endsWithin(quietMs, next))) {
        yield beat;
        continue;
      }
      const result = await next;
      if (result.done) return;
      const { event, data, id } = result.value;
      const text = JSON.stringify(reply.parse(data));
      yield `${id === undefined ? '' : `id: ${id}\n`}event: ${event}\ndata: ${text}\n\n`;
      next = iterator.next();
    }
  } finally {
    await iterator.return?.();
  }
}

/** Yields an answer with one object. The object's last field is an array, which is written batch by batch. */
async function* growingOf(
  { head, items, meta }: GrowingParts,
  { grows, parts }: Route,
  own: object,
): AsyncGenerator<string> {
  if (!parts) throw new Error('this route has no `parts`: define it with growing() or inPieces()');
  const start = (): string =>
    `{"data":${JSON.stringify(parts.rest.parse(head)).slice(0, -1)},${JSON.stringify(grows)}:[`;
  let begun = false;
  for await (const batch of items) {
    const text = JSON.stringify(parts.items.parse(batch)).slice(1, -1);
    if (text === '') continue;
    // Nothing is sent before the first items are ready. If these items cannot be read, the client thus gets an ordinary
    // error.
    yield (begun ? ',' : start()) + text;
    begun = true;
  }
  yield `${begun ? '' : start()}]},"meta":${JSON.stringify({ ...own, ...meta })}}`;
}

/**
 * Sends all chunks and ends the answer. Cuts the connection after a failure, or if the number of bytes is not `length`.
 */
async function send(
  { ctx, caller, log }: Exchange,
  chunks: AsyncIterable<Uint8Array | string> | undefined,
  reply: { status: number; headers: Record<string, string>; length?: number | undefined; quiet?: boolean },
): Promise<void> {
  const { res } = ctx;
  const { status, headers, length, quiet = false } = reply;
  // The headers are sent after the first chunk was read, so that an earlier failure becomes an ordinary error.
  // Exception: the headers of a `quiet` stream wait at most `headMs`, because its first chunk may come late.
  const ready = chunks && (await begun(chunks, length, quiet ? headMs : undefined));
  ctx.status = status;
  ctx.set(headers);
  ctx.respond = false;
  // The answer to a HEAD request has no body. If there are chunks, dispatcher() closes their stream when the request
  // ends.
  if (!ready || ctx.method === 'HEAD') return void res.end();
  if (quiet) res.flushHeaders();
  const { request_id, signal } = caller;
  await pipeline(ready, res, { signal }).catch((error: unknown) => {
    if (!signal.aborted) log.warn({ err: error, request_id }, 'an answer was not sent in full');
  });
}

/**
 * Waits for the first chunk, at most `ms` milliseconds if `ms` is set. Rejects if the stream fails in this time. The
 * returned stream fails unless it has `length` bytes.
 */
async function begun<T extends { length: number }>(
  chunks: AsyncIterable<T>,
  length: number | undefined,
  ms: number | undefined,
): Promise<AsyncGenerator<T>> {
  const iterator = chunks[Symbol.asyncIterator]();
  let first: Promise<IteratorResult<T>> | undefined = iterator.next();
  await (ms === undefined ? first : endsWithin(ms, first));
  return (async function* () {
    let sent = 0;
    try {
      for (let next = await first; next && !next.done; next = await iterator.next()) {
        // This releases the memory of the first chunk, because sending a large answer may take hours.
        first = undefined;
        sent += next.value.length;
        yield next.value;
      }
    } finally {
      await iterator.return?.();
    }
    if (length !== undefined && sent !== length)
      throw new Error(`the answer should have ${length} bytes, but ${sent} were sent`);
  })();
}
