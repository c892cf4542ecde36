// farhand machines: who there is, how they are, what they are called.
import type { Command } from 'commander';
import { mostSkewMs } from '../../shared/clock.ts';
import { UsageError } from '../../shared/errors.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { demandYes } from './ask.ts';
import { collect, given } from './flags.ts';
import { machineNamed } from './named.ts';
import { printFields, printTable, size, span, when } from './output.ts';
import { type Common, every, verb, withClient } from './verb.ts';

export function addMachines(program: Command): void {
  const machines = program.command('machines').description('machines, by name or id');
  verb(
    machines,
    'list',
    'all machines',
    'farhand machines list --tag web --status online',
    'farhand machines list -o json',
  )
    .option('--tag <tag>', 'only those with this tag; several times: with all of them', collect)
    .option('--status <status>', 'online or offline')
    .option('--search <text>', 'part of the name')
    .action(withClient(list));
  verb(machines, 'get <machine>', 'one machine', 'farhand machines get web-1').action(withClient(get));
  verb(
    machines,
    'status <machine>',
    'how it is now: processor, memory, disks, network',
    'farhand machines status web-1',
  ).action(withClient(status));
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
  verb(
    machines,
    'rename <machine> <name>',
    'give it another name',
    'farhand machines rename web-1 web-2',
  ).action(withClient(rename));
  verb(
    machines,
    'remove <machine>',
    'remove it: its agent stops for good, its history stays',
    'farhand machines remove web-1 --yes',
  )
    .option('--yes', 'do not ask')
    .action(withClient(remove));
}

interface ListOptions extends Common {
  tag?: string[];
  status?: string;
  search?: string;
}

async function list(client: Farhand, { tag, status, search, output }: ListOptions): Promise<void> {
  const known = (['online', 'offline'] as const).find((one) => one === status);
  if (status !== undefined && !known) throw new UsageError(`--status ${status}: must be online or offline`);
  const wish = given({ status: known, search, tags: tag?.join(',') });
  const all = await every((page) =>
    client.machines.list({ ...wish, include: 'agent_version', sort: 'name', ...page }),
  );
  await printTable(output, all, {
    name: ({ name }) => name,
    id: ({ id }) => id,
    status: (one) => one.status,
    os: ({ os, arch }) => `${os} ${arch}`,
    version: ({ agent_version }) => agent_version,
    tags: ({ tags }) => tags.join(','),
    'last seen': (one) => (one.status === 'online' ? 'now' : when(one.last_seen)),
  });
}

type Machine = Awaited<ReturnType<Farhand['machines']['get']>>;

async function get(client: Farhand, machine: string, { output }: Common): Promise<void> {
  await show(output, await client.machines.get({ machine_id: await machineNamed(client, machine) }));
}

async function show(output: Common['output'], one: Machine): Promise<void> {
  await printFields(output, one, {
    id: one.id,
    name: one.name,
    status: one.status,
    hostname: one.hostname,
    system: `${one.os} ${one.arch}`,
    tags: one.tags.join(','),
    address: one.ip,
    agent: one.agent_version,
    capabilities: one.capabilities.join(', '),
    joined: one.created_at,
    'last seen': one.last_seen,
  });
}

async function status(client: Farhand, machine: string, { output }: Common): Promise<void> {
  const now = await client.machines.status({ machine_id: await machineNamed(client, machine) });
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
  await printFields(output, now, {
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
  await show(output, await client.machines.update({ machine_id, tags: changes[action]() }));
}

async function rename(client: Farhand, machine: string, name: string, { output }: Common): Promise<void> {
  const machine_id = await machineNamed(client, machine);
  await show(output, await client.machines.update({ machine_id, name }));
}

async function remove(client: Farhand, machine: string, options: Common & { yes?: boolean }): Promise<void> {
  const machine_id = await machineNamed(client, machine);
  await demandYes(options.yes, `remove ${machine} and stop its agent for good`);
  const answer = await client.machines.remove({ machine_id });
  await printFields(options.output, answer, { removed: machine });
}
