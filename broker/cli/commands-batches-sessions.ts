// The verbs farhand commands, farhand batches and farhand sessions: list, inspect and end commands and terminals on
// machines.
import type { Command } from 'commander';
import { definedFields } from '../../shared/defined-fields.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { verb } from './declare-verb.ts';
import { copyOut } from './output-and-signals.ts';
import { shorten } from './print.ts';
import { latest, ofMachine, printView, routeVerb, since, viewText } from './verb-from-route.ts';

const line = ({ command, args }: { command: string; args: string[] | null }): string =>
  shorten([command, ...(args ?? [])].join(' '));

export function addCommands(program: Command): void {
  const commands = program
    .command('commands')
    .description('inspect and cancel commands that run on machines');
  routeVerb(commands, 'list', 'commands', 'list', {
    examples: ['--machine web-1 --status failed'],
    flags: {
      ...ofMachine,
      '--status <status>':
        'only commands with this status: queued, running, completed, failed, timeout, cancelled, expired or lost',
      ...since,
      ...latest,
    },
    view: {
      fields: 'id machine status exit=exit_code took=duration asked=created_at command',
      cells: { command: line },
    },
  });
  routeVerb(commands, 'get', 'commands', 'get');
  const output = {
    about: 'print the output of a command',
    examples: ['farhand commands output cmd_… --follow', 'farhand commands output cmd_… --offset 1048576'],
    flags: {
      '--stream <stdout|stderr>': 'output to print (default: stdout)',
      '--offset <number>': 'skip this number of bytes at the beginning of the output',
      '-f, --follow': 'print the stored output, then new output until the command ends',
    },
  } as const;
  verb(commands, 'output <command>', output, async (client, command_id, { stream, offset, follow }) => {
    const params = definedFields({ stream, offset, follow });
    const { body } = await client.commands.output({ command_id, ...params });
    await copyOut(body);
  });
  routeVerb(commands, 'cancel', 'commands', 'cancel');
  routeVerb(commands, 'signal', 'commands', 'signal', {
    examples: ['--signal SIGHUP'],
    flags: { '--signal <name>': 'signal to send, such as SIGINT' },
    required: ['signal'],
  });
}

export function addBatches(program: Command): void {
  const batches = program
    .command('batches')
    .description('inspect and cancel batches, which run one command on many machines');
  routeVerb(batches, 'list', 'batches', 'list', {
    examples: ['--machine web-1 --since 2h'],
    flags: {
      '--machine <machine>': 'list only batches that include the machine MACHINE',
      '--status <status>': 'only batches with this status: running, completed, failed or cancelled',
      ...since,
      ...latest,
    },
    view: { fields: 'id status total counts asked=created_at command', cells: { command: line } },
  });
  routeVerb(batches, 'get', 'batches', 'get', { text: batchText });
  routeVerb(batches, 'cancel', 'batches', 'cancel', { text: batchText });
}

type Batch = Awaited<ReturnType<Farhand['batches']['get']>>;

async function batchText(batch: Batch, client: Farhand): Promise<string> {
  const fields = 'machine command=id status exit=exit_code took=duration reason';
  return `${await viewText(client, batch)}\n${await viewText(client, batch.results, { fields })}`;
}

export function addSessions(program: Command): void {
  const sessions = program
    .command('sessions')
    .description('list terminals on machines, attach to them, and end them');
  const listing = {
    about: 'list open sessions, the latest first',
    examples: ['farhand sessions list --all'],
    flags: { '--all': 'list the latest 100 sessions, including ended ones' },
  } as const;
  verb(sessions, 'list', listing, async (client, { all, output }) => {
    const filters = all ? [{}] : openStatuses.map((status) => ({ status }));
    const pages = await Promise.all(filters.map((one) => client.sessions.list({ ...one, limit: 100 })));
    const found = pages
      .flatMap(({ items }) => items)
      .sort((a, b) => b.created_at.localeCompare(a.created_at));
    const fields = 'id=session_id status machine attached=attached_count opened=created_at';
    await printView(client, output, found, { fields });
  });
  const attach = {
    about: 'attach this terminal to a session; Ctrl-] detaches and leaves the session open',
    examples: ['farhand sessions attach sess_… --observe'],
    flags: { '--observe': 'only watch: send no input' },
    interactive: true,
  } as const;
  verb(sessions, 'attach <session>', attach, async (client, session, { observe = false }) => {
    process.exitCode = await (await import('./shell.ts')).showSession(client, session, observe);
  });
  routeVerb(sessions, 'end', 'sessions', 'end');
}

const openStatuses = ['PENDING', 'CONNECTED', 'GRACE_PERIOD'] as const;
