// Commands over REST (spec 2.9, 4.5).
import { z } from 'zod';
import {
  commandId,
  instant,
  label,
  list,
  machineId,
  milliseconds,
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

const command = z
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
    stdout: z.string().meta({ description: 'The last 1 MiB, U+FFFD for bytes that are not UTF-8' }),
    stderr: z.string(),
    stdout_bytes: z.number(),
    stderr_bytes: z.number(),
    stdout_truncated: z.boolean().meta({ description: 'stdout is not everything that was written' }),
    stderr_truncated: z.boolean(),
    duration: z.number().nullable().meta({ description: 'Milliseconds' }),
    created_at: timestamp,
    started_at: timestamp.nullable(),
    finished_at: timestamp.nullable(),
    reason: z.string().nullable(),
    schedule_id: z.string().nullable(),
    batch_id: z.string().nullable(),
    requested_by: z.string().nullable().meta({ description: 'Id of the key' }),
  })
  .meta({ id: 'Command' });

const environment = z
  .record(
    z
      .string()
      .regex(/^[A-Za-z_][A-Za-z0-9_]*$/)
      .max(256),
    text(131_072),
  )
  .refine((env) => Object.keys(env).length <= 256, 'at most 256 variables');

export const commands = {
  create: single({
    method: 'POST',
    path: '/commands',
    access: 'commands:execute',
    summary: 'Run a command on a machine and wait for it',
    body: z.strictObject({
      machine_id: machineId,
      command: text(131_072)
        .min(1)
        .meta({ description: 'Runs under /bin/sh -c; with args it is the program itself' }),
      args: z.array(text(131_072)).max(4096).optional(),
      cwd: text(4096).min(1).optional(),
      env: environment.optional(),
      user: label(1, 64).optional(),
      stdin: z.string().optional(),
      timeout: milliseconds(1, 31 * 86_400_000)
        .optional()
        .meta({ description: 'Milliseconds until the whole process tree is killed' }),
      wait: milliseconds(0, 50_000)
        .default(30_000)
        .meta({ description: 'Milliseconds to wait for the end; 0 answers at once' }),
    }),
    reply: command,
    status: 201,
    idempotency: 'replay',
  }),
  list: list({
    path: '/commands',
    access: 'commands:read',
    summary: 'List commands',
    query: {
      machine_id: machineId.optional(),
      status: z.enum(commandStatuses).optional(),
      since: instant.optional(),
    },
    sort: ['created_at', 'started_at', 'status'],
    defaultSort: '-created_at',
    reply: command,
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
};
