// Derives verbs from the table of REST routes: arguments and flags become the input of one call. The answer
// is printed as a table, a record or lines.
import type { Command } from 'commander';
import type * as z from 'zod';
import type { Route } from '../../shared/api/route.ts';
import { type Api, allRoutes } from '../../shared/api/route-table.ts';
import { StartError, UsageError } from '../../shared/errors.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { type Common, type Flags, take, type VerbSpec, verb } from './declare-verb.ts';
import { kinds, machineNames } from './find-by-name.ts';
import { type Cell, type Format, hint, print, record, size, span, summary, table, when } from './print.ts';
import { confirm } from './prompt.ts';
import { copyOut } from './stdout-stderr-and-exit.ts';

export type Item = Record<string, unknown>;

/** Columns of a table. The column `machine` contains a machine's name, which is found by the item's machine_id. */
export interface View<T> {
  /**
   * Columns to print, separated by spaces: fields of the answer, or names in `cells`. `title=field` gives a column
   * another title.
   */
  fields?: string;
  cells?: Record<string, (item: T) => Cell>;
}

type Answer<R> = R extends { reply: infer S extends z.ZodType } ? z.output<S> : never;
/** Values of flags by name. */
export type Given = Common & { yes?: boolean; limit?: number } & Item;

interface RouteVerb<T> extends Partial<VerbSpec> {
  /** Default values of the input, by their names in the API. Flags override them. */
  defaults?: Item;
  /** Returns further input, from flags that are not fields of the route. */
  input?: (given: Given) => Item | Promise<Item>;
  /**
   * Is set if the verb's effect cannot be undone. The user must confirm `what`, such as "delete the package".
   * Afterwards `done` is printed, such as "deleted".
   */
  destroys?: [what: string, done: string];
  view?: View<T>;
  /** Returns the text of an answer. Without this function all fields are printed. */
  text?: (answer: T, client: Farhand) => string[] | Promise<string>;
  /** Called after the answer is printed. */
  after?: (answer: T, format: Format, client: Farhand) => void | Promise<void>;
}

/** Flags that several lists have. */
export const ofMachine = { '--machine <machine>': 'list only items that concern the machine MACHINE' };
export const since = { '--since <time>': 'only items since this time: a date, or 2h for 2 hours ago' };
export const latest = { '--limit <count>': 'print at most COUNT items, the latest first (default: 50)' };

/**
 * Adds a verb that calls one route. The verb's first arguments are the ids in the route's path. `words`: the verb's
 * name, and further arguments.
 */
export function routeVerb<N extends keyof Api, O extends keyof Api[N] & string>(
  parent: Command,
  words: string,
  noun: N,
  operation: O,
  spec: RouteVerb<Answer<Api[N][O]>> = {},
): Command {
  const route = routeOf(noun, operation);
  const [name = '', ...more] = words.split(' ');
  const ids = Object.keys(route.params).map(argumentOf);
  const { destroys, examples = [destroys ? '--yes' : ''] } = spec;
  const path = parent.parent ? ['farhand', parent.name()] : ['farhand'];
  const start = [...path, name, ...ids.map((id) => samples[id] ?? id.toUpperCase())].join(' ');
  const whole: VerbSpec = {
    about: route.summary.charAt(0).toLowerCase() + route.summary.slice(1),
    ...spec,
    examples: examples.map((example) => `${start} ${example}`.trim()),
    flags: { ...helpTexts(route, spec.flags), ...(destroys && { '--yes': 'do not ask' }) },
  };
  const all = [name, ...ids.map((id) => `<${id}>`), ...more].join(' ');
  const made: Command = verb(parent, all, whole, async (client) => {
    const { registeredArguments, processedArgs } = made;
    const positional = Object.fromEntries(
      registeredArguments.map((one, at): [string, unknown] => [one.name(), processedArgs[at]]),
    );
    assertIds(parent, ids, made.args);
    // The cast is safe: the client has one method per route with the route's input (shared/sdk).
    const calls = client[noun] as unknown as Record<string, Call<Answer<Api[N][O]>>>;
    await perform({ client, route, calls, operation, spec }, { ...positional, ...made.opts<Common>() });
  });
  return made;
}

/**
 * Returns a function that warns if a new object has the name of an older one: verbs then need an id instead of the
 * name. `what`: a key of `kinds`.
 */
export const warnOfSameName =
  (what: string) =>
  async ({ name }: { name: string }, _format: unknown, client: Farhand): Promise<void> => {
    try {
      await kinds[what]?.find(client, name);
    } catch (error) {
      // All other errors are ignored: a key may be allowed to create objects, but not to list them.
      if (error instanceof StartError) hint(`farhand: ${error.message}`);
    }
  };

/**
 * Returns the help texts of a route's flags. For a PATCH route, the texts contain no defaults, because a missing flag
 * leaves its field unchanged.
 */
function helpTexts({ method }: Route, flags: Flags = {}): Flags {
  if (method !== 'PATCH') return flags;
  const withoutDefault = ([flag, text]: [string, string]): [string, string] => [
    flag,
    text.replace(/ \(default: [^)]*\)/, ''),
  ];
  return Object.fromEntries(Object.entries(flags).map(withoutDefault));
}

/** Converts --enable and --disable to a request's field `enabled`. Throws UsageError if both are given. */
export function enabledOf({ enable, disable }: Item): { enabled?: boolean } {
  if (enable && disable) throw new UsageError('use --enable or --disable, but not both');
  return enable || disable ? { enabled: Boolean(enable) } : {};
}

/** Throws UsageError if an id is empty, for example because a variable of a script is not set. */
function assertIds(parent: Command, ids: readonly string[], args: readonly string[]): void {
  const at = ids.findIndex((_, index) => args[index]?.trim() === '');
  if (at < 0) return;
  const id = ids[at] ?? '';
  const names = parent.commands.map((one) => one.name());
  const list = names.find((name) => name === 'list' || name === `list-${id}s`);
  const next = at === 0 && list ? `; farhand ${parent.name()} ${list} prints the ids` : '';
  throw new UsageError(`${id.toUpperCase()} is empty${next}`);
}

type Call<T> = (input: Item) => Promise<T> & AsyncIterable<T>;

interface Performed<T> {
  client: Farhand;
  route: Route;
  /** The client's calls for the route's noun, by operation. */
  calls: Record<string, Call<T>>;
  operation: string;
  spec: RouteVerb<T>;
}

async function perform<T>(performed: Performed<T>, options: Given): Promise<void> {
  const { client, route, calls, operation, spec } = performed;
  const { view, text, flags = {} } = spec;
  const { output, limit = '--limit <count>' in flags ? 50 : Number.POSITIVE_INFINITY } = options;
  const input = {
    ...spec.defaults,
    ...(await inputOf(client, route, options)),
    ...(await spec.input?.(options)),
  };
  const call = calls[operation];
  if (!call) throw new Error(`the SDK has no operation ${operation}`);
  if (route.kind === 'list' && view) {
    const items = call({ ...input, limit: Math.min(100, limit) });
    return printView(client, output, await take(items, limit), view);
  }
  const destroyed = spec.destroys && (await confirmed(performed, spec.destroys, options, input));
  const answer = await call(input);
  // The cast is safe: for a route of the kind `bytes`, the SDK returns the Response itself.
  if (route.kind === 'bytes') return copyOut((answer as Response).body);
  if (destroyed) await print(output, answer, () => record(destroyed));
  else if (text) await print(output, answer, () => text(answer, client));
  else await printView(client, output, answer);
  await spec.after?.(answer, output, client);
}

/**
 * Asks the user to confirm, unless --yes is given. Returns what to print after the route was called, such as
 * `{ removed: 'web-1 (mach_…)' }`.
 */
async function confirmed<T>(
  { route, calls }: Performed<T>,
  [what, done]: [string, string],
  options: Given,
  input: Item,
): Promise<Record<string, string>> {
  const [field = ''] = Object.keys(route.params);
  const [given, id] = [String(options[argumentOf(field)]), String(input[field])];
  let name = given;
  // With --yes the name is not looked up: a key may be allowed to remove the object, but not to read it.
  if (given === id && !options.yes && kinds[argumentOf(field)])
    name = nameIn(await calls.get?.({ [field]: id }));
  const text = name === id ? id : `${name} (${id})`;
  await confirm(options.yes, `${what} ${text}`);
  return { [done]: text };
}

const nameIn = (answer: unknown): string => String((answer as { name?: unknown } | undefined)?.name);

/** Returns the name of the argument for an id field: join-token for join_token_id. */
const argumentOf = (id: string): string => id.replace(/_id$/, '').replace('_', '-');

function routeOf(noun: string, operation: string): Route {
  const found = allRoutes().find((one) => one.noun === noun && one.operation === operation);
  if (!found) throw new Error(`there is no route ${noun}.${operation}`);
  return found.route;
}

/**
 * Sample values of arguments, for the examples in the help. An argument without a sample is printed as its name in
 * capitals.
 */
const samples: Readonly<Record<string, string>> = {
  machine: 'web-1',
  schedule: 'backup',
  command: 'cmd_…',
  'saved-command': 'restart',
};

/**
 * Returns an object whose keys are the fields of a route's body. In a checkout, `body` is a zod schema with such an
 * object. In a packaged program, `body` itself is this object (scripts/package/routes-as-plain-data.ts).
 */
function bodyOf({ body = {} }: { body?: object | undefined }): object {
  return 'shape' in body && typeof body.shape === 'object' ? (body.shape ?? {}) : body;
}

/** Returns the route's input from flags: --catch-up as catch_up, --machine as machine_id or machine_ids. */
async function inputOf(client: Farhand, route: Route, options: Item): Promise<Item> {
  const fields = new Set([route.params, route.query, bodyOf(route)].flatMap(Object.keys));
  const input: Item = {};
  for (const [name, value] of Object.entries(options)) {
    const word = name.replaceAll('-', '_').replaceAll(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
    const field = ['', '_id', '_ids', 's', '_at'].map((end) => word + end).find((one) => fields.has(one));
    if (field === undefined || value === undefined) continue;
    const find = (text: unknown) => kinds[name]?.find(client, String(text)) ?? text;
    input[field] = Array.isArray(value) ? await Promise.all(value.map(find)) : await find(value);
  }
  return input;
}

/**
 * Prints JSON or text: a list as a table, an item as a record. The text contains the fields in `view`, or by default
 * those of fieldsOf().
 */
export const printView = <T>(
  client: Farhand,
  format: Format,
  answer: T | T[],
  view?: View<T>,
): Promise<void> => print(format, answer, () => viewText(client, answer, view));

export async function viewText<T>(client: Farhand, answer: T | T[], view: View<T> = {}): Promise<string> {
  const { fields = fieldsOf(answer ?? {}), cells } = view;
  const isTable = Array.isArray(answer);
  const items = isTable ? answer : [answer];
  const columns = fields.split(' ').map((word) => {
    const [title = '', field = title] = word.split('=');
    return [title.replaceAll('_', ' '), field] as const;
  });
  const withNames = columns.some(([, field]) => /^machine(_ids)?$/.test(field) && !cells?.[field]);
  const machines = items.flatMap((item) => [machineOf(item), ...machinesOf(item)]);
  const nameOf = withNames ? await machineNames(client, machines) : String;
  const cell = (field: string, item: T): Cell => {
    if (cells?.[field]) return cells[field](item);
    if (field === 'machine') return nameOf(machineOf(item));
    const value = (item as Item)[field];
    return textOf(field, field === 'machine_ids' && value ? machinesOf(item).map(nameOf) : value, isTable);
  };
  if (!isTable)
    return record(Object.fromEntries(columns.map(([title, field]) => [title, cell(field, answer)])));
  return table(
    items,
    Object.fromEntries(columns.map(([title, field]) => [title, (item) => cell(field, item)])),
  );
}

/**
 * Returns the names of the fields of a record. Leaves out lists of objects. Also leaves out stdout and stderr, because
 * the verb `output` prints them.
 */
function fieldsOf(record: object): string {
  const isLong = (name: string, value: unknown): boolean =>
    /^std(out|err)$/.test(name) || (Array.isArray(value) && typeof value[0] === 'object');
  const names = Object.entries(record).flatMap(([name, value]) => (isLong(name, value) ? [] : [name]));
  return names.map((name) => (name === 'machine_id' ? 'machine' : name)).join(' ');
}

const machineOf = (item: unknown): string | null =>
  (item as { machine_id?: string | null }).machine_id ?? null;

const machinesOf = (item: unknown): readonly string[] =>
  (item as { machine_ids?: readonly string[] | null }).machine_ids ?? [];

/** Returns a value as text, formatted by its field. In a table, times are printed relative to now, such as "5m ago". */
function textOf(field: string, value: unknown, isTable: boolean): Cell {
  if (value === undefined || value === null || typeof value === 'boolean') return value;
  if (Array.isArray(value)) return value.join(isTable ? ',' : ', ');
  if (typeof value === 'object') return summary(value);
  if (typeof value === 'number') {
    if (/^(duration|timeout|catch_up_window|grace_period|for|before|repeat_every)$/.test(field))
      return span(value);
    return field.endsWith('_bytes') ? size(value) : value;
  }
  const text = typeof value === 'string' ? value : JSON.stringify(value);
  return isTable && /^(at|.+_at|timestamp|next_run|next_start|active_until)$/.test(field) ? when(text) : text;
}
