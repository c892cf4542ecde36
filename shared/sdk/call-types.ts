// Types of the SDK's methods, their inputs and answers, derived from the table of routes.
import type * as z from 'zod';
import type { Route } from '../api/route.ts';
import type { Api, ListMeta } from '../api/route-table.ts';
import type { Attached } from './build-request.ts';
import type { Terminal, TerminalSettings } from './terminal.ts';

export interface CallSettings {
  signal?: AbortSignal;
  /**
   * Key that makes a repeat of the call safe. The broker does not execute a second call with the same key within 24 h,
   * but repeats its answer to the first call.
   */
  idempotencyKey?: string;
  /**
   * Reports changes of the connection, for event streams that reconnect after a loss. Called with false when the
   * connection is lost, and again after each failed attempt to reconnect. Called with true when the stream is connected
   * again.
   */
  onConnection?: (isOpen: boolean) => void;
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

/** Content of an upload. A stream is sent as it is read, and cannot be sent again for a retry. */
export type UploadContent = string | Uint8Array<ArrayBuffer> | Blob | ReadableStream<Uint8Array>;

/** Input of a call in one object: params, query, headers and body of its route, and the content of an upload. */
export type CallInput<R> =
  R extends Route<infer P, infer Q, infer H, infer B>
    ? Loose<P> &
        Loose<Q> &
        Loose<H> &
        Body<B> &
        (R extends { accepts: string } ? { content: UploadContent } : unknown)
    : never;

export interface ListResult<T> {
  items: T[];
  total: number;
  limit: number;
  offset: number;
  has_more: boolean;
}

/** Result of a list call. Await it for one page, or iterate over it for all items. Only then is a request sent. */
export type Listing<T, Meta = unknown> = Promise<ListResult<T> & Meta> & AsyncIterable<T>;

/**
 * Result of a stream call. Iterate over it for the items, or await it for the start of the answer. Only then is the
 * request sent.
 */
export type Stream<T> = Promise<AsyncIterable<T>> & AsyncIterable<T>;

export interface ReceivedEvent<T> {
  event: string;
  data: T;
  id?: string;
}

type Output<R> = R extends { reply: infer T extends z.ZodType } ? z.output<T> : never;

/**
 * What a call returns. The promise of a download resolves to the Response itself, with a streaming body and headers
 * about the file.
 */
type Answer<R> = R extends { kind: 'list' }
  ? Listing<Output<R>, ListMeta<R>>
  : R extends { kind: 'lines' }
    ? Stream<Output<R>>
    : R extends { kind: 'events' }
      ? Stream<ReceivedEvent<Output<R>>>
      : Promise<Plain<R>>;

type Plain<R> = R extends { kind: 'raw' }
  ? string
  : R extends { kind: 'bytes' }
    ? Response
    : R extends { kind: 'growing' }
      ? Output<R> & Omit<ListResult<never>, 'items'>
      : Output<R>;

type Call<R> = R extends { kind: 'socket' }
  ? (attached: Attached, settings?: TerminalSettings) => Promise<Terminal>
  : object extends CallInput<R>
    ? (input?: CallInput<R>, settings?: CallSettings) => Answer<R>
    : (input: CallInput<R>, settings?: CallSettings) => Answer<R>;

/** One namespace per resource, one method per route. */
export type Namespaces = { [N in keyof Api]: { [O in keyof Api[N]]: Call<Api[N][O]> } };
