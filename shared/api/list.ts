// Routes that answer a page of objects. What a list is filtered by follows from the fields of its items, for every list alike.
import * as z from 'zod';
import {
  type Access,
  build,
  type Draft,
  idSchemas,
  instant,
  label,
  type NoShape,
  type Nothing,
  type PathParams,
  queryBoolean,
  queryNumber,
} from './route.ts';

type SortBy<Sort extends readonly string[]> = Sort[number] | `-${Sort[number]}`;

/**
 * A route that answers a page of objects. Besides its own query it takes limit, offset and sort, since and until, and
 * each field of its items that one filters by. `fields`: where the items have more of them than a page shows.
 */
export function list<
  const P extends string,
  R extends z.ZodObject,
  const Sort extends readonly [string, ...string[]],
  Q extends z.ZodRawShape = NoShape,
  F extends z.ZodObject = R,
>(
  path: P,
  access: Access,
  draft: Draft<Q, NoShape, Nothing, R> & { sort: Sort; defaultSort?: SortBy<Sort>; fields?: F },
) {
  const { sort, defaultSort = '-created_at', fields = draft.reply, ...rest } = draft;
  const names = sort.flatMap((field) => [field, `-${field}`]);
  // The fields and their negatives are exactly SortBy<Sort>; flatMap cannot say so.
  const schema = z.enum(names as [SortBy<Sort>, ...SortBy<Sort>[]]).default(defaultSort as never);
  const made = build('list', 'GET', path, access, { ...rest, query: {} });
  const derived = filtersOf(fields, { ...made.params, ...rest.query });
  const query = { ...derived, ...times(defaultSort.replace('-', '')), ...rest.query, ...paging(schema) };
  // The query has the shape that the type derives from the same schemas.
  type Query = Omit<Filters<F['shape']>, keyof PathParams<P> | keyof Q> & Times & Q & Paging<SortBy<Sort>>;
  return {
    ...made,
    query: query as unknown as Query,
    filters: [...Object.keys(made.params), ...Object.keys(derived)],
  };
}

function paging<S extends z.ZodType>(sort: S) {
  return {
    limit: queryNumber(1, 100).default(20).describe('Items per page'),
    offset: queryNumber(0).default(0).describe('Items to skip'),
    sort,
  };
}
type Paging<S> = ReturnType<typeof paging<z.ZodType<S>>>;

/** The time of an item is the one that a list is sorted by unless told. */
function times(field: string) {
  return {
    since: instant.optional().describe(`Those whose ${field} is this or later`),
    until: instant.optional().describe(`Those whose ${field} is before this`),
  };
}
type Times = ReturnType<typeof times>;

/** Texts that one filters by; in any other text one searches. */
const filterable = /^(?:id|name|hostname|os|arch|type|.+_(?:id|name|hostname))$/;
type Filterable =
  | 'id'
  | 'name'
  | 'hostname'
  | 'os'
  | 'arch'
  | 'type'
  | `${string}_${'id' | 'name' | 'hostname'}`;

/** Enums, booleans, and those texts; an id that names a thing of ours is looked up like any other. */
function filtersOf({ shape }: z.ZodObject, given: object): Record<string, z.ZodType> {
  const filters = Object.entries<z.core.$ZodType>(shape).flatMap(([name, schema]): [string, z.ZodType][] => {
    const filter = Object.hasOwn(given, name) ? undefined : filterOf(name, schema);
    return filter ? [[name, filter.optional()]] : [];
  });
  return Object.fromEntries(filters);
}

function filterOf(name: string, schema: z.core.$ZodType): z.ZodType | undefined {
  if (schema instanceof z.ZodNullable || schema instanceof z.ZodOptional) {
    return filterOf(name, schema.unwrap());
  }
  if (schema instanceof z.ZodEnum) return schema;
  if (schema instanceof z.ZodBoolean) return queryBoolean;
  if (!(schema instanceof z.ZodString) || !filterable.test(name)) return undefined;
  return Object.entries(idSchemas).find(([noun]) => name === `${noun}_id`)?.[1] ?? label(1, 255);
}

type Bare<S> = S extends z.ZodNullable<infer T> | z.ZodOptional<infer T> ? Bare<T> : S;
type Filter<K, S> = S extends z.ZodEnum
  ? S
  : S extends z.ZodBoolean
    ? typeof queryBoolean
    : K extends Filterable
      ? S extends z.ZodType<string>
        ? z.ZodString
        : never
      : never;
type Filters<Shape> = {
  [K in keyof Shape as [Filter<K, Bare<Shape[K]>>] extends [never] ? never : K]: z.ZodOptional<
    Filter<K, Bare<Shape[K]>>
  >;
};
