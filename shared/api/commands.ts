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
    exit_code: z.number().nullable().describe('128 + n when killed by signal n'),
    signal: z.string().nullable(),
    stdout: z.string().describe('The last 1 MiB (4 KiB in lists), U+FFFD for bytes that are not UTF-8'),
    stderr: z.string(),
    stdout_bytes: z.number(),
    stderr_bytes: z.number(),
    stdout_truncated: z.boolean().describe('stdout is not everything that was written'),
    stderr_truncated: z.boolean(),
    stdout_start: z.number().describe('Offset of the first byte that GET output still has'),
    stderr_start: z.number(),
    duration: z.number().nullable().describe('Milliseconds'),
    created_at: timestamp,
    started_at: timestamp.nullable(),
    finished_at: timestamp.nullable(),
    reason: z.string().nullable().describe('Why it did not run, or why its outcome is unknown'),
    queued_until: timestamp.nullable().describe('While it waits for its machine: until when'),
    schedule_id: z.string().nullable(),
    batch_id: z.string().nullable(),
    requested_by: z.string().nullable().describe('Id of the key'),
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
  command: text(131_072).min(1).describe('Runs under /bin/sh -c; with args it is the program itself'),
  args: z.array(text(131_072)).max(4096).optional(),
  cwd: text(4096).min(1).optional(),
  env: environment.optional(),
  user: label(1, 64).optional(),
  stdin: z.string().optional().describe('Its input; without it and without input: none'),
  timeout: milliseconds(1, 31 * day)
    .optional()
    .describe('Milliseconds until the whole process tree is killed'),
  queue_for: milliseconds(1, 31 * day)
    .optional()
    .describe('Milliseconds that it may wait for an offline machine, or for a place on a busy one'),
};

/** How long a request waits. */
export const wait = milliseconds(0, 50_000)
  .default(30_000)
  .describe('Milliseconds to wait for the end; 0 answers at once');

const creation = {
  machine_id: machineId,
  ...spec,
  input: z.boolean().optional().describe('Its input stays open for POST input after stdin'),
};

const paging = {
  sort: ['created_at', 'started_at', 'status'],
  reply: command,
} as const;

const streams = ['stdout', 'stderr'] as const;

/** What a stream of events tells: output, bytes that are gone, and how it ended. */
const told = z.union([
  z.object({
    stream: z.enum(streams),
    offset: z.number().describe('Of the first byte of data in this stream'),
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
  create: single('POST', '/commands', 'commands:execute', {
    summary: 'Run a command on a machine and wait for it',
    body: z.strictObject({ ...creation, wait }),
    reply: command,
    status: 201,
    idempotency: 'replay',
    waits: true,
  }),
  async: single('POST', '/commands/async', 'commands:execute', {
    summary: 'Run a command on a machine without waiting for it',
    body: z.strictObject(creation),
    reply: command,
    status: 201,
    idempotency: 'replay',
  }),
  list: list('/commands', 'commands:read', {
    summary: 'List commands',
    ...paging,
  }),
  ofMachine: list('/machines/{machine_id}/commands', 'commands:read', {
    summary: 'List the commands of a machine',
    ...paging,
  }),
  purge: single('DELETE', '/machines/{machine_id}/commands', 'commands:execute', {
    summary: 'Cancel every command that still waits for a machine',
    reply: z.object({ cancelled: z.array(commandId) }),
  }),
  get: single('GET', '/commands/{command_id}', 'commands:read', {
    summary: 'Get a command and its result',
    reply: command,
  }),
  cancel: single('DELETE', '/commands/{command_id}', 'commands:execute', {
    summary: 'Cancel a command: TERM, then KILL after 10 s, to its whole process tree',
    reply: command,
  }),
  output: outgoing('bytes', '/commands/{command_id}/output', 'commands:read', {
    summary: 'The bytes a command wrote, on request as they come; X-Output-Offset tells where they start',
    query: {
      stream: z.enum(streams).default('stdout'),
      offset: queryNumber(0).optional().describe('First byte wanted; without it the first one kept'),
      follow: queryBoolean.optional(),
    },
  }),
  stream: outgoing('events', '/commands/{command_id}/stream', 'commands:read', {
    summary: 'Both outputs and the end as events; Last-Event-ID resumes',
    headers: {
      last_event_id: z
        .string()
        .regex(/^\d{1,16}\.\d{1,16}$/, 'must be the id of an event')
        .optional(),
    },
    reply: told,
    lastEvent: 'exit',
  }),
  input: single('POST', '/commands/{command_id}/input', 'commands:execute', {
    summary: 'Give a running command input, if it was started with input',
    body: z.strictObject({
      data: z.string().default(''),
      encoding: z.enum(['utf-8', 'base64']).default('utf-8'),
      offset: z
        .int()
        .min(0)
        .optional()
        .describe('Where data belongs among all input: a repeat is then harmless'),
      end: z.boolean().default(false).describe('Nothing comes after this'),
    }),
    reply: z.object({ taken: z.number().describe('Bytes of input taken in all') }),
  }),
  signal: single('POST', '/commands/{command_id}/signal', 'commands:execute', {
    summary: 'Send a signal to the process group of a running command',
    body: z.strictObject({ signal: z.enum(signals) }),
    reply: command,
  }),
};
