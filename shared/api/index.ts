// The REST contract: one table of routes. OpenAPI, the SDK and dispatch are derived from it.
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

/** A body as it comes. */
export interface Content<Fields> {
  /** Ends only when all has come; throws when it is cut off. */
  chunks: AsyncIterable<Uint8Array>;
  /** A form's fields once its chunks have ended: some may follow the file. */
  fields(): Fields;
}

/** What a handler gets: params, query, headers and body of its route, parsed and laid flat, and the content. */
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

/** What a route answers with that sends a file. */
export interface BytesReply {
  status?: 200 | 206 | 304;
  /** What a browser would call it; its ending tells the type. */
  filename: string;
  /** Bytes that will come, where that is known. */
  length?: number;
  /** Must be iterated, or ended by return(); absent with 304. */
  bytes?: AsyncIterableIterator<Uint8Array>;
  /** The first of them may be long in coming: the head goes out before. */
  quiet?: boolean;
}

/** What a route answers with whose array grows: the rest of the object, then the items in batches. */
export interface GrowingReply<T, G extends keyof T> {
  head: Omit<T, G>;
  /** Of the page. */
  meta: { total: number; limit: number; offset: number; has_more: boolean };
  items: AsyncIterable<T[G]>;
}

/** One server-sent event. */
export interface SentEvent<T> {
  event: string;
  data: T;
  id?: string;
}

/** What a raw route answers with. */
export interface RawReply {
  status?: number;
  type: string;
  body: string | Uint8Array;
  /** Of what may be stored, if it is asked for again before each use. */
  etag?: string;
}

/** One page, and how many items there are in all. */
export interface Page<T> {
  items: T[];
  total: number;
}

/** What a handler gives back; dispatch parses it with the route's reply schema before it leaves. */
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

/** Something that commits entries together with a change: both stores' transactions are one. */
export interface Journal {
  append(entry: { kind: string }): void;
}

/** What a key may at one moment. Once it is revoked or expired, asking throws unauthorized. */
export interface Rights {
  may(scope: Scope): boolean;
  reaches(machine: MachineId): boolean;
  /** Every machine this key reaches; undefined: all there are and were. */
  reachable(): readonly MachineId[] | undefined;
}

/** Who is asking, with what right at this moment, and how to answer besides the data. */
export interface Caller extends Rights {
  key_id: KeyId;
  key_name: string;
  request_id: string;
  /** Where the request comes from; empty over the broker's own socket file. */
  address: string;
  /** Fires when the client has gone away. */
  signal: AbortSignal;
  /** Headers of the answer. */
  headers: Headers;
  /** The right that a change of what is declared finds: an earlier one of the same commit may have taken some. */
  during(change: Journal): Rights;
  /**
   * Puts the request into the commit of what it does: on record, and its Idempotency-Key with it. `made` names what was
   * made, first of all what answers a repeat; `machines` are those it is about, where the request names none. Where
   * that changes what is declared, key and ids are judged once more from what it finds: throws as admission does.
   */
  commit(journal: Journal, made?: Readonly<Record<string, string>>, machines?: readonly MachineId[]): void;
}

/** One function per route; a forgotten one does not compile. A WebSocket is led to what its ticket names. */
export type Handlers = {
  [N in keyof Api]: {
    [O in keyof Api[N] as Api[N][O] extends { kind: 'socket' } ? never : O]: (
      input: Input<Api[N][O]>,
      caller: Caller,
    ) => Promise<Reply<Api[N][O]>> | Reply<Api[N][O]>;
  };
};

/** Every route with its place in the table: `machines.list`. */
export function allRoutes(): { noun: string; operation: string; route: Route }[] {
  return Object.entries(api).flatMap(([noun, operations]) =>
    Object.entries(operations).map(([operation, route]) => ({ noun, operation, route: route as Route })),
  );
}
