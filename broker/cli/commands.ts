// farhand commands and farhand batches: what runs, and what ran.
import { type Command, Option } from 'commander';
import type { Farhand } from '../../shared/sdk/index.ts';
import type { Format } from './output.ts';
import { printView, routeVerb, type View } from './resource-verbs.ts';
import { write } from './told.ts';
import { type Common, verb, withClient } from './verb.ts';

type Line = { command: string; args: string[] | null };

const whole = ({ command, args }: Line): string => [command, ...(args ?? [])].join(' ');
function line(one: Line): string {
  const text = whole(one);
  return text.length > 60 ? `${text.slice(0, 59)}…` : text;
}

const one: View<Awaited<ReturnType<Farhand['commands']['get']>>> = {
  fields:
    'id machine=machine_id command status exit_code signal reason user directory=cwd asked=created_at started=started_at ended=finished_at took=duration stdout=stdout_bytes stderr=stderr_bytes',
  cells: { command: whole },
};

export function addCommands(program: Command): void {
  const commands = program.command('commands').description('commands that run or ran');
  routeVerb(commands, 'list', 'commands', 'list', {
    examples: ['--machine web-1 --status failed'],
    filters: ['machine', 'since', 'limit'],
    view: {
      fields: 'id machine status exit=exit_code took=duration asked=created_at command',
      cells: { command: line },
    },
  }).option('--status <status>', 'queued, running, completed, failed, timeout, cancelled, expired or lost');
  routeVerb(commands, 'get', 'commands', 'get', { view: one });
  verb(commands, 'output <command>', 'the bytes that it wrote', 'farhand commands output cmd_… --follow')
    .addOption(new Option('--stream <stream>').choices(['stdout', 'stderr']).default('stdout'))
    .option('-f, --follow', 'until it ends')
    .action(withClient(output));
  routeVerb(commands, 'cancel', 'commands', 'cancel', { view: one });
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
  routeVerb(batches, 'get', 'batches', 'get', { show: showBatch });
  routeVerb(batches, 'cancel', 'batches', 'cancel', { show: showBatch });
}

type Batch = Awaited<ReturnType<Farhand['batches']['get']>>;

async function showBatch(client: Farhand, format: Format, batch: Batch): Promise<void> {
  const fields = 'id command status machines=total asked=created_at ended=finished_at';
  await printView(client, format, batch, { fields, cells: { command: line } });
  if (format === 'json') return;
  const results = 'machine command=id status exit=exit_code took=duration reason';
  await printView(client, format, batch.results, { fields: results });
}
