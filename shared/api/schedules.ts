// REST routes of schedules and of their runs. A schedule runs a command by a cron expression or when a path changes.
import * as z from 'zod';
import { cwd, environment, timeout, untilKilled, user } from './commands.ts';
import { list } from './define-list-route.ts';
import { single } from './define-route.ts';
import { machineErrors } from './route.ts';
import { parameterValues } from './saved-commands.ts';
import {
  batchId,
  commandId,
  day,
  deleted,
  endStatuses,
  instant,
  label,
  machineId,
  milliseconds,
  named,
  path,
  queryNumber,
  runId,
  savedCommandId,
  scheduleId,
  tagList,
  text,
  timestamp,
} from './shared-schemas.ts';

const overlap = z.enum(['skip', 'allow']);
const catchUp = z.enum(['none', 'last', 'all']);
const runStatuses = ['running', ...endStatuses, 'skipped', 'missed', 'lost'] as const;

const notify = z.object({
  on_success: z.boolean().describe('True: each successful run emits the event `schedule.completed`'),
  on_failure: z.boolean().describe('True: each failed run emits the event `schedule.failed`'),
});

const watched = {
  path: z.string().describe('Path on the machine'),
  recursive: z.boolean().describe('True to watch everything below the directory'),
  settle: z
    .number()
    .describe('A change starts a run once the path has not changed again for this many milliseconds'),
};

const lastRun = z.object({
  at: timestamp.describe('Time of the start'),
  exit_code: z.number().describe('Exit code; -1 if there is none'),
  duration: z.number().describe('Milliseconds from start to end'),
  status: z.enum(runStatuses).describe('Status of the run'),
});

const listed = named('Schedule', {
  id: scheduleId,
  name: z.string().describe('Name'),
  machine_id: machineId.nullable().describe('Id of the machine; null for a schedule with `tags`'),
  tags: z
    .array(z.string())
    .nullable()
    .describe(
      'The schedule runs on every machine that has all of these tags; null for a schedule with `machine_id`',
    ),
  command: z.string().nullable().describe('Shell line; null for a schedule with `saved_command_id`'),
  saved_command_id: savedCommandId
    .nullable()
    .describe('Id of the saved command; null for a schedule with `command`'),
  parameters: parameterValues.nullable().describe('Values of the parameters of the saved command'),
  cron: z.string().nullable().describe('Cron expression; null for a schedule with `on_change`'),
  on_change: z
    .object(watched)
    .nullable()
    .describe('The path whose changes start a run; null for a schedule with `cron`'),
  timezone: z.string().describe('IANA time zone of the expression'),
  enabled: z.boolean().describe('True if the schedule is enabled: the broker starts its runs automatically'),
  next_run: timestamp.nullable().describe('Time of the next run'),
  last_run: lastRun
    .nullable()
    .describe(
      'Last run that has ended or could not start. Skipped and missed runs do not count. If a schedule with `tags` ran on several machines together, this is the run with the worst status',
    ),
  created_at: timestamp.describe('Time of creation'),
});

const detailed = listed
  .extend({
    description: z.string().nullable().describe('What the schedule is for'),
    timeout: z
      .number()
      .nullable()
      .describe('Milliseconds after which the command is killed with all its processes'),
    notify: notify.nullable().describe('Which runs emit an event'),
    overlap: overlap.describe(
      'Whether a run starts while the previous one is in progress: `skip` or `allow`',
    ),
    catch_up: catchUp.describe(
      'Which missed runs start after the broker was down. With `on_change`: whether a change that happened while the path was not watched starts a run',
    ),
    catch_up_window: z
      .number()
      .describe('A missed run that was due longer ago than this many milliseconds is not started'),
    user: z.string().nullable().describe('User that the command runs as; null: the agent’s user'),
    cwd: z.string().nullable().describe('Working directory; null: the home of the user'),
    env: z.record(z.string(), z.string()).nullable().describe('Environment variables'),
    next_runs: z.array(timestamp).describe('Times of the next five runs'),
    requested_by: z
      .string()
      .describe(
        'Id of the API key whose rights the schedule has. With `machine_id`, this is the key that last changed the schedule. With `tags`, it is the key that last set `tags`, `command`, `saved_command_id`, `parameters`, `env`, `user`, `cwd` or `on_change`',
      ),
    updated_at: timestamp.describe('Time of the last change by a request'),
  })
  .meta({ id: 'ScheduleDetail' });

const run = named('ScheduleRun', {
  id: runId,
  schedule_id: scheduleId,
  machine_id: machineId,
  command_id: commandId.nullable().describe('Id of the command; null if none was created'),
  batch_id: batchId
    .nullable()
    .describe('Id of the batch, if this run was started by hand and its schedule has `tags`; otherwise null'),
  status: z.enum(runStatuses).describe('Status'),
  trigger: z.enum(['cron', 'change', 'manual', 'catch_up']).describe('Why the schedule ran'),
  scheduled_for: timestamp
    .nullable()
    .describe('Time at which the run was due; null if a user or a changed file started the run'),
  started_at: timestamp.describe('Time of the start'),
  finished_at: timestamp.nullable().describe('Time of the end; null while the command runs'),
  exit_code: z.number().nullable().describe('Exit code; -1 if there is none; null while the command runs'),
  duration: z.number().nullable().describe('Milliseconds from start to end; null while the command runs'),
  stdout: z.string().describe('Last 4 KiB of output; `GET /commands/{command_id}/output` returns more of it'),
  stderr: z.string().describe('Last 4 KiB of error output; the reason if the command never started'),
  reason: z.string().nullable().describe('Why the command did not run, or why its outcome is unknown'),
});

const upcoming = z.object({
  schedule_id: scheduleId,
  name: z.string().describe('Name of the schedule'),
  machine_id: machineId.nullable().describe('Id of the machine; null for a schedule with `tags`'),
  at: timestamp.describe('Time when the run is due'),
  utc_offset: z.number().describe('Minutes by which the schedule’s time zone is ahead of UTC at that time'),
});

const cron = z.string().meta({
  description:
    'Cron expression: 5 fields, or 6 with the seconds first. Names, `L`, `#` and `@daily` are allowed',
  examples: ['30 2 * * *'],
});
const timezone = z.string().meta({ description: 'IANA time zone', examples: ['Europe/Berlin'] });

const onChange = z
  .strictObject({
    path,
    recursive: z.boolean().default(false).describe('Watch everything below the directory'),
    settle: milliseconds(1000, 600_000)
      .default(2000)
      .describe(
        'A change starts a run once the path has not changed again for this many milliseconds. If changes do not stop, the run starts 10 × `settle` after the first change',
      ),
  })
  .meta({
    description: 'Run when this path changes, in place of `cron`. The path need not exist yet',
    examples: [{ path: '/etc/nginx', recursive: true, settle: 5000 }],
  });

const trigger = { cron: cron.optional(), on_change: onChange.optional() };
const required = { name: label(1, 100).describe('Name') };

const window = milliseconds(1000, 31 * day);
const further = {
  description: text(4096).nullable().optional().describe('What the schedule is for'),
  timeout: timeout.nullable().optional().describe(untilKilled),
  notify: z.strictObject(notify.partial().shape).nullable().optional().describe('Which runs emit an event'),
  enabled: z
    .boolean()
    .optional()
    .describe('True if the schedule is enabled: the broker starts its runs automatically; default: true'),
  timezone: timezone.optional().describe('IANA time zone of the expression; default: UTC'),
  overlap: overlap
    .optional()
    .describe(
      'Whether a run starts while the previous one is in progress: `skip` (default) or `allow`. With `on_change`, `skip` loses no change: if the path changes during a run, one more run starts after that run',
    ),
  catch_up: catchUp
    .optional()
    .describe(
      'Which missed runs start after the broker was down: `none` (default), the `last` or `all`. With `on_change` the default is `last`: a change that happened while the path was not watched starts one run',
    ),
  catch_up_window: window
    .optional()
    .describe(
      'A missed run that was due longer ago than this many milliseconds is not started; default: a day',
    ),
  user: user.nullable().optional().describe('User to run as; default: the agent’s user'),
  cwd: cwd.nullable().optional().describe('Working directory; default: the home of the user'),
  env: environment.nullable().optional().describe('Environment variables, added to those of the user'),
};

const target = {
  machine_id: machineId.optional(),
  // An empty list would select every machine, so at least one tag is required.
  tags: tagList(1)
    .optional()
    .describe('Run on every machine that has all of these tags at the time of the run'),
};
const runnable = {
  command: text(131_072).min(1).optional().describe('Shell line for `/bin/sh -c`'),
  saved_command_id: savedCommandId.optional(),
  parameters: parameterValues
    .nullable()
    .optional()
    .describe('Values of the parameters of the saved command, by name'),
};
const isTwice = ({ machine_id, tags }: { machine_id?: unknown; tags?: unknown }): boolean =>
  machine_id !== undefined && tags !== undefined;
const either = { path: ['machine_id'], error: 'name exactly one of machine_id and tags' };
const oneCommand = { path: ['command'], error: 'name exactly one of command and saved_command_id' };

const oneTrigger = { path: ['cron'], error: 'name exactly one of cron and on_change' };

const creation = z
  .strictObject({ ...required, ...trigger, ...target, ...runnable, ...further })
  .refine((body) => (body.cron === undefined) !== (body.on_change === undefined), oneTrigger)
  .refine((body) => !isTwice(body) && (body.machine_id ?? body.tags) !== undefined, either)
  .refine((body) => (body.command === undefined) !== (body.saved_command_id === undefined), oneCommand);
const changes = z
  .strictObject({ ...z.object(required).partial().shape, ...trigger, ...target, ...runnable, ...further })
  .refine((body) => body.cron === undefined || body.on_change === undefined, oneTrigger)
  .refine((body) => !isTwice(body), either)
  .refine((body) => body.command === undefined || body.saved_command_id === undefined, oneCommand);

const changeRules = [
  'The key needs the scopes `schedules:write` and `commands:execute`, and with `on_change` also `files:read`.',
  'A key without the scope `schedules:read` must also send `env` if it changes the command, its parameters, user, cwd, machine or tags. Otherwise the changed command could print the stored environment.',
  'A schedule runs with the rights of the key that its field `requested_by` names. With `machine_id`, this is the key that last changed the schedule. With `tags`, it is the key that last set `tags`, `command`, `saved_command_id`, `parameters`, `env`, `user`, `cwd` or `on_change`.',
  'Only the key `requested_by`, and keys that may use all machines of the schedule, can change a schedule with `tags`.',
  'If a schedule has `tags` and its key `requested_by` is revoked or expired, a change must set both the machines (`tags` or `machine_id`) and the command (`command` or `saved_command_id`). This is not needed if the change disables the schedule or leaves it disabled, and sets none of the fields that change `requested_by`.',
].join('\n\n');

export const schedules = {
  create: single('POST', '/schedules', 'schedules:write', {
    summary: 'Create a schedule: run a command by a cron expression, or when a path changes',
    description:
      'The body has either `machine_id` or `tags`, and either `cron` or `on_change`. Needs the scope `commands:execute` too, and with `on_change` also `files:read`. A schedule with `tags` runs only on machines that the key of this request may use.',
    body: creation,
    example: {
      name: 'backup',
      machine_id: 'mach_4fJ2kQ9ZtR7wXc0BvN1mLp',
      command: 'tar czf /tmp/etc.tar.gz /etc',
      cron: '30 2 * * *',
      timezone: 'Europe/Berlin',
      notify: { on_failure: true },
    },
    reply: detailed,
    status: 201,
    errors: ['conflict', 'permission_denied', 'invalid_path'],
    idempotency: 'replay',
  }),
  list: list('/schedules', 'schedules:read', {
    summary: 'List schedules',
    fields: detailed,
    query: { machine_id: machineId.optional().describe('Only schedules that run on this machine') },
    sort: ['name', 'created_at', 'updated_at', 'next_run'],
    reply: listed,
  }),
  preview: single('GET', '/schedules/preview', 'schedules:read', {
    summary: 'Preview a cron expression: its next times, and the expression in words',
    query: {
      cron,
      timezone: timezone.default('UTC').describe('IANA time zone of the expression'),
      count: queryNumber(1, 100).default(5).describe('Number of times'),
      from: instant.optional().describe('List the times after this one; default: now'),
    },
    reply: z.object({
      cron: z.string().describe('Cron expression'),
      timezone: z.string().describe('IANA time zone'),
      description: z.string().describe('The expression in words'),
      next_runs: z.array(timestamp).describe('Next times'),
    }),
  }),
  upcoming: single('GET', '/schedules/upcoming', 'schedules:read', {
    summary: 'List the next runs of all schedules, in the order of their times',
    description:
      'If `utc_offset` changes between two runs, daylight saving time begins or ends between them.',
    query: {
      from: instant.optional().describe('Start of the period; default: now. An earlier time counts as now'),
      until: instant.optional().describe('End; default: 24 hours after the start'),
      limit: queryNumber(1, 1_000).default(200).describe('Largest number of runs in the answer'),
      schedule_id: scheduleId.optional().describe('List only the runs of this schedule'),
      machine_id: machineId.optional().describe('List only the runs on this machine'),
    },
    reply: named('UpcomingRuns', {
      from: timestamp.describe('Start'),
      until: timestamp.describe('End'),
      runs: z.array(upcoming).describe('Future runs, soonest first'),
      more: z.boolean().describe('True if there are more runs before `until`'),
    }),
  }),
  get: single('GET', '/schedules/{schedule_id}', 'schedules:read', {
    summary: 'Get a schedule',
    reply: detailed,
  }),
  update: single('PATCH', '/schedules/{schedule_id}', 'schedules:write', {
    summary: 'Change a schedule',
    description: changeRules,
    body: changes,
    example: { cron: '@hourly', enabled: false },
    reply: detailed,
    errors: ['conflict', 'permission_denied', 'invalid_path'],
  }),
  remove: single('DELETE', '/schedules/{schedule_id}', 'schedules:write', {
    summary: 'Delete a schedule',
    description: 'A run in progress goes on, and the history of the schedule stays.',
    reply: deleted,
  }),
  run: single('POST', '/schedules/{schedule_id}/run', 'schedules:write', {
    summary: 'Run a schedule now',
    description:
      'Also works for a disabled schedule, and while a run is in progress. Needs the scope `commands:execute` too. Answers when the agent has accepted the command. A schedule with `tags` runs as a batch on its machines that the key may use.',
    reply: z.object({
      command_id: commandId.describe('Id of the command, or of the batch’s first command'),
      status: z.string().describe('Status of the command'),
      batch_id: batchId.nullable().describe('Id of the batch of a schedule with `tags`; null without tags'),
    }),
    errors: [...machineErrors, 'conflict'],
    idempotency: 'replay',
    again: 'getRun',
  }),
  history: list('/schedules/{schedule_id}/history', 'schedules:read', {
    summary: 'List the runs of a schedule',
    sort: ['started_at'],
    defaultSort: '-started_at',
    reply: run,
  }),
  getRun: single('GET', '/runs/{run_id}', 'schedules:read', { summary: 'Get a schedule run', reply: run }),
};
