// One call as a request: its address, headers and body out of the input that its route describes.
import type { Route } from '../api/route.ts';
import type { Attached } from './shape.ts';

/** Where requests go, and as whom. */
export interface Connection {
  /** Without /api/v1 and without a slash at its end. */
  baseUrl: string;
  apiKey: string | undefined;
  fetch: typeof fetch;
  retries: number;
  userAgent: string | undefined;
  webSocket: (url: string) => WebSocket;
}

/** A request that may be sent more than once, as far as its body allows. */
export interface Prepared {
  route: Route;
  url: string;
  headers: Headers;
  body: RequestInit & { duplex?: 'half' };
  /** The body is not used up by sending it. */
  repeatable: boolean;
  /** Doing it twice does no more than doing it once. */
  harmless: boolean;
}

type Input = Readonly<Record<string, unknown>>;

export function prepare(to: Connection, route: Route, input: Input, given: string | undefined): Prepared {
  const headers = new Headers(pick(input, route.headers, (name) => name.replaceAll('_', '-')));
  if (to.apiKey) headers.set('Authorization', `Bearer ${to.apiKey}`);
  if (to.userAgent) headers.set('User-Agent', to.userAgent);
  const { body, type, repeatable } = bodyOf(route, input);
  if (type) headers.set('Content-Type', type);
  // A repeat of ours must be known as one.
  const ours = route.idempotency && repeatable && to.retries > 0 ? randomKey() : undefined;
  const key = given ?? ours;
  if (key) headers.set('Idempotency-Key', key);
  const harmless =
    route.method === 'GET' ||
    (route.method === 'PUT' && !headers.has('if-match')) ||
    (route.idempotency !== undefined && key !== undefined);
  return { route, url: urlOf(to.baseUrl, route, input), headers, body, repeatable, harmless };
}

/** Of stream_url only the ticket is used: the broker is where this client has reached it. */
export function socketUrl(
  { baseUrl }: Connection,
  route: Route,
  { session_id, stream_url }: Attached,
): string {
  const ticket = new URL(stream_url, baseUrl).searchParams.get('ticket');
  return urlOf(baseUrl, route, { session_id, ticket }).replace(/^http/, 'ws');
}

function urlOf(baseUrl: string, route: Route, input: Input): string {
  const path = route.path.replaceAll(/\{(\w+)\}/g, (_, name: string) => pathPiece(String(input[name]), name));
  const query = new URLSearchParams(pick(input, route.query, (name) => name)).toString();
  return `${baseUrl}${route.base}${path}${query && `?${query}`}`;
}

/** A URL drops the pieces "", "." and "..": the call would go to another route. */
function pathPiece(text: string, name: string): string {
  if (/^\.{0,2}$/.test(text)) throw new TypeError(`${name} must be an id`);
  return encodeURIComponent(text);
}

function pick(input: Input, shape: Record<string, unknown>, rename: (name: string) => string) {
  const given = Object.keys(shape).filter((name) => input[name] !== undefined);
  return Object.fromEntries(given.map((name) => [rename(name), asText(input[name])]));
}

function asText(value: unknown): string {
  return value instanceof Date ? value.toISOString() : String(value);
}

function bodyOf(route: Route, input: Input): { body: Prepared['body']; type?: string; repeatable: boolean } {
  const elsewhere = new Set(
    [route.params, route.query, route.headers].flatMap((shape) => Object.keys(shape)),
  );
  const rest = Object.entries(input).filter(([name, value]) => !elsewhere.has(name) && value !== undefined);
  if (!route.accepts) {
    if (!route.body) return { body: {}, repeatable: true };
    return {
      body: { body: JSON.stringify(Object.fromEntries(rest)) },
      type: 'application/json',
      repeatable: true,
    };
  }
  const content = contentOf(input.content);
  const fields = rest.filter(([name]) => name !== 'content');
  // A stream is sent as it is read (WHATWG fetch, section 5.4).
  if (route.accepts === 'bytes')
    return { body: { body: content, duplex: 'half' }, repeatable: !isStream(content) };
  if (isStream(content)) return { ...streamedForm(fields, content), repeatable: false };
  const form = new FormData();
  // The fields first: the broker then need not keep the file.
  for (const [name, value] of fields) form.set(name, asText(value));
  form.set('file', content instanceof Blob ? content : new Blob([content]));
  return { body: { body: form }, repeatable: true };
}

function isStream(content: unknown): content is ReadableStream<Uint8Array> {
  return content instanceof ReadableStream;
}

function contentOf(content: unknown): string | Uint8Array<ArrayBuffer> | Blob | ReadableStream<Uint8Array> {
  if (typeof content === 'string' || content instanceof Blob || isStream(content)) return content;
  // Shared memory apart, a view has such a buffer.
  if (content instanceof Uint8Array) return content as Uint8Array<ArrayBuffer>;
  throw new TypeError('content must be a string, a Uint8Array, a Blob or a ReadableStream');
}

/** A form (RFC 7578) around a stream: fetch itself would first read it all. */
function streamedForm(fields: [string, unknown][], content: ReadableStream<Uint8Array>) {
  const boundary = `farhand${randomKey()}`;
  const part = (name: string): string => `--${boundary}\r\nContent-Disposition: form-data; name="${name}"`;
  const before = fields.map(([name, value]) => `${part(name)}\r\n\r\n${asText(value)}\r\n`).join('');
  const head = `${before}${part('file')}; filename="blob"\r\nContent-Type: application/octet-stream\r\n\r\n`;
  const text = new TextEncoder();
  const framed = new TransformStream<Uint8Array, Uint8Array>({
    start: (controller) => controller.enqueue(text.encode(head)),
    flush: (controller) => controller.enqueue(text.encode(`\r\n--${boundary}--\r\n`)),
  });
  const body = { body: content.pipeThrough(framed), duplex: 'half' as const };
  return { body, type: `multipart/form-data; boundary=${boundary}` };
}

function randomKey(): string {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) =>
    byte.toString(16).padStart(2, '0'),
  ).join('');
}
