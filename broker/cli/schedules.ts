// The verbs of farhand schedules: manage commands that run by cron expressions or when a path changes, and list their
// runs.
import type { Command } from 'commander';
import { iso, now } from '../../shared/clock.ts';
import { UsageError } from '../../shared/errors.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { machineNames } from './find-by-name.ts';
import { when } from './print.ts';
import {
  type Item,
  latest,
  ofMachine,
  routeVerb,
  since,
  viewText,
  warnOfSameName,
} from './verb-from-route.ts';

type Run = Awaited<ReturnType<Farhand['schedules']['upcoming']>>['runs'][number];
type Schedule = Awaited<ReturnType<Farhand['schedules']['get']>>;

const trigger = ({ cron, timezone, on_change }: Pick<Schedule, 'cron' | 'timezone' | 'on_change'>): string =>
  on_change ? `on change of ${on_change.path}` : `${cron} (${timezone})`;

/** Flags of both create and update. */
const flags = {
  '--name <name>': 'name of the schedule',
  '--machine <machine>': 'machine to run on',
  '--tags <list>': 'run on every machine with all of these tags, in place of --machine',
  '--command <line>': 'shell command line to run',
  '--saved-command <name>': 'saved command to run, in place of --command',
  '--param <name=value>': 'value of a parameter of the saved command; repeat the flag for several',
  '--cron <expression>':
    'when to run, as a cron expression (5 fields, or 6 with the seconds first) or a word such as @daily',
  '--on-change <path>': 'run when this path on the machine changes, in place of --cron',
  '--recursive': 'watch everything below the directory of --on-change',
  '--settle <duration>':
    'with --on-change: wait until the path has not changed for this time, then start the run (default: 2s)',
  '--timezone <zone>': 'time zone of --cron, such as Europe/Berlin (default: UTC)',
  '--description <text>': 'what the schedule is for',
  '--timeout <duration>': 'kill the command and its child processes after this time',
  '--user <name>': 'user to run as, if the agent allows it',
  '--cwd <dir>': 'working directory on the machine',
  '--env <name=value>': 'environment variable; repeat the flag for several',
  '--overlap <skip|allow>': 'skip or allow a run while the previous run is still in progress (default: skip)',
  '--catch-up <none|last|all>':
    'after the broker was down, start none, the last or all of the missed runs (default: none; with --on-change: last)',
  '--catch-up-window <duration>': 'do not start missed runs that were due longer ago than this (default: 1d)',
  '--notify-failure': 'emit the event schedule.failed when a run fails',
  '--notify-success': 'emit the event schedule.completed when a run succeeds',
};

/** Pairs of flags, each with its name in commander. A new schedule needs exactly one flag of each pair. */
const choices = [
  ['where to run', ['machine', '--machine'], ['tags', '--tags']],
  ['what to run', ['command', '--command'], ['savedCommand', '--saved-command']],
  ['when to run', ['cron', '--cron'], ['onChange', '--on-change']],
] as const;

/** Settings that --clear can remove from a schedule. */
const clearable = ['description', 'timeout', 'user', 'cwd', 'env', 'notify'];

export function addSchedules(program: Command): void {
  const schedules = program
    .command('schedules')
    .description(
      'manage commands that run by cron or when a path changes; a schedule is given by name or id',
    );
  routeVerb(schedules, 'list', 'schedules', 'list', {
    examples: ['--machine db-1'],
    flags: ofMachine,
    defaults: { sort: 'name' },
    view: {
      fields: 'name id machine cron enabled next last tags',
      cells: {
        cron: trigger,
        next: ({ next_run }) => when(next_run),
        last: ({ last_run }) => last_run?.status,
      },
    },
  });
  routeVerb(schedules, 'get', 'schedules', 'get');
  routeVerb(schedules, 'create', 'schedules', 'create', {
    examples: [
      "--name backup --machine db-1 --cron '30 2 * * *' --timezone Europe/Berlin --command ./backup.sh",
      '--name restart --tags web --cron @weekly --saved-command restart --param unit=nginx',
      "--name reload --tags web --on-change /etc/nginx --recursive --command 'systemctl reload nginx'",
      "--name updates --tags web,eu --cron @daily --command 'apt-get -s upgrade'",
    ],
    flags,
    required: ['name'],
    input: (given) => {
      for (const [what, [first, flag], [second, other]] of choices)
        if ((given[first] === undefined) === (given[second] === undefined))
          throw new UsageError(`give either ${flag} or ${other} (${what}), but not both`);
      return inputOf(given);
    },
    after: warnOfSameName('schedule'),
  });
  routeVerb(schedules, 'update', 'schedules', 'update', {
    examples: ["--cron '0 3 * * *'", '--clear timeout,notify'],
    flags: { ...flags, '--clear <list>': `remove these settings, comma-separated: ${clearable.join(', ')}` },
    input: ({ clear, ...given }) => ({ ...inputOf(given), ...clearedBy(clear) }),
  });
  for (const [name, about] of [
    ['enable', 'enable a schedule: it runs by cron, or when its path changes'],
    ['disable', 'disable a schedule: it runs only by farhand schedules run'],
  ] as const)
    routeVerb(schedules, name, 'schedules', 'update', {
      about,
      defaults: { enabled: name === 'enable' },
    });
  routeVerb(schedules, 'delete', 'schedules', 'remove', {
    about: 'remove a schedule; a run in progress goes on, and the history stays',
    destroys: ['remove the schedule', 'removed'],
  });
  addRuns(schedules);
}

function addRuns(schedules: Command): void {
  routeVerb(schedules, 'run', 'schedules', 'run', {
    text: ({ command_id, status, batch_id }) => [`${batch_id ?? command_id} ${status}`],
  });
  routeVerb(schedules, 'history', 'schedules', 'history', {
    examples: ['--since 7d --status failed'],
    flags: {
      '--status <status>':
        'only runs with this status: running, completed, failed, timeout, cancelled, skipped, missed or lost',
      ...since,
      ...latest,
    },
    view: {
      fields:
        'started=started_at due=scheduled_for machine trigger status exit=exit_code took=duration command=command_id reason',
    },
  });
  routeVerb(schedules, 'upcoming', 'schedules', 'upcoming', {
    examples: ['--within 7d --machine db-1'],
    flags: {
      ...ofMachine,
      '--within <duration>': 'list runs up to this far ahead (default: 1d)',
      '--limit <count>': 'print at most COUNT runs (default: 50)',
    },
    input: ({ within }) => (typeof within === 'number' ? { until: iso(now() + within) } : {}),
    text: async ({ runs, more }, client) => {
      const machineOf = await machineOrTags(client, runs);
      const text = await viewText(client, runs, {
        fields: 'at name machine',
        cells: { at: ({ at }) => at, machine: machineOf },
      });
      return more ? `${text}\nThere are more runs; raise --limit to print them.` : text;
    },
  });
  routeVerb(schedules, 'preview <cron>', 'schedules', 'preview', {
    examples: ["'0 9 * * mon-fri'"],
    flags: {
      '--timezone <zone>': 'time zone of the expression (default: UTC)',
      '--count <count>': 'number of start times to print (default: 5)',
    },
    text: ({ description, timezone, next_runs }) => [`${description} (${timezone})`, ...next_runs],
  });
}

/**
 * Returns a function that describes where a run takes place: the name of its machine or, if the run is on several
 * machines, the tags of its schedule.
 */
async function machineOrTags(client: Farhand, runs: readonly Run[]): Promise<(run: Run) => string> {
  const byTags = runs.some(({ machine_id }) => machine_id === null);
  const all = byTags ? await Array.fromAsync(client.schedules.list({ limit: 100 })) : [];
  const tagsOf = new Map(all.map(({ id, tags }) => [id, tags?.join(',')]));
  const nameOf = await machineNames(
    client,
    runs.flatMap(({ machine_id }) => machine_id ?? []),
  );
  return ({ schedule_id, machine_id }) =>
    machine_id === null ? `tags ${tagsOf.get(schedule_id) ?? '-'}` : nameOf(machine_id);
}

function inputOf({ param, ...given }: Item): Item {
  return { ...notifyOf(given), ...onChangeOf(given), ...(param !== undefined && { parameters: param }) };
}

function onChangeOf({ onChange: path, recursive, settle }: Item): Item {
  if (path === undefined && (recursive ?? settle) !== undefined)
    throw new UsageError('--recursive and --settle need a path to watch: add --on-change PATH');
  return path === undefined ? {} : { on_change: { path, recursive, settle } };
}

/**
 * Converts --notify-failure and --notify-success to the field `notify` of a request. In an update, a missing flag
 * leaves its setting unchanged. For a new schedule, a missing flag means that its event is not emitted.
 */
function notifyOf({ notifyFailure: on_failure, notifySuccess: on_success }: Item): Item {
  return on_failure === undefined && on_success === undefined ? {} : { notify: { on_failure, on_success } };
}

function clearedBy(clear: unknown): Item {
  const names = Array.isArray(clear) ? clear.map(String) : [];
  const unknown = names.find((name) => !clearable.includes(name));
  if (unknown !== undefined)
    throw new UsageError(`--clear ${unknown}: write one or more of ${clearable.join(', ')}`);
  return Object.fromEntries(names.map((name) => [name, null]));
}
