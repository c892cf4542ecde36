// Verbs derived from the table of routes: arguments and flags become the input of one call, its answer a table, a
// record or lines.
import { type Command, Option } from 'commander';
import type * as z from 'zod';
import { type Api, allRoutes } from '../../shared/api/index.ts';
import type { Route } from '../../shared/api/route.ts';
import { now } from '../../shared/clock.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { demandYes } from './ask.ts';
import { count, since } from './flags.ts';
import { machineNamed, namesOf, scheduleNamed } from './named.ts';
import {
  type Cell,
  type Format,
  print,
  printFields,
  printTable,
  sayJson,
  size,
  span,
  when,
} from './output.ts';
import { type Common, every, verb, withClient } from './verb.ts';

export type Item = Record<string, unknown>;

/** What is shown of a resource. `machine` is the name of the machine that its machine_id says. */
export interface View<T> {
  /** Fields of the answer or of `cells`, with spaces between; `title=field` where the title is another. */
  fields: string;
  cells?: Record<string, (item: T) => Cell>;
}

type Answer<R> = R extends { reply: infer S extends z.ZodType } ? z.output<S> : never;

export interface RouteVerb<T> {
  /** What it does; the summary of its route unless given. */
  about?: string;
  /** Each is an example in its help, after the verb and its arguments. */
  examples?: [string, ...string[]];
  /** Shared flags: --machine, --since and --limit. */
  filters?: (keyof typeof filters)[];
  /** Input that no flag gives. */
  fixed?: Item;
  /** Input of flags that are no fields of the route. */
  input?: (told: Item) => Item | Promise<Item>;
  /** It cannot be undone. */
  destroys?: Destroys;
  view?: View<T>;
  lines?: (answer: T) => string[];
  show?: (client: Farhand, format: Format, answer: T) => Promise<void>;
  /** Does something else where a flag asks for it; false: no flag did. */
  instead?: (client: Farhand, told: Told, input: Item) => Promise<boolean>;
  /** After the answer was printed. */
  after?: (answer: T, format: Format) => void;
  mayBegin?: boolean;
}

interface Destroys {
  /** What --yes agrees to. */
  what: (name: string) => string;
  /** The word for what was done. */
  done: string;
  /** What it is called; as it was given unless told. */
  nameOf?: (client: Farhand, given: string, id: string, yes?: boolean) => Promise<string>;
}

const filters = {
  machine: () => new Option('--machine <machine>', 'of this machine'),
  since: () => new Option('--since <time>', 'not before, such as 2h (ago)').argParser(since('--since', now)),
  limit: () =>
    new Option('--limit <count>', 'at most so many, the latest first')
      .argParser(count('--limit'))
      .default(50),
};

/** Adds a verb that calls one route; arguments in `words` come after the ids in its path. */
export function routeVerb<N extends keyof Api, O extends keyof Api[N] & string>(
  parent: Command,
  words: string,
  noun: N,
  operation: O,
  spec: RouteVerb<Answer<Api[N][O]>> = {},
): Command {
  const route = routeOf(noun, operation);
  const [name = '', ...more] = words.split(' ');
  const ids = Object.keys(route.params);
  const { destroys, examples = [destroys ? '--yes' : ''] } = spec;
  const path = parent.parent ? ['farhand', parent.name()] : ['farhand'];
  const start = [...path, name, ...ids.map((id) => samples[id] ?? id)];
  const [first, ...others] = examples.map((example) => [...start, example].join(' ').trim());
  const made = verb(
    parent,
    [name, ...ids.map((id) => `<${wordOf(id)}>`), ...more].join(' '),
    spec.about ?? route.summary.charAt(0).toLowerCase() + route.summary.slice(1),
    first ?? '',
    ...others,
  );
  for (const filter of spec.filters ?? []) made.addOption(filters[filter]());
  if (destroys) made.option('--yes', 'do not ask');
  const act = async (client: Farhand, ..._: unknown[]): Promise<void> => {
    const told: Told = { ...argumentsOf(made), ...made.opts<Common>() };
    // One method per route, which takes the input that its route describes (shared/sdk).
    const call = client[noun][operation] as unknown as Call<Answer<Api[N][O]>>;
    await perform({ client, route, call, spec }, told);
  };
  return made.action(withClient<[...unknown[], Common]>(act, { mayBegin: spec.mayBegin }));
}

/** Arguments and flags by name. */
export type Told = Common & { yes?: boolean; limit?: number } & Item;
type Call<T> = (input: Item) => Promise<T> & AsyncIterable<T>;

interface Performed<T> {
  client: Farhand;
  route: Route;
  call: Call<T>;
  spec: RouteVerb<T>;
}

async function perform<T>({ client, route, call, spec }: Performed<T>, told: Told): Promise<void> {
  const { output } = told;
  const input = { ...(await inputOf(client, route, told)), ...(await spec.input?.(told)), ...spec.fixed };
  if (await spec.instead?.(client, told, input)) return;
  if (route.kind === 'list' && spec.view) {
    const items = await every((page) => call({ ...input, ...page }), told.limit);
    return printView(client, output, items, spec.view);
  }
  const destroyed = spec.destroys && (await agreedOn(spec.destroys, client, route, told, input));
  const answer = await call(input);
  if (destroyed) await printFields(output, answer, destroyed);
  else if (spec.lines) print(output, answer, () => spec.lines?.(answer) ?? []);
  else if (spec.view) await printView(client, output, answer, spec.view);
  else await spec.show?.(client, output, answer);
  spec.after?.(answer, output);
}

/** Goes on only with --yes or when a person agrees; what is then printed. */
async function agreedOn(
  { what, done, nameOf }: Destroys,
  client: Farhand,
  { params }: Route,
  told: Told,
  input: Item,
): Promise<Record<string, string>> {
  const [id = ''] = Object.keys(params);
  const given = String(told[wordOf(id)]);
  const name = nameOf ? await nameOf(client, given, String(input[id]), told.yes) : given;
  await demandYes(told.yes, what(name));
  return { [done]: name };
}

/** The argument that an id is given by: join-token for join_token_id. */
const wordOf = (id: string): string => id.replace(/_id$/, '').replace('_', '-');

function routeOf(noun: string, operation: string): Route {
  const found = allRoutes().find((one) => one.noun === noun && one.operation === operation);
  if (!found) throw new Error(`there is no route ${noun}.${operation}`);
  return found.route;
}

/** Ids in examples. */
const samples: Readonly<Record<string, string>> = {
  machine_id: 'web-1',
  schedule_id: 'backup',
  command_id: 'cmd_…',
  batch_id: 'batch_…',
  session_id: 'sess_…',
  webhook_id: 'hook_…',
  key_id: 'key_…',
  join_token_id: 'join_…',
};

function argumentsOf({ registeredArguments, args }: Command): Item {
  return Object.fromEntries(registeredArguments.map((one, at) => [one.name(), args[at]]));
}

/** A bundle has the names of the fields where the table has a schema (scripts/package/routes.ts). */
function bodyOf({ body = {} }: { body?: object | undefined }): object {
  return 'shape' in body && typeof body.shape === 'object' ? (body.shape ?? {}) : body;
}

/** Each value under the field of the route that it is for: --catch-up is catch_up, --machine machine_id or machine_ids. */
async function inputOf(client: Farhand, route: Route, told: Item): Promise<Item> {
  const fields = new Set([route.params, route.query, bodyOf(route)].flatMap(Object.keys));
  const input: Item = {};
  for (const [name, value] of Object.entries(told)) {
    const word = name.replaceAll('-', '_').replaceAll(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
    const field = ['', '_id', '_ids', 's', '_at'].map((end) => word + end).find((one) => fields.has(one));
    if (field !== undefined && value !== undefined) input[field] = await resolved(client, name, value);
  }
  return input;
}

/** Ids where names are given. */
async function resolved(client: Farhand, name: string, value: unknown): Promise<unknown> {
  const find = name === 'machine' ? machineNamed : name === 'schedule' ? scheduleNamed : undefined;
  if (!find) return value;
  if (Array.isArray(value)) return Promise.all(value.map((one) => find(client, String(one))));
  return find(client, String(value));
}

/** A list as a table, one item as a record; as JSON whole. */
export async function printView<T>(
  client: Farhand,
  format: Format,
  answer: T | T[],
  { fields, cells }: View<T>,
): Promise<void> {
  if (format === 'json') return sayJson(answer, 2);
  const isTable = Array.isArray(answer);
  const items = isTable ? answer : [answer];
  const words = fields.split(' ').map((word) => word.split('=') as [string, string?]);
  const withNames = words.some(([title, field]) => (field ?? title) === 'machine' && !cells?.machine);
  const nameOf = withNames ? await namesOf(client, items.map(machineOf)) : String;
  const cell = (field: string, item: T): Cell => {
    if (cells?.[field]) return cells[field](item);
    if (field === 'machine') return nameOf(machineOf(item));
    return textOf(field, (item as Item)[field], isTable);
  };
  const columns = words.map(([title, field = title]) => {
    return [title.replaceAll('_', ' '), (item: T) => cell(field, item)] as const;
  });
  if (isTable) return printTable(format, items, Object.fromEntries(columns));
  await printFields(
    format,
    answer,
    Object.fromEntries(columns.map(([title, read]) => [title, read(answer)])),
  );
}

const machineOf = (item: unknown): string | null => {
  const { machine_id } = item as { machine_id?: string | null };
  return machine_id ?? null;
};

/** A value as its field says; of times a table shows how long ago. */
function textOf(field: string, value: unknown, isTable: boolean): Cell {
  if (value === undefined || value === null || typeof value === 'boolean') return value;
  if (Array.isArray(value)) return value.join(isTable ? ',' : ', ');
  if (typeof value === 'number') {
    if (/^(duration|timeout)$/.test(field)) return span(value);
    return field.endsWith('_bytes') ? size(value) : value;
  }
  const text = typeof value === 'string' ? value : JSON.stringify(value);
  return isTable && /^(at|.+_at|timestamp|next_run)$/.test(field) ? when(text) : text;
}
