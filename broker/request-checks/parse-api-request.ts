// Parses requests by their route's schemas (path, query, headers, body), and finds every id in them.
import { parse as parseQuery } from 'node:querystring';
import { z } from 'zod';
import { headerName, type Route } from '../../shared/api/route.ts';
import type { Input } from '../../shared/api/route-table.ts';
import { type IdNoun, idSchemas, type KeyId, type MachineId } from '../../shared/api/shared-schemas.ts';
import { AppError } from '../../shared/errors.ts';

/** The parts of a request before parsing. */
export interface RawInput {
  params: Record<string, unknown>;
  query: Record<string, unknown>;
  headers: Record<string, unknown>;
  body: unknown;
}

/** An id in a request, and the kind of object that it identifies. */
export interface FoundId {
  noun: IdNoun;
  id: string;
  /** True if the id is in an array, such as `machine_ids`. Any other id names the object that the request is about. */
  listed: boolean;
  /** True if the id is a filter of a list or of an event stream. Such an id may identify a removed object. */
  filters: boolean;
}

/** An id in a request, with what the broker knows of the object that the id identifies. */
export interface Subject extends FoundId {
  /** False if no object has this id. */
  exists: boolean;
  /** The machines that the object belongs to. */
  machines?: readonly MachineId[] | undefined;
  /** A schedule with tags runs with the rights of this key. Undefined for all other objects. */
  ownKey?: KeyId | undefined;
}

/** Longer ids are cut to this length. That is safe, because all ids that the broker creates are shorter. */
const longestId = 1_000;

/**
 * One step of the path to an id: the name of a field or, for an array, the maximum number of items that are searched.
 */
type Step = string | number;

/** The path to ids of one kind in a request. */
interface IdPath {
  noun: IdNoun;
  path: readonly Step[];
  /** True if the ids are in an array of the request. */
  listed: boolean;
}

/** Maximum number of schema issues, or of unknown names, that one error lists. */
const mostNamed = 20;
const longestName = 100;

export class RequestParser<R extends Route> {
  readonly #route: Route;
  readonly #parts: Record<keyof RawInput, z.ZodType>;
  readonly #idPaths: IdPath[];

  constructor(route: Route) {
    this.#route = route;
    this.#parts = {
      params: z.object(route.params),
      query: z.object(route.query),
      headers: z.object(route.headers),
      body: route.body ?? z.undefined(),
    };
    this.#idPaths = Object.entries(this.#parts).flatMap(([part, schema]) => idPathsIn(schema, [part]));
  }

  /** Finds every id in a request, before any other check. */
  ids(raw: RawInput): FoundId[] {
    const reads = ['list', 'events'].includes(this.#route.kind);
    const found: FoundId[] = [];
    for (const { noun, path, listed } of this.#idPaths) {
      const filters = reads && path[0] === 'query';
      // A cut id matches no object, because no id is this long.
      for (const id of valuesAt(raw, path)) found.push({ noun, id: id.slice(0, longestId), listed, filters });
    }
    return found;
  }

  /** The kinds of ids that a request may contain. */
  get nouns(): IdNoun[] {
    return this.#idPaths.map(({ noun }) => noun);
  }

  /** True if the body of this route has a field with the id of the machine that the request is about. */
  get namesMachineInBody(): boolean {
    return this.#idPaths.some(
      ({ noun, path, listed }) => path[0] === 'body' && noun === 'machine' && !listed,
    );
  }

  /**
   * Parses all parts. Throws invalid_request for a bad path, query or header, or if the body is null, a string, a
   * number or a boolean. Throws validation_failed for any other bad body, such as an array.
   */
  parse(raw: RawInput): Input<R> {
    const { query, body } = this.#route;
    assertKnownParameters(raw.query, query);
    const outer = {
      ...parsePart(this.#parts.params, raw.params, 'invalid_request', 'path'),
      ...parsePart(this.#parts.query, raw.query, 'invalid_request', 'query'),
      ...parsePart(this.#parts.headers, raw.headers, 'invalid_request', 'header'),
    };
    // The casts are safe: Input is derived from the route's schemas.
    if (!body) return outer as Input<R>;
    if (raw.body === null || (typeof raw.body !== 'object' && raw.body !== undefined)) {
      throw new AppError('invalid_request', 'the body must be a JSON object');
    }
    return { ...outer, ...parsePart(body, raw.body ?? {}, 'validation_failed', 'body') } as Input<R>;
  }
}

/** Parses a query to strings. A parameter that is given twice becomes an array, which no schema accepts. */
export function queryOf(text: string): Record<string, unknown> {
  if (text === '') return {};
  try {
    // decodeURIComponent() throws for bytes that are not UTF-8; parseQuery() would silently replace them.
    decodeURIComponent(text);
  } catch {
    const message =
      'query: must be percent-encoded UTF-8; if a path is not UTF-8, encode it in base64 and add path_encoding=base64';
    throw new AppError('invalid_request', message);
  }
  return parseQuery(text, '&', '=', { maxKeys: 0 });
}

/** Throws invalid_request for query parameters that the route does not have. */
export function assertKnownParameters(query: Record<string, unknown>, known: Route['query']): void {
  const unknown = Object.keys(query).filter((name) => !Object.hasOwn(known, name));
  if (unknown.length === 0) return;
  const names = Object.keys(known).join(', ');
  const instead = names === '' ? 'this route has no parameters' : `this route has: ${names}`;
  const issues = unknown
    .slice(0, mostNamed)
    .map((name) => ({ path: nameOf([name]), message: 'is not a parameter of this route' }));
  const what = `unknown parameter${unknown.length === 1 ? '' : 's'} ${namesOf(unknown)}`;
  throw new AppError('invalid_request', `query: ${what}; ${instead}`, { issues });
}

function parsePart(
  schema: z.ZodType,
  value: unknown,
  code: 'invalid_request' | 'validation_failed',
  part: string,
) {
  const parsed = schema.safeParse(value);
  // The cast is safe: every part of a route is an object schema.
  if (parsed.success) return parsed.data as Record<string, unknown>;
  const issues = parsed.error.issues.slice(0, mostNamed).map((issue) => ({
    path: nameOf(issue.path),
    message: issue.code === 'unrecognized_keys' ? `Unrecognized keys: ${namesOf(issue.keys)}` : issue.message,
  }));
  const { path, message } = issues[0] ?? { path: '', message: 'not valid' };
  // The message names a header as clients send it; `issues` names the field, as in the SDK.
  const named = part === 'header' ? headerName(path) : path;
  throw new AppError(code, `${part}: ${named && `${named}: `}${message}`, { issues });
}

/** Shortens a path or name for an error message, because the names in a request can be very long. */
function nameOf(path: readonly PropertyKey[]): string {
  return path.map((step) => String(step).slice(0, longestName).toWellFormed()).join('.');
}

function namesOf(names: readonly string[]): string {
  const first = names.slice(0, mostNamed).map((name) => JSON.stringify(nameOf([name])));
  return `${first.join(', ')}${names.length > mostNamed ? ', …' : ''}`;
}

/**
 * Finds the places in a request that can contain ids, by the schema of the request. Called at the broker's start.
 * Throws if an id is inside a kind of schema that the authorization check cannot search.
 */
function idPathsIn(
  schema: z.core.$ZodType,
  path: readonly Step[],
  above: readonly z.core.$ZodType[] = [],
): IdPath[] {
  const noun = nounOf(schema);
  if (noun) return [{ noun, path, listed: path.some((step) => typeof step === 'number') }];
  const inside = [...above, schema];
  const turns = above.includes(schema);
  if (!turns && schema instanceof z.ZodObject && !hidesId(schema._zod.def.catchall)) {
    return Object.entries<z.core.$ZodType>(schema.shape).flatMap(([key, inner]) =>
      idPathsIn(inner, [...path, key], inside),
    );
  }
  if (!turns && schema instanceof z.ZodArray) {
    // Items beyond the maximum length are not searched for ids, because the schema refuses such an array.
    const longest = schema._zod.def.checks?.find((check) => check instanceof z.core.$ZodCheckMaxLength);
    const most = longest?._zod.def.maximum ?? Number.POSITIVE_INFINITY;
    return idPathsIn(schema.element, [...path, most], inside);
  }
  if (schema instanceof z.ZodOptional || schema instanceof z.ZodNullable || schema instanceof z.ZodDefault) {
    return idPathsIn(schema.unwrap(), path, inside);
  }
  if (hidesId(schema)) {
    throw new Error(
      `${path.join('.')}: the authorization check cannot find an id in this kind of schema; use an object, array or optional`,
    );
  }
  return [];
}

/** True if a schema contains an id schema at any depth. Recursive schemas are visited only once. */
function hidesId(value: unknown, seen = new Set<unknown>()): boolean {
  if (typeof value !== 'object' || value === null || seen.has(value)) return false;
  seen.add(value);
  if (!(value instanceof z.core.$ZodType)) return Object.values(value).some((inner) => hidesId(inner, seen));
  if (nounOf(value)) return true;
  const { def } = value._zod;
  // The definition of a lazy schema can be read only after unwrap().
  const parts = value instanceof z.ZodLazy ? [value.unwrap()] : Object.values(def);
  return parts.some((part) => hidesId(part, seen));
}

/**
 * Returns the kind of id that a schema describes, such as machine; undefined if it does not describe an id. Copies of
 * an id schema, which describe() and refine() return, have the same checks. So an id schema is recognized by its
 * checks.
 */
function nounOf(schema: z.core.$ZodType): IdNoun | undefined {
  const checks = schema._zod.def.checks ?? [];
  const found = Object.entries(idSchemas).find(([, one]) =>
    one._zod.def.checks?.some((check) => checks.includes(check)),
  );
  return found?.[0] as IdNoun | undefined;
}

function valuesAt(value: unknown, path: readonly Step[]): string[] {
  const [step, ...rest] = path;
  if (step === undefined) return typeof value === 'string' ? [value] : [];
  if (typeof value !== 'object' || value === null) return [];
  if (typeof step === 'string') {
    return Object.hasOwn(value, step) ? valuesAt(Reflect.get(value, step), rest) : [];
  }
  return Array.isArray(value) ? value.slice(0, step).flatMap((item) => valuesAt(item, rest)) : [];
}
