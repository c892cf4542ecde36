// The TypeScript SDK, derived from the table of routes: fetch and WebSocket only, so that it runs in Node and in a
// browser.
import { allRoutes } from '../api/index.ts';
import type { Route } from '../api/route.ts';
import { attachTerminal } from './attach.ts';
import { wholeOrError } from './body.ts';
import { envelopeOf, failureOf } from './failure.ts';
import { type Following, follow } from './follow.ts';
import { Lazy } from './lazy.ts';
import { allItems } from './pages.ts';
import { type Connection, prepare } from './request.ts';
import { send, textOf } from './send.ts';
import type { Attached, CallSettings, ListResult, Namespaces } from './shape.ts';
import { chunksOf, objectsOf } from './sse.ts';
import type { TerminalSettings } from './terminal.ts';

export { FarhandError } from './failure.ts';
export type {
  CallInput,
  CallSettings,
  Listing,
  ListResult,
  ReceivedEvent,
  Stream,
  UploadContent,
} from './shape.ts';
export type { Ending, Terminal, TerminalNote, TerminalSettings } from './terminal.ts';
export { SignatureError, verifyWebhook, type WebhookDelivery, type WebhookEvent } from './webhook.ts';

export interface FarhandOptions {
  /** Where the broker is, with or without `/api/v1`: `https://farhand.example.org`. */
  baseUrl: string;
  apiKey?: string | undefined;
  /** How often a call is tried again where that is safe; 0: never, and streams of events do not reconnect. */
  retries?: number | undefined;
  /** Told as User-Agent, where the platform allows it. */
  userAgent?: string | undefined;
  /** Another fetch, for a proxy or a socket file. */
  fetch?: typeof fetch;
  /** Another way to open a WebSocket, for the same. */
  webSocket?: (url: string) => WebSocket;
}

/** One namespace per noun, one method per route. Every method rejects with FarhandError when the broker refuses. */
export type Farhand = Namespaces;

class Client {
  constructor(options: FarhandOptions) {
    const connection = connectionOf(options);
    const namespaces: Record<string, Record<string, unknown>> = {};
    for (const { noun, operation, route } of allRoutes()) {
      namespaces[noun] = { ...namespaces[noun], [operation]: methodOf(connection, route) };
    }
    Object.assign(this, namespaces);
  }
}

/** A client of one broker. */
// Built from the very table that the type is derived from.
export const Farhand = Client as unknown as new (options: FarhandOptions) => Farhand;

/** What is wrong with a key or an address is said without showing it. */
function connectionOf(options: FarhandOptions): Connection {
  const { apiKey, retries = 2, userAgent, fetch: own, webSocket = (url) => new WebSocket(url) } = options;
  const url = URL.parse(options.baseUrl);
  if (!url || !/^https?:$/.test(url.protocol) || url.username || url.password) {
    throw new TypeError('baseUrl must be an http or https URL without a user name or password');
  }
  if (apiKey && !/^[\x21-\x7e]+$/.test(apiKey)) {
    throw new TypeError('apiKey must be visible ASCII: is there a space or a line break in it?');
  }
  const baseUrl = `${url.origin}${url.pathname}`.replace(/\/+$/, '').replace(/\/api\/v1$/, '');
  return {
    baseUrl,
    apiKey,
    retries,
    userAgent,
    webSocket,
    fetch: own ?? ((input, init) => fetch(input, init)),
  };
}

type Input = Record<string, unknown>;

function methodOf(to: Connection, route: Route): unknown {
  if (route.kind === 'socket') {
    return (attached: Attached, settings?: TerminalSettings) => attachTerminal(to, route, attached, settings);
  }
  const ask = askerOf(to, route);
  if (route.kind === 'list') return listed(ask);
  if (route.kind === 'lines') return lines(to, route);
  return route.kind === 'events' ? events(to, route) : ask;
}

type Ask = (input?: Input, settings?: CallSettings) => Promise<unknown>;

/** One request and its answer. */
function askerOf(to: Connection, route: Route): Ask {
  return async (input = {}, { signal, idempotencyKey } = {}) => {
    const request = prepare(to, route, input, idempotencyKey);
    const { url } = request;
    return send(to, request, signal, async (response) => {
      if (route.kind === 'bytes') return wholeOrError(response, url, signal);
      const text = await textOf(response, url, signal);
      if (route.kind === 'raw') return text;
      const envelope = envelopeOf(text);
      if (!envelope) throw failureOf(response, text);
      if (route.kind === 'list') return { items: envelope.data, ...envelope.meta };
      return route.kind === 'growing' ? { ...asObject(envelope.data), ...envelope.meta } : envelope.data;
    });
  };
}

function asObject(data: unknown): object {
  return typeof data === 'object' && data !== null ? data : {};
}

function listed(ask: Ask) {
  return (input: Input = {}, settings: CallSettings = {}) => {
    // The broker answers a list with a page.
    const page = (given: Input) => ask(given, settings) as Promise<ListResult<unknown>>;
    return new Lazy(
      () => page(input),
      () => allItems((paging) => page({ ...input, ...paging }), input),
    );
  };
}

function lines(to: Connection, route: Route) {
  return (input: Input = {}, { signal }: CallSettings = {}) =>
    streamed(async () => {
      const request = prepare(to, route, input, undefined);
      const response = await send(to, request, signal, (head) =>
        Promise.resolve(wholeOrError(head, request.url, signal)),
      );
      return objectsOf(chunksOf(response.body));
    });
}

function events(to: Connection, route: Route) {
  return (input: Input = {}, { signal }: CallSettings = {}) => {
    const connect = (from: Connection, given: Input): Promise<Response> =>
      send(from, prepare(from, route, given, undefined), signal, (response) => Promise.resolve(response));
    return streamed(async () => {
      const how: Following = {
        url: to.baseUrl,
        signal,
        resumes: to.retries > 0 && 'last_event_id' in route.headers,
        last: route.lastEvent,
        // follow() itself tries again.
        connect: (after) =>
          connect({ ...to, retries: 0 }, after === undefined ? input : { ...input, last_event_id: after }),
      };
      return follow(await connect(to, input), how);
    });
  };
}

function streamed(begin: () => Promise<AsyncGenerator<unknown>>) {
  return new Lazy(begin, (begun) =>
    (async function* () {
      yield* await begun();
    })(),
  );
}
