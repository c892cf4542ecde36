// farhand events and farhand audit: what happened, and who did what.
import type { Command } from 'commander';
import { now } from '../../shared/clock.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { given, limitOption, since } from './flags.ts';
import { machineNamed } from './named.ts';
import { clean, cleanJson, printTable, when } from './output.ts';
import { lost, write } from './told.ts';
import { type Common, every, verb, withClient } from './verb.ts';

export function addEvents(program: Command): void {
  verb(
    program,
    'events',
    'what happened, the latest first; --follow tells more as it happens',
    'farhand events --machine web-1 --since 2h',
    'farhand events --follow --type "machine.*,command.failed" -o json',
  )
    .option('-f, --follow', 'go on, the latest last, until Ctrl-C; with -o json one object a line')
    .option('--type <types>', 'of these types; with --follow also families such as machine.*, with commas')
    .option('--machine <machine>', 'of this machine')
    .option('--since <time>', 'not before, such as 2h (ago)', since('--since', now))
    .addOption(limitOption(50))
    .action(withClient(events));
}

interface EventOptions extends Common {
  follow?: boolean;
  type?: string;
  machine?: string;
  since?: string;
  limit: number;
}

async function events(client: Farhand, options: EventOptions): Promise<void> {
  const { type, machine, limit, output } = options;
  const machine_id = machine === undefined ? undefined : await machineNamed(client, machine);
  if (options.follow) return follow(client, options, machine_id);
  const wish = given({ type, machine_id, since: options.since }) as Parameters<Farhand['events']['list']>[0];
  const found = await every((page) => client.events.list({ ...wish, ...page }), limit);
  await printTable(output, found, {
    when: ({ timestamp }) => when(timestamp),
    type: (event) => event.type,
    machine: ({ data }) => nameIn(data),
    what: ({ data }) => summary(data),
  });
}

type Event = Awaited<ReturnType<Farhand['events']['list']>>['items'][number];

/** Until Ctrl-C, or until the broker goes away. */
async function follow(client: Farhand, { type, output }: EventOptions, machine_id?: string): Promise<void> {
  const leaving = new AbortController();
  process.once('SIGINT', () => leaving.abort());
  const signal = AbortSignal.any([leaving.signal, lost]);
  try {
    const stream = await client.events.stream(given({ types: type, machine_id }) as object, {
      signal,
    });
    for await (const { data } of stream) {
      await write('stdout', `${output === 'json' ? cleanJson(data) : clean(lineOf(data))}\n`);
    }
  } catch (error) {
    if (!signal.aborted) throw error;
  }
}

function lineOf({ timestamp, type, data }: Event): string {
  return [timestamp, type.padEnd(24), nameIn(data).padEnd(16), summary(data)].join('  ').trimEnd();
}

const nameIn = (data: Record<string, unknown>): string =>
  typeof data.machine_name === 'string' ? data.machine_name : '-';

/** What there is besides the machine, in few words. */
function summary(data: Record<string, unknown>): string {
  const rest = Object.entries(data).filter(
    ([name, value]) => !['machine_id', 'machine_name'].includes(name) && value !== null && value !== '',
  );
  return rest.map(([name, value]) => `${name}=${asWord(value)}`).join(' ');
}

const asWord = (value: unknown): string => {
  const text = typeof value === 'string' ? value : JSON.stringify(value);
  return text.length > 60 ? `${text.slice(0, 59)}…` : text;
};

export function addAudit(program: Command): void {
  verb(program, 'audit', 'who did what, the latest first', 'farhand audit --since 24h --machine web-1')
    .option('--action <action>', 'only this one')
    .option('--key <key>', 'of this key, by its id')
    .option('--machine <machine>', 'to this machine')
    .option('--since <time>', 'not before, such as 2h (ago)', since('--since', now))
    .addOption(limitOption(50))
    .action(withClient(audit));
}

interface AuditOptions extends Common {
  action?: string;
  key?: string;
  machine?: string;
  since?: string;
  limit: number;
}

async function audit(
  client: Farhand,
  { action, key, machine, limit, output, ...rest }: AuditOptions,
): Promise<void> {
  const machine_id = machine === undefined ? undefined : await machineNamed(client, machine);
  const wish = given({ action, key, machine_id, since: rest.since }) as Parameters<
    Farhand['audit']['list']
  >[0];
  const rows = await every((page) => client.audit.list({ ...wish, ...page }), limit);
  await printTable(output, rows, {
    when: ({ at }) => when(at),
    key: ({ key_name }) => key_name,
    action: (row) => row.action,
    result: ({ result }) => result,
    what: ({ what }) => summary(what),
    from: ({ address }) => address,
    request: ({ request_id }) => request_id,
  });
}
