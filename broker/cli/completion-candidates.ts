// The hidden verb farhand __complete prints words that can complete a command line. The completion script of a shell
// calls this verb when the user presses Tab.
import { type Argument, Option } from 'commander';
import { after } from '../../shared/clock.ts';
import { clean } from '../../shared/sanitize-text.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { where, withUrl } from './connect-to-broker.ts';
import { findMachine, kinds, machine as machines } from './find-by-name.ts';
import { createProgram, nouns } from './verb-tree.ts';

/**
 * Prints the words that can complete the last word, one per line. bash passes the whole line, other shells pass
 * separate words.
 */
export async function complete([shell = '', ...args]: string[]): Promise<void> {
  const words = shell === 'bash' ? wordsIn(args[0] ?? '').slice(1) : args;
  const current = words.at(-1) ?? '';
  const all = await candidates(words.slice(0, -1), current);
  // Names that contain control characters are left out, because they could control the terminal.
  const found = all.filter((one) => one.startsWith(current) && clean(one) === one);
  for (const one of found) process.stdout.write(`${shell === 'bash' ? forBash(one, current) : one}\n`);
}

/** Splits a line into words as a shell does. If the line ends with a space, the last word is empty. */
function wordsIn(line: string): string[] {
  const words = [...line.matchAll(/(?:\\.|"(?:\\.|[^"\\])*"?|'[^']*'?|[^\s"'\\])+/g)].map(([word]) => word);
  if (/(^|[^\\])\s$/.test(line)) words.push('');
  return words.map((word) => word.replace(/\\(.)|["']/g, '$1'));
}

/**
 * Returns the text that bash inserts for a candidate, with special characters escaped. For bash, a new word begins
 * after each colon in `current` (the text typed so far). So only the part after the last colon is returned.
 */
const forBash = (candidate: string, current: string): string =>
  candidate.slice(current.lastIndexOf(':') + 1).replace(/[^\w@%+=:,./~-]/gu, '\\$&');

async function candidates(before: string[], current: string): Promise<string[]> {
  const [noun] = before;
  if (noun === undefined) return nouns;
  if (!nouns.includes(noun) || before.includes('--')) return [];
  let command = await createProgram(noun);
  let open: Option | undefined;
  let given = 0;
  for (const word of before) {
    const option = command.options.find(({ long, short }) => word === long || word === short);
    const below = command.commands.find((one) => one.name() === word);
    if (open) open = undefined;
    else if (below) command = below;
    else if (option?.required) open = option;
    else if (!word.startsWith('-')) given++;
  }
  if (open) return valuesOf(open, current);
  if (current.startsWith('-'))
    return ['--help', ...command.options.flatMap(({ hidden, long }) => (hidden || !long ? [] : [long]))];
  if (command.commands.length > 0) return command.commands.map((one) => one.name());
  const { registeredArguments: all } = command;
  const argument = all[given] ?? (all.at(-1)?.variadic ? all.at(-1) : undefined);
  // The first argument of `files put` is a local path, which the script of the shell completes by itself.
  if (!argument || (command.name() === 'put' && given === 0)) return [];
  return valuesOf(argument, current);
}

/**
 * Returns candidates for the value of a flag or argument. If the flag or argument has fixed choices, they are the
 * candidates. Otherwise its name decides what is listed.
 */
async function valuesOf(of: Option | Argument, current: string): Promise<string[]> {
  const name = of instanceof Option ? of.attributeName() : of.name();
  if (of.argChoices) return of.argChoices;
  // Only the last item of a list is completed.
  const isList = of instanceof Option && of.flags.endsWith('<list>');
  const start = isList ? current.slice(0, current.lastIndexOf(',') + 1) : '';
  const find = name === 'webhook' ? webhooks : kinds[name]?.names;
  if (find)
    return ask(async (client) => (await find(client, current.slice(start.length))).map((one) => start + one));
  return /^(paths?|from|to)$/.test(name) ? ask((client) => paths(client, current)) : [];
}

const answerMs = 1000;

/** A webhook has no name, so its id is the candidate. */
const webhooks = async (client: Farhand): Promise<string[]> =>
  (await client.webhooks.list({ limit: 100 })).items.map(({ id }) => id);

/** Returns candidates for a remote path: machines before the colon, and entries of a directory after it. */
async function paths(client: Farhand, current: string): Promise<string[]> {
  const [, machine, directory = ''] = /^([^/:]+):(.*\/)?/.exec(current) ?? [];
  if (machine === undefined) return (await machines.names(client, current)).map((name) => `${name}:`);
  const path = { machine_id: await findMachine(client, machine), path: directory || '~' };
  const { files } = await client.files.list({ ...path, limit: 1000 });
  return files.map(({ name, type }) => `${machine}:${directory}${name}${type === 'directory' ? '/' : ''}`);
}

/** Calls the configured broker. Returns no candidates if it does not answer within a second. */
async function ask(use: (client: Farhand) => Promise<string[]>): Promise<string[]> {
  const place = where({});
  const { url, apiKey } = place;
  if (!url || !apiKey) return [];
  const cancel = after(answerMs, () => process.exit(0));
  return withUrl({ ...place, url }, use)
    .catch(() => [])
    .finally(cancel);
}
