// The verbs of farhand machines: list, inspect, tag, rename and remove machines.
import type { Command } from 'commander';
import { mostSkewMs } from '../../shared/clock.ts';
import { percentUsed } from '../../shared/percent-used.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { list, verb } from './declare-verb.ts';
import { findMachine } from './find-by-name.ts';
import { addMachineInventory } from './inventory.ts';
import { record, size, span, when } from './print.ts';
import { addMachineUpgrade } from './upgrades.ts';
import { printView, routeVerb } from './verb-from-route.ts';

type Machine = Awaited<ReturnType<Farhand['machines']['get']>>;

const cells = {
  system: ({ os, arch }: Pick<Machine, 'os' | 'arch'>) => `${os} ${arch}`,
  seen: ({ status, last_seen }: Pick<Machine, 'status' | 'last_seen'>) =>
    status === 'online' ? 'now' : when(last_seen),
  tags: ({ tags }: Pick<Machine, 'tags'>) => tags.join(','),
};

type Listed = Awaited<ReturnType<Farhand['machines']['statuses']>>['items'][number];

const loads = {
  cpu: ({ latest }: Listed) => latest && `${Math.round(latest.cpu.usage)} %`,
  memory: ({ latest }: Listed) => latest && percent(latest.memory),
  disk: ({ latest }: Listed) => latest && percent(latest.disk),
  load: ({ latest }: Listed) => latest?.load_average[0]?.toFixed(2),
  up: ({ latest }: Listed) => latest && span(latest.uptime * 1000),
};

const selection = {
  '--tags <list>': 'only machines with all of these tags, comma-separated',
  '--status <online|offline>': 'only machines with this status',
  '--search <text>': 'only machines with this text in their name',
};

export function addMachines(program: Command): void {
  const machines = program.command('machines').description('manage machines, by name or id');
  routeVerb(machines, 'list', 'machines', 'list', {
    examples: ['--tags web --status online', '-o json'],
    flags: selection,
    defaults: { include: 'agent_version', sort: 'name' },
    view: { fields: 'name id status os=system version=agent_version tags last_seen=seen', cells },
  });
  routeVerb(machines, 'get', 'machines', 'get');
  routeVerb(machines, 'statuses', 'machines', 'statuses', {
    about: 'list machines with their CPU, memory and disk usage',
    examples: ['--sort -cpu --limit 10', '--tags web'],
    flags: {
      ...selection,
      '--sort <field>': 'field to sort by, such as -cpu, -memory, -disk or name (default: name)',
      '--limit <count>': 'print at most COUNT machines (default: 50)',
    },
    defaults: { sort: 'name' },
    view: { fields: 'name status cpu memory disk load up last_seen=seen', cells: { ...cells, ...loads } },
  });
  routeVerb(machines, 'tags', 'tags', 'list', {
    flags: { '--search <text>': 'only tags that contain this text' },
    view: { fields: 'name machines' },
  });
  routeVerb(machines, 'status', 'machines', 'status', { text: statusText });
  addMachineInventory(machines);
  addMachineUpgrade(machines);
  const tag = {
    about: 'add, remove or replace the tags of a machine',
    examples: ['add web-1 web,eu', 'remove web-1 eu', 'set web-1 db'].map(
      (rest) => `farhand machines tag ${rest}`,
    ),
  };
  verb(
    machines,
    'tag <add|remove|set> <machine> <tags...>',
    tag,
    async (client, action, machine, texts, options) => {
      const words = texts.flatMap((text) => list(text));
      const machine_id = await findMachine(client, machine);
      const { tags } = action === 'set' ? { tags: [] } : await client.machines.get({ machine_id });
      const changed = action === 'remove' ? tags.filter((one) => !words.includes(one)) : [...tags, ...words];
      const answer = await client.machines.update({ machine_id, tags: changed });
      await printView(client, options.output, answer);
    },
  );
  routeVerb(machines, 'rename <name>', 'machines', 'update', {
    about: 'rename a machine',
    examples: ['web-2'],
  });
  routeVerb(machines, 'remove', 'machines', 'remove', {
    about: 'remove a machine; its agent stops for good, and its history stays',
    destroys: ['stop the agent for good and remove the machine', 'removed'],
  });
}

type Status = Awaited<ReturnType<Farhand['machines']['status']>>;
type Disk = Status['disks'][number];

function statusText(now: Status): Promise<string> {
  const part = (space: { used: number; total: number }): string =>
    `${size(space.used)} of ${size(space.total)} (${percent(space)})`;
  const disk = (space: Disk): string =>
    space.available === undefined
      ? part(space)
      : `${size(space.used)} used, ${size(space.available)} available of ${size(space.total)} (${percent(space)})`;
  return record({
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

const percent = (space: Parameters<typeof percentUsed>[0]): string =>
  `${Math.ceil(percentUsed(space) ?? 0)} %`;

/** Returns the offset of a machine's clock from the broker's; undefined if the clocks nearly agree. */
function clockText(offset = 0): string | undefined {
  if (Math.abs(offset) <= mostSkewMs) return undefined;
  return `${span(Math.abs(offset))} ${offset < 0 ? 'behind' : 'ahead of'} the broker’s`;
}
