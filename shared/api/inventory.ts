// REST routes of inventories: facts about machines and what runs on them. Also the limits of the data that agents send.
import * as z from 'zod';
import { paging } from './define-list-route.ts';
import { build, inPieces, single } from './define-route.ts';
import { machineErrors } from './route.ts';
import { allOfTags, machineId, named, queryBoolean, text, timestamp } from './shared-schemas.ts';

const word = (about: string) => text(256).describe(about);
const amount = (about: string) => z.number().min(0).max(Number.MAX_SAFE_INTEGER).describe(about);

const packageFormat = z.enum(['deb', 'rpm', 'apk', 'pacman']);
export type PackageFormat = z.output<typeof packageFormat>;

/** Facts that have the same form in the agent's message and in the API. */
export const systemFacts = z.object({
  os_id: word('Distribution, as ID of os-release: `debian`'),
  os_version: word('Version of the distribution, as VERSION_ID of os-release; empty if it has none'),
  os_name: word('Full name of the distribution, as PRETTY_NAME of os-release'),
  kernel: word('Release of the kernel, as `uname -r`'),
  arch: word('Architecture, as `uname -m`'),
  hostname: word('Host name'),
  cpu_model: word('Model of the processor; empty if the kernel does not name it'),
  cpu_cores: amount('Number of logical processors'),
  memory_bytes: amount('Bytes of memory'),
  swap_bytes: amount('Bytes of swap space'),
  virtualization: word(
    'Virtualization as systemd-detect-virt names it, such as `kvm` or `docker`; `none` on a physical machine',
  ),
});

const facts = systemFacts.extend({
  booted_at: timestamp.describe('Time of the last boot, by the machine’s clock'),
  reboot_required: z
    .boolean()
    .nullable()
    .describe('True if the machine needs a restart; null if it has no information about that'),
  package_format: packageFormat
    .nullable()
    .describe('Rule by which versions are compared; null: no known package manager'),
});

const installed = z.object({
  name: word('Name of the package'),
  version: word('Version, with epoch and release if it has them'),
  arch: word('Architecture of the package; empty if the package manager does not name it'),
});

/** The lists of an inventory. Each `max` is the maximum number of items. */
export const inventoryLists = z.object({
  disks: z
    .array(
      z.object({
        name: word('Name of the device: `sda`'),
        size_bytes: amount('Size in bytes'),
        model: word('Model of the disk; empty if the disk reports none'),
        rotational: z.boolean().describe('True for a disk that rotates'),
      }),
    )
    .max(256)
    .describe('Disks, without partitions'),
  interfaces: z
    .array(
      z.object({
        name: word('Name: `eth0`'),
        mac: word('Hardware address'),
        addresses: z.array(text(64)).max(64).describe('Addresses with prefix length, such as `10.0.0.5/24`'),
        state: word('`up`, `down` or `unknown`'),
      }),
    )
    .max(256)
    .describe('Network interfaces, without the loopback'),
  packages: z.array(installed).max(20_000).describe('Installed packages'),
  updates: z
    .array(
      z.object({
        name: word('Name of the package'),
        installed: word('Installed version'),
        available: word('Version that the machine’s package lists offer'),
      }),
    )
    .max(5_000)
    .describe('Pending updates, according to the package lists that the machine fetched last'),
  ports: z
    .array(
      z.object({
        protocol: z.enum(['tcp', 'udp']).describe('Protocol'),
        address: word('Address on which the program listens; `0.0.0.0` and `::` stand for all addresses'),
        port: z.number().min(0).max(65_535).describe('Port'),
        process: word('Name of the process; empty if the agent may not see it'),
        pid: amount('Id of the process; 0 if the agent may not see it'),
      }),
    )
    .max(2_000)
    .describe('Ports that programs listen on'),
  failed_units: z
    .array(z.object({ name: word('Name of the unit'), description: word('Description of the unit') }))
    .max(500)
    .describe('Units of systemd that have failed'),
  containers: z
    .array(
      z.object({
        id: word('First characters of the id of the container'),
        name: word('Name'),
        image: word('Image'),
        state: word('State of the container, such as `running` or `exited`'),
      }),
    )
    .max(1_000)
    .describe('Containers of Docker and Podman, if the agent may use their socket'),
  incomplete: z
    .array(
      z.object({
        part: word('Name of the incomplete part, such as `packages`'),
        reason: word('Why this part of the inventory is not complete'),
      }),
    )
    .max(64)
    .describe('Parts that could not be read or are incomplete'),
});

const collectedAt = timestamp.describe('Time of the collection');

const machineInventory = named('Inventory', {
  machine_id: machineId,
  collected_at: collectedAt,
  ...facts.shape,
  ...inventoryLists.shape,
});

const listItem = named('ListedInventory', {
  machine_id: machineId,
  machine_name: z.string().describe('Name of the machine'),
  ip: z.string().describe('Address from which the agent connected'),
  tags: z.array(z.string()).describe('Tags of the machine'),
  collected_at: collectedAt.nullable().describe('Time of the collection; null: no collection yet'),
  facts: facts.nullable().describe('Facts about the machine; null: no collection yet'),
  updates: z.number().nullable().describe('Number of pending updates; null: no collection yet'),
  packages: z.array(installed).describe('Packages that the parameter `package` selected'),
});

export const inventory = {
  get: single('GET', '/machines/{machine_id}/inventory', 'machines:read', {
    summary: 'Get the inventory of a machine',
    description:
      'Returns the inventory that the machine collected at `collected_at`. If there is none yet, or with `refresh=true`, the machine collects a new one first.',
    query: { refresh: queryBoolean.optional().describe('True to collect now') },
    ...inPieces(machineInventory, 'packages'),
    errors: machineErrors,
    waits: true,
  }),
  list: {
    ...build('list', 'GET', '/inventory', 'machines:read', {
      summary: 'List machines with their inventory, or find a package on them',
      description:
        'Returns the inventory that each machine collected last. With `package`, lists only machines that have this package. Versions are compared by the rule of each machine’s distribution. If `version_below` has no epoch, the epochs of packages are ignored.',
      query: {
        package: text(256).min(1).optional().describe('Only machines with the package of this name'),
        version_below: text(256)
          .min(1)
          .optional()
          .describe('With `package`: only versions older than this one'),
        tags: allOfTags,
        refresh: queryBoolean
          .optional()
          .describe(
            'True to make online machines collect their inventory first. The request waits at most 2 minutes for them. With an `offset` above 0, `refresh` has no effect: only the request for the first page makes machines collect',
          ),
        ...paging(['machine_name', 'collected_at'], 'machine_name'),
      },
      reply: listItem,
      waits: true,
    }),
    listMeta: z.object({
      without_inventory: z
        .int()
        .describe(
          'Number of machines that have the `tags` but no inventory: they never sent one, or their owner no longer allows it. A search for a `package` cannot find these machines',
        ),
    }),
  },
};
