// The parameters of saved commands: checks them, and inserts their values into arguments. No shell reads a value, and a
// value is never split.
import { createContext, Script } from 'node:vm';
import { mostInput } from '../../shared/api/batches.ts';
import { longestValue } from '../../shared/api/saved-commands.ts';
import { type AppError, fieldError } from '../../shared/errors.ts';
import type { SavedCommand } from '../state/index.ts';
import type { CommandParams } from './command-record.ts';

type Parameter = SavedCommand['parameters'][number];
type Value = NonNullable<Parameter['default']>;
export type ParameterValues = Readonly<Record<string, Value>>;

/** A parameter in an argument, such as {{name}}. */
const placeholder = /\{\{([a-z][a-z0-9_]*)\}\}/g;
/**
 * Milliseconds of CPU time that all patterns of one request may take. A pattern that backtracks could otherwise take
 * hours. Elapsed time would refuse ordinary values on a busy machine, where this thread waits for a CPU.
 */
const patternMs = 50;

/**
 * Returns the command that a saved command runs with these values. Throws validation_failed with the name of a wrong
 * parameter.
 */
export function commandWith(saved: SavedCommand, values: ParameterValues): CommandParams {
  const { argv, parameters, user, cwd, timeout } = saved;
  const unknown = Object.keys(values).find((name) => !parameters.some((one) => one.name === name));
  if (unknown !== undefined) throw refused(unknown, `is no parameter of ${saved.name}`);
  const until = cpuMs() + patternMs;
  // A Map, because a parameter can have the name of a property that every object inherits, such as `constructor`.
  const given = new Map(Object.entries(values));
  const texts = new Map(parameters.map((one) => [one.name, textOf(one, given.get(one.name), until)]));
  let length = 0;
  const args = argv.flatMap((argument) => {
    const [, only] = /^\{\{([a-z][a-z0-9_]*)\}\}$/.exec(argument) ?? [];
    // An argument that consists of one parameter is left out if the parameter has no value.
    if (only !== undefined && texts.get(only) === undefined) return [];
    const text = argument.replace(placeholder, (_, name: string) => texts.get(name) ?? '');
    length += text.length;
    if (length > mostInput)
      throw fieldError('body', 'parameters', 'make the arguments longer than 64 KiB together');
    return [text];
  });
  const [command = '', ...rest] = args;
  return {
    ...{ command, args: rest },
    ...(user !== null && { user }),
    ...(cwd !== null && { cwd }),
    ...(timeout !== null && { timeout }),
  };
}

/** Throws validation_failed if an argument uses its parameters wrongly, or if a parameter itself is wrong. */
export function assertParameters({ argv, parameters }: SavedCommand): void {
  const names = new Set(parameters.map((one) => one.name));
  if (names.size < parameters.length)
    throw fieldError('body', 'parameters', 'must not have two parameters of the same name');
  for (const [at, argument] of argv.entries()) {
    const rest = argument.replace(placeholder, (whole, used: string) => (names.has(used) ? '' : whole));
    if (rest.includes('{{'))
      throw fieldError(
        'body',
        `argv.${at}`,
        'must use {{ only in {{NAME}}, where NAME is the name of one of the parameters',
      );
    if (at === 0 && (rest !== argument || argument === ''))
      throw fieldError('body', 'argv.0', 'must be the name of a program, without a parameter');
    const [optional] = parameters.filter(
      (one) => mayBeLeftOut(one) && argument.replace(`{{${one.name}}}`, '') !== argument,
    );
    // An optional parameter must be a whole argument. Otherwise an argument such as /srv/{{x}} would become /srv/ when
    // the parameter has no value.
    if (optional && argument !== `{{${optional.name}}}`) {
      const message = `contains the optional parameter ${optional.name} and other text: give the parameter a default, make it required, or use it as an argument of its own`;
      throw fieldError('body', `argv.${at}`, message);
    }
  }
  const until = cpuMs() + patternMs;
  for (const [at, one] of parameters.entries()) assertSoundParameter(one, `parameters.${at}`, until);
}

const mayBeLeftOut = (parameter: Parameter): boolean => !parameter.required && parameter.default === null;

function assertSoundParameter(parameter: Parameter, path: string, until: number): void {
  const { type, values, pattern, min, max } = parameter;
  if (type === 'enum' && values === null)
    throw fieldError('body', `${path}.values`, 'are missing: the type enum needs them');
  if (type !== 'enum' && values !== null)
    throw fieldError('body', `${path}.values`, 'are only for the type enum: leave them out');
  if (pattern !== null && type !== 'string' && type !== 'path')
    throw fieldError('body', `${path}.pattern`, 'is only for the types string and path: leave it out');
  if ((min ?? max) !== null && type !== 'integer')
    throw fieldError('body', `${path}.min`, 'min and max are only for the type integer: leave them out');
  if (max !== null && max < (min ?? 0))
    throw fieldError('body', `${path}.max`, 'must not be less than min, which is 0 by default');
  if (pattern !== null && !isPattern(pattern))
    throw fieldError('body', `${path}.pattern`, 'is not a regular expression');
  const problem =
    parameter.default === null ? undefined : problemOf(parameter, String(parameter.default), until);
  if (problem !== undefined) throw fieldError('body', `${path}.default`, problem);
}

const refused = (name: string, message: string): AppError =>
  fieldError('body', `parameters.${name.slice(0, 32)}`, message);

/** Returns the text of a value; undefined if the parameter is left out. Throws validation_failed. */
function textOf(parameter: Parameter, given: Value | undefined, until: number): string | undefined {
  const { name, type, required } = parameter;
  const value = given ?? (required ? null : parameter.default);
  if (value === null) {
    if (required) throw refused(name, 'is missing');
    return undefined;
  }
  const text = String(value);
  const problem = problemOf(parameter, text, until);
  if (problem !== undefined) throw refused(name, problem);
  // 010 becomes 10, the number that was checked above: a program could read 010 as the octal number 8. -0 becomes 0.
  return type === 'integer' ? String(Number(text)) : text;
}

/**
 * Returns what is wrong with the text of a value; undefined if the parameter allows it. `until` is the value of
 * cpuMs() at which the patterns of the request have taken too long.
 */
function problemOf(parameter: Parameter, text: string, until: number): string | undefined {
  const { type, pattern } = parameter;
  const problem = text.length > longestValue ? 'is too long' : problems[type](text, parameter);
  return problem ?? (pattern === null ? undefined : mismatchOf(pattern, text, until));
}

/**
 * For each type, returns what is wrong with a value. Every value is a text here, because the CLI also sends numbers as
 * texts.
 */
const problems: Record<Parameter['type'], (text: string, parameter: Parameter) => string | undefined> = {
  boolean: (text) => (/^(true|false)$/.test(text) ? undefined : 'must be true or false'),
  enum: (text, { values }) =>
    values?.includes(text) ? undefined : `must be one of ${values?.join(', ').slice(0, 1000)}`,
  integer(text, { min, max }) {
    const number = Number(text);
    if (!/^-?\d{1,15}$/.test(text)) return 'must be a whole number';
    if (number < (min ?? 0)) return `must be at least ${min ?? 0}`;
    return max !== null && number > max ? `must be at most ${max}` : undefined;
  },
  path(text) {
    if (!text.startsWith('/') || text.split('/').includes('..')) return 'must be an absolute path without ..';
    return wrongText(text);
  },
  string(text, { pattern }) {
    // With an empty value, /srv/{{x}} would become /srv/. A program would read a value such as -x as an option.
    if (pattern === null && (text === '' || text.startsWith('-')))
      return 'must not be empty or begin with -, unless the parameter has a pattern that allows it';
    return wrongText(text);
  },
};

function wrongText(text: string): string | undefined {
  return text.isWellFormed() && !text.includes('\0') ? undefined : 'must be well-formed Unicode without NUL';
}

function isPattern(pattern: string): boolean {
  try {
    new RegExp(pattern, 'u');
    return true;
  } catch {
    return false;
  }
}

const test = new Script('new RegExp(pattern, "u").test(text)');
/** The code of the error with which Node ends a script at its timeout. */
const timedOut = 'ERR_SCRIPT_EXECUTION_TIMEOUT';
const sandbox = createContext({ pattern: '', text: '' });

/** Returns the CPU time of this thread in milliseconds. */
function cpuMs(): number {
  const { user, system } = process.threadCpuUsage();
  return (user + system) / 1000;
}

/**
 * Returns what is wrong if the pattern does not match the whole text, or if the comparison does not end before cpuMs()
 * is `until`. Otherwise returns undefined.
 */
function mismatchOf(pattern: string, text: string, until: number): string | undefined {
  const mismatch = `must match ${pattern}`;
  Object.assign(sandbox, { pattern: `^(?:${pattern})$`, text });
  // The timeout of a script is elapsed time. If it ends a script that has CPU time left, the script runs again.
  for (let left = until - cpuMs(); left > 0; left = until - cpuMs()) {
    try {
      return test.runInContext(sandbox, { timeout: Math.ceil(left) }) === true ? undefined : mismatch;
    } catch (error) {
      // A timeout is recognized by its code. `instanceof` would not work, because a vm context has its own class Error.
      // After any other error, such as a stack overflow, the text does not match the pattern.
      if (Reflect.get(Object(error), 'code') !== timedOut) return mismatch;
    }
  }
  return `took too long to compare with ${pattern}: simplify the pattern, because all patterns of one request may take ${patternMs} ms of CPU time together`;
}
