// Reads the settings of a program from flags, FARHAND_… variables and a TOML file. One table declares all of them.
import { readFileSync } from 'node:fs';
import { homedir } from 'node:os';
import { join, resolve } from 'node:path';
import { parseArgs } from 'node:util';
import { parse as parseToml, stringify } from 'smol-toml';
import * as z from 'zod';
import { durationForm, parseDuration } from './duration.ts';
import { errnoOf, StartError, UsageError } from './errors.ts';
import { logLevels } from './logger.ts';
import { reasonOf } from './system-error-messages.ts';

export interface Setting<T extends z.ZodType = z.ZodType> {
  /** Parses the text of a flag or variable, or the value in the file. */
  schema: T;
  /** Placeholder of the flag's value in the help text; absent for a switch. */
  value?: string;
  /** Single letter that can be used instead of the flag. */
  short?: string;
  help: string;
  /** True if the flag may be given several times, for a schema that takes a list. */
  repeats?: boolean;
  /** True if the setting is read from the command line only, never from a variable or the file. */
  flagOnly?: boolean;
  /**
   * True if only verbs with another table use the setting, such as `install`. With this table, the setting has no flag
   * or variable, but is accepted in the file.
   */
  fileOnly?: boolean;
}

export type Settings<Table extends Record<string, Setting>> = {
  [K in keyof Table]: z.output<Table[K]['schema']>;
};

/** Arguments and environment of a program. They are passed in, so that tests need no process. */
export interface Invocation {
  argv: readonly string[];
  env: Readonly<Record<string, string | undefined>>;
}

/** A duration such as `300ms`, `5m` or `24h`, parsed to milliseconds. */
export const duration = z
  .string()
  .regex(durationForm, 'must be a duration such as 300ms, 5m or 24h')
  .transform(parseDuration);

/** A size such as `512MiB` or `10GiB`, parsed to bytes. */
export const size = z
  .string()
  .regex(/^\d{1,6}(KiB|MiB|GiB|TiB)$/, 'must be a size such as 512MiB or 10GiB')
  .transform(
    (text) => Number.parseInt(text, 10) * 1024 ** (1 + ['K', 'M', 'G', 'T'].indexOf(text.at(-3) ?? '')),
  );

/** HOST:PORT, with brackets around an IPv6 address; port 0 lets the system choose. */
export const hostPort = z
  .string()
  .regex(/^(\[[0-9a-fA-F:.]+\]|[^:[\]]+):\d{1,5}$/, 'must be HOST:PORT')
  .transform((text) => {
    const at = text.lastIndexOf(':');
    return { host: text.slice(0, at).replace(/^\[|\]$/g, ''), port: Number(text.slice(at + 1)) };
  })
  .refine(({ port }) => port <= 65_535, 'the port must be at most 65535');

export const isHostPort = (text: string): boolean => hostPort.safeParse(text).success;

/** Comma-separated words. In the file they may also be an array. */
export const words = z
  .union([z.array(z.string()), z.string().transform((text) => text.split(','))])
  .transform((list) => list.map((word) => word.trim()).filter((word) => word !== ''));

/** The data directory of a program, as an absolute path. */
export const dataDir = (program: string) =>
  z
    .string()
    .min(1)
    .default(() =>
      process.getuid?.() === 0 ? `/var/lib/${program}` : join(homedir(), '.local/state', program),
    )
    .transform((path) => resolve(path));

/** A switch: a flag without a value, false by default. */
export const flag = z
  .union([z.boolean(), z.enum(['true', 'false']).transform((text) => text === 'true')])
  .default(false);

export const logLevel = {
  schema: z.enum(logLevels).default('info'),
  value: 'LEVEL',
  help: `lowest level of messages to log: ${logLevels.join(', ')}`,
};

export const common = {
  config: { schema: z.string().optional(), value: 'FILE', help: 'TOML file with these settings' },
  help: { schema: flag, help: 'print this help and exit', flagOnly: true },
  version: { schema: flag, help: 'print the version and exit', flagOnly: true },
};

/**
 * Reads the settings of a table. A flag takes precedence over its variable, and the variable over the file. Throws
 * UsageError for an unknown flag, and StartError (exit code 78) for an invalid value.
 */
export function readSettings<Table extends Record<string, Setting>>(
  table: Table,
  from: Invocation,
): Settings<Table> {
  return parseSettings(table, givenSettings(table, from));
}

/**
 * Validates the values of settings, such as those of givenSettings(). Throws StartError for a missing or invalid value.
 */
export function parseSettings<Table extends Record<string, Setting>>(
  table: Table,
  given: Record<string, unknown>,
): Settings<Table> {
  const entries = Object.keys(table).map((name) => {
    const value = given[name];
    const parsed = table[name]?.schema.safeParse(value);
    if (parsed?.success) return [name, parsed.data];
    const reason = parsed?.error.issues[0]?.message;
    if (value === undefined)
      throw new StartError(`${dashed(name)} is required; set this flag or the variable ${variable(name)}`);
    throw new StartError(`${dashed(name)} ${JSON.stringify(value)}: ${reason}`);
  });
  // The cast is safe: there is one entry per row of the table, parsed by the schema of that row.
  return Object.fromEntries(entries) as Settings<Table>;
}

/** Returns the settings that a flag, a variable or the file sets. parseSettings() validates them. */
export function givenSettings(table: Record<string, Setting>, from: Invocation): Record<string, unknown> {
  const flags = readFlags(table, from.argv);
  const variables = Object.fromEntries(flagged(table).map((name) => [name, from.env[variable(name)]]));
  const file = readFile(flags.config ?? variables.config, table);
  const entries = Object.keys(table).map((name): [string, unknown] => [
    name,
    flags[name] ?? (table[name]?.flagOnly ? undefined : (variables[name] ?? file[name])),
  ]);
  return Object.fromEntries(entries.filter(([, value]) => value !== undefined));
}

/**
 * Returns settings as the text of a TOML file for `--config`. Makes relative paths absolute, because the program that
 * reads the file may run in another directory.
 */
export function settingsText(table: Record<string, Setting>, values: Record<string, unknown>): string {
  const isPath = (name: string): boolean => ['FILE', 'DIR'].includes(table[name]?.value ?? '');
  const lasting = Object.entries(values).filter(([name]) => !table[name]?.flagOnly);
  const entries = lasting.map(([name, value]): [string, unknown] => [
    name,
    isPath(name) && typeof value === 'string' ? resolve(value) : value,
  ]);
  return stringify(Object.fromEntries(entries));
}

/** Returns the help text of a program, with one line per setting. */
export function helpText(program: string, purpose: string, table: Record<string, Setting>): string {
  const rows = flagged(table).map((name) => {
    const { value, short, help } = table[name] ?? { help: '' };
    const forms = `${short ? `-${short}, ` : ''}${dashed(name)}${value ? ` ${value}` : ''}`;
    return `  ${forms.padEnd(30)} ${help}`;
  });
  // The help names one variable as an example. It belongs to the first setting that takes a value, or to the first
  // switch if no setting takes one.
  const others = flagged(table).filter((name) => !table[name]?.flagOnly);
  const example = others.find((name) => table[name]?.value) ?? others[0];
  const ways = `Each flag can also be set by a variable, such as ${variable(example ?? '')}, or in a TOML file; --no-FLAG turns a switch off.`;
  return [`${program}: ${purpose}`, '', ...rows, ...(example ? ['', ways] : []), ''].join('\n');
}

/** Names of the settings that are flags of this program. */
function flagged(table: Record<string, Setting>): string[] {
  return Object.keys(table).filter((name) => !table[name]?.fileOnly);
}

function dashed(name: string): string {
  return `--${name.replaceAll('_', '-')}`;
}

function variable(name: string): string {
  return `FARHAND_${name.toUpperCase()}`;
}

function readFlags(
  table: Record<string, Setting>,
  argv: readonly string[],
): Record<string, string | boolean | undefined> {
  const optionOf = ({ value, short, repeats = false }: Partial<Setting> = {}) => ({
    type: value ? ('string' as const) : ('boolean' as const),
    multiple: repeats,
    ...(short && { short }),
  });
  const options = Object.fromEntries(
    flagged(table).map((name) => [dashed(name).slice(2), optionOf(table[name])]),
  );
  try {
    const { values } = parseArgs({ args: [...argv], options, allowNegative: true });
    // The cast is safe: parseArgs returns arrays only for options with `multiple`, whose values are texts.
    const entries = Object.entries(values).map(([name, value]): [string, string | boolean] => [
      name.replaceAll('-', '_'),
      // Each value may itself be a comma-separated list.
      Array.isArray(value) ? value.join(',') : (value as string | boolean),
    ]);
    return Object.fromEntries(entries);
  } catch (error) {
    throw new UsageError(error instanceof Error ? error.message : String(error));
  }
}

function readFile(
  path: string | boolean | undefined,
  table: Record<string, Setting>,
): Record<string, unknown> {
  if (typeof path !== 'string') return {};
  let content: Record<string, unknown>;
  try {
    const settings = Object.entries(parseToml(readFileSync(path, 'utf8')));
    content = Object.fromEntries(settings.map(([name, value]) => [name.replaceAll('-', '_'), value]));
  } catch (error) {
    throw new StartError(errnoOf(error) ? reasonOf(error) : `${path}: ${reasonOf(error)}`);
  }
  const unknown = Object.keys(content).find((name) => !Object.hasOwn(table, name));
  if (unknown) throw new StartError(`${path}: unknown setting ${unknown}; see --help for the settings`);
  return content;
}
