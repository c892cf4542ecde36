// The REST contract: one table of routes. OpenAPI, the SDK and dispatch are derived from it.
import type { z } from 'zod';
import { commands } from './commands.ts';
import { events } from './events.ts';
import { files } from './files.ts';
import { joinTokens } from './join-tokens.ts';
import { keys } from './keys.ts';
import { machines } from './machines.ts';
import type { KeyId, MachineId, Route, Scope } from './route.ts';
import { service } from './service.ts';

export const api = { machines, joinTokens, files, commands, events, keys, service };
export type Api = typeof api;

type Parsed<Shape extends z.ZodRawShape> = keyof Shape extends never ? unknown : z.output<z.ZodObject<Shape>>;
type ParsedBody<Body> = Body extends z.ZodType
  ? undefined extends z.output<Body>
    ? unknown
    : z.output<Body>
  : unknown;
type Flat<T> = { [K in keyof T]: T[K] } & {};

/** What a handler gets: params, query, headers and body of its route, parsed and laid flat. */
export type Input<R> =
  R extends Route<infer P, infer Q, infer H, infer B>
    ? Flat<Parsed<P> & Parsed<Q> & Parsed<H> & ParsedBody<B>>
    : never;

/** What a raw route answers with. */
export interface RawReply {
  status?: number;
  type: string;
  body: string | Uint8Array;
}

/** One page, and how many items there are in all. */
export interface Page<T> {
  items: T[];
  total: number;
}

/** What a handler gives back; dispatch parses it with the route's reply schema before it leaves. */
export type Reply<R> = R extends { kind: 'raw' }
  ? RawReply
  : R extends { kind: 'list'; reply: infer T extends z.ZodType }
    ? Page<z.input<T>>
    : R extends { reply: infer T extends z.ZodType }
      ? z.input<T>
      : never;

/** Something that commits entries together with a change: both stores' transactions are one. */
export interface Journal {
  append(entry: { kind: string }): void;
}

/** Who is asking, with what right, and how to answer besides the data. */
export interface Caller {
  key_id: KeyId;
  key_name: string;
  request_id: string;
  /** Fires when the client has gone away. */
  signal: AbortSignal;
  /** Headers of the answer. */
  headers: Headers;
  may(scope: Scope): boolean;
  reaches(machine: MachineId): boolean;
  /** Every machine this key reaches; undefined: all there are and were. */
  reachable(): readonly MachineId[] | undefined;
  /** Ties the request's Idempotency-Key to what it made, in the commit that makes it. */
  made(journal: Journal, id: string): void;
}

/** One function per route; a forgotten one does not compile. */
export type Handlers = {
  [N in keyof Api]: {
    [O in keyof Api[N]]: (
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
