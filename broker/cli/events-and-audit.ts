// The verbs farhand events and farhand audit: list or follow events, and list the audit log.
import type { Command } from 'commander';
import { definedFields } from '../../shared/defined-fields.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { take, verb } from './declare-verb.ts';
import { findMachine } from './find-by-name.ts';
import { clean, cleanJson, summary } from './print.ts';
import { lost, write } from './stdout-stderr-and-exit.ts';
import { latest, ofMachine, printView, routeVerb, since } from './verb-from-route.ts';

export function addEvents(program: Command): void {
  const spec = {
    about: 'list events, the latest first; with --follow print new events as they happen',
    examples: [
      'farhand events --machine web-1 --since 2h',
      'farhand events --follow --type "machine.*,command.failed" -o json',
    ],
    flags: {
      '-f, --follow': 'print new events until Ctrl-C; with -o json one object per line',
      '--type <types>':
        'only events of these types, comma-separated; with --follow also families such as machine.*',
      ...ofMachine,
      ...since,
      ...latest,
    },
  } as const;
  verb(
    program,
    'events',
    spec,
    async (client, { follow: following, machine, type, since, limit = 50, output }) => {
      const machine_id = machine && (await findMachine(client, machine));
      // The value of --type may be any text here, because the broker checks it. TypeScript would accept only known
      // event types, so the filters have the type `object`.
      const filters: object = definedFields({ type, machine_id, since });
      if (following) return follow(client, definedFields({ types: type, machine_id }), output === 'json');
      const items = await take(client.events.list({ ...filters, limit: Math.min(100, limit) }), limit);
      await printView(client, output, items, {
        fields: 'when=timestamp type machine what',
        cells: { machine: ({ data }) => machineIn(data), what: ({ data }) => rest(data) },
      });
    },
  );
}

type Event = Awaited<ReturnType<Farhand['events']['list']>>['items'][number];

/** Prints events until Ctrl-C or until the broker ends the stream. */
async function follow(client: Farhand, filters: object, json: boolean): Promise<void> {
  const leaving = new AbortController();
  process.once('SIGINT', () => leaving.abort());
  const signal = AbortSignal.any([leaving.signal, lost]);
  try {
    const stream = await client.events.stream(filters, { signal });
    for await (const { data } of stream)
      await write('stdout', `${json ? cleanJson(data) : clean(lineOf(data))}\n`);
  } catch (error) {
    if (!signal.aborted) throw error;
  }
}

function lineOf({ timestamp, type, data }: Event): string {
  return [timestamp, type.padEnd(24), machineIn(data).padEnd(16), rest(data)].join('  ').trimEnd();
}

const machineIn = (data: Record<string, unknown>): string =>
  typeof data.machine_name === 'string' ? data.machine_name : '-';

/** Returns the details of an event as text, without its machine. */
const rest = (data: object): string => summary(data, 'machine_id', 'machine_name');

export function addAudit(program: Command): void {
  routeVerb(program, 'audit', 'audit', 'list', {
    about: 'list the audit log: who did what, the latest first',
    examples: ['--since 24h --machine web-1'],
    flags: {
      '--action <action>': 'only calls of this operation, such as commands.create',
      '--key <key>': 'only calls of the API key with this id, or of all keys with this name',
      ...ofMachine,
      ...since,
      ...latest,
    },
    input: ({ key }) =>
      typeof key === 'string' && !key.startsWith('key_') ? { key_name: key, key: undefined } : {},
    view: {
      fields: 'when=at key=key_name action result what from=address request=request_id',
      cells: { what: ({ what }) => rest(what) },
    },
  });
}
