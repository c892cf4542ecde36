// Adds verbs to the command line. Each verb is declared by its words, flags and examples. TypeScript derives the types
// of the handler's arguments from the words and flags.
import { type Command, InvalidArgumentError, Option } from 'commander';
import { now } from '../../shared/clock.ts';
import { durationForm, parseDuration } from '../../shared/duration.ts';
import { UsageError } from '../../shared/errors.ts';
import { clean } from '../../shared/sanitize-text.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { where, withBroker } from './connect-to-broker.ts';
import type { Format } from './print.ts';

/**
 * Help texts by flag, such as `--limit <count>`. The word in brackets decides how the value is parsed (see
 * `readers`).
 */
export type Flags = Readonly<Record<string, string>>;

export interface VerbSpec<F extends Flags = Flags> {
  about: string;
  examples: readonly string[];
  flags?: F;
  /** Names of the required flags. */
  required?: readonly string[];
  usage?: string;
  /** Text printed below the examples. */
  notes?: string;
  /** True if the verb takes over the terminal and therefore has no --output. */
  interactive?: boolean;
  /** True if a new directory may become a broker's data directory. */
  mayCreate?: boolean | undefined;
  /** True if the broker may send no byte for minutes, for example during a copy. */
  isSlow?: boolean;
}

export interface Common {
  dataDir?: string;
  output: Format;
}

interface Values {
  count: number;
  number: number;
  value: number;
  duration: number;
  list: string[];
  'name=value': Record<string, string>;
}
type Choice<V> = V extends `${infer One}|${infer Rest}` ? One | Choice<Rest> : V;
type Value<V> = V extends keyof Values ? Values[V] : V extends `${string}|${string}` ? Choice<V> : string;
type Camel<S extends string> = S extends `${infer A}-${infer B}` ? `${A}${Capitalize<Camel<B>>}` : S;
type NameIn<W> = W extends `${string}--${infer N} <${string}` | `${string}--${infer N}` ? Camel<N> : never;
type ValueIn<W> = W extends `${string} <${infer V}>` ? Value<V> : true;
/** Type of the object that has the values of the flags: `--max-failures <number>` becomes `maxFailures?: number`. */
export type Options<F> = Common & { [W in keyof F & string as NameIn<W>]?: ValueIn<W> };

type Argument<W> = W extends `<${string}...>` | `[${string}...]`
  ? [string[]]
  : W extends `<${infer V}>`
    ? [V extends `${string}|${string}` ? Choice<V> : string]
    : W extends `[${string}]`
      ? [string | undefined]
      : [];
type Arguments<W> = W extends `${infer One} ${infer Rest}`
  ? [...Argument<One>, ...Arguments<Rest>]
  : Argument<W>;

/** Adds a verb that calls the broker. `words` has Commander's syntax, such as `get <machine>`. */
export function verb<const W extends string, const F extends Flags = Record<never, string>>(
  parent: Command,
  words: W,
  spec: VerbSpec<F>,
  act: (client: Farhand, ...args: [...Arguments<W>, Options<F>]) => Promise<void>,
): Command {
  return localVerb<W, F>(parent, words, spec, (...args) => {
    // Commander passes the options as the last argument.
    const { mayCreate, isSlow } = spec;
    const place = { ...where(args.at(-1) as Common), mayCreate, isSlow };
    return withBroker(place, (client) => act(client, ...args));
  });
}

/** Like verb(), but `act` gets no client. A verb that needs a broker must connect on its own. */
export function localVerb<const W extends string, const F extends Flags = Record<never, string>>(
  parent: Command,
  words: W,
  spec: VerbSpec<F>,
  act: (...args: [...Arguments<W>, Options<F>]) => Promise<void> | void,
): Command {
  const { about, examples, flags = {}, required = [], usage, notes = '', interactive = false } = spec;
  const made = parent.command(words).description(about);
  if (usage) made.usage(usage);
  for (const one of made.registeredArguments)
    if (one.name().includes('|')) one.choices(one.name().split('|'));
  const all = {
    ...flags,
    ...common,
    ...(!interactive && { '-o, --output <text|json>': 'output format (default: text)' }),
  };
  for (const [flag, help] of Object.entries(all)) addFlag(made, flag, help, required);
  made.addHelpText('after', `\nExamples:\n${examples.map((line) => `  ${line}`).join('\n')}\n${notes}`);
  return made.action(async (...given: unknown[]) => {
    try {
      // Commander passes arguments as `words` declares them, then options, then the command itself.
      await act(...(given.slice(0, -1) as [...Arguments<W>, Options<F>]));
    } catch (error) {
      if (error instanceof UsageError) made.error(`farhand: ${clean(error.message)}`, { exitCode: 2 });
      throw error;
    }
  });
}

const common = { '--data-dir <dir>': 'data directory of a broker on this machine' };

/** Maps the present name of a flag to its name in version 0.1.0. The old name still works, but is not in the help. */
const former: Readonly<Record<string, string>> = { tags: 'tag', expiresIn: 'expires' };

/** Parses a flag's value. `before`: the value that the same flag had earlier on the command line. */
type Reader = (text: string, before: never) => unknown;

function addFlag(command: Command, flag: string, help: string, required: readonly string[]): void {
  const option = new Option(flag, help);
  const [, word = ''] = /<(.*)>/.exec(flag) ?? [];
  const name = option.attributeName();
  // The cast is safe: Commander passes each reader its own earlier result.
  const read = (name === 'tags' ? tags : readers[word]) as
    | ((text: string, before: unknown) => unknown)
    | undefined;
  if (word.includes('|')) option.choices(word.split('|'));
  if (word === 'text|json') option.default('text');
  if (read) option.argParser(read);
  command.addOption(option.makeOptionMandatory(required.includes(name)));
  const old = former[name];
  if (!old) return;
  const alias = new Option(`--${old} <${word}>`).hideHelp();
  alias.attributeName = () => name;
  command.addOption(read ? alias.argParser(read) : alias);
}

/** Parses a list, which may be given in one flag with commas, or in several flags. */
export function list(text: string, before: string[] = []): string[] {
  const words = text.split(',').map((word) => word.trim());
  return [...before, ...words.filter((word) => word !== '')];
}

export function duration(text: string): number {
  if (durationForm.test(text)) return parseDuration(text);
  throw new InvalidArgumentError('It must be a duration such as 300ms, 5m or 24h.');
}

const whole = (least: number) => (text: string) => {
  if (/^\d{1,9}$/.test(text) && Number(text) >= least) return Number(text);
  throw new InvalidArgumentError(`It must be a whole number, at least ${least}.`);
};

/**
 * Parses a date in any form that Date.parse() knows. Returns NaN for texts that Date.parse() takes for another date: a
 * number, such as 5 for May 2001, and a day that does not exist, such as February 30 for March 2.
 */
function dateOf(text: string): number {
  const [day] = /^\d{4}-\d\d-\d\d/.exec(text) ?? [];
  const start = new Date(day ?? '');
  const isReal = day
    ? Number.isFinite(start.getTime()) && start.toISOString().startsWith(day)
    : /[^\d.\s+-]/.test(text);
  return isReal ? Date.parse(text) : NaN;
}

/** Functions that parse a flag's value, by the word in the flag's brackets. */
const readers: Readonly<Record<string, Reader>> = {
  count: whole(1),
  number: whole(0),
  value(text) {
    if (/^\d{1,7}(\.\d{1,3})?$/.test(text)) return Number(text);
    throw new InvalidArgumentError('It must be a number such as 90 or 0.5.');
  },
  list,
  duration,
  time(text) {
    const ms = durationForm.test(text) ? now() - parseDuration(text) : dateOf(text);
    if (Number.isFinite(ms)) return new Date(ms).toISOString();
    throw new InvalidArgumentError(
      'It must be a time: 2h for 2 hours ago, or a date such as 2026-11-21T10:00:00Z.',
    );
  },
  mode(text) {
    if (/^[0-7]{3,4}$/.test(text)) return text;
    throw new InvalidArgumentError('It must be 3 or 4 octal digits, such as 0644.');
  },
  'name=value'(text, before: Record<string, string> = {}) {
    const at = text.indexOf('=');
    if (at < 1) throw new InvalidArgumentError('It must have the form NAME=VALUE.');
    return { ...before, [text.slice(0, at)]: text.slice(at + 1) };
  },
};

/**
 * Parses a list of tags. Refuses an empty list, which usually comes from an unset variable: as a filter it would match
 * everything.
 */
const tags: Reader = (text, before) => {
  const all = list(text, before);
  if (all.length > 0) return all;
  throw new InvalidArgumentError('It must have at least one tag.');
};

export async function take<T>(items: AsyncIterable<T>, most: number): Promise<T[]> {
  const taken: T[] = [];
  for await (const item of items) if (taken.push(item) >= most) break;
  return taken;
}
