// The verbs farhand inventory and farhand machines inventory: print facts about machines as text, CSV or an
// Ansible inventory.
import type { Command } from 'commander';
import { definedFields } from '../../shared/defined-fields.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { verb } from './declare-verb.ts';
import { type Cell, clean, counted, hint, print, record, size, when } from './print.ts';
import { writeNow } from './stdout-stderr-and-exit.ts';
import { printView, routeVerb } from './verb-from-route.ts';

type Inventory = Awaited<ReturnType<Farhand['inventory']['get']>>;
type Listed = Awaited<ReturnType<Farhand['inventory']['list']>>['items'][number];

export function addMachineInventory(machines: Command): void {
  routeVerb(machines, 'inventory', 'inventory', 'get', {
    examples: ['', '--refresh', '-o json'],
    flags: {
      '--refresh':
        'make the machine collect its inventory now (default: print the inventory that it collected last)',
    },
    text: inventoryText,
  });
}

const spec = {
  about: 'list machines with their inventory, or find a package on them',
  examples: [
    'farhand inventory --package openssl --version-below 3.0.15',
    'farhand inventory --refresh --format csv > machines.csv',
    'farhand inventory --tags web --format ansible > hosts.json',
  ],
  flags: {
    '--package <name>': 'only machines with this package',
    '--version-below <version>': 'with --package: only versions older than this one',
    '--tags <list>': 'only machines with all of these tags, comma-separated',
    '--refresh': 'make online machines collect their inventory first',
    '--format <table|csv|ansible>': 'print a table (default), CSV, or an inventory file of Ansible',
  },
} as const;

export function addInventory(program: Command): void {
  verb(program, 'inventory', spec, async (client, { format, output, ...options }) => {
    const { package: name, versionBelow: version_below, tags, refresh } = options;
    const only = { package: name, version_below, tags: tags?.join(',') };
    const query = definedFields({ ...only, refresh: refresh && ('true' as const) });
    const items = await Array.fromAsync(client.inventory.list({ ...query, limit: 100 }));
    if (name !== undefined) await warnOfMissing(client, only.tags, refresh);
    if (format === 'csv') return writeNow('stdout', csvOf(items));
    if (format === 'ansible') return print('json', ansibleOf(items), () => []);
    const version = name === undefined ? '' : 'version ';
    await printView(client, output, items, {
      fields: `machine=machine_name system kernel updates reboot ${version}collected=collected_at`,
      cells: {
        system: ({ facts }) => facts?.os_name,
        kernel: ({ facts }) => facts?.kernel,
        reboot: ({ facts }) => facts?.reboot_required,
        version: versionsOf,
      },
    });
  });
}

/** Warns of machines without an inventory, because a search for a package does not find them. */
async function warnOfMissing(client: Farhand, tags?: string, refresh?: boolean): Promise<void> {
  const { total, without_inventory } = await client.inventory.list({ ...definedFields({ tags }), limit: 1 });
  const next = refresh
    ? 'a machine sends its inventory only while it is online, and only if its owner allows that (capability "inventory" of the agent’s option --allow)'
    : 'add --refresh to collect it';
  const have = `${without_inventory} of ${counted(total)} ${without_inventory === 1 ? 'has' : 'have'}`;
  if (without_inventory > 0) hint(`farhand: ${have} no inventory; ${next}`);
}

const versionsOf = ({ packages }: Listed): string => packages.map(({ version }) => version).join(' ');

type Row = [name: string, text: string];

/** Maximum number of updates whose names are printed. */
const mostNames = 20;

function inventoryText(found: Inventory): Promise<string> {
  const { disks, interfaces, updates, ports, failed_units, containers, incomplete } = found;
  const names = updates.slice(0, mostNames).map(({ name }) => name);
  if (updates.length > mostNames) names.push('…');
  const rows: Row[] = [
    ...disks.map((one): Row => [`disk ${one.name}`, `${size(one.size_bytes)} ${one.model}`]),
    ...interfaces.map((one): Row => [`network ${one.name}`, `${one.state} ${one.addresses.join(' ')}`]),
    ...ports.map((one): Row => [`port ${one.protocol} ${one.address} ${one.port}`, one.process]),
    ...failed_units.map((one): Row => [`failed ${one.name}`, one.description]),
    ...containers.map((one): Row => [`container ${one.name}`, `${one.state} ${one.image}`]),
    ...incomplete.map((one): Row => [`incomplete ${one.part}`, one.reason]),
  ];
  return record({
    collected: when(found.collected_at),
    host: found.hostname,
    system: found.os_name,
    kernel: `${found.kernel} ${found.arch}`.trim(),
    processor: `${found.cpu_model || 'unknown model'}, ${found.cpu_cores} cores`,
    memory: `${size(found.memory_bytes)}, swap ${size(found.swap_bytes)}`,
    virtualization: found.virtualization,
    booted: when(found.booted_at),
    'reboot required': found.reboot_required,
    packages: `${found.packages.length} (${found.package_format ?? 'no known package manager'})`,
    updates: [updates.length, ...names].join(' '),
    ...Object.fromEntries(rows),
  });
}

// ---- CSV and Ansible

/** Returns the items as CSV (RFC 4180) with a heading. */
function csvOf(items: readonly Listed[]): string {
  const rows = items.map((item) => {
    const { machine_id, machine_name, ip, tags, collected_at, updates, facts } = item;
    const { os_id, os_version, os_name, kernel, arch, hostname, cpu_model, cpu_cores } = facts ?? {};
    const { memory_bytes, virtualization, booted_at, reboot_required } = facts ?? {};
    return {
      ...{ machine_id, machine_name, ip, tags: tags.join(' '), collected_at, os_id, os_version, os_name },
      ...{ kernel, arch, hostname, cpu_model, cpu_cores, memory_bytes, virtualization, booted_at },
      ...{ reboot_required, updates, packages: versionsOf(item) },
    };
  });
  const lines = [Object.keys(rows[0] ?? {}), ...rows.map((row) => Object.values(row))];
  return lines.map((line) => `${line.map(csvCell).join(',')}\r\n`).join('');
}

/**
 * Escapes a text from a machine for CSV. A text that starts like a formula gets an apostrophe in front, because a
 * spreadsheet would run the formula.
 */
function csvCell(value: Cell): string {
  const text = clean(String(value ?? ''));
  return `"${/^[=+\-@]/.test(text) ? "'" : ''}${text.replaceAll('"', '""')}"`;
}

/**
 * Makes a file for Ansible's inventory plugin `yaml`, which also reads JSON. Its groups are tags and
 * operating systems.
 */
function ansibleOf(items: readonly Listed[]): object {
  const groups = new Map<string, Record<string, object>>();
  const hosts: Record<string, object> = {};
  for (const { machine_id, machine_name, ip, tags, facts, updates } of items) {
    // Ansible reads a name such as web[1:3] as several hosts, so characters such as [ and : are replaced.
    const name = machine_name.replaceAll(/[^\w.-]/g, '_');
    const host = Object.hasOwn(hosts, name) ? `${name}-${machine_id}` : name;
    const of = { os: facts?.os_id, os_version: facts?.os_version, arch: facts?.arch };
    const texts = Object.entries(of).flatMap(([key, text]): Row[] =>
      text ? [[`farhand_${key}`, withoutTemplates(text)]] : [],
    );
    hosts[host] = {
      ...{ ansible_host: withoutTemplates(ip), farhand_machine_id: machine_id },
      ...(updates !== null && { farhand_updates: updates }),
      ...Object.fromEntries(texts),
    };
    const own = [...tags.map((tag) => `tag_${tag}`), ...(facts?.os_id ? [`os_${facts.os_id}`] : [])];
    for (const group of own.map((text) => text.replaceAll(/\W/g, '_')))
      groups.set(group, { ...groups.get(group), [host]: {} });
  }
  const children = Object.fromEntries([...groups].map(([group, members]) => [group, { hosts: members }]));
  return { all: { hosts, children } };
}

/** Replaces braces by underscores, because Ansible runs templates in braces and these texts come from machines. */
const withoutTemplates = (text: string): string => text.replaceAll(/[{}]/g, '_');
