// REST routes of maintenance windows, in which alerts are held back.
import * as z from 'zod';
import { list } from './define-list-route.ts';
import { single } from './define-route.ts';
import {
  day,
  deleted,
  instant,
  label,
  machineId,
  milliseconds,
  named,
  tagList,
  timestamp,
  windowId,
} from './shared-schemas.ts';

const described = {
  machine_ids: 'Ids of machines whose alerts are held back; null: `tags` selects the machines',
  tags: 'Alerts of machines that have at least one of these tags are held back too. If `tags` and `machine_ids` are both null, the alerts of all machines are held back',
  starts_at: 'Start of a window without `cron`, which is open only once; default: now',
  ends_at: 'End of a window without `cron`',
  cron: 'Cron expression of the start times; null: the window is open only once',
  timezone: 'IANA time zone of the expression; default: UTC',
  duration: 'Milliseconds for which the window is open after each start',
};

const maintenanceWindow = named('MaintenanceWindow', {
  id: windowId,
  name: z.string().describe('Name'),
  machine_ids: z.array(z.string()).nullable().describe(described.machine_ids),
  tags: z.array(z.string()).nullable().describe(described.tags),
  starts_at: timestamp.nullable().describe(described.starts_at),
  ends_at: timestamp.nullable().describe(described.ends_at),
  cron: z.string().nullable().describe(described.cron),
  timezone: z.string().describe(described.timezone),
  duration: z.number().nullable().describe(described.duration),
  active_until: timestamp.nullable().describe('End of the window if it is open now; null if it is not'),
  next_start: timestamp
    .nullable()
    .describe('Next time when the window starts; null if it does not start again'),
  created_at: timestamp.describe('Time of creation'),
});

export const maintenanceWindows = {
  list: list('/alerts/windows', 'machines:read', {
    summary: 'List maintenance windows',
    description: 'A key that is limited to certain machines sees only windows of these machines.',
    sort: ['name', 'created_at'],
    reply: maintenanceWindow,
  }),
  create: single('POST', '/alerts/windows', 'webhooks:write', {
    summary: 'Create a maintenance window, in which alerts are held back',
    description:
      'A window takes place once, until `ends_at` or for `duration`. With `cron` it takes place repeatedly, each time for `duration`. Alerts during a window have the status `held`. They open at the end of the window if their condition still holds.',
    body: z.strictObject({
      name: label(1, 100).describe('Name'),
      machine_ids: z.array(machineId).min(1).max(1000).optional().describe(described.machine_ids),
      tags: tagList(1).optional().describe(described.tags),
      starts_at: instant.optional().describe(described.starts_at),
      ends_at: instant.optional().describe(described.ends_at),
      cron: z
        .string()
        .optional()
        .meta({ description: described.cron, examples: ['0 3 * * sun'] }),
      timezone: z.string().default('UTC').describe(described.timezone),
      duration: milliseconds(60_000, 31 * day)
        .optional()
        .describe(described.duration),
    }),
    example: { name: 'updates', tags: ['web'], cron: '0 3 * * sun', duration: 7_200_000 },
    reply: maintenanceWindow,
    status: 201,
    idempotency: 'replay',
  }),
  get: single('GET', '/alerts/windows/{window_id}', 'machines:read', {
    summary: 'Get a maintenance window',
    reply: maintenanceWindow,
  }),
  remove: single('DELETE', '/alerts/windows/{window_id}', 'webhooks:write', {
    summary: 'Delete a maintenance window; if it is open, it ends now',
    reply: deleted,
  }),
};
