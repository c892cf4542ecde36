// Commands over REST (spec 2.9, 4.5).
import * as z from 'zod';
import { signals } from '../signals.ts';
import { list } from './list.ts';
import {
  commandId,
  label,
  machineId,
  milliseconds,
  outgoing,
  queryBoolean,
  queryNumber,
  single,
  text,
  timestamp,
} from './route.ts';

const commandStatuses = [
  'queued',
  'running',
  'completed',
  'failed',
  'timeout',
  'cancelled',
  'expired',
  'lost',
] as const;

export const command = z
  .object({
    id: commandId,
    machine_id: machineId,
    command: z.string(),
    args: z.array(z.string()).nullable(),
    cwd: z.string().nullable(),
    user: z.string().nullable(),
    status: z.enum(commandStatuses),
    exit_code: z.number().nullable().meta({ description: '128 + n when killed by signal n' }),
    signal: z.string().nullable(),
    stdout: z
      .string()
      .meta({ description: 'The last 1 MiB (4 KiB in lists), U+FFFD for bytes that are not UTF-8' }),
    stderr: z.string(),
    stdout_bytes: z.number(),
    stderr_bytes: z.number(),
    stdout_truncated: z.boolean().meta({ description: 'stdout is not everything that was written' }),
    stderr_truncated: z.boolean(),
    stdout_start: z.number().meta({ description: 'Offset of the first byte that GET output still has' }),
    stderr_start: z.number(),
    duration: z.number().nullable().meta({ description: 'Milliseconds' }),
    created_at: timestamp,
    started_at: timestamp.nullable(),
    finished_at: timestamp.nullable(),
    reason: z.string().nullable().meta({ description: 'Why it did not run, or why its outcome is unknown' }),
    queued_until: timestamp.nullable().meta({ description: 'While it waits for its machine: until when' }),
    schedule_id: z.string().nullable(),
    batch_id: z.string().nullable(),
    requested_by: z.string().nullable().meta({ description: 'Id of the key' }),
  })
  .meta({ id: 'Command' });

export const mostVariables = 256;
export const environment = z
  .record(
    z
      .string()
      .regex(/^[A-Za-z_][A-Za-z0-9_]*$/)
      .max(256),
    text(131_072),
  )
  .refine((env) => Object.keys(env).length <= mostVariables, `at most ${mostVariables} variables`);

const day = 86_400_000;

/** What is to run. */
export const spec = {
  command: text(131_072)
    .min(1)
    .meta({ description: 'Runs under /bin/sh -c; with args it is the program itself' }),
  args: z.array(text(131_072)).max(4096).optional(),
  cwd: text(4096).min(1).optional(),
  env: environment.optional(),
  user: label(1, 64).optional(),
  stdin: z.string().optional().meta({ description: 'Its input; without it and without input: none' }),
  timeout: milliseconds(1, 31 * day)
    .optional()
    .meta({ description: 'Milliseconds until the whole process tree is killed' }),
  queue_for: milliseconds(1, 31 * day)
    .optional()
    .meta({
      description: 'Milliseconds that it may wait for an offline machine, or for a place on a busy one',
    }),
};

/** How long a request waits. */
export const wait = milliseconds(0, 50_000)
  .default(30_000)
  .meta({ description: 'Milliseconds to wait for the end; 0 answers at once' });

const creation = {
  machine_id: machineId,
  ...spec,
  input: z.boolean().optional().meta({ description: 'Its input stays open for POST input after stdin' }),
};

const paging = {
  sort: ['created_at', 'started_at', 'status'],
  defaultSort: '-created_at',
  reply: command,
} as const;

const streams = ['stdout', 'stderr'] as const;

/** What a stream of events tells: output, bytes that are gone, and how it ended. */
const told = z.union([
  z.object({
    stream: z.enum(streams),
    offset: z.number().meta({ description: 'Of the first byte of data in this stream' }),
    data: z.string(),
    encoding: z.enum(['utf-8', 'base64']),
  }),
  z.object({ stream: z.enum(streams), from: z.number(), to: z.number() }),
  command.pick({
    status: true,
    exit_code: true,
    signal: true,
    reason: true,
    duration: true,
    stdout_bytes: true,
    stderr_bytes: true,
  }),
]);

export const commands = {
  create: single({
    method: 'POST',
    path: '/commands',
    access: 'commands:execute',
    summary: 'Run a command on a machine and wait for it',
    body: z.strictObject({ ...creation, wait }),
    reply: command,
    status: 201,
    idempotency: 'replay',
    waits: true,
  }),
  async: single({
    method: 'POST',
    path: '/commands/async',
    access: 'commands:execute',
    summary: 'Run a command on a machine without waiting for it',
    body: z.strictObject(creation),
    reply: command,
    status: 201,
    idempotency: 'replay',
  }),
  list: list({
    path: '/commands',
    access: 'commands:read',
    summary: 'List commands',
    ...paging,
  }),
  ofMachine: list({
    path: '/machines/{machine_id}/commands',
    access: 'commands:read',
    summary: 'List the commands of a machine',
    params: { machine_id: machineId },
    ...paging,
  }),
  purge: single({
    method: 'DELETE',
    path: '/machines/{machine_id}/commands',
    access: 'commands:execute',
    summary: 'Cancel every command that still waits for a machine',
    params: { machine_id: machineId },
    reply: z.object({ cancelled: z.array(commandId) }),
  }),
  get: single({
    method: 'GET',
    path: '/commands/{command_id}',
    access: 'commands:read',
    summary: 'Get a command and its result',
    params: { command_id: commandId },
    reply: command,
  }),
  cancel: single({
    method: 'DELETE',
    path: '/commands/{command_id}',
    access: 'commands:execute',
    summary: 'Cancel a command: TERM, then KILL after 10 s, to its whole process tree',
    params: { command_id: commandId },
    reply: command,
  }),
  output: outgoing('bytes', {
    path: '/commands/{command_id}/output',
    access: 'commands:read',
    summary: 'The bytes a command wrote, on request as they come; X-Output-Offset tells where they start',
    params: { command_id: commandId },
    query: {
      stream: z.enum(streams).default('stdout'),
      offset: queryNumber(
        0,
        Number.MAX_SAFE_INTEGER,
        'First byte wanted; without it the first one kept',
      ).optional(),
      follow: queryBoolean.optional(),
    },
  }),
  stream: outgoing('events', {
    path: '/commands/{command_id}/stream',
    access: 'commands:read',
    summary: 'Both outputs and the end as events; Last-Event-ID resumes',
    params: { command_id: commandId },
    headers: {
      last_event_id: z
        .string()
        .regex(/^\d{1,16}\.\d{1,16}$/, 'must be the id of an event')
        .optional(),
    },
    reply: told,
    lastEvent: 'exit',
  }),
  input: single({
    method: 'POST',
    path: '/commands/{command_id}/input',
    access: 'commands:execute',
    summary: 'Give a running command input, if it was started with input',
    params: { command_id: commandId },
    body: z.strictObject({
      data: z.string().default(''),
      encoding: z.enum(['utf-8', 'base64']).default('utf-8'),
      offset: z
        .int()
        .min(0)
        .optional()
        .meta({ description: 'Where data belongs among all input: a repeat is then harmless' }),
      end: z.boolean().default(false).meta({ description: 'Nothing comes after this' }),
    }),
    reply: z.object({ taken: z.number().meta({ description: 'Bytes of input taken in all' }) }),
  }),
  signal: single({
    method: 'POST',
    path: '/commands/{command_id}/signal',
    access: 'commands:execute',
    summary: 'Send a signal to the process group of a running command',
    params: { command_id: commandId },
    body: z.strictObject({ signal: z.enum(signals) }),
    reply: command,
  }),
};
