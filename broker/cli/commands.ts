// farhand commands and farhand batches: what runs, and what ran.
import { type Command, Option } from 'commander';
import { now } from '../../shared/clock.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { given, limitOption, since } from './flags.ts';
import { machineNamed, namesOf } from './named.ts';
import { type Format, printFields, printTable, size, span, when } from './output.ts';
import { write } from './told.ts';
import { type Common, every, verb, withClient } from './verb.ts';

export function addCommands(program: Command): void {
  const commands = program.command('commands').description('commands that run or ran');
  verb(commands, 'list', 'the latest commands', 'farhand commands list --machine web-1 --status failed')
    .option('--machine <machine>', 'of this machine')
    .option('--status <status>', 'queued, running, completed, failed, timeout, cancelled, expired or lost')
    .option('--since <time>', 'not before, such as 2h (ago)', since('--since', now))
    .addOption(limitOption(50))
    .action(withClient(list));
  verb(commands, 'get <command>', 'one command, and how it went', 'farhand commands get cmd_…').action(
    withClient(get),
  );
  verb(commands, 'output <command>', 'the bytes that it wrote', 'farhand commands output cmd_… --follow')
    .addOption(new Option('--stream <stream>').choices(['stdout', 'stderr']).default('stdout'))
    .option('-f, --follow', 'until it ends')
    .action(withClient(output));
  verb(
    commands,
    'cancel <command>',
    'end a command and everything that it started',
    'farhand commands cancel cmd_…',
  ).action(
    withClient(async (client, command_id: string, options: Common) =>
      show(options.output, await client.commands.cancel({ command_id })),
    ),
  );
}

interface ListOptions extends Common {
  machine?: string;
  status?: string;
  since?: string;
  limit: number;
}

async function list(
  client: Farhand,
  { machine, status, limit, output, ...rest }: ListOptions,
): Promise<void> {
  const machine_id = machine === undefined ? undefined : await machineNamed(client, machine);
  const wish = given({ machine_id, status, since: rest.since }) as Parameters<Farhand['commands']['list']>[0];
  const found = await every((page) => client.commands.list({ ...wish, ...page }), limit);
  const nameOf = output === 'json' ? String : await namesOf(client);
  await printTable(output, found, {
    id: ({ id }) => id,
    machine: (one) => nameOf(one.machine_id),
    status: (one) => one.status,
    exit: ({ exit_code }) => exit_code,
    took: ({ duration }) => (duration === null ? null : span(duration)),
    asked: ({ created_at }) => when(created_at),
    command: (one) => line(one),
  });
}

function line({ command, args }: { command: string; args: string[] | null }): string {
  const text = [command, ...(args ?? [])].join(' ');
  return text.length > 60 ? `${text.slice(0, 59)}…` : text;
}

type Record = Awaited<ReturnType<Farhand['commands']['get']>>;

async function get(client: Farhand, command_id: string, { output: format }: Common): Promise<void> {
  await show(format, await client.commands.get({ command_id }));
}

async function show(format: Format, one: Record): Promise<void> {
  await printFields(format, one, {
    id: one.id,
    machine: one.machine_id,
    command: [one.command, ...(one.args ?? [])].join(' '),
    status: one.status,
    'exit code': one.exit_code,
    signal: one.signal,
    reason: one.reason,
    user: one.user,
    directory: one.cwd,
    asked: one.created_at,
    started: one.started_at,
    ended: one.finished_at,
    took: one.duration === null ? undefined : span(one.duration),
    stdout: size(one.stdout_bytes),
    stderr: size(one.stderr_bytes),
  });
}

async function output(
  client: Farhand,
  command_id: string,
  { stream, follow }: Common & { stream: 'stdout' | 'stderr'; follow?: boolean },
): Promise<void> {
  const { body } = await client.commands.output({ command_id, stream, ...(follow && { follow }) });
  if (body) for await (const chunk of body as AsyncIterable<Uint8Array>) await write('stdout', chunk);
}

export function addBatches(program: Command): void {
  const batches = program.command('batches').description('commands on many machines');
  verb(
    batches,
    'get <batch>',
    'one batch, and how it went on each machine',
    'farhand batches get batch_…',
  ).action(
    withClient(async (client, batch_id: string, options: Common) =>
      showBatch(client, options.output, await client.batches.get({ batch_id })),
    ),
  );
  verb(
    batches,
    'cancel <batch>',
    'what waits never runs, what runs is ended',
    'farhand batches cancel batch_…',
  ).action(
    withClient(async (client, batch_id: string, options: Common) =>
      showBatch(client, options.output, await client.batches.cancel({ batch_id })),
    ),
  );
}

async function showBatch(
  client: Farhand,
  format: Format,
  batch: Awaited<ReturnType<Farhand['batches']['get']>>,
): Promise<void> {
  if (format === 'json') return printFields(format, batch, {});
  await printFields(format, batch, {
    id: batch.id,
    command: line(batch),
    status: batch.status,
    machines: batch.total,
    asked: batch.created_at,
    ended: batch.finished_at,
  });
  const nameOf = await namesOf(client);
  await printTable(format, batch.results, {
    machine: ({ machine_id }) => nameOf(machine_id),
    command: ({ id }) => id,
    status: ({ status }) => status,
    exit: ({ exit_code }) => exit_code,
    took: ({ duration }) => (duration === null ? null : span(duration)),
    reason: ({ reason }) => reason,
  });
}
