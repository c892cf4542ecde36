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

const clockOffset = z.number().optional().meta({
  description: 'The machine’s clock minus the broker’s at its last report; absent where there was none',
});

const extras = ['agent_version', 'clock_offset_ms'] as const;
/** Items are exactly the spec's unless more is included. */
const listItem = machine
  .extend({ agent_version: z.string().optional(), clock_offset_ms: clockOffset })
  .meta({ id: 'Machine' });

const machineDetail = machine
  .extend({
    ip: z.string().meta({ description: 'The address the agent connected from' }),
    agent_version: z.string(),
    capabilities: z.array(z.string()).meta({ description: 'What the machine’s owner lets the agent do' }),
  })
  .meta({ id: 'MachineDetail' });

const space = z.object({ total: z.number(), used: z.number(), free: z.number() });
const disk = space.extend({
  available: z
    .number()
    .optional()
    .meta({ description: 'Free for others than root; absent where the agent is older' }),
});

const status = z
  .object({
    connected: z.boolean(),
    uptime: z.number().meta({ description: 'Seconds' }),
    last_ping: timestamp,
    cpu: z.object({
      usage: z.number().meta({ description: 'Percent of all cores, 0 to 100' }),
      cores: z.number(),
    }),
    memory: space.meta({ description: 'Bytes' }),
    disk: disk.meta({ description: 'Bytes, the file system of /' }),
    load_average: z.array(z.number()),
    disks: z.array(disk.extend({ mount: z.string(), filesystem: z.string() })),
    network: z.array(z.object({ name: z.string(), received_bytes: z.number(), sent_bytes: z.number() })),
    agent: z.object({ rss: z.number(), uptime: z.number() }),
    recorded_at: timestamp,
    clock_offset_ms: clockOffset,
    stale_ms: z.number().meta({ description: 'Age of the last byte heard from the machine' }),
  })
  .meta({ id: 'MachineStatus' });

const metrics = z
  .object({
    since: timestamp,
    until: timestamp,
    step: z.number().meta({ description: 'Seconds' }),
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

const params = { machine_id: machineId };

/** The fields that a list's `include` names. */
export const includedIn = (text = ''): (typeof extras)[number][] =>
  extras.filter((field) => text.split(',').includes(field));

export const machines = {
  list: list({
    path: '/machines',
    access: 'machines:read',
    summary: 'List machines',
    query: {
      tags: z
        .string()
        .max(4096)
        .optional()
        .meta({ description: 'Comma-separated; a machine must have all of them' }),
      search: z.string().max(200).optional().meta({ description: 'Part of the name, case ignored' }),
      include: z
        .string()
        .max(200)
        .refine(
          (text) => includedIn(text).length === text.split(',').length,
          `must be of ${extras.join(', ')}`,
        )
        .optional()
        .meta({ description: `Comma-separated fields that items have besides: ${extras.join(', ')}` }),
    },
    sort: ['name', 'hostname', 'status', 'created_at', 'last_seen'],
    defaultSort: '-created_at',
    reply: listItem,
  }),
  get: single({
    method: 'GET',
    path: '/machines/{machine_id}',
    access: 'machines:read',
    summary: 'Get a machine',
    params,
    reply: machineDetail,
  }),
  status: single({
    method: 'GET',
    path: '/machines/{machine_id}/status',
    access: 'machines:read',
    summary: 'Live CPU, memory, disk and network of a machine; the last known ones when it is offline',
    params,
    reply: status,
  }),
  metrics: single({
    method: 'GET',
    path: '/machines/{machine_id}/metrics',
    access: 'machines:read',
    summary: 'History of a machine’s metrics, 48 h at 5 minutes',
    params,
    query: {
      since: instant.optional(),
      until: instant.optional(),
      step: queryNumber(1, 604_800, 'Seconds per point; averages are taken').optional(),
    },
    reply: metrics,
  }),
  update: single({
    method: 'PATCH',
    path: '/machines/{machine_id}',
    access: 'machines:write',
    summary: 'Rename or retag a machine',
    params,
    body: z.strictObject({ name: label(1, 100).optional(), tags: tags.optional() }),
    reply: machineDetail,
  }),
  remove: single({
    method: 'DELETE',
    path: '/machines/{machine_id}',
    access: 'machines:write',
    summary: 'Remove a machine: its link closes, its agent stops for good, its history stays',
    params,
    reply: z.object({ deleted: z.boolean() }),
  }),
};
