// Machines over REST (spec 2.2, 2.3, 4.1).
import * as z from 'zod';
import { list } from './list.ts';
import { instant, label, machineId, queryNumber, single, tags, timestamp } from './route.ts';

const machine = z.object({
  id: machineId,
  name: z.string(),
  status: z.enum(['online', 'offline']),
  os: z.string().meta({ examples: ['linux'] }),
  arch: z.string().meta({ examples: ['x64'] }),
  hostname: z.string(),
  tags: z.array(z.string()),
  created_at: timestamp,
  last_seen: timestamp,
});

const clockOffset = z
  .number()
  .optional()
  .describe('The machine’s clock minus the broker’s at its last report; absent where there was none');

const extras = ['agent_version', 'clock_offset_ms'] as const;
/** Items are exactly the spec's unless more is included. */
const listItem = machine
  .extend({ agent_version: z.string().optional(), clock_offset_ms: clockOffset })
  .meta({ id: 'Machine' });

const machineDetail = machine
  .extend({
    ip: z.string().describe('The address the agent connected from'),
    agent_version: z.string(),
    capabilities: z.array(z.string()).describe('What the machine’s owner lets the agent do'),
  })
  .meta({ id: 'MachineDetail' });

const space = z.object({ total: z.number(), used: z.number(), free: z.number() });
const disk = space.extend({
  available: z.number().optional().describe('Free for others than root; absent where the agent is older'),
});

const status = z
  .object({
    connected: z.boolean(),
    uptime: z.number().describe('Seconds'),
    last_ping: timestamp,
    cpu: z.object({
      usage: z.number().describe('Percent of all cores, 0 to 100'),
      cores: z.number(),
    }),
    memory: space.describe('Bytes'),
    disk: disk.describe('Bytes, the file system of /'),
    load_average: z.array(z.number()),
    disks: z.array(disk.extend({ mount: z.string(), filesystem: z.string() })),
    network: z.array(z.object({ name: z.string(), received_bytes: z.number(), sent_bytes: z.number() })),
    agent: z.object({ rss: z.number(), uptime: z.number() }),
    recorded_at: timestamp,
    clock_offset_ms: clockOffset,
    stale_ms: z.number().describe('Age of the last byte heard from the machine'),
  })
  .meta({ id: 'MachineStatus' });

const metrics = z
  .object({
    since: timestamp,
    until: timestamp,
    step: z.number().describe('Seconds'),
    points: z.array(
      z.object({
        at: timestamp,
        cpu_usage: z.number(),
        memory_used: z.number(),
        memory_total: z.number(),
        disk_used: z.number(),
        disk_total: z.number(),
        load_average: z.number(),
      }),
    ),
  })
  .meta({ id: 'MachineMetrics' });

/** The fields that a list's `include` names. */
export const includedIn = (text = ''): (typeof extras)[number][] =>
  extras.filter((field) => text.split(',').includes(field));

export const machines = {
  list: list('/machines', 'machines:read', {
    summary: 'List machines',
    query: {
      tags: z.string().max(4096).optional().describe('Comma-separated; a machine must have all of them'),
      search: z.string().max(200).optional().describe('Part of the name, case ignored'),
      include: z
        .string()
        .max(200)
        .refine(
          (text) => includedIn(text).length === text.split(',').length,
          `must be of ${extras.join(', ')}`,
        )
        .optional()
        .describe(`Comma-separated fields that items have besides: ${extras.join(', ')}`),
    },
    sort: ['name', 'hostname', 'status', 'created_at', 'last_seen'],
    reply: listItem,
  }),
  get: single('GET', '/machines/{machine_id}', 'machines:read', {
    summary: 'Get a machine',
    reply: machineDetail,
  }),
  status: single('GET', '/machines/{machine_id}/status', 'machines:read', {
    summary: 'Live CPU, memory, disk and network of a machine; the last known ones when it is offline',
    reply: status,
  }),
  metrics: single('GET', '/machines/{machine_id}/metrics', 'machines:read', {
    summary: 'History of a machine’s metrics, 48 h at 5 minutes',
    query: {
      since: instant.optional(),
      until: instant.optional(),
      step: queryNumber(1, 604_800).optional().describe('Seconds per point; averages are taken'),
    },
    reply: metrics,
  }),
  update: single('PATCH', '/machines/{machine_id}', 'machines:write', {
    summary: 'Rename or retag a machine',
    body: z.strictObject({ name: label(1, 100).optional(), tags: tags.optional() }),
    reply: machineDetail,
  }),
  remove: single('DELETE', '/machines/{machine_id}', 'machines:write', {
    summary: 'Remove a machine: its link closes, its agent stops for good, its history stays',
    reply: z.object({ deleted: z.boolean() }),
  }),
};
