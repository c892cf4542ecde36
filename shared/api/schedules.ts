// Schedules over REST (spec 2.7, 2.8, 4.3): commands by cron, and what became of every time.
import * as z from 'zod';
import { environment } from './commands.ts';
import { list } from './list.ts';
import {
  commandId,
  instant,
  label,
  machineId,
  milliseconds,
  queryNumber,
  runId,
  scheduleId,
  single,
  text,
  timestamp,
} from './route.ts';

const overlaps = ['skip', 'allow'] as const;
const catchUps = ['none', 'last', 'all'] as const;
const triggers = ['cron', 'manual', 'catch_up'] as const;
const runStatuses = [
  'running',
  'completed',
  'failed',
  'timeout',
  'cancelled',
  'skipped',
  'missed',
  'lost',
] as const;

const notify = z.object({ on_success: z.boolean(), on_failure: z.boolean() });

const lastRun = z.object({
  at: timestamp,
  exit_code: z.number(),
  duration: z.number().describe('Milliseconds'),
  status: z.enum(runStatuses),
});

const listed = z
  .object({
    id: scheduleId,
    name: z.string(),
    machine_id: machineId,
    command: z.string(),
    cron: z.string(),
    timezone: z.string(),
    enabled: z.boolean(),
    next_run: timestamp.nullable(),
    last_run: lastRun.nullable().describe('The last that ran, or was to and could not'),
    created_at: timestamp,
  })
  .meta({ id: 'Schedule' });

const detailed = listed
  .extend({
    description: z.string().nullable(),
    timeout: z.number().nullable().describe('Milliseconds'),
    notify: notify.nullable(),
    overlap: z.enum(overlaps),
    catch_up: z.enum(catchUps),
    catch_up_window: z.number().describe('Milliseconds'),
    user: z.string().nullable(),
    cwd: z.string().nullable(),
    env: z.record(z.string(), z.string()).nullable(),
    next_runs: z.array(timestamp).describe('The next five'),
    requested_by: z
      .string()
      .describe('Id of the key that last changed it: it runs with the right of that key'),
    updated_at: timestamp,
  })
  .meta({ id: 'ScheduleDetail' });

const run = z
  .object({
    id: runId,
    schedule_id: scheduleId,
    machine_id: machineId,
    command_id: commandId.nullable().describe('null where no command was made'),
    status: z.enum(runStatuses),
    trigger: z.enum(triggers),
    scheduled_for: timestamp.nullable().describe('The time it was due; null by hand'),
    started_at: timestamp,
    finished_at: timestamp.nullable(),
    exit_code: z.number().nullable().describe('-1 where there is none; null while it runs'),
    duration: z.number().nullable().describe('Milliseconds'),
    stdout: z.string().describe('The last 4 KiB; GET /commands/{command_id}/output has the rest'),
    stderr: z.string().describe('The last 4 KiB; the reason where it never started'),
    reason: z.string().nullable().describe('Why it did not run, or why its outcome is unknown'),
  })
  .meta({ id: 'ScheduleRun' });

const day = 86_400_000;
const cron = z.string().meta({
  description: '5 fields, or 6 with seconds first; names, ranges, steps, lists, L, #, @daily and the like',
  examples: ['30 2 * * *'],
});
const timezone = z.string().meta({ description: 'An IANA name', examples: ['Europe/Berlin'] });

const wanted = {
  name: label(1, 100),
  machine_id: machineId,
  command: text(131_072).min(1).describe('Runs under /bin/sh -c'),
  cron,
};

const further = {
  description: text(4096).nullable().optional(),
  timeout: milliseconds(1, 31 * day)
    .nullable()
    .optional()
    .describe('Milliseconds until the whole process tree is killed'),
  notify: z
    .strictObject({ on_success: z.boolean().optional(), on_failure: z.boolean().optional() })
    .nullable()
    .optional()
    .describe('Which ends are an event: schedule.completed, schedule.failed'),
  enabled: z.boolean().optional(),
  timezone: timezone.optional(),
  overlap: z
    .enum(overlaps)
    .optional()
    .describe('When the run before is not over: skip (default) or allow another one beside it'),
  catch_up: z
    .enum(catchUps)
    .optional()
    .describe('Of the times that passed while the broker was down: run none (default), the last, all'),
  catch_up_window: milliseconds(1000, 31 * day)
    .optional()
    .describe('Milliseconds; what was due longer ago is missed. A day unless told'),
  user: label(1, 64).nullable().optional(),
  cwd: text(4096).min(1).nullable().optional(),
  env: environment.nullable().optional(),
};

const creation = z.strictObject({ ...wanted, ...further });

export const schedules = {
  create: single('POST', '/schedules', 'schedules:write', {
    summary: 'Run a command on a machine by a cron expression; takes commands:execute too',
    body: creation,
    reply: detailed,
    status: 201,
    idempotency: 'replay',
  }),
  list: list('/schedules', 'schedules:read', {
    summary: 'List schedules',
    fields: detailed,
    sort: ['name', 'created_at', 'updated_at', 'next_run'],
    reply: listed,
  }),
  preview: single('GET', '/schedules/preview', 'schedules:read', {
    summary: 'When a cron expression would fire, and the expression in words',
    query: {
      cron,
      timezone: timezone.default('UTC'),
      count: queryNumber(1, 100).default(5).describe('Times wanted'),
      from: instant.optional(),
    },
    reply: z.object({
      cron: z.string(),
      timezone: z.string(),
      description: z.string(),
      next_runs: z.array(timestamp),
    }),
  }),
  get: single('GET', '/schedules/{schedule_id}', 'schedules:read', {
    summary: 'Get a schedule',
    reply: detailed,
  }),
  update: single('PATCH', '/schedules/{schedule_id}', 'schedules:write', {
    summary:
      'Change a schedule; takes commands:execute too, and without schedules:read env wherever command, user, cwd or machine_id change',
    body: creation.partial(),
    reply: detailed,
  }),
  remove: single('DELETE', '/schedules/{schedule_id}', 'schedules:write', {
    summary: 'Remove a schedule: what runs goes on, its history stays',
    reply: z.object({ deleted: z.boolean() }),
  }),
  run: single('POST', '/schedules/{schedule_id}/run', 'schedules:write', {
    summary: 'Run a schedule now, whether it is enabled or running already; takes commands:execute too',
    reply: z.object({ command_id: commandId, status: z.string() }),
    idempotency: 'replay',
    again: 'getRun',
  }),
  history: list('/schedules/{schedule_id}/history', 'schedules:read', {
    summary: 'List what became of the times of a schedule',
    sort: ['started_at'],
    defaultSort: '-started_at',
    reply: run,
  }),
  getRun: single('GET', '/runs/{run_id}', 'schedules:read', {
    summary: 'Get one run of a schedule',
    reply: run,
  }),
};
