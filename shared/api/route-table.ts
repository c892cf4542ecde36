// The table of all REST routes. The broker's router, the OpenAPI document, the SDK and the CLI verbs are made from it.
import type * as z from 'zod';
import { packages } from './agent-packages.ts';
import { alertChannels } from './alert-channels.ts';
import { alertRules, alerts } from './alerts.ts';
import { audit } from './audit.ts';
import { batches } from './batches.ts';
import { brokers } from './brokers.ts';
import { commands } from './commands.ts';
import { events } from './events.ts';
import { files } from './files.ts';
import { service } from './info-health-metrics-and-docs.ts';
import { inventory } from './inventory.ts';
import { joinTokens } from './join-tokens.ts';
import { keys } from './keys.ts';
import { live } from './live.ts';
import { logins } from './logins.ts';
import { machines } from './machines.ts';
import { maintenanceWindows } from './maintenance-windows.ts';
import type { Route, Scope } from './route.ts';
import { savedCommands } from './saved-commands.ts';
import { schedules } from './schedules.ts';
import type { KeyId, LoginId, MachineId } from './shared-schemas.ts';
import { tags } from './tags-in-use.ts';
import { sessions } from './terminal-sessions.ts';
import { terminal } from './terminal-websocket.ts';
import { upgrades } from './upgrades.ts';
import { webhooks } from './webhooks.ts';

export const api = {
  machines,
  inventory,
  tags,
  joinTokens,
  files,
  commands,
  batches,
  savedCommands,
  upgrades,
  schedules,
  sessions: { ...sessions, terminal },
  events,
  live,
  keys,
  logins,
  webhooks,
  // These routes come before alerts, whose path /alerts/{alert_id} would match their paths.
  alertRules,
  alertChannels,
  maintenanceWindows,
  alerts,
  audit,
  packages,
  brokers,
  service,
};
export type Api = typeof api;

type Parsed<Shape extends z.ZodRawShape> = keyof Shape extends never ? unknown : z.output<z.ZodObject<Shape>>;
type ParsedBody<Body> = Body extends z.ZodType
  ? undefined extends z.output<Body>
    ? unknown
    : z.output<Body>
  : unknown;
type Flat<T> = { [K in keyof T]: T[K] } & {};

/** A request body that is read as a stream. */
export interface Content<Fields> {
  /** Chunks of the body. Iterating ends after the last byte and throws if the body is cut off. */
  chunks: AsyncIterable<Uint8Array>;
  /** Returns the fields of a form. Call this after the last chunk, because fields may follow the file. */
  fields(): Fields;
}

/** Input of a handler: parsed params, query, headers and body in one object, and any streamed content. */
export type Input<R> =
  R extends Route<infer P, infer Q, infer H, infer B>
    ? Flat<
        Parsed<P> &
          Parsed<Q> &
          Parsed<H> &
          ParsedBody<B> &
          (R extends { accepts: string } ? { content: Content<ParsedBody<B>> } : unknown)
      >
    : never;

/** What the handler of a route of the kind `bytes` returns: a file, or a part of one. */
export interface BytesReply {
  status?: 200 | 206 | 304;
  /** Name under which clients save the file. Its extension decides the media type. */
  filename: string;
  /** Number of bytes of the content, if known. */
  length?: number;
  /** The content; absent with status 304. To release its resources, iterate it to its end or call return(). */
  bytes?: AsyncIterableIterator<Uint8Array>;
  /** True if the first byte may come late. The headers then wait for it only a short time, and may be sent first. */
  quiet?: boolean;
}

/** Reply of a route of the kind `growing`, whose answer is an object with an array of any length. */
export interface GrowingReply<T, G extends keyof T> {
  head: Omit<T, G>;
  meta: { total: number; limit: number; offset: number; has_more: boolean };
  items: AsyncIterable<T[G]>;
}

export interface SentEvent<T> {
  event: string;
  data: T;
  id?: string;
}

export interface RawReply {
  type: string;
  body: string | Uint8Array;
  /** ETag of an answer that clients may cache and must revalidate before each use. */
  etag?: string;
}

/** One page of a list, and the number of items on all pages. */
export interface Page<T> {
  items: T[];
  total: number;
}

/** Reply of a handler. The route's reply schema parses it before it is sent. */
export type Reply<R> = R extends { kind: 'raw' }
  ? RawReply
  : R extends { kind: 'bytes' }
    ? BytesReply
    : R extends { kind: 'lines' | 'events' | 'growing'; reply: infer T extends z.ZodType }
      ? StreamReply<R, z.input<T>>
      : ObjectReply<R>;

type StreamReply<R, T> = R extends { kind: 'lines' }
  ? AsyncIterable<T>
  : R extends { kind: 'events' }
    ? AsyncIterable<SentEvent<T>>
    : R extends { grows: infer G extends keyof T }
      ? GrowingReply<T, G>
      : never;

/** Further fields in `meta` of a list. */
export type ListMeta<R> = R extends { listMeta: infer T extends z.ZodType } ? z.output<T> : unknown;

type ObjectReply<R> = R extends { kind: 'list'; reply: infer T extends z.ZodType }
  ? Page<z.input<T>> & ListMeta<R>
  : R extends { reply: infer T extends z.ZodType }
    ? z.input<T>
    : never;

/**
 * A transaction of state.json or history.db. The appended entries are committed together with the other changes of the
 * transaction.
 */
export interface Journal {
  append(entry: { kind: string }): void;
  /** Runs a function after the commit. State transactions lack this function. */
  committed?(run: () => void): void;
}

/** The rights of an API key. Each method throws unauthorized once the key is revoked or expired. */
export interface Rights {
  may(scope: Scope): boolean;
  reaches(machine: MachineId): boolean;
  /** Ids of the machines that the key may use; undefined if it may use all, including removed ones. */
  reachable(): readonly MachineId[] | undefined;
}

/** The client of a request: its key and rights, and the headers of the answer. */
export interface Caller extends Rights {
  key_id: KeyId;
  key_name: string;
  request_id: string;
  /** Id of the login by whose cookie the request was authorized. */
  login_id?: LoginId | undefined;
  /** IP address of the client; empty for a client of the broker's own socket file. */
  address: string;
  /** For a request that logs in: the SHA-256 of the API key that was sent, in hexadecimal digits. */
  secret_hash?: string | undefined;
  /** For a request that logs in: true if it was encrypted, or came from the broker's own machine. */
  secure?: boolean;
  /**
   * True if another broker forwarded the request. That broker collects the answers of all brokers, so this one answers
   * only for its own machines.
   */
  isForwarded?: boolean;
  /** Fires when the client disconnects. */
  signal: AbortSignal;
  headers: Headers;
  /**
   * Returns the caller’s rights at the start of this state transaction. Several transactions may be committed together;
   * these rights include the changes of the earlier ones. The caller's own methods, such as may(), use only the last
   * committed state.
   */
  during(change: Journal): Rights;
  /**
   * Adds this request's audit rows and idempotency key to a transaction, so that they are committed with its change. In
   * a state transaction, the request is first authorized again, because the key may have lost rights since the request
   * was admitted.
   */
  commit(
    journal: Journal,
    /** Ids of created objects. The first is stored with the idempotency key: a repeated request finds this object. */
    made?: Readonly<Record<string, string>>,
    /** Affected machines that the request does not name. */
    machines?: readonly MachineId[],
    /** True if further commits of the same change follow. The last commit gets the idempotency key. */
    more?: boolean,
  ): void;
}

/**
 * One handler per route; a missing handler does not compile. WebSocket routes have no handler: the broker connects each
 * WebSocket directly to the session for which its ticket was made.
 */
export type Handlers = {
  [N in keyof Api]: {
    [O in keyof Api[N] as Api[N][O] extends { kind: 'socket' } ? never : O]: (
      input: Input<Api[N][O]>,
      caller: Caller,
    ) => Promise<Reply<Api[N][O]>> | Reply<Api[N][O]>;
  };
};

const routes = Object.entries(api).flatMap(([noun, operations]) =>
  Object.entries(operations).map(([operation, route]) => ({ noun, operation, route: route as Route })),
);

/** Returns every route with its noun and operation, such as `machines` and `list`. */
export function allRoutes(): readonly { noun: string; operation: string; route: Route }[] {
  return routes;
}
