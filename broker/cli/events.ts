// farhand events and farhand audit: what happened, and who did what.
import type { Command } from 'commander';
import type { Farhand } from '../../shared/sdk/index.ts';
import { given } from './flags.ts';
import { clean, cleanJson } from './output.ts';
import { type Item, routeVerb, type Told } from './resource-verbs.ts';
import { lost, write } from './told.ts';

export function addEvents(program: Command): void {
  routeVerb(program, 'events', 'events', 'list', {
    about: 'what happened, the latest first; --follow tells more as it happens',
    examples: ['--machine web-1 --since 2h', '--follow --type "machine.*,command.failed" -o json'],
    filters: ['machine', 'since', 'limit'],
    view: {
      fields: 'when=timestamp type machine what',
      cells: { machine: ({ data }) => nameIn(data), what: ({ data }) => summary(data) },
    },
    instead: follow,
  })
    .option('-f, --follow', 'go on, the latest last, until Ctrl-C; with -o json one object a line')
    .option('--type <types>', 'of these types; with --follow also families such as machine.*, with commas');
}

type Event = Awaited<ReturnType<Farhand['events']['list']>>['items'][number];

/** With --follow: until Ctrl-C, or until the broker goes away. */
async function follow(client: Farhand, told: Told, { type, machine_id }: Item): Promise<boolean> {
  if (!told.follow) return false;
  // The broker judges which types there are.
  const wanted: object = given({ types: type, machine_id });
  const leaving = new AbortController();
  process.once('SIGINT', () => leaving.abort());
  const signal = AbortSignal.any([leaving.signal, lost]);
  try {
    const stream = await client.events.stream(wanted, { signal });
    for await (const { data } of stream) {
      await write('stdout', `${told.output === 'json' ? cleanJson(data) : clean(lineOf(data))}\n`);
    }
  } catch (error) {
    if (!signal.aborted) throw error;
  }
  return true;
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
  routeVerb(program, 'audit', 'audit', 'list', {
    about: 'who did what, the latest first',
    examples: ['--since 24h --machine web-1'],
    filters: ['machine', 'since', 'limit'],
    view: {
      fields: 'when=at key=key_name action result what from=address request=request_id',
      cells: { what: ({ what }) => summary(what) },
    },
  })
    .option('--action <action>', 'only this one')
    .option('--key <key>', 'of this key, by its id');
}
