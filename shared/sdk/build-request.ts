// Builds the HTTP request of a call: URL, headers and body from the input that its route describes.
import type { Route } from '../api/route.ts';
import type { FarhandError } from './errors-and-envelopes.ts';

/** The address of one broker, the API key for it, and the functions that send requests to it. */
export interface Connection {
  /** Address of the broker without /api/v1 and without a trailing slash. */
  baseUrl: string;
  apiKey: string | undefined;
  fetch: typeof fetch;
  retries: number;
  userAgent: string | undefined;
  webSocket: (url: string) => WebSocket;
  onRetry?: ((error: FarhandError, waitMs: number) => void) | undefined;
}

export interface Prepared {
  route: Route;
  url: string;
  headers: Headers;
  body: RequestInit & { duplex?: 'half' };
  /** True if the body can be sent again, which is impossible for a stream. */
  repeatable: boolean;
  /** True if two executions of the request have the same effect as one. */
  idempotent: boolean;
}

/** The answer of an attach call, with the address of the terminal's WebSocket. */
export type Attached = { session_id: string; stream_url: string };

type Input = Readonly<Record<string, unknown>>;

export function prepare(to: Connection, route: Route, input: Input, given: string | undefined): Prepared {
  const headers = new Headers(pick(input, route.headers, (name) => name.replaceAll('_', '-')));
  if (to.apiKey) headers.set('Authorization', `Bearer ${to.apiKey}`);
  if (to.userAgent) headers.set('User-Agent', to.userAgent);
  const { body, type, repeatable } = bodyOf(route, input);
  if (type) headers.set('Content-Type', type);
  // A random idempotency key lets the broker recognize a retry of this request.
  const ownKey = route.idempotency && repeatable && to.retries > 0 ? randomKey() : undefined;
  const key = given ?? ownKey;
  if (key) headers.set('Idempotency-Key', key);
  // After a first attempt whose answer was lost, a repeat of a conditional write would be refused.
  const conditional = headers.has('if-match') || headers.has('if-none-match') || input.overwrite === false;
  const idempotent =
    route.method === 'GET' ||
    (route.method === 'PUT' && !conditional) ||
    (route.idempotency !== undefined && key !== undefined);
  return { route, url: urlOf(to.baseUrl, route, input), headers, body, repeatable, idempotent };
}

/**
 * Returns the WebSocket address of a terminal. Only the ticket is taken from `stream_url`. Host and path come from the
 * broker address that this client uses.
 */
export function socketUrl(
  { baseUrl }: Connection,
  route: Route,
  { session_id, stream_url }: Attached,
): string {
  const ticket = new URL(stream_url, baseUrl).searchParams.get('ticket');
  return urlOf(baseUrl, route, { session_id, ticket }).replace(/^http/, 'ws');
}

function urlOf(baseUrl: string, route: Route, input: Input): string {
  const path = route.path.replaceAll(/\{(\w+)\}/g, (_, name: string) =>
    pathSegment(String(input[name]), name),
  );
  const query = new URLSearchParams(pick(input, route.query, (name) => name)).toString();
  return `${baseUrl}${route.base}${path}${query && `?${query}`}`;
}

/** Encodes a path segment. Throws for "", "." and "..", which would vanish from the URL and lead to another route. */
function pathSegment(text: string, name: string): string {
  if (/^\.{0,2}$/.test(text)) throw new TypeError(`${name} must not be empty, "." or ".."`);
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
  const elsewhere = new Set([route.params, route.query, route.headers].flatMap(Object.keys));
  const rest = Object.entries(input).filter(([name, value]) => !elsewhere.has(name) && value !== undefined);
  if (!route.accepts) {
    if (!route.body) return { body: {}, repeatable: true };
    const json = JSON.stringify(Object.fromEntries(rest));
    return { body: { body: json }, type: 'application/json', repeatable: true };
  }
  const content = contentOf(input.content);
  const fields = rest.filter(([name]) => name !== 'content');
  // `duplex: 'half'` is required to send a stream as it is read (WHATWG fetch, section 5.4).
  if (route.accepts === 'bytes')
    return { body: { body: content, duplex: 'half' }, repeatable: !isStream(content) };
  if (isStream(content)) return { ...streamedForm(fields, content), repeatable: false };
  const form = new FormData();
  // Fields come before the file, so that the broker can forward the file to the machine without storing it.
  for (const [name, value] of fields) form.set(name, asText(value));
  form.set('file', content instanceof Blob ? content : new Blob([content]));
  return { body: { body: form }, repeatable: true };
}

function isStream(content: unknown): content is ReadableStream<Uint8Array> {
  return content instanceof ReadableStream;
}

function contentOf(content: unknown): string | Uint8Array<ArrayBuffer> | Blob | ReadableStream<Uint8Array> {
  if (typeof content === 'string' || content instanceof Blob || isStream(content)) return content;
  // The cast is safe except for bytes in shared memory, which fetch refuses.
  if (content instanceof Uint8Array) return content as Uint8Array<ArrayBuffer>;
  throw new TypeError('content must be a string, a Uint8Array, a Blob or a ReadableStream');
}

/** Builds a form (RFC 7578) around a stream. The FormData of fetch would first read the stream into memory. */
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
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('');
}
