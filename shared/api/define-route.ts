// Functions that define REST routes, one for each kind of answer.
import * as z from 'zod';
import type { Accepts, Access, Kind, Route } from './route.ts';
import { type IdNoun, idSchemas } from './shared-schemas.ts';

const nothing = z.undefined();
export type Nothing = typeof nothing;
export type NoShape = Record<never, never>;

type ParamNames<Path> = Path extends `${string}{${infer Name}}${infer Rest}`
  ? Name | ParamNames<Rest>
  : never;
/**
 * The params of a path. A param that is named after a kind of object, such as `{machine_id}`, takes an id of that kind.
 * All other params take any text.
 */
export type PathParams<Path> = {
  [N in ParamNames<Path>]: N extends `${infer Noun extends IdNoun}_id`
    ? (typeof idSchemas)[Noun]
    : z.ZodString;
};

function paramsOf<Path extends string>(path: Path): PathParams<Path> {
  const shape = [...path.matchAll(/\{(\w+?)(_id)?\}/g)].map(([, noun = '', id = '']) => [
    noun + id,
    id && Object.hasOwn(idSchemas, noun)
      ? idSchemas[noun as IdNoun]
      : z.string().describe('Name of the file'),
  ]);
  // The cast is safe: PathParams derives the same names and schemas from the path.
  return Object.fromEntries(shape) as PathParams<Path>;
}

/** The parts of a route besides its method, path and access. */
export type Definition<
  Q extends z.ZodRawShape,
  H extends z.ZodRawShape,
  B extends z.ZodType,
  R extends z.ZodType,
> = Pick<Route, 'summary'> &
  Partial<Pick<Route, 'base' | 'status'>> &
  Pick<Route, 'description' | 'example' | 'types' | 'replyHeaders' | 'errors' | 'idempotency' | 'again'> &
  Pick<Route, 'bodyLimit' | 'impliesMachine' | 'waits' | 'confirmed' | 'lastEvent' | 'grows' | 'parts'> & {
    query?: Q;
    headers?: H;
    body?: B;
    reply: R;
  };

export function single<
  const P extends string,
  R extends z.ZodType,
  Q extends z.ZodRawShape = NoShape,
  H extends z.ZodRawShape = NoShape,
  B extends z.ZodType = Nothing,
>(method: Route['method'], path: P, access: Access, definition: Definition<Q, H, B, R>) {
  return build('single', method, path, access, definition);
}

/**
 * Describes a reply with an array that may be long, so that the array is checked and sent in pieces. `grows`: name of
 * the array.
 */
export function inPieces<R extends z.ZodObject>(reply: R, grows: keyof z.output<R> & string) {
  const { [grows]: items, ...others } = reply.shape;
  // The cast is safe: `grows` names a field of the reply.
  return { reply, grows, parts: { items: items as z.ZodType, rest: z.object(others) } };
}

/** Defines a route that answers one object with an array of any length. The array is sent while its items are read. */
export function growing<
  const P extends string,
  R extends z.ZodObject,
  const G extends keyof z.output<R> & string,
  Q extends z.ZodRawShape = NoShape,
>(path: P, access: Access, definition: Definition<Q, NoShape, Nothing, R> & { grows: G }) {
  const { grows, ...given } = definition;
  return { ...build('growing', 'GET', path, access, given), ...inPieces(definition.reply, grows) };
}

/** Defines a route whose body is bytes or a form instead of JSON. */
export function incoming<
  const A extends Accepts,
  const P extends string,
  R extends z.ZodType,
  Q extends z.ZodRawShape = NoShape,
  H extends z.ZodRawShape = NoShape,
  B extends z.ZodType = Nothing,
>(accepts: A, method: Route['method'], path: P, access: Access, definition: Definition<Q, H, B, R>) {
  return { ...build('single', method, path, access, definition), accepts };
}

/** Defines a GET route that answers a stream: the bytes of a file, lines, or events. */
export function outgoing<
  const K extends 'bytes' | 'lines' | 'events',
  const P extends string,
  R extends z.ZodType = Nothing,
  Q extends z.ZodRawShape = NoShape,
  H extends z.ZodRawShape = NoShape,
>(kind: K, path: P, access: Access, definition: Omit<Definition<Q, H, Nothing, R>, 'reply'> & { reply?: R }) {
  // The cast is safe: if the definition has no reply, R has its default, the type Nothing.
  return build(kind, 'GET', path, access, {
    ...definition,
    reply: definition.reply ?? (nothing as unknown as R),
  });
}

/** Defines a route that answers a text with its own media type. */
export function raw<const P extends string, Q extends z.ZodRawShape = NoShape>(
  path: P,
  access: Access,
  definition: RawDefinition & { query?: Q },
) {
  return build('raw', 'GET', path, access, { base: '', ...definition, reply: nothing });
}
type RawDefinition = Pick<Route, 'summary' | 'description' | 'errors'> & {
  types: readonly string[];
  base?: Route['base'];
};

/**
 * Defines a GET route that opens a WebSocket. Browsers cannot send an API key with such a request, so its query
 * contains a ticket that authorizes it.
 */
export function socket<const P extends string, Q extends z.ZodRawShape & { ticket: z.ZodType }>(
  path: P,
  definition: Pick<Route, 'summary' | 'description'> & { query: Q },
) {
  return build('socket', 'GET', path, 'everybody', { ...definition, reply: nothing, status: 101 });
}

/** Makes a route of any kind, with defaults for parts that its definition omits. */
export function build<
  K extends Kind,
  P extends string,
  R extends z.ZodType,
  Q extends z.ZodRawShape = NoShape,
  H extends z.ZodRawShape = NoShape,
  B extends z.ZodType = Nothing,
>(
  kind: K,
  method: Route['method'],
  path: P,
  access: Access,
  definition: Definition<Q, H, B, R>,
): Route<PathParams<P>, Q, H, B, R, K> {
  const { query, headers, body, ...rest } = definition;
  return {
    status: 200,
    base: '/api/v1',
    ...rest,
    kind,
    method,
    path,
    access,
    params: paramsOf(path),
    // The casts are safe: an omitted part is an empty shape, the default of its type parameter.
    query: query ?? ({} as Q),
    headers: headers ?? ({} as H),
    body,
  };
}
