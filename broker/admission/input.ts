// The one place where outside input is parsed: params, query, headers and body of a route, and the ids it holds.
import { z } from 'zod';
import { type IdNoun, idSchemas, type Route } from '../../shared/api/route.ts';
import { AppError } from '../../shared/errors.ts';

/** A request's parts as they came. */
export interface RawInput {
  params: Record<string, unknown>;
  query: Record<string, unknown>;
  headers: Record<string, unknown>;
  body: unknown;
}

/** An id found in a request, and the noun that can tell what it names. */
export interface FoundId {
  noun: IdNoun;
  id: string;
  /** An item of a list: the others say what the request is about. */
  listed: boolean;
}

/** What is known of one route beforehand. */
export interface Reader {
  /** Every id in a request, read before anything else is checked. */
  ids(raw: RawInput): FoundId[];
  /** Parses all of it. Throws invalid_request for a bad query, validation_failed for a bad body. */
  parse(raw: RawInput): Record<string, unknown>;
}

/** Where in a value ids of a noun lie; '*' steps into every item. */
interface Place {
  noun: IdNoun;
  path: readonly string[];
}

export function readerOf(route: Route): Reader {
  const parts = {
    params: z.object(route.params),
    query: z.object(route.query),
    headers: z.object(route.headers),
    body: route.body ?? z.undefined(),
  };
  const places = Object.entries(parts).flatMap(([part, schema]) => placesIn(schema, [part]));
  return {
    ids: (raw) =>
      places.flatMap(({ noun, path }) =>
        valuesAt(raw, path).map((id) => ({ noun, id, listed: path.includes('*') })),
      ),
    parse(raw) {
      const outer = {
        ...read(parts.params, raw.params, 'invalid_request', 'path'),
        ...read(parts.query, raw.query, 'invalid_request', 'query'),
        ...read(parts.headers, raw.headers, 'invalid_request', 'header'),
      };
      if (!route.body) return outer;
      if (raw.body === null || (typeof raw.body !== 'object' && raw.body !== undefined)) {
        throw new AppError('invalid_request', 'the body must be a JSON object');
      }
      return { ...outer, ...read(parts.body, raw.body ?? {}, 'validation_failed', 'body') };
    },
  };
}

function read(
  schema: z.ZodType,
  value: unknown,
  code: 'invalid_request' | 'validation_failed',
  part: string,
) {
  const parsed = schema.safeParse(value);
  // Every part of a route is an object schema.
  if (parsed.success) return parsed.data as Record<string, unknown>;
  const issues = parsed.error.issues
    .slice(0, 20)
    .map(({ path, message }) => ({ path: path.map(String).join('.'), message }));
  const { path, message } = issues[0] ?? { path: '', message: 'not valid' };
  throw new AppError(code, `${part}: ${path && `${path}: `}${message}`, { issues });
}

/** Finds the id schemas in a schema. One in a place that is not looked into would escape the check: refused at start. */
function placesIn(
  schema: z.core.$ZodType,
  path: readonly string[],
  above: readonly z.core.$ZodType[] = [],
): Place[] {
  const noun = nounOf(schema);
  if (noun) return [{ noun, path }];
  const inside = [...above, schema];
  const turns = above.includes(schema);
  if (!turns && schema instanceof z.ZodObject && !hidesId(schema._zod.def.catchall)) {
    return Object.entries<z.core.$ZodType>(schema.shape).flatMap(([key, inner]) =>
      placesIn(inner, [...path, key], inside),
    );
  }
  if (!turns && schema instanceof z.ZodArray) return placesIn(schema.element, [...path, '*'], inside);
  if (schema instanceof z.ZodOptional || schema instanceof z.ZodNullable || schema instanceof z.ZodDefault) {
    return placesIn(schema.unwrap(), path, inside);
  }
  if (hidesId(schema)) {
    throw new Error(`${path.join('.')}: an id must not lie in such a schema, nobody would find it`);
  }
  return [];
}

/** Whether an id schema lies anywhere in a definition, however deep and however often it turns in a circle. */
function hidesId(value: unknown, seen = new Set<unknown>()): boolean {
  if (typeof value !== 'object' || value === null || seen.has(value)) return false;
  seen.add(value);
  if (!(value instanceof z.core.$ZodType)) return Object.values(value).some((inner) => hidesId(inner, seen));
  if (nounOf(value)) return true;
  const { def } = value._zod;
  // A lazy schema shows what it is only when it is asked.
  const parts = value instanceof z.ZodLazy ? [value.unwrap()] : Object.values(def);
  return parts.some((part) => hidesId(part, seen));
}

/** A described or refined copy of an id schema still carries the original's own checks. */
function nounOf(schema: z.core.$ZodType): IdNoun | undefined {
  const checks = schema._zod.def.checks ?? [];
  const found = Object.entries(idSchemas).find(([, one]) =>
    one._zod.def.checks?.some((check) => checks.includes(check)),
  );
  return found?.[0] as IdNoun | undefined;
}

function valuesAt(value: unknown, path: readonly string[]): string[] {
  const [step, ...rest] = path;
  if (step === undefined) return typeof value === 'string' ? [value] : [];
  if (typeof value !== 'object' || value === null) return [];
  if (step !== '*')
    return Object.hasOwn(value, step)
      ? valuesAt(Object.entries(value).find(([key]) => key === step)?.[1], rest)
      : [];
  return Array.isArray(value) ? value.flatMap((item) => valuesAt(item, rest)) : [];
}
