// The verbs of farhand schedules: create, change, list and run commands by cron, and list their runs.
import type { Command } from 'commander';
import type { Farhand } from '../../shared/sdk/index.ts';
import { when } from './print.ts';
import { latest, ofMachine, routeVerb, since } from './route-verb.ts';

type Schedule = Awaited<ReturnType<Farhand['schedules']['get']>>;

const cron = ({ cron, timezone }: Pick<Schedule, 'cron' | 'timezone'>): string => `${cron} (${timezone})`;

/** Flags of both create and update. */
const flags = {
  '--name <name>': 'name of the schedule',
  '--machine <machine>': 'machine to run on',
  '--command <line>': 'shell command line to run',
  '--cron <expression>': 'when to run: 5 fields, 6 with seconds first, or @daily and the like',
  '--timezone <zone>': 'time zone of the expression, such as Europe/Berlin (default: UTC)',
  '--description <text>': 'purpose of the schedule',
  '--timeout <duration>': 'kill the command and its children after this time',
  '--user <name>': 'user to run as, if the agent allows it',
  '--cwd <dir>': 'directory to run in',
  '--env <name=value>': 'environment variable; repeat it for several',
  '--overlap <skip|allow>': 'what to do while the previous run has not ended (default: skip)',
  '--catch-up <none|last|all>': 'which runs to start late, after the broker was down (default: none)',
  '--catch-up-window <duration>': 'never start runs that were due longer ago (default: 1d)',
  '--notify-failure': 'emit the event schedule.failed for failures',
  '--notify-success': 'emit the event schedule.completed for successes',
};

export function addSchedules(program: Command): void {
  const schedules = program.command('schedules').description('run commands by cron; schedules by name or id');
  routeVerb(schedules, 'list', 'schedules', 'list', {
    examples: ['--machine db-1'],
    flags: ofMachine,
    defaults: { sort: 'name' },
    view: {
      fields: 'name id machine cron enabled next last',
      cells: { cron, next: ({ next_run }) => when(next_run), last: ({ last_run }) => last_run?.status },
    },
  });
  routeVerb(schedules, 'get', 'schedules', 'get');
  routeVerb(schedules, 'create', 'schedules', 'create', {
    examples: [
      "--name backup --machine db-1 --cron '30 2 * * *' --timezone Europe/Berlin --command ./backup.sh",
    ],
    flags,
    required: ['name', 'machine', 'command', 'cron'],
    input: notifyOf,
  });
  routeVerb(schedules, 'update', 'schedules', 'update', {
    about: 'change what the flags name',
    examples: ["--cron '0 3 * * *'"],
    flags,
    input: notifyOf,
  });
  for (const [name, about] of [
    ['enable', 'run a schedule by its cron expression'],
    ['disable', 'run a schedule only by hand'],
  ] as const)
    routeVerb(schedules, name, 'schedules', 'update', {
      about,
      defaults: { enabled: name === 'enable' },
    });
  routeVerb(schedules, 'delete', 'schedules', 'remove', {
    about: 'remove a schedule: a run in progress continues, its history stays',
    destroys: ['remove the schedule', 'removed'],
  });
  addRuns(schedules);
}

function addRuns(schedules: Command): void {
  routeVerb(schedules, 'run', 'schedules', 'run', {
    text: ({ command_id, status }) => [`${command_id} ${status}`],
  });
  routeVerb(schedules, 'history', 'schedules', 'history', {
    examples: ['--since 7d --status failed'],
    flags: {
      '--status <status>':
        'only with this status: running, completed, failed, timeout, cancelled, skipped, missed or lost',
      ...since,
      ...latest,
    },
    view: {
      fields:
        'started=started_at due=scheduled_for trigger status exit=exit_code took=duration command=command_id reason',
    },
  });
  routeVerb(schedules, 'preview <cron>', 'schedules', 'preview', {
    examples: ["'0 9 * * mon-fri'"],
    flags: {
      '--timezone <zone>': 'time zone of the expression (default: UTC)',
      '--count <count>': 'how many times to print (default: 5)',
    },
    text: ({ description, timezone, next_runs }) => [`${description} (${timezone})`, ...next_runs],
  });
}

function notifyOf({ notifyFailure, notifySuccess }: Record<string, unknown>): Record<string, unknown> {
  if (notifyFailure === undefined && notifySuccess === undefined) return {};
  return { notify: { on_failure: notifyFailure ?? false, on_success: notifySuccess ?? false } };
}
