// farhand machines: who there is, how they are, what they are called.
import { type Command, Option } from 'commander';
import { mostSkewMs } from '../../shared/clock.ts';
import { UsageError } from '../../shared/errors.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { collect } from './flags.ts';
import { machineNamed } from './named.ts';
import { type Format, printFields, size, span, when } from './output.ts';
import { printView, routeVerb, type View } from './resource-verbs.ts';
import { type Common, verb, withClient } from './verb.ts';

type Machine = Awaited<ReturnType<Farhand['machines']['get']>>;

const cells = {
  system: ({ os, arch }: Pick<Machine, 'os' | 'arch'>) => `${os} ${arch}`,
  seen: ({ status, last_seen }: Pick<Machine, 'status' | 'last_seen'>) =>
    status === 'online' ? 'now' : when(last_seen),
  tags: ({ tags }: Pick<Machine, 'tags'>) => tags.join(','),
};

const one: View<Machine> = {
  fields:
    'id name status hostname system tags address=ip agent=agent_version capabilities joined=created_at last_seen',
  cells,
};

export function addMachines(program: Command): void {
  const machines = program.command('machines').description('machines, by name or id');
  routeVerb(machines, 'list', 'machines', 'list', {
    examples: ['--tag web --status online', '-o json'],
    fixed: { include: 'agent_version', sort: 'name' },
    view: { fields: 'name id status os=system version=agent_version tags last_seen=seen', cells },
  })
    .option('--tag <tag>', 'only those with this tag; several times: with all of them', collect)
    .addOption(new Option('--status <status>').choices(['online', 'offline']))
    .option('--search <text>', 'part of the name');
  routeVerb(machines, 'get', 'machines', 'get', { view: one });
  routeVerb(machines, 'status', 'machines', 'status', { show: showStatus });
  verb(
    machines,
    'tag <add|remove|set> <machine> <tags...>',
    'add, remove or set tags',
    'farhand machines tag add web-1 web,eu',
    'farhand machines tag remove web-1 eu',
    'farhand machines tag set web-1 db',
  )
    .showHelpAfterError('Say tag add|remove|set MACHINE TAGS. See farhand --help.')
    .action(withClient(tag));
  routeVerb(machines, 'rename <name>', 'machines', 'update', {
    about: 'give a machine another name',
    examples: ['web-2'],
    view: one,
  });
  routeVerb(machines, 'remove', 'machines', 'remove', {
    about: 'remove a machine: its agent stops for good, its history stays',
    destroys: { what: (name) => `remove ${name} and stop its agent for good`, done: 'removed' },
  });
}

type Status = Awaited<ReturnType<Farhand['machines']['status']>>;

async function showStatus(_: Farhand, format: Format, now: Status): Promise<void> {
  const part = ({ used, total }: { used: number; total: number }): string =>
    `${size(used)} of ${size(total)} (${total > 0 ? Math.round((100 * used) / total) : 0} %)`;
  // As df(1): what is reserved for root is neither used nor available.
  const disk = ({
    available,
    ...one
  }: {
    used: number;
    total: number;
    available?: number | undefined;
  }): string =>
    available === undefined
      ? part(one)
      : `${size(one.used)} used, ${size(available)} available of ${size(one.total)} (${percentOf(one.used, available)} %)`;
  await printFields(format, now, {
    status: now.connected ? 'online' : 'offline',
    'last heard': `${span(now.stale_ms)} ago`,
    uptime: span(now.uptime * 1000),
    processor: `${now.cpu.usage.toFixed(1)} % of ${now.cpu.cores} cores`,
    load: now.load_average.map((load) => load.toFixed(2)).join(' '),
    memory: part(now.memory),
    clock: clockText(now.clock_offset_ms),
    ...Object.fromEntries(now.disks.map((one) => [`disk ${one.mount}`, disk(one)])),
    ...Object.fromEntries(
      now.network.map((one) => [
        `network ${one.name}`,
        `${size(one.received_bytes)} in, ${size(one.sent_bytes)} out`,
      ]),
    ),
    agent: `${size(now.agent.rss)}, up for ${span(now.agent.uptime * 1000)}`,
  });
}

const percentOf = (used: number, available: number): number =>
  used + available > 0 ? Math.ceil((100 * used) / (used + available)) : 0;

/** Only one that is off is worth a line. */
function clockText(offset = 0): string | undefined {
  if (Math.abs(offset) <= mostSkewMs) return undefined;
  return `${span(Math.abs(offset))} ${offset < 0 ? 'behind' : 'ahead of'} the broker’s`;
}

async function tag(
  client: Farhand,
  action: string,
  machine: string,
  told: string[],
  { output }: Common,
): Promise<void> {
  if (action !== 'add' && action !== 'remove' && action !== 'set')
    throw new UsageError(`tag ${action}: must be add, remove or set`);
  const words = told.flatMap((text) => collect(text));
  const machine_id = await machineNamed(client, machine);
  const { tags } = action === 'set' ? { tags: [] } : await client.machines.get({ machine_id });
  const changes = {
    add: () => [...tags, ...words],
    remove: () => tags.filter((one) => !words.includes(one)),
    set: () => words,
  };
  await printView(client, output, await client.machines.update({ machine_id, tags: changes[action]() }), one);
}
