// farhand schedules: commands by cron, and what became of every time.
import { type Command, Option } from 'commander';
import { now } from '../../shared/clock.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { demandYes } from './ask.ts';
import { count, given, limitOption, milliseconds, since, variables } from './flags.ts';
import { machineNamed, nameOfMachine, namesOf, scheduleNamed } from './named.ts';
import { type Format, print, printFields, printTable, span, when } from './output.ts';
import { type Common, every, verb, withClient } from './verb.ts';

export function addSchedules(program: Command): void {
  const schedules = program.command('schedules').description('commands by cron; schedules by name or id');
  verb(schedules, 'list', 'all schedules', 'farhand schedules list --machine db-1')
    .option('--machine <machine>', 'of this machine')
    .action(withClient(list));
  verb(
    schedules,
    'get <schedule>',
    'one schedule, and when it runs next',
    'farhand schedules get backup',
  ).action(withClient(get));
  addChanges(schedules);
  addRuns(schedules);
}

function addChanges(schedules: Command): void {
  shaped(
    verb(
      schedules,
      'create',
      'run a command by a cron expression',
      "farhand schedules create --name backup --machine db-1 --cron '30 2 * * *' --timezone Europe/Berlin --command ./backup.sh",
    ),
    true,
  ).action(withClient(create));
  shaped(
    verb(
      schedules,
      'update <schedule>',
      'change what is told',
      "farhand schedules update backup --cron '0 3 * * *'",
    ),
    false,
  ).action(withClient(update));
  for (const [name, enabled] of [
    ['enable', true],
    ['disable', false],
  ] as const) {
    verb(
      schedules,
      `${name} <schedule>`,
      enabled ? 'let it run by its cron' : 'let it run only by hand',
      `farhand schedules ${name} backup`,
    ).action(
      withClient(async (client, schedule: string, { output }: Common) => {
        const schedule_id = await scheduleNamed(client, schedule);
        await show(client, output, await client.schedules.update({ schedule_id, enabled }));
      }),
    );
  }
  verb(
    schedules,
    'delete <schedule>',
    'remove it: what runs goes on, its history stays',
    'farhand schedules delete backup --yes',
  )
    .option('--yes', 'do not ask')
    .action(withClient(remove));
}

function addRuns(schedules: Command): void {
  verb(schedules, 'run <schedule>', 'run it now', 'farhand schedules run backup').action(withClient(run));
  verb(
    schedules,
    'history <schedule>',
    'what became of its times, the latest first',
    'farhand schedules history backup --since 7d --status failed',
  )
    .option('--since <time>', 'not before, such as 7d (ago)', since('--since', now))
    .option('--status <status>', 'running, completed, failed, timeout, cancelled, skipped, missed or lost')
    .addOption(limitOption(50))
    .action(withClient(history));
  verb(
    schedules,
    'preview <cron>',
    'when a cron expression would fire',
    "farhand schedules preview '0 9 * * mon-fri'",
  )
    .option('--timezone <zone>', 'an IANA name', 'UTC')
    .option('--count <count>', 'times wanted', count('--count'), 5)
    .action(withClient(preview));
}

interface Shape extends Common {
  name?: string;
  machine?: string;
  command?: string;
  cron?: string;
  timezone?: string;
  description?: string;
  timeout?: number;
  user?: string;
  cwd?: string;
  env?: Record<string, string>;
  overlap?: string;
  catchUp?: string;
  catchUpWindow?: number;
  notifyFailure?: boolean;
  notifySuccess?: boolean;
}

/** The flags of create and update alike. */
function shaped(command: Command, needed: boolean): Command {
  const told = (flags: string, what: string): Option => new Option(flags, what).makeOptionMandatory(needed);
  return command
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

async function bodyOf(client: Farhand, shape: Shape): Promise<Record<string, unknown>> {
  const { name, command, cron, timezone, description, timeout, user, cwd, env, overlap } = shape;
  const { machine, catchUp, catchUpWindow, notifyFailure, notifySuccess } = shape;
  const machine_id = machine === undefined ? undefined : await machineNamed(client, machine);
  const notified = notifyFailure !== undefined || notifySuccess !== undefined;
  const notify = notified
    ? { on_failure: notifyFailure ?? false, on_success: notifySuccess ?? false }
    : undefined;
  const plain = {
    name,
    machine_id,
    command,
    cron,
    timezone,
    description,
    timeout,
    user,
    cwd,
    env,
    overlap,
    notify,
  };
  return given({ ...plain, catch_up: catchUp, catch_up_window: catchUpWindow });
}

async function create(client: Farhand, shape: Shape): Promise<void> {
  // What Commander has demanded is there; the broker judges the rest.
  const made = await client.schedules.create(
    (await bodyOf(client, shape)) as Parameters<Farhand['schedules']['create']>[0],
  );
  await show(client, shape.output, made);
}

async function update(client: Farhand, schedule: string, shape: Shape): Promise<void> {
  const body = { schedule_id: await scheduleNamed(client, schedule), ...(await bodyOf(client, shape)) };
  await show(client, shape.output, await client.schedules.update(body));
}

type Schedule = Awaited<ReturnType<Farhand['schedules']['get']>>;

async function get(client: Farhand, schedule: string, { output }: Common): Promise<void> {
  const schedule_id = await scheduleNamed(client, schedule);
  await show(client, output, await client.schedules.get({ schedule_id }));
}

async function show(client: Farhand, format: Format, one: Schedule): Promise<void> {
  await printFields(format, one, {
    id: one.id,
    name: one.name,
    description: one.description,
    machine: format === 'json' ? null : await nameOfMachine(client, one.machine_id),
    command: one.command,
    cron: `${one.cron} (${one.timezone})`,
    enabled: one.enabled,
    next: one.next_runs.join(', '),
    last: one.last_run && `${one.last_run.at} ${one.last_run.status} (exit ${one.last_run.exit_code})`,
    overlap: one.overlap,
    'catch up': one.catch_up,
    timeout: one.timeout === null ? null : span(one.timeout),
    user: one.user,
    directory: one.cwd,
  });
}

async function list(client: Farhand, { machine, output }: Common & { machine?: string }): Promise<void> {
  const wish = machine === undefined ? {} : { machine_id: await machineNamed(client, machine) };
  const all = await every((page) => client.schedules.list({ ...wish, sort: 'name', ...page }));
  const nameOf = output === 'json' ? String : await namesOf(client);
  await printTable(output, all, {
    name: ({ name }) => name,
    id: ({ id }) => id,
    machine: ({ machine_id }) => nameOf(machine_id),
    cron: ({ cron, timezone }) => `${cron} (${timezone})`,
    enabled: ({ enabled }) => enabled,
    next: ({ next_run }) => when(next_run),
    last: ({ last_run }) => last_run?.status,
  });
}

async function run(client: Farhand, schedule: string, { output }: Common): Promise<void> {
  const schedule_id = await scheduleNamed(client, schedule);
  const started = await client.schedules.run({ schedule_id });
  print(output, started, () => [`${started.command_id} ${started.status}`]);
}

interface HistoryOptions extends Common {
  since?: string;
  status?: string;
  limit: number;
}

async function history(client: Farhand, schedule: string, options: HistoryOptions): Promise<void> {
  const { status, limit, output } = options;
  const schedule_id = await scheduleNamed(client, schedule);
  const wish = { schedule_id, ...given({ status, since: options.since }) } as Parameters<
    Farhand['schedules']['history']
  >[0];
  const runs = await every((page) => client.schedules.history({ ...wish, ...page }), limit);
  await printTable(output, runs, {
    started: ({ started_at }) => when(started_at),
    due: ({ scheduled_for }) => scheduled_for,
    trigger: ({ trigger }) => trigger,
    status: (one) => one.status,
    exit: ({ exit_code }) => exit_code,
    took: ({ duration }) => (duration === null ? null : span(duration)),
    command: ({ command_id }) => command_id,
    reason: ({ reason }) => reason,
  });
}

async function preview(
  client: Farhand,
  cron: string,
  { timezone, count: times, output }: Common & { timezone: string; count: number },
): Promise<void> {
  const shown = await client.schedules.preview({ cron, timezone, count: times });
  print(output, shown, () => [`${shown.description} (${shown.timezone})`, ...shown.next_runs]);
}

async function remove(client: Farhand, schedule: string, options: Common & { yes?: boolean }): Promise<void> {
  const schedule_id = await scheduleNamed(client, schedule);
  const { yes, output } = options;
  // With --yes and an id nothing need be read: a key may remove and not read.
  const name =
    yes || schedule !== schedule_id ? schedule : (await client.schedules.get({ schedule_id })).name;
  const removed = name === schedule_id ? schedule_id : `${name} (${schedule_id})`;
  await demandYes(yes, `remove the schedule ${removed}`);
  await printFields(output, await client.schedules.remove({ schedule_id }), { removed });
}
