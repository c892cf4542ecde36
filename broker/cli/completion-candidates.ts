// The hidden verb farhand __complete prints words that can complete a command line. The completion script of a shell
// calls this verb when the user presses Tab.
import { type Argument, type Command, Option } from 'commander';
import { after } from '../../shared/clock.ts';
import { clean } from '../../shared/sanitize-text.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { where, withUrl } from './connect-to-broker.ts';
import { findMachine, findSavedCommand, kinds, machine as machines } from './find-by-name.ts';
import { createProgram, nouns } from './verb-tree.ts';

/**
 * Prints the words that can complete the last word, one per line. bash passes the line up to the cursor, and the
 * characters at which bash breaks words. Other shells pass separate words, of which only the last can contain quotes.
 */
export async function complete([shell = '', ...args]: string[]): Promise<void> {
  const [line = '', breaks = ''] = args;
  const words = shell === 'bash' ? wordsIn(line).slice(1) : args;
  const [last = '', ...before] = words.reverse();
  const current = unquote(last);
  const all = await candidates(before.reverse().map(shell === 'bash' ? unquote : String), current);
  // Names that contain control characters are left out, because they could control the terminal.
  const found = all.filter((one) => one.startsWith(current) && clean(one) === one);
  const format = shell === 'bash' ? forBash(last, breaks) : String;
  for (const one of found) process.stdout.write(`${format(one)}\n`);
}

/** Splits a line into words like a shell, but keeps quotes. If the line ends with a space, the last word is empty. */
function wordsIn(line: string): string[] {
  const words = [...line.matchAll(/(?:\\.|"(?:\\.|[^"\\])*"?|'[^']*'?|[^\s"'\\])+/g)].map(([word]) => word);
  const isOpen = /(^|[^\\])\s$/.test(line) && !isQuoted(words.at(-1) ?? '');
  return isOpen ? [...words, ''] : words;
}

/** True if a word ends within quotes. */
const isQuoted = (word: string): boolean => /^("(\\.|[^"\\])*|'[^']*)$/u.test(partsOf(word).at(-1) ?? '');

/** Splits a word into quoted texts and single characters. A quoted text may lack its closing quote. */
const partsOf = (word: string): string[] => word.match(/\\.|"(?:\\.|[^"\\])*"?|'[^']*'?|[^"'\\]/gu) ?? [];

const unquote = (word: string): string =>
  partsOf(word)
    .map((part) => (part.startsWith("'") ? part.replaceAll("'", '') : part.replace(/\\(.)|"/gu, '$1')))
    .join('');

/**
 * Returns a function that escapes a candidate for bash. bash replaces only the text after an open quote or, if no quote
 * is open, after the last word break, such as a colon. The function therefore returns only the end of the candidate,
 * from that position on.
 */
function forBash(last: string, breaks: string): (candidate: string) => string {
  let [before, start, quote] = ['', 0, ''];
  for (const part of partsOf(last)) {
    if (isQuoted(part)) [start, quote] = [before.length, part.charAt(0)];
    before += unquote(part);
    if (breaks.includes(part)) start = before.length;
  }
  return (candidate) => {
    const text = candidate.slice(start);
    if (quote === "'") return text.replaceAll("'", "'\\''");
    if (quote === '') return text.replace(/[^\w@%+=:,./-]/gu, '\\$&');
    // A backslash does not protect `!` within double quotes: bash would insert an earlier command.
    return text.replace(/["\\$`]/g, '\\$&').replaceAll('!', `"'!'"`);
  };
}

/** The part of a command line before the word to complete, divided into command, arguments and options. */
interface Line {
  command: Command;
  /** The option whose value comes next. */
  open: Option | undefined;
  args: string[];
  /** Values of the options, by the name of the option in commander. */
  values: Map<string, string>;
}

function lineOf(program: Command, before: string[]): Line {
  const line: Line = { command: program, open: undefined, args: [], values: new Map() };
  for (const word of before) {
    const { command, open } = line;
    const option = command.options.find(({ long, short }) => word === long || word === short);
    const below = command.commands.find((one) => one.name() === word);
    line.open = undefined;
    if (open) line.values.set(open.attributeName(), word);
    else if (below) line.command = below;
    else if (option?.required) line.open = option;
    else if (!word.startsWith('-')) line.args.push(word);
  }
  return line;
}

async function candidates(before: string[], current: string): Promise<string[]> {
  const [noun] = before;
  if (noun === undefined) return nouns;
  if (!nouns.includes(noun) || before.includes('--')) return [];
  const line = lineOf(await createProgram(noun), before);
  const { command, open, args } = line;
  if (open?.attributeName() === 'param') return ask((client) => parameters(client, line, current));
  if (open) return valuesOf(open, current);
  if (current.startsWith('-'))
    return ['--help', ...command.options.flatMap(({ hidden, long }) => (hidden || !long ? [] : [long]))];
  if (command.commands.length > 0) return command.commands.map((one) => one.name());
  const { registeredArguments: all } = command;
  const argument = all[args.length] ?? (all.at(-1)?.variadic ? all.at(-1) : undefined);
  // The first argument of `files put` is a local path, which the script of the shell completes by itself.
  if (!argument || (command.name() === 'put' && args.length === 0)) return [];
  return valuesOf(argument, current);
}

/**
 * Returns candidates for the value of a flag or argument. If the flag or argument has fixed choices, they are the
 * candidates. Otherwise its name decides what is listed.
 */
async function valuesOf(of: Option | Argument, current: string): Promise<string[]> {
  const isOption = of instanceof Option;
  const name = isOption ? of.attributeName() : of.name();
  // Only the last item of a list is completed.
  const isList = isOption ? of.flags.endsWith('<list>') : name === 'tags';
  const start = isList ? current.slice(0, current.lastIndexOf(',') + 1) : '';
  if (of.argChoices) return of.argChoices.map((one) => start + one);
  const find = lists[name] ?? kinds[name]?.names;
  if (find)
    return ask(async (client) => (await find(client, current.slice(start.length))).map((one) => start + one));
  return !isOption && /^(paths?|from|to)$/.test(name) ? ask((client) => paths(client, current)) : [];
}

const answerMs = 1000;

/** Candidates for values that find-by-name.ts does not find, by the name of their flag or argument. */
const lists: Readonly<Record<string, (client: Farhand, search: string) => Promise<string[]>>> = {
  // A webhook has no name, so its id is the candidate.
  webhook: async (client) => (await client.webhooks.list({ limit: 100 })).items.map(({ id }) => id),
  tags: async (client, search) =>
    (await client.tags.list({ limit: 100, ...(search && { search }) })).items.map(({ name }) => name),
};

/**
 * Returns candidates for --param. Before the `=`, they are the parameters of the saved command in the command line.
 * After `NAME=`, they are the values that the parameter NAME allows.
 */
async function parameters(
  client: Farhand,
  { command, args, values }: Line,
  current: string,
): Promise<string[]> {
  const isRun = command.registeredArguments[0]?.name() === 'saved-command';
  const text = values.get('savedCommand') ?? (isRun ? args[0] : undefined);
  if (text === undefined) return [];
  const saved = await client.savedCommands.get({ saved_command_id: await findSavedCommand(client, text) });
  const [given] = /^[^=]+=/.exec(current) ?? [];
  if (given === undefined) return saved.parameters.map(({ name }) => `${name}=`);
  const { type, values: allowed } = saved.parameters.find(({ name }) => `${name}=` === given) ?? {};
  return (type === 'boolean' ? ['true', 'false'] : (allowed ?? [])).map((value) => given + value);
}

/** Returns candidates for a remote path: machines before the colon, and entries of a directory after it. */
async function paths(client: Farhand, current: string): Promise<string[]> {
  const [, machine, directory = ''] = /^([^/:]+):(.*\/)?/.exec(current) ?? [];
  if (machine === undefined) return (await machines.names(client, current)).map((name) => `${name}:`);
  const path = { machine_id: await findMachine(client, machine), path: directory || '~' };
  const { files } = await client.files.list({ ...path, limit: 1000 });
  const named = files.filter(({ name_encoding }) => !name_encoding);
  return named.map(({ name, type }) => `${machine}:${directory}${name}${type === 'directory' ? '/' : ''}`);
}

/** Calls the configured broker. Returns no candidates on failure. Ends the program after a second without an answer. */
async function ask(use: (client: Farhand) => Promise<string[]>): Promise<string[]> {
  const place = where({});
  const { url, apiKey } = place;
  if (!url || !apiKey) return [];
  const cancel = after(answerMs, () => process.exit(0));
  return withUrl({ ...place, url }, use)
    .catch(() => [])
    .finally(cancel);
}
