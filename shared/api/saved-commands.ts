// REST routes of saved commands: a program and its arguments, with typed parameters that are filled in for each run.
import * as z from 'zod';
import { cwd, timeout, untilKilled, user } from './commands.ts';
import { list } from './define-list-route.ts';
import { single } from './define-route.ts';
import { deleted, label, named, savedCommandId, someOf, text, timestamp } from './shared-schemas.ts';

export const mostSavedCommands = 1_000;
export const longestValue = 4_096;

const value = z.union([z.string().max(longestValue), z.number(), z.boolean()]);
export const parameterValues = z
  .record(z.string().max(32), value)
  .refine((values) => Object.keys(values).length <= 50, 'at most 50 parameters')
  .describe('Values of the parameters of the saved command, by name');

const described = {
  name: 'Name; in `argv`, `{{name}}` stands for the value',
  type: '`path` is an absolute path without `..`; `enum` is one of `values`',
  required:
    'True if every caller must give a value. Default: false if the parameter has a `default`, otherwise true. An optional parameter without `default` must be an argument of its own in `argv`. If a caller gives no value, this argument is left out',
  default: 'Value that the parameter has if a caller gives none; not used with `required`',
  values: 'Values of an `enum`',
  pattern: 'Regular expression that a whole `string` or `path` must match',
  min: 'Smallest `integer`; default: 0',
  max: 'Largest `integer`',
  description: 'What the parameter is for',
};
const types = z.enum(['string', 'integer', 'boolean', 'enum', 'path']);

const parameter = z.object({
  name: z.string().describe(described.name),
  type: types.describe(described.type),
  required: z.boolean().describe(described.required),
  default: value.nullable().describe(described.default),
  values: z.array(z.string()).nullable().describe(described.values),
  pattern: z.string().nullable().describe(described.pattern),
  min: z.number().nullable().describe(described.min),
  max: z.number().nullable().describe(described.max),
  description: z.string().nullable().describe(described.description),
});

const newParameter = z.strictObject({
  name: z
    .string()
    .regex(
      /^[a-z][a-z0-9_]{0,31}$/,
      'must be at most 32 lower-case letters, digits and _, and begin with a letter',
    )
    .describe(described.name),
  type: types.describe(described.type),
  required: z.boolean().optional().describe(described.required),
  default: value.nullish().describe(described.default),
  values: z.array(text(256).min(1)).min(1).max(100).nullish().describe(described.values),
  pattern: text(256).min(1).nullish().describe(described.pattern),
  min: z.int().nullish().describe(described.min),
  max: z.int().nullish().describe(described.max),
  description: text(1024).nullish().describe(described.description),
});

const savedCommand = named('SavedCommand', {
  id: savedCommandId,
  name: z.string().describe('Unique name'),
  description: z.string().nullable().describe('What the command does'),
  argv: z
    .array(z.string())
    .describe('Program and arguments, run without a shell; `{{name}}` stands for a parameter'),
  parameters: z.array(parameter).describe('Parameters of the command'),
  user: z.string().nullable().describe('User that the command runs as; null: the agent’s user'),
  cwd: z.string().nullable().describe('Working directory; null: the home of the user'),
  timeout: z.number().nullable().describe('Milliseconds after which the command is killed'),
  updated_by: z.string().describe('Id of the API key that changed it last'),
  created_at: timestamp.describe('Time of creation'),
  updated_at: timestamp.describe('Time of the last change by a request'),
});

const fields = {
  name: label(1, 100).describe('Unique name'),
  argv: z
    .array(text(16_384))
    .min(1)
    .max(256)
    .describe(
      'Program and arguments, run without a shell. In an argument, `{{name}}` stands for the value of a parameter, which always stays within this one argument. The program must not contain `{{name}}`',
    ),
  parameters: z.array(newParameter).max(50).optional().describe('Parameters of the command'),
  description: text(4096).nullable().optional().describe('What the command does'),
  user: user.nullable().optional().describe('User to run as; default: the agent’s user'),
  cwd: cwd.nullable().optional().describe('Working directory; default: the home of the user'),
  timeout: timeout.nullable().optional().describe(untilKilled),
};
const notLimited =
  'The key of this request must not be limited to some machines, because the saved command can run on all machines.';
const withSchedules =
  'If a schedule uses the saved command, the key also needs `schedules:write` and `schedules:read`.';

export const savedCommands = {
  create: single('POST', '/saved-commands', 'commands:execute', {
    summary: 'Save a command with parameters',
    description: notLimited,
    body: z.strictObject(fields),
    example: {
      name: 'restart',
      argv: ['systemctl', 'restart', '{{unit}}'],
      parameters: [{ name: 'unit', type: 'enum', values: ['nginx', 'redis'] }],
    },
    reply: savedCommand,
    status: 201,
    errors: ['conflict'],
    idempotency: 'replay',
  }),
  list: list('/saved-commands', 'commands:read', {
    summary: 'List saved commands',
    sort: ['name', 'created_at'],
    reply: savedCommand,
  }),
  get: single('GET', '/saved-commands/{saved_command_id}', 'commands:read', {
    summary: 'Get a saved command',
    reply: savedCommand,
  }),
  update: single('PATCH', '/saved-commands/{saved_command_id}', 'commands:execute', {
    summary: 'Change a saved command',
    description: `The change also applies to schedules that use the saved command, from their next run on. ${notLimited} ${withSchedules}`,
    body: someOf(z.strictObject(fields).partial()),
    example: { timeout: 60_000 },
    reply: savedCommand,
    errors: ['conflict'],
  }),
  remove: single('DELETE', '/saved-commands/{saved_command_id}', 'commands:execute', {
    summary: 'Delete a saved command that no schedule uses',
    description: `${notLimited} ${withSchedules}`,
    reply: deleted,
    errors: ['conflict'],
  }),
};
