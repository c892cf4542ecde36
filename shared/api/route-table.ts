// The table of all REST routes; the broker, the OpenAPI document, the SDK and CLI verbs are derived from it.
import type * as z from 'zod';
import { audit } from './audit.ts';
import { batches } from './batches.ts';
import { commands } from './commands.ts';
import { events } from './events.ts';
import { files } from './files.ts';
import { joinTokens } from './join-tokens.ts';
import { keys } from './keys.ts';
import { machines } from './machines.ts';
import { packages } from './packages.ts';
import type { KeyId, MachineId, Route, Scope } from './route.ts';
import { schedules } from './schedules.ts';
import { service } from './service.ts';
import { sessions } from './sessions.ts';
import { terminal } from './terminal.ts';
import { webhooks } from './webhooks.ts';

export const api = {
  machines,
  joinTokens,
  files,
  commands,
  batches,
  schedules,
  sessions: { ...sessions, terminal },
  events,
  keys,
  webhooks,
  audit,
  packages,
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
  /** Chunks of the body; ends after the last byte, throws if the body is cut off. */
  chunks: AsyncIterable<Uint8Array>;
  /**
   * Returns the fields of a form. Call it after the chunks have ended, because fields may follow the file.
   */
  fields(): Fields;
}

/** Input of a handler in one object: parsed params, query, headers and body, and any streamed content. */
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

/** Reply of a bytes route. */
export interface BytesReply {
  status?: 200 | 206 | 304;
  /** Name under which clients save the file; its extension decides the media type. */
  filename: string;
  /** Number of bytes, if known. */
  length?: number;
  /**
   * Content; the broker must iterate it or call return() to release its resources. Absent with status 304.
   */
  bytes?: AsyncIterableIterator<Uint8Array>;
  /** Whether the first byte may take long; the response head is then sent before it. */
  quiet?: boolean;
}

/** Reply of a growing route: the object without its array, then the array's items in batches. */
export interface GrowingReply<T, G extends keyof T> {
  head: Omit<T, G>;
  meta: { total: number; limit: number; offset: number; has_more: boolean };
  items: AsyncIterable<T[G]>;
}

/** One server-sent event. */
export interface SentEvent<T> {
  event: string;
  data: T;
  id?: string;
}

/** Reply of a raw route. */
export interface RawReply {
  status?: number;
  type: string;
  body: string | Uint8Array;
  /** Set if clients may cache the answer and must revalidate it before each use. */
  etag?: string;
}

/** One page of a list, and the number of items on all pages. */
export interface Page<T> {
  items: T[];
  total: number;
}

/** Reply of a handler; the reply schema of its route parses the reply before it is sent. */
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

type ObjectReply<R> = R extends { kind: 'list'; reply: infer T extends z.ZodType }
  ? Page<z.input<T>>
  : R extends { reply: infer T extends z.ZodType }
    ? z.input<T>
    : never;

/** A transaction that accepts entries to commit with a change; state and history each have one. */
export interface Journal {
  append(entry: { kind: string }): void;
}

/** The rights of an API key. Each method throws unauthorized once the key is revoked or expired. */
export interface Rights {
  may(scope: Scope): boolean;
  reaches(machine: MachineId): boolean;
  /**
   * Ids of the machines that the key may use; undefined if it may use every machine, removed ones included.
   */
  reachable(): readonly MachineId[] | undefined;
}

/** The caller of a request: its key, its rights, and the headers of its answer. */
export interface Caller extends Rights {
  key_id: KeyId;
  key_name: string;
  request_id: string;
  /** IP address of the client; empty for a client of the broker's own socket file. */
  address: string;
  /** Fires when the client disconnects. */
  signal: AbortSignal;
  /** Headers to add to the answer. */
  headers: Headers;
  /**
   * The rights inside a state transaction, where an earlier change of the same commit may have removed some.
   */
  during(change: Journal): Rights;
  /**
   * Adds the audit entry and the idempotency key of this request to the commit of its change. `made` names
   * the created objects; a repeat is answered with the first. `machines` are affected machines that the
   * request does not name. In a state transaction the key and the ids are checked again: throws the errors of
   * authorization.
   */
  commit(journal: Journal, made?: Readonly<Record<string, string>>, machines?: readonly MachineId[]): void;
}

/**
 * One handler per route; a missing handler does not compile. WebSocket routes have none: their ticket names
 * the session.
 */
export type Handlers = {
  [N in keyof Api]: {
    [O in keyof Api[N] as Api[N][O] extends { kind: 'socket' } ? never : O]: (
      input: Input<Api[N][O]>,
      caller: Caller,
    ) => Promise<Reply<Api[N][O]>> | Reply<Api[N][O]>;
  };
};

/** Every route with its noun and operation in the table, such as machines and list. */
export function allRoutes(): { noun: string; operation: string; route: Route }[] {
  return Object.entries(api).flatMap(([noun, operations]) =>
    Object.entries(operations).map(([operation, route]) => ({ noun, operation, route: route as Route })),
  );
}
