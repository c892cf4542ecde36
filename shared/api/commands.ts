// REST routes of commands: run, follow, send input, signal and cancel.
import * as z from 'zod';
import { signals } from '../signals.ts';
import { list } from './define-list-route.ts';
import { outgoing, single } from './define-route.ts';
import { machineErrors } from './route.ts';
import {
  commandId,
  day,
  encoded,
  endStatuses,
  label,
  machineId,
  milliseconds,
  named,
  queryBoolean,
  queryNumber,
  text,
  timestamp,
} from './shared-schemas.ts';

const commandStatuses = ['queued', 'running', ...endStatuses, 'expired', 'lost'] as const;

export const requestedBy = z.string().nullable().describe('Id of the API key that made the request');

export const command = named('Command', {
  id: commandId,
  machine_id: machineId,
  command: z
    .string()
    .describe('Command line for a shell, or, if `args` is set, a program to run without a shell'),
  args: z
    .array(z.string())
    .nullable()
    .describe('Arguments of the program; null if `command` is a command line for a shell'),
  cwd: z.string().nullable().describe('Working directory; null: the home of the user'),
  user: z.string().nullable().describe('User that the command runs as; null: the agent’s user'),
  status: z
    .enum(commandStatuses)
    .describe('`expired`: the command never ran; `lost`: its outcome is unknown'),
  exit_code: z.number().nullable().describe('Exit code; 128 + n if killed by signal n; null before the end'),
  signal: z.string().nullable().describe('Name of the signal that killed the command; null if none did'),
  stdout: z
    .string()
    .describe('Last 1 MiB of standard output (4 KiB in lists); bytes that are not UTF-8 become U+FFFD'),
  stderr: z.string().describe('Like `stdout`'),
  stdout_bytes: z.number().describe('Total number of bytes written to standard output'),
  stderr_bytes: z.number().describe('Total number of bytes written to standard error'),
  stdout_truncated: z.boolean().describe('True if `stdout` is not everything that was written'),
  stderr_truncated: z.boolean().describe('True if `stderr` is not everything that was written'),
  stdout_start: z.number().describe('Offset of the first byte of output that is still stored'),
  stderr_start: z.number().describe('Offset of the first byte of output that is still stored'),
  duration: z.number().nullable().describe('Milliseconds from start to end'),
  created_at: timestamp.describe('Time of creation'),
  started_at: timestamp.nullable().describe('Time of the start'),
  finished_at: timestamp.nullable().describe('Time of the end'),
  reason: z.string().nullable().describe('Why the command did not run, or why its outcome is unknown'),
  queued_until: timestamp
    .nullable()
    .describe('Time until which the command waits for its machine; null without `queue_for`'),
  schedule_id: z.string().nullable().describe('Id of the schedule that created the command'),
  batch_id: z.string().nullable().describe('Id of the batch that the command belongs to'),
  requested_by: requestedBy,
});

export const mostVariables = 256;
const variable = z
  .string()
  .regex(/^[A-Za-z_][A-Za-z0-9_]*$/)
  .max(256);
export const environment = z
  .record(variable, text(131_072))
  .refine((env) => Object.keys(env).length <= mostVariables, `at most ${mostVariables} variables`)
  .describe('Environment variables to add to those of the user that the command runs as');

export const untilKilled =
  'Milliseconds after which the command is killed with all its processes; default: no limit';
/** Fields of requests that run a command or create a schedule. */
export const timeout = milliseconds(1, 31 * day).describe(untilKilled);
export const cwd = text(4096).min(1).describe('Working directory; default: the home of the user');
export const user = label(1, 64).describe('User to run as; default: the agent’s user');

export const spec = {
  command: text(131_072)
    .min(1)
    .describe('Command line for `/bin/sh -c`, or, if `args` is set, a program to run without a shell'),
  args: z.array(text(131_072)).max(4096).optional().describe('Arguments of the program'),
  cwd: cwd.optional(),
  env: environment.optional(),
  user: user.optional(),
  stdin: z
    .string()
    .refine((value) => value.isWellFormed(), 'must be well-formed Unicode')
    .optional()
    .describe('Text for the standard input of the command; default: empty'),
  timeout: timeout.optional(),
  queue_for: milliseconds(1, 31 * day)
    .optional()
    .describe(
      'Milliseconds that the command may wait to start while its machine is offline or busy. Default: it fails at once if the machine is offline, and waits without limit if the machine is busy',
    ),
};

export const wait = milliseconds(0, 50_000)
  .default(30_000)
  .describe('Milliseconds that the request waits for the end of the command; 0: answer at once');

const creation = {
  machine_id: machineId,
  ...spec,
  input: z.boolean().optional().describe('Leave standard input open for `POST …/input`'),
};

const paging = { sort: ['created_at', 'started_at', 'status'], reply: command } as const;

const streams = ['stdout', 'stderr'] as const;

export const outputPiece = z.object({
  stream: z.enum(streams).describe('Whether `data` is from standard output or standard error'),
  offset: z.number().describe('Offset of the first byte of `data`'),
  data: z.string().describe('The bytes of the output, in `encoding`'),
  encoding: z.enum(['utf-8', 'base64']).describe('Encoding of `data`'),
});
export const outputGap = z.object({
  stream: z.enum(streams).describe('Which output of the command has the gap'),
  from: z.number().describe('Offset of the first byte that is not stored'),
  to: z.number().describe('Offset at which the output continues after the gap'),
});
export const exit = command.pick({
  status: true,
  exit_code: true,
  signal: true,
  reason: true,
  duration: true,
  stdout_bytes: true,
  stderr_bytes: true,
});
/** Schemas of a command's events: `output`, `gap` (bytes that are not stored) and `exit`. */
const streamEvent = z.union([outputPiece, outputGap, exit]);

const eventId = z.string().regex(/^\d{1,16}\.\d{1,16}$/, 'must be the id of an event');

export const commands = {
  create: single('POST', '/commands', 'commands:execute', {
    summary: 'Run a command on a machine and wait for it',
    description:
      'Answers when the command ends, or after `wait` milliseconds. In the second case `status` is not final, and the command goes on. A machine runs 64 commands at once; up to 1,024 more wait as `queued`, in order.',
    example: { machine_id: 'mach_4fJ2kQ9ZtR7wXc0BvN1mLp', command: 'df -h /', timeout: 60_000 },
    errors: machineErrors,
    body: z.strictObject({ ...creation, wait }),
    reply: command,
    status: 201,
    idempotency: 'replay',
    waits: true,
  }),
  async: single('POST', '/commands/async', 'commands:execute', {
    summary: 'Run a command on a machine without waiting for it',
    example: { machine_id: 'mach_4fJ2kQ9ZtR7wXc0BvN1mLp', command: 'make', args: ['-j4'], cwd: '/srv/app' },
    errors: machineErrors,
    body: z.strictObject(creation),
    reply: command,
    status: 201,
    idempotency: 'replay',
  }),
  list: list('/commands', 'commands:read', { summary: 'List commands', ...paging }),
  ofMachine: list('/machines/{machine_id}/commands', 'commands:read', {
    summary: 'List the commands of a machine',
    ...paging,
  }),
  purge: single('DELETE', '/machines/{machine_id}/commands', 'commands:execute', {
    summary: 'Cancel all commands of a machine that have not started',
    reply: z.object({ cancelled: z.array(commandId).describe('Ids of the cancelled commands') }),
  }),
  get: single('GET', '/commands/{command_id}', 'commands:read', {
    summary: 'Get a command and its result',
    reply: command,
  }),
  cancel: single('DELETE', '/commands/{command_id}', 'commands:execute', {
    summary: 'Cancel a command',
    description:
      'Sends SIGTERM to all processes of the command, and SIGKILL after 10 s. If the machine is offline, the signals are sent when it is online again.',
    reply: command,
  }),
  output: outgoing('bytes', '/commands/{command_id}/output', 'commands:read', {
    summary: 'Read the output of a command as bytes',
    description:
      'The header `X-Output-Offset` is the offset of the first byte in the answer. The last 64 MiB of output are stored.',
    types: ['application/octet-stream'],
    replyHeaders: ['X-Output-Offset'],
    errors: ['range_not_satisfiable'],
    query: {
      stream: z.enum(streams).default('stdout').describe('Output to read'),
      offset: queryNumber(0)
        .optional()
        .describe('Offset of the first byte to read; default: the first stored byte'),
      follow: queryBoolean.optional().describe('Send further output too, as soon as the command writes it'),
    },
  }),
  stream: outgoing('events', '/commands/{command_id}/stream', 'commands:read', {
    summary: 'Follow stdout, stderr and the end of a command as events',
    description: 'Events: `output`, `gap` (output that is not stored), and `exit` as the last one.',
    headers: {
      last_event_id: eventId.optional().describe('Id of the last event received, to resume after it'),
    },
    reply: streamEvent,
    lastEvent: 'exit',
  }),
  input: single('POST', '/commands/{command_id}/input', 'commands:execute', {
    summary: 'Write to the standard input of a running command',
    description: 'The command must have been started with `"input": true`.',
    example: { data: 'yes\n', end: true },
    errors: [...machineErrors, 'conflict'],
    body: encoded(
      'data',
      z.strictObject({
        data: z.string().default('').describe('Bytes of input, in `encoding`'),
        encoding: z.enum(['utf-8', 'base64']).default('utf-8').describe('Encoding of `data`'),
        offset: z
          .int()
          .min(0)
          .optional()
          .describe('Offset of `data` in the whole input; bytes that were already received are skipped'),
        end: z.boolean().default(false).describe('Close the input after `data`'),
      }),
    ),
    reply: z.object({
      taken: z.number().describe('Total number of bytes of input that were accepted so far'),
    }),
  }),
  signal: single('POST', '/commands/{command_id}/signal', 'commands:execute', {
    summary: 'Send a signal to the process group of a running command',
    body: z.strictObject({ signal: z.enum(signals).describe('Name of the signal') }),
    example: { signal: 'SIGINT' },
    errors: [...machineErrors, 'conflict'],
    reply: command,
  }),
};
