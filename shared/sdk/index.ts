// The TypeScript SDK, derived from the table of routes: fetch and WebSocket only, so that it runs in Node and in a
// browser.
import type { z } from 'zod';
import { type Api, allRoutes } from '../api/index.ts';
import type { Route } from '../api/route.ts';
import { openTerminal, type Terminal, type TerminalSettings } from './terminal.ts';

export type { Ending, Terminal, TerminalNote, TerminalSettings } from './terminal.ts';

export interface FarhandOptions {
  /** Where the broker is, with or without `/api/v1`: `https://farhand.example.org`. */
  baseUrl: string;
  apiKey?: string;
  /** Another fetch, for a proxy or a socket file. */
  fetch?: typeof fetch;
  /** Another way to open a WebSocket, for the same. */
  webSocket?: (url: string) => WebSocket;
}

export interface CallSettings {
  signal?: AbortSignal;
  /** A repeat within 24 h with the same key gets the first answer. */
  idempotencyKey?: string;
}

/** A failure told by the broker, with its code, HTTP status and request id. */
export class FarhandError extends Error {
  override readonly name = 'FarhandError';
  readonly code: string;
  readonly status: number;
  readonly details: Readonly<Record<string, unknown>>;
  readonly requestId: string;

  constructor(
    status: number,
    requestId: string,
    error: { code: string; message: string; details: Record<string, unknown> },
  ) {
    super(error.message);
    this.code = error.code;
    this.details = error.details;
    this.status = status;
    this.requestId = requestId;
  }
}

type Loose<Shape extends z.ZodRawShape> = {
  [K in keyof Shape as undefined extends z.input<Shape[K]> ? never : K]:
    | z.input<Shape[K]>
    | z.output<Shape[K]>;
} & {
  [K in keyof Shape as undefined extends z.input<Shape[K]> ? K : never]?:
    | z.input<Shape[K]>
    | z.output<Shape[K]>;
};
type Body<B> = B extends z.ZodType ? (undefined extends z.input<B> ? unknown : z.input<B>) : unknown;

/** What a call takes: params, query, headers and body of its route, laid flat, and for an upload the content. */
export type CallInput<R> =
  R extends Route<infer P, infer Q, infer H, infer B>
    ? Loose<P> & Loose<Q> & Loose<H> & Body<B> & ContentOf<R>
    : never;
type FetchBody = NonNullable<RequestInit['body']>;
type ContentOf<R> = R extends { accepts: 'bytes' }
  ? { content: FetchBody }
  : R extends { accepts: 'form' }
    ? { content: Blob }
    : unknown;

/** One page of a list. */
export interface ListResult<T> {
  items: T[];
  total: number;
  limit: number;
  offset: number;
  has_more: boolean;
}

/** A server-sent event. */
export interface ReceivedEvent<T> {
  event: string;
  data: T;
  id?: string;
}

/** Bytes come as the Response itself: its body streams, its headers tell about the file. */
type CallResult<R> = R extends { kind: 'raw' }
  ? string
  : R extends { kind: 'bytes' }
    ? Response
    : R extends { kind: 'lines'; reply: infer T extends z.ZodType }
      ? AsyncIterable<z.output<T>>
      : R extends { kind: 'events'; reply: infer T extends z.ZodType }
        ? AsyncIterable<ReceivedEvent<z.output<T>>>
        : ObjectResult<R>;

type ObjectResult<R> = R extends { kind: 'growing'; reply: infer T extends z.ZodType }
  ? z.output<T> & Omit<ListResult<never>, 'items'>
  : R extends { kind: 'list'; reply: infer T extends z.ZodType }
    ? ListResult<z.output<T>>
    : R extends { reply: infer T extends z.ZodType }
      ? z.output<T>
      : never;

/** What a WebSocket is opened with: the answer of an attach. */
type Attached = { session_id: string; stream_url: string };

type Call<R> = R extends { kind: 'socket' }
  ? (attached: Attached, settings?: TerminalSettings) => Promise<Terminal>
  : object extends CallInput<R>
    ? (input?: CallInput<R>, settings?: CallSettings) => Promise<CallResult<R>>
    : (input: CallInput<R>, settings?: CallSettings) => Promise<CallResult<R>>;

/** One namespace per noun, one method per route. */
export type Farhand = { [N in keyof Api]: { [O in keyof Api[N]]: Call<Api[N][O]> } };

class Client {
  constructor(options: FarhandOptions) {
    const baseUrl = options.baseUrl.replace(/\/+$/, '').replace(/\/api\/v1$/, '');
    Object.assign(this, namespacesOf({ ...options, baseUrl }));
  }
}

/** A client of one broker. Every method rejects with FarhandError when the broker refuses. */
// Built from the very table that the type is derived from.
export const Farhand = Client as unknown as new (options: FarhandOptions) => Farhand;

function namespacesOf(options: FarhandOptions): Record<string, Record<string, unknown>> {
  const client: Record<string, Record<string, unknown>> = {};
  for (const { noun, operation, route } of allRoutes()) {
    const methods = client[noun] ?? {};
    client[noun] = methods;
    if (route.kind === 'socket') {
      methods[operation] = (attached: Attached, settings: TerminalSettings = {}) =>
        openTerminal(openSocket(options, route, attached), settings);
      continue;
    }
    methods[operation] = (input: Record<string, unknown> = {}, settings: CallSettings = {}) =>
      request(options, route, input, settings);
  }
  return client;
}

async function request(
  options: FarhandOptions,
  route: Route,
  input: Record<string, unknown>,
  settings: CallSettings,
): Promise<unknown> {
  const used = new Set([
    ...Object.keys(route.params),
    ...Object.keys(route.query),
    ...Object.keys(route.headers),
  ]);
  const rest = Object.fromEntries(Object.entries(input).filter(([name]) => !used.has(name)));
  const headers = new Headers(pick(input, route.headers, (name) => name.replaceAll('_', '-')));
  if (options.apiKey) headers.set('Authorization', `Bearer ${options.apiKey}`);
  if (settings.idempotencyKey) headers.set('Idempotency-Key', settings.idempotencyKey);
  if (route.body && !route.accepts) headers.set('Content-Type', 'application/json');
  const response = await (options.fetch ?? fetch)(urlOf(options.baseUrl, route, input), {
    method: route.method,
    headers,
    ...bodyOf(route, rest),
    ...(settings.signal && { signal: settings.signal }),
  });
  if (!response.ok && response.status !== 304) throw failureOf(response, await response.text());
  if (route.kind === 'bytes') return response;
  if (route.kind === 'lines') return linesOf(response);
  if (route.kind === 'events') return eventsOf(response);
  const text = await response.text();
  if (route.kind === 'raw') return text;
  const envelope = parseEnvelope(text);
  if (!envelope) throw failureOf(response, text);
  if (route.kind === 'list') return { items: envelope.data, ...envelope.meta };
  return route.kind === 'growing' ? { ...Object(envelope.data), ...envelope.meta } : envelope.data;
}

/** Of stream_url only the ticket is used: the broker is where this client has reached it. */
function openSocket(options: FarhandOptions, route: Route, { session_id, stream_url }: Attached): WebSocket {
  const ticket = new URL(stream_url, options.baseUrl).searchParams.get('ticket');
  const url = urlOf(options.baseUrl, route, { session_id, ticket }).replace(/^http/, 'ws');
  return options.webSocket ? options.webSocket(url) : new WebSocket(url);
}

function bodyOf(
  route: Route,
  { content, ...fields }: Record<string, unknown>,
): RequestInit & { duplex?: 'half' } {
  // A stream is sent as it is read (WHATWG fetch, section 5.4).
  if (route.accepts === 'bytes') return { body: content as FetchBody, duplex: 'half' };
  if (route.accepts !== 'form') return route.body ? { body: JSON.stringify({ content, ...fields }) } : {};
  const form = new FormData();
  // The fields first: the broker then need not keep the file.
  for (const [name, value] of Object.entries(fields)) if (value !== undefined) form.set(name, asText(value));
  if (content instanceof Blob) form.set('file', content);
  return { body: form };
}

/** The lines of a text as they come; a last one without its end was cut off. */
async function* textLines(response: Response): AsyncGenerator<string> {
  if (!response.body) return;
  let rest = '';
  for await (const text of response.body.pipeThrough(new TextDecoderStream())) {
    const lines = (rest + text).split('\n');
    rest = lines.pop() ?? '';
    yield* lines;
  }
}

async function* linesOf(response: Response): AsyncGenerator<unknown> {
  for await (const line of textLines(response)) if (line !== '') yield JSON.parse(line);
}

/** Server-sent events of our own kind: one line of data each. */
async function* eventsOf(response: Response): AsyncGenerator<ReceivedEvent<unknown>> {
  let fields: Record<string, string> = {};
  for await (const line of textLines(response)) {
    const [name = '', ...rest] = line.split(': ');
    if (line !== '') fields[name] = rest.join(': ');
    else if (fields.data !== undefined) {
      const { event = 'message', data, id } = fields;
      yield { event, data: JSON.parse(data), ...(id !== undefined && { id }) };
      fields = {};
    }
  }
}

/** The envelope of spec section 2.1; what is in it the broker has parsed with the same schemas. */
function parseEnvelope(text: string): { data: unknown; meta: object } | undefined {
  try {
    const value: unknown = JSON.parse(text);
    if (typeof value !== 'object' || value === null || !('data' in value)) return undefined;
    return {
      data: value.data,
      meta: 'meta' in value && typeof value.meta === 'object' ? { ...value.meta } : {},
    };
  } catch {
    return undefined;
  }
}

function urlOf(baseUrl: string, route: Route, input: Record<string, unknown>): string {
  const path = route.path.replaceAll(/\{(\w+)\}/g, (_, name: string) => pathPiece(String(input[name]), name));
  const query = new URLSearchParams(pick(input, route.query, (name) => name)).toString();
  return `${baseUrl}${route.base}${path}${query && `?${query}`}`;
}

/** A URL drops the pieces "", "." and "..": the call would go to another route. */
function pathPiece(text: string, name: string): string {
  if (/^\.{0,2}$/.test(text)) throw new TypeError(`${name} must be an id`);
  return encodeURIComponent(text);
}

function pick(
  input: Record<string, unknown>,
  shape: Record<string, unknown>,
  rename: (name: string) => string,
) {
  const given = Object.keys(shape).filter((name) => input[name] !== undefined);
  return Object.fromEntries(given.map((name) => [rename(name), asText(input[name])]));
}

function asText(value: unknown): string {
  return value instanceof Date ? value.toISOString() : String(value);
}

function failureOf(response: Response, text: string): FarhandError {
  const requestId = response.headers.get('x-request-id') ?? '';
  const fallback = { code: 'internal_error', message: `the broker answered ${response.status}`, details: {} };
  try {
    const { error } = JSON.parse(text) as { error: typeof fallback };
    return new FarhandError(response.status, requestId, { ...fallback, ...error });
  } catch {
    return new FarhandError(response.status, requestId, fallback);
  }
}
