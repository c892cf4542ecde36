// farhand schedules: commands by cron, and what became of every time.
import { type Command, Option } from 'commander';
import type { Farhand } from '../../shared/sdk/index.ts';
import { count, milliseconds, variables } from './flags.ts';
import { when } from './output.ts';
import { routeVerb, type View } from './resource-verbs.ts';

type Schedule = Awaited<ReturnType<Farhand['schedules']['get']>>;

const cron = ({ cron, timezone }: Pick<Schedule, 'cron' | 'timezone'>): string => `${cron} (${timezone})`;

const one: View<Schedule> = {
  fields:
    'id name description machine command cron enabled next=next_runs last overlap catch_up timeout user directory=cwd',
  cells: {
    cron,
    last: ({ last_run }) => last_run && `${last_run.at} ${last_run.status} (exit ${last_run.exit_code})`,
  },
};

export function addSchedules(program: Command): void {
  const schedules = program.command('schedules').description('commands by cron; schedules by name or id');
  routeVerb(schedules, 'list', 'schedules', 'list', {
    examples: ['--machine db-1'],
    filters: ['machine'],
    fixed: { sort: 'name' },
    view: {
      fields: 'name id machine cron enabled next last',
      cells: { cron, next: ({ next_run }) => when(next_run), last: ({ last_run }) => last_run?.status },
    },
  });
  routeVerb(schedules, 'get', 'schedules', 'get', { view: one });
  addChanges(schedules);
  addRuns(schedules);
}

function addChanges(schedules: Command): void {
  const create = routeVerb(schedules, 'create', 'schedules', 'create', {
    about: 'run a command by a cron expression',
    examples: [
      "--name backup --machine db-1 --cron '30 2 * * *' --timezone Europe/Berlin --command ./backup.sh",
    ],
    input: notifyOf,
    view: one,
  });
  const update = routeVerb(schedules, 'update', 'schedules', 'update', {
    about: 'change what is told',
    examples: ["--cron '0 3 * * *'"],
    input: notifyOf,
    view: one,
  });
  for (const [command, needed] of [
    [create, true],
    [update, false],
  ] as const)
    addFlags(command, needed);
  const enable = { about: 'let it run by its cron', fixed: { enabled: true }, view: one };
  routeVerb(schedules, 'enable', 'schedules', 'update', enable);
  const disable = { about: 'let it run only by hand', fixed: { enabled: false }, view: one };
  routeVerb(schedules, 'disable', 'schedules', 'update', disable);
  routeVerb(schedules, 'delete', 'schedules', 'remove', {
    about: 'remove a schedule: what runs goes on, its history stays',
    destroys: { what: (name) => `remove the schedule ${name}`, done: 'removed', nameOf: nameToRemove },
  });
}

function addRuns(schedules: Command): void {
  routeVerb(schedules, 'run', 'schedules', 'run', {
    about: 'run it now',
    lines: ({ command_id, status }) => [`${command_id} ${status}`],
  });
  routeVerb(schedules, 'history', 'schedules', 'history', {
    about: 'what became of its times, the latest first',
    examples: ['--since 7d --status failed'],
    filters: ['since', 'limit'],
    view: {
      fields:
        'started=started_at due=scheduled_for trigger status exit=exit_code took=duration command=command_id reason',
    },
  }).option('--status <status>', 'running, completed, failed, timeout, cancelled, skipped, missed or lost');
  routeVerb(schedules, 'preview <cron>', 'schedules', 'preview', {
    about: 'when a cron expression would fire',
    examples: ["'0 9 * * mon-fri'"],
    lines: ({ description, timezone, next_runs }) => [`${description} (${timezone})`, ...next_runs],
  })
    .option('--timezone <zone>', 'an IANA name', 'UTC')
    .option('--count <count>', 'times wanted', count('--count'), 5);
}

/** The flags of create and update alike. */
function addFlags(command: Command, needed: boolean): void {
  const told = (flags: string, what: string): Option => new Option(flags, what).makeOptionMandatory(needed);
  command
    .addOption(told('--name <name>', 'what it is called'))
    .addOption(told('--machine <machine>', 'where it runs'))
    .addOption(told('--command <line>', 'a line of shell'))
    .addOption(told('--cron <expression>', '5 fields, or 6 with seconds first; @daily and the like'))
    .option('--timezone <zone>', 'an IANA name, such as Europe/Berlin (UTC unless told)')
    .option('--description <text>', 'what it is for')
    .option('--timeout <time>', 'kill it with all it started after so long', milliseconds('--timeout'))
    .option('--user <name>', 'whom it runs as, where the agent may')
    .option('--cwd <dir>', 'the directory it runs in')
    .option('--env <name=value>', 'a variable; several times', variables)
    .addOption(new Option('--overlap <how>', 'while the run before is not over').choices(['skip', 'allow']))
    .addOption(
      new Option('--catch-up <which>', 'of what the broker slept through').choices(['none', 'last', 'all']),
    )
    .option(
      '--catch-up-window <time>',
      'what was due longer ago is missed',
      milliseconds('--catch-up-window'),
    )
    .option('--notify-failure', 'an event schedule.failed of what fails')
    .option('--notify-success', 'an event schedule.completed of what succeeds');
}

function notifyOf({ notifyFailure, notifySuccess }: Record<string, unknown>): Record<string, unknown> {
  if (notifyFailure === undefined && notifySuccess === undefined) return {};
  return { notify: { on_failure: notifyFailure ?? false, on_success: notifySuccess ?? false } };
}

async function nameToRemove(client: Farhand, given: string, id: string, yes?: boolean): Promise<string> {
  // With --yes and an id nothing need be read: a key may remove and not read.
  const name = yes || given !== id ? given : (await client.schedules.get({ schedule_id: id })).name;
  return name === id ? id : `${name} (${id})`;
}
