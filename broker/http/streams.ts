// Answers that are sent as they come, at the pace of whoever reads: files, lines, events, and objects with an array of
// any length. What fails before the first byte is an ordinary error; what fails later cuts the connection, so that
// nobody takes a part for the whole.
import { once } from 'node:events';
import type { ServerResponse } from 'node:http';
import type { Context } from 'koa';
import mime from 'mime';
import { z } from 'zod';
import type { BytesReply, Caller, SentEvent } from '../../shared/api/index.ts';
import type { Route } from '../../shared/api/route.ts';
import type { Logger } from '../../shared/logger.ts';
import { jsonType } from './headers.ts';
import { eventStream, within } from './sse.ts';

/** An answer under way. */
export interface Outgoing {
  ctx: Context;
  caller: Caller;
  /** Of the envelope, where there is one. */
  meta: object;
  log: Logger;
  /** Nobody reads on: ends whatever the answer waits for. */
  leave(): void;
}

/** Sends what the handler of a route gave back, to its end. */
export type Sender = (out: Outgoing, reply: unknown) => Promise<void>;

/** How the answer of a route is sent as it comes; undefined where it is an ordinary object. */
export function senderOf(route: Route): Sender | undefined {
  // Handlers have the reply that the kind of their route says: the compiler saw to that.
  if (route.kind === 'bytes') return (out, reply) => sendBytes(out, reply as BytesReply);
  if (route.kind === 'lines') return linesSender(route);
  if (route.kind === 'events') return eventsSender(route);
  return route.kind === 'growing' ? growingSender(route) : undefined;
}

/** Whoever asked for what is still to come gets the head of the answer after this. */
const quietMs = 50;

/** mime takes these for videos. */
const types: Readonly<Record<string, string>> = { ts: 'text/plain', mts: 'text/plain' };

/** A file, or with HEAD what is said about it. */
async function sendBytes(
  out: Outgoing,
  { status = 200, filename, length, bytes, quiet = false }: BytesReply,
): Promise<void> {
  const { ctx } = out;
  const head = ctx.method === 'HEAD';
  if (head) await bytes?.return?.();
  const ready = bytes && !head ? await begun(bytes, quiet ? quietMs : undefined) : undefined;
  ctx.status = status;
  ctx.set('Cache-Control', 'private, no-cache');
  if (status !== 304) describeFile(ctx, filename, length);
  if (ready) return pour(out, ready, { length, quiet });
  ctx.respond = false;
  ctx.res.end();
}

function describeFile(ctx: Context, filename: string, length: number | undefined): void {
  // biome-ignore lint/suspicious/noControlCharactersInRegex: no header may hold them
  ctx.attachment(filename.replaceAll(/[\u0000-\u001f\u007f]/g, '_'));
  const ending = filename.slice(filename.lastIndexOf('.') + 1).toLowerCase();
  const type = Object.hasOwn(types, ending) ? types[ending] : mime.getType(filename);
  ctx.set('Content-Type', type ?? 'application/octet-stream');
  if (length !== undefined) ctx.set('Content-Length', String(length));
}

function linesSender({ reply: schema, status }: Route): Sender {
  return async (out, items) => {
    const lines = map(items as AsyncIterable<unknown>, (item) => `${JSON.stringify(schema.parse(item))}\n`);
    await sendText(out, status, 'application/x-ndjson', lines);
  };
}

function eventsSender({ reply: schema, status }: Route): Sender {
  return async (out, events) => {
    const parsed = map(events as AsyncIterable<SentEvent<unknown>>, (event) => ({
      ...event,
      data: schema.parse(event.data),
    }));
    const ready = await begun(parsed, quietMs);
    out.ctx.status = status;
    out.ctx.set('Content-Type', 'text/event-stream');
    // nginx would hold events back.
    out.ctx.set('X-Accel-Buffering', 'no');
    await pour(out, eventStream(ready), { quiet: true });
  };
}

/** The envelope of one object, its array last and written batch by batch. */
function growingSender(route: Route): Sender {
  const array = route.grows ?? '';
  // The builder of such routes takes object schemas alone.
  const { [array]: items, ...others } = (route.reply as z.ZodObject).shape;
  const rest = z.object(others);
  return async (out, reply) => {
    const given = reply as { head: unknown; items: AsyncIterable<unknown>; meta: object };
    const start = (): string =>
      `{"data":${JSON.stringify(rest.parse(given.head)).slice(0, -1)},${JSON.stringify(array)}:[`;
    const text = async function* () {
      let begins = true;
      for await (const batch of given.items) {
        const parsed = JSON.stringify((items as z.ZodArray).parse(batch)).slice(1, -1);
        if (parsed === '') continue;
        // With the first batch: until then a failure is still an error of its own.
        yield (begins ? start() : ',') + parsed;
        begins = false;
      }
      yield `${begins ? start() : ''}]},"meta":${JSON.stringify({ ...out.meta, ...given.meta })}}`;
    };
    await sendText(out, route.status, jsonType, text());
  };
}

async function sendText(
  out: Outgoing,
  status: number,
  type: string,
  text: AsyncIterable<string>,
): Promise<void> {
  const ready = await begun(text);
  out.ctx.status = status;
  out.ctx.set('Content-Type', type);
  await pour(
    out,
    map(ready, (piece) => Buffer.from(piece)),
  );
}

/** Writes all of it and ends the answer; a failure, or another number of bytes than announced, cuts it. */
async function pour(
  out: Outgoing,
  chunks: AsyncIterable<Uint8Array>,
  { length, quiet = false }: { length?: number | undefined; quiet?: boolean } = {},
): Promise<void> {
  const { res } = out.ctx;
  out.ctx.respond = false;
  if (quiet) res.flushHeaders();
  const head = out.ctx.method === 'HEAD';
  if (head) {
    res.end();
    // What comes first may be long in coming: it is waited for no more, and what was opened for it is closed.
    out.leave();
  }
  let sent = 0;
  try {
    for await (const chunk of chunks) {
      if (head) return;
      sent += chunk.length;
      if (!res.write(chunk)) await drained(res, out.caller.signal);
    }
    if (length !== undefined && sent !== length) throw new Error(`${sent} bytes came instead of ${length}`);
    res.end();
  } catch (error) {
    if (head) return;
    const { request_id, signal } = out.caller;
    if (!signal.aborted) out.log.warn({ err: error, request_id }, 'an answer was cut off');
    res.destroy();
  }
}

async function drained(res: ServerResponse, signal: AbortSignal): Promise<void> {
  signal.throwIfAborted();
  await once(res, 'drain', { signal });
}

/**
 * With the first item fetched, so that what fails before it still has an error of its own; but no longer than `ms`,
 * where it may be long in coming.
 */
async function begun<T>(items: AsyncIterable<T>, ms = Number.POSITIVE_INFINITY): Promise<AsyncIterable<T>> {
  const iterator = items[Symbol.asyncIterator]();
  const first = iterator.next();
  await within(ms, first);
  return (async function* () {
    try {
      for (let next = await first; !next.done; next = await iterator.next()) yield next.value;
    } finally {
      await iterator.return?.();
    }
  })();
}

async function* map<T, U>(items: AsyncIterable<T>, change: (item: T) => U): AsyncGenerator<U> {
  for await (const item of items) yield change(item);
}
