// The TypeScript SDK: a client with one method per REST route, for Node and browsers (fetch, WebSocket).

import type { Route } from '../api/route.ts';
import { allRoutes } from '../api/route-table.ts';
import { type Attached, type Connection, prepare, socketUrl } from './build-request.ts';
import type { CallSettings, ListResult, Namespaces } from './call-types.ts';
import { envelopeOf, failureOf } from './errors-and-envelopes.ts';
import { type FollowOptions, follow } from './follow-events.ts';
import { allItems, lazy } from './iterable-result.ts';
import { chunksOf, objectsOf } from './parse-lines-and-sse.ts';
import { checkedBody, send, textOf } from './send.ts';
import { openTerminal, type TerminalSettings } from './terminal.ts';

export type {
  CallInput,
  CallSettings,
  Listing,
  ListResult,
  ReceivedEvent,
  Stream,
  UploadContent,
} from './call-types.ts';
export { FarhandError } from './errors-and-envelopes.ts';
export type { Ending, Terminal, TerminalNote, TerminalSettings } from './terminal.ts';
export { SignatureError, verifyWebhook, type WebhookDelivery, type WebhookEvent } from './webhook.ts';

export interface FarhandOptions {
  /** Address of the broker, with or without `/api/v1`: `https://farhand.example.org`. */
  baseUrl: string;
  apiKey?: string | undefined;
  /**
   * Maximum number of retries of a call that is safe to repeat, 2 by default. With 0, event streams do not reconnect
   * either.
   */
  retries?: number | undefined;
  /** Value of the User-Agent header, where the platform allows it. */
  userAgent?: string | undefined;
  /** Replaces fetch, for a proxy or a socket file. */
  fetch?: typeof fetch;
  /** Replaces the WebSocket constructor, for a proxy or a socket file. */
  webSocket?: (url: string) => WebSocket;
  /** Called before a failed attempt is retried, with its error and the milliseconds until the next attempt. */
  onRetry?: Connection['onRetry'];
}

/**
 * One namespace per resource, one method per route. If a request fails, its method rejects with FarhandError. After the
 * caller's signal has fired, it rejects with the reason of the signal.
 */
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

// The cast is safe: the client is built from the table of routes that the type is derived from.
export const Farhand = Client as unknown as new (options: FarhandOptions) => Farhand;

/** Checks the options. Error messages contain neither the key nor the address, which may contain a password. */
function connectionOf(options: FarhandOptions): Connection {
  const { apiKey, retries = 2, userAgent, onRetry } = options;
  const url = URL.parse(options.baseUrl);
  if (!url || !/^https?:$/.test(url.protocol) || url.username || url.password) {
    throw new TypeError('baseUrl must be an http or https URL without a user name or password');
  }
  if (apiKey && !/^[\x21-\x7e]+$/.test(apiKey)) {
    throw new TypeError('apiKey must be visible ASCII: remove spaces and line breaks');
  }
  const baseUrl = `${url.origin}${url.pathname}`.replace(/\/+$/, '').replace(/\/api\/v1$/, '');
  // The globals are looked up at each call, because a test or a polyfill may replace them later.
  const transport = {
    fetch: options.fetch ?? ((input, init) => fetch(input, init)),
    webSocket: options.webSocket ?? ((address) => new WebSocket(address)),
  };
  return { baseUrl, apiKey, retries, userAgent, onRetry, ...transport };
}

type Input = Record<string, unknown>;

function methodOf(to: Connection, route: Route): unknown {
  if (route.kind === 'socket') {
    // `attached` is the answer of an attach call.
    return async (attached: Attached, settings?: TerminalSettings) =>
      openTerminal(to.webSocket(socketUrl(to, route, attached)), settings);
  }
  const call = callOf(to, route);
  if (route.kind === 'list') return listing(call);
  if (route.kind === 'lines') return lines(to, route);
  return route.kind === 'events' ? events(to, route) : call;
}

type Call = (input?: Input, settings?: CallSettings) => Promise<unknown>;

/** Returns the function that sends one request of a route and resolves to the answer. */
function callOf(to: Connection, route: Route): Call {
  return async (input = {}, { signal, idempotencyKey } = {}) => {
    const request = prepare(to, route, input, idempotencyKey);
    const { url } = request;
    return send(to, request, signal, async (response) => {
      if (route.kind === 'bytes') return checkedBody(response, url, signal);
      const text = await textOf(response, url, signal);
      if (route.kind === 'raw') return text;
      const envelope = envelopeOf(text);
      if (!envelope) throw failureOf(response, text);
      const { data, meta } = envelope;
      if (route.kind === 'list') return { items: data, ...meta };
      return route.kind === 'growing' ? { ...(typeof data === 'object' && data), ...meta } : data;
    });
  };
}

function listing(call: Call) {
  return (input: Input = {}, settings: CallSettings = {}) => {
    // The cast is safe: the broker answers a list route with a page.
    const page = (given: Input) => call(given, settings) as Promise<ListResult<unknown>>;
    return lazy(
      () => page(input),
      () => allItems((paging) => page({ ...input, ...paging }), input),
    );
  };
}

function lines(to: Connection, route: Route) {
  return (input: Input = {}, { signal }: CallSettings = {}) =>
    lazyStream(async () => {
      const request = prepare(to, route, input, undefined);
      const response = await send(to, request, signal, (head) => checkedBody(head, request.url, signal));
      return objectsOf(chunksOf(response.body));
    });
}

function events(to: Connection, route: Route) {
  return (input: Input = {}, { signal, onConnection }: CallSettings = {}) => {
    const open = (from: Connection, given: Input): Promise<Response> =>
      send(from, prepare(from, route, given, undefined), signal, (response) => response);
    return lazyStream(async () => {
      const how: FollowOptions = {
        url: to.baseUrl,
        signal,
        resumes: to.retries > 0 && 'last_event_id' in route.headers,
        last: route.lastEvent,
        onConnection,
        // send() does not retry this request, because follow() itself tries again after a failure.
        connect: (after) =>
          open({ ...to, retries: 0 }, after === undefined ? input : { ...input, last_event_id: after }),
      };
      return follow(await open(to, input), how);
    });
  };
}

function lazyStream(begin: () => Promise<AsyncGenerator<unknown>>) {
  return lazy(begin, (begun) =>
    (async function* () {
      yield* await begun();
    })(),
  );
}
