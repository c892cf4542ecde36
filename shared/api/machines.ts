// REST routes of machines.
import * as z from 'zod';
import { list } from './define-list-route.ts';
import { single } from './define-route.ts';
import {
  allOfTags,
  deleted,
  group,
  instant,
  label,
  machineId,
  named,
  queryNumber,
  tags,
  timestamp,
} from './shared-schemas.ts';
import { machineUpgrade, upgradePolicy } from './upgrades.ts';

const machine = z.object({
  id: machineId,
  name: z.string().describe('Name of the machine; several machines may have the same name'),
  status: z.enum(['online', 'offline']).describe('`online` while the agent is connected'),
  os: z.string().meta({ description: 'Operating system, as Node names it', examples: ['linux'] }),
  arch: z.string().meta({ description: 'CPU architecture, as Node names it', examples: ['x64'] }),
  hostname: z.string().describe('Host name of the machine'),
  tags: z.array(z.string()).describe('Tags, in the order given'),
  created_at: timestamp.describe('Time when the machine joined'),
  last_seen: timestamp.describe('Time of the last message from the machine’s agent'),
});

const ahead =
  'Milliseconds by which the machine’s clock is ahead of the broker’s; absent before the first report';
const clockOffset = z.number().optional().describe(ahead);

const agentVersion = z.string().describe('Version of the machine’s agent');
const extras = ['agent_version', 'clock_offset_ms', 'upgrade'] as const;
/** A machine in a list: the fields of `machine`, and the extra fields that the parameter `include` names. */
const listItem = machine
  .extend({
    agent_version: agentVersion.optional(),
    clock_offset_ms: clockOffset,
    upgrade: machineUpgrade.optional(),
  })
  .meta({ id: 'Machine' });

const machineDetail = machine
  .extend({
    ip: z.string().describe('Address from which the agent connected'),
    agent_version: agentVersion,
    capabilities: z
      .array(z.string())
      .describe('What the machine’s owner allows the broker to do, such as `files:read`'),
    broker: z
      .object({
        id: z.string().describe('Id of the broker; a restart changes it'),
        url: z.string().describe('URL at which other brokers reach it'),
      })
      .optional()
      .describe('The broker that owns the machine; absent with a single broker, and while no broker owns it'),
    upgrade: machineUpgrade
      .optional()
      .describe('Present if the request has `include=upgrade`, or changes `agent_pin` or `agent_hold`'),
  })
  .meta({ id: 'MachineDetail' });

const space = z.object({
  total: z.number().describe('Total bytes'),
  used: z.number().describe('Bytes used'),
  free: z.number().describe('Bytes free'),
});
const available = z.number().optional().describe('Bytes free for users other than root, if known');
const disk = space.extend({ available });

const mountedDisk = disk.extend({
  mount: z.string().describe('Mount point'),
  filesystem: z.string().describe('Type of the file system'),
});
const networkInterface = z.object({
  name: z.string().describe('Name of the interface'),
  received_bytes: z.number().describe('Bytes received since boot'),
  sent_bytes: z.number().describe('Bytes sent since boot'),
});

/** Fields of a report that both `MachineStatus` and `LiveMachine` contain. */
const report = {
  uptime: z.number().describe('Seconds since the machine booted'),
  cpu: group('CPU', {
    usage: z
      .number()
      .describe('CPU use of all cores together since the last report, in percent from 0 to 100'),
    cores: z.number().describe('Number of cores'),
  }),
  memory: space.describe('Memory'),
  disk: disk.describe('File system of `/`'),
  load_average: z.array(z.number()).describe('Load of the last 1, 5 and 15 minutes'),
  recorded_at: timestamp.describe('Time of this report'),
};

const status = named('MachineStatus', {
  connected: z
    .boolean()
    .describe('True while the agent is connected; otherwise all values are the last known ones'),
  last_ping: timestamp.describe('Time of the last message from the machine’s agent'),
  ...report,
  disks: z.array(mountedDisk).describe('Mounted file systems'),
  network: z.array(networkInterface).describe('Network interfaces'),
  agent: group('Memory and running time of the agent’s own process', {
    rss: z.number().describe('Bytes of memory that the agent uses'),
    uptime: z.number().describe('Seconds since the start of the agent'),
  }),
  clock_offset_ms: clockOffset,
  stale_ms: z.number().describe('Milliseconds since the machine last sent anything'),
});

/** A machine with its last report, as `GET /machines/statuses` and live updates send it. */
export const liveMachine = machine
  .extend({
    agent_version: agentVersion,
    latest: z
      .object(report)
      .nullable()
      .describe('Last report; null: none yet, or the machine’s owner does not allow reports'),
    stale_ms: z.number().describe('Milliseconds since the machine last sent anything'),
  })
  .meta({ id: 'LiveMachine' });

const percent = z.array(z.number().nullable());
const listedStatus = liveMachine
  .extend({
    hour: group(
      'The last hour, a point for each minute, oldest first. When the broker restarts, it takes the earlier points from the stored history, which has one point per 5 minutes',
      {
        cpu: percent.describe('CPU in percent; null: no report in that minute'),
        memory: percent.describe('Memory in use in percent; null: no report in that minute'),
      },
    ),
  })
  .meta({ id: 'ListedMachineStatus' });

const point = z.object({
  at: timestamp.describe('Start of the period that the point covers'),
  cpu_usage: z.number().describe('CPU use of all cores together, in percent from 0 to 100'),
  memory_used: z.number().describe('Bytes of memory in use'),
  memory_total: z.number().describe('Total bytes of memory'),
  disk_used: z.number().describe('Bytes in use on the file system of `/`'),
  disk_total: z.number().describe('Size of the file system of `/` in bytes'),
  load_average: z.number().describe('Load of the last minute'),
});

const metrics = named('MachineMetrics', {
  since: timestamp.describe('Start of the period. `points` contains averages of the reports in this period'),
  until: timestamp.describe('End of the period; reports from this time on are left out'),
  step: z.number().describe('Seconds per point'),
  points: z.array(point).describe('Averages, oldest first'),
});

/** Returns the extra fields that are named in a value of the parameter `include`, such as `upgrade,agent_version`. */
export const includedIn = (text = ''): (typeof extras)[number][] =>
  extras.filter((field) => text.split(',').includes(field));

const areExtras = (text: string): boolean => includedIn(text).length === text.split(',').length;
const include = z
  .string()
  .max(200)
  .refine(areExtras, `must be a comma-separated list of ${extras.join(', ')}`);

const selection = {
  tags: allOfTags,
  search: z
    .string()
    .max(200)
    .optional()
    .describe('Only machines whose name contains this text, ignoring case'),
};
const sortable = ['name', 'hostname', 'status', 'created_at', 'last_seen'] as const;

export const machines = {
  list: list('/machines', 'machines:read', {
    summary: 'List machines',
    query: {
      ...selection,
      include: include.optional().describe(`More fields of each item, comma-separated: ${extras.join(', ')}`),
    },
    sort: sortable,
    reply: listItem,
  }),
  // Must come before the route of one machine, whose path /machines/{machine_id} also matches /machines/statuses.
  statuses: list('/machines/statuses', 'machines:read', {
    summary: 'List machines with their last report, and their CPU and memory use in the last hour',
    description:
      'Takes the same filters as `GET /machines`. `cpu`, `memory` and `disk` sort by percent in use.',
    query: selection,
    sort: [...sortable, 'cpu', 'memory', 'disk'],
    fields: machine,
    reply: listedStatus,
  }),
  get: single('GET', '/machines/{machine_id}', 'machines:read', {
    summary: 'Get a machine',
    query: { include: z.literal('upgrade').optional().describe('More fields: upgrade') },
    reply: machineDetail,
  }),
  status: single('GET', '/machines/{machine_id}/status', 'machines:read', {
    summary: 'Get the use of CPU, memory, disk and network of a machine',
    description:
      'Answers the current values. For an offline machine it answers the last known values, with `connected: false`.',
    reply: status,
  }),
  metrics: single('GET', '/machines/{machine_id}/metrics', 'machines:read', {
    summary: 'Get the metrics history of a machine',
    description: 'The broker stores one point per 5 minutes, for 48 hours.',
    query: {
      since: instant.optional().describe('Start of the period; default: 48 hours before its end'),
      until: instant.optional().describe('End of the period; default: now'),
      step: queryNumber(1, 604_800).optional().describe('Seconds per point; default: as stored'),
    },
    reply: metrics,
  }),
  update: single('PATCH', '/machines/{machine_id}', 'machines:write', {
    summary: 'Rename or retag a machine, or set the limits of its agent upgrades',
    description:
      'A change of tags needs the scope `admin` if any API key is limited by tags, or if a schedule uses a tag that is added or removed. A key that is limited to some machines cannot change tags.',
    body: z.strictObject({
      name: label(1, 100).optional().describe('New name'),
      tags: tags.optional().describe('New tags, which replace all old ones'),
      ...upgradePolicy,
    }),
    example: { name: 'web-1', tags: ['web', 'eu'] },
    reply: machineDetail,
  }),
  remove: single('DELETE', '/machines/{machine_id}', 'machines:write', {
    summary: 'Remove a machine',
    description:
      'The machine’s agent stops for good. The machine’s schedules are deleted, and its history stays.',
    reply: deleted,
    confirmed: true,
  }),
};
