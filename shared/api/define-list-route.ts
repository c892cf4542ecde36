// Defines routes of lists, with paging, sorting, time filters, and filters by the fields of the items.
import * as z from 'zod';
import { build, type Definition, type NoShape, type Nothing, type PathParams } from './define-route.ts';
import type { Access, Route } from './route.ts';
import { idSchemas, instant, label, queryBoolean, queryNumber } from './shared-schemas.ts';

type SortBy<Sort extends readonly string[]> = Sort[number] | `-${Sort[number]}`;

type ListQuery<
  P extends string,
  Sort extends readonly string[],
  Q extends z.ZodRawShape,
  F extends z.ZodObject,
> = Omit<Filters<F['shape']>, keyof PathParams<P> | keyof Q> & Times & Q & ReturnType<typeof paging<Sort>>;

/**
 * Defines a route that answers one page of a list. `fields`: object schema whose ids, names, enums and booleans become
 * filters of the list; by default the schema of the items.
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
  definition: Definition<Q, NoShape, Nothing, R> & { sort: Sort; defaultSort?: SortBy<Sort>; fields?: F },
): Route<PathParams<P>, ListQuery<P, Sort, Q, F>, NoShape, Nothing, R, 'list'> & { filters: string[] } {
  const { sort, defaultSort = '-created_at', fields = definition.reply, ...rest } = definition;
  const made = build('list', 'GET', path, access, { ...rest, query: {} });
  const derived = filtersOf(fields, { ...made.params, ...rest.query });
  const query = { ...derived, ...times(defaultSort.replace('-', '')), ...rest.query };
  return {
    ...made,
    // The cast is safe: ListQuery derives the type of the query from the same schemas.
    query: { ...query, ...paging(sort, defaultSort) } as unknown as ListQuery<P, Sort, Q, F>,
    filters: [...Object.keys(made.params), ...Object.keys(derived)],
  };
}

/** Returns the query parameters of a page. `sort`: the fields by which the list can be sorted. */
export function paging<const Sort extends readonly string[]>(sort: Sort, defaultSort: SortBy<Sort>) {
  const names = sort.flatMap((field) => [field, `-${field}`]);
  // The cast is safe: the names are exactly SortBy<Sort>, which the type of flatMap cannot express.
  const schema = z.enum(names as SortBy<Sort>[]);
  return {
    limit: queryNumber(1, 100).default(20).describe('Largest number of items in the answer'),
    offset: queryNumber(0).default(0).describe('Number of items to skip'),
    sort: schema
      .default(defaultSort as never)
      .describe('Field to sort by; a minus in front sorts in descending order'),
  };
}

/** Returns the filters `since` and `until` for `field`, the field by which the list is sorted by default. */
function times(field: string) {
  return {
    since: instant.optional().describe(`Only items whose ${field} is this time or later`),
    until: instant.optional().describe(`Only items whose ${field} is before this time`),
  };
}
type Times = ReturnType<typeof times>;

/** Matches the names of text fields that get a filter. */
const filterable = /^(?:id|name|hostname|os|arch|type|.+_(?:id|name|hostname))$/;
type Filterable =
  | 'id'
  | 'name'
  | 'hostname'
  | 'os'
  | 'arch'
  | 'type'
  | `${string}_${'id' | 'name' | 'hostname'}`;

/**
 * Returns the filters for the fields of an item. An id in a filter is authorized like an id in the path, but it may
 * also be the id of a removed object.
 */
function filtersOf({ shape }: z.ZodObject, given: object): Record<string, z.ZodType> {
  const filters = Object.entries<z.core.$ZodType>(shape).flatMap(([name, schema]): [string, z.ZodType][] => {
    const filter = Object.hasOwn(given, name) ? undefined : filterOf(name, schema);
    return filter ? [[name, filter.optional().describe(`Only items with this ${name}`)]] : [];
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
