// The verbs farhand commands, farhand batches and farhand sessions: list, inspect and end commands and terminals on
// machines.
import type { Command } from 'commander';
import type { Farhand } from '../../shared/sdk/index.ts';
import { verb } from './declare-verb.ts';
import { machineNames } from './find-by-name.ts';
import { clean, cleanLines, shorten } from './print.ts';
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
  routeVerb(commands, 'output', 'commands', 'output', {
    about: 'print the output of a command',
    examples: ['--follow', '--offset 1048576'],
    isSlow: true,
    flags: {
      '--stream <stdout|stderr>': 'output to print (default: stdout)',
      '--offset <number>': 'skip this number of bytes at the beginning of the output',
      '-f, --follow': 'print the stored output, then new output until the command ends',
    },
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
  routeVerb(batches, 'get', 'batches', 'get', { text: batchText(true) });
  routeVerb(batches, 'cancel', 'batches', 'cancel', { text: batchText(false) });
}

type Batch = Awaited<ReturnType<Farhand['batches']['get']>>;
type NameOf = Awaited<ReturnType<typeof machineNames>>;

/** Returns a function that describes a batch as text, with the last output of its machines if `withOutput` is set. */
const batchText =
  (withOutput: boolean) =>
  async (batch: Batch, client: Farhand): Promise<string> => {
    const { results } = batch;
    const nameOf = await machineNames(
      client,
      results.map(({ machine_id }) => machine_id),
    );
    const commands = await viewText(client, results, {
      fields: 'machine command=id status exit=exit_code took=duration reason',
      cells: { machine: ({ machine_id }) => nameOf(machine_id) },
    });
    const output = withOutput ? outputText(batch, nameOf) : '';
    return [`${await viewText(client, batch)}\n${commands}`, output].filter(Boolean).join('\n\n');
  };

/** Returns the last output of each machine, with the name of the machine in front of each line, as exec prints it. */
function outputText({ results }: Batch, nameOf: NameOf): string {
  const width = Math.max(...results.map(({ machine_id }) => nameOf(machine_id).length));
  const lines = results.flatMap(({ id, machine_id, ...result }) =>
    (['stdout', 'stderr'] as const).flatMap((stream) => {
      const stored = result[stream].replace(/\n$/, '');
      const whole = `[not all of ${stream}; for the rest: farhand commands output ${id} --stream ${stream}]`;
      const found = [
        ...(result[`${stream}_truncated`] ? [whole] : []),
        ...(stored === '' ? [] : stored.split('\n')),
      ];
      return found.map((line) => `${clean(nameOf(machine_id)).padEnd(width)} | ${cleanLines(line)}`);
    }),
  );
  return lines.join('\n');
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
    // As for farhand shell, the WebSocket must be closed even over a dead connection.
    isSlow: true,
  } as const;
  verb(sessions, 'attach <session>', attach, async (client, session, { observe = false }) => {
    process.exitCode = await (await import('./shell.ts')).showSession(client, session, observe);
  });
  routeVerb(sessions, 'end', 'sessions', 'end');
}

const openStatuses = ['PENDING', 'CONNECTED', 'GRACE_PERIOD'] as const;
