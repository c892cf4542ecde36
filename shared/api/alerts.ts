// REST routes of alerts, and of the rules that open them.
import * as z from 'zod';
import { list } from './define-list-route.ts';
import { single } from './define-route.ts';
import {
  alertId,
  channelId,
  day,
  deleted,
  label,
  machineId,
  milliseconds,
  named,
  ruleId,
  tagList,
  text,
  timestamp,
  windowId,
} from './shared-schemas.ts';

export const alertKinds = [
  'offline',
  'cpu',
  'memory',
  'disk',
  'load',
  'schedule',
  'agent_outdated',
  'certificate',
  'key',
] as const;
export type AlertKind = (typeof alertKinds)[number];

const alertStatuses = ['held', 'open', 'acknowledged', 'resolved'] as const;

const whatKinds =
  'What the rule watches. `offline`: a machine is offline. `cpu`, `memory`, `disk`: the percentage in use is over `above`. `load`: the load average is over `above`. `schedule`: a schedule failed or did not run. `agent_outdated`: an agent is older than the broker. `certificate`, `key`: a certificate of the broker or an API key expires soon';

/** Descriptions of those fields of a rule that are optional in requests. Requests and answers share them. */
const described = {
  above: 'Value above which an alert opens: percent, or the load average of one minute',
  recover: 'Value at or below which an alert resolves; default: 90 % of `above`',
  mount:
    'For the kind `disk`: the mount point of the file system to watch, such as `/srv`, or `*` for the fullest file system that is not on a file server. Null: `/`',
  for: 'Milliseconds for which the condition must last before an alert opens; default: 300,000 for `offline`, `cpu`, `memory`, `disk` and `load`; 0 for the other kinds',
  before: 'An alert opens this many milliseconds before the certificate or key expires; default: 14 days',
  machine_ids: 'Ids of machines that the rule applies to; null: `tags` alone selects the machines',
  tags: 'Tags: the rule applies to machines with any of them, in addition to those in `machine_ids`. If both are null, it applies to all machines',
  repeat_every: 'Milliseconds after which an unacknowledged alert is repeated; null: never',
  channel_ids: 'Ids of the channels that get the alerts of this rule; null: all channels',
  enabled: 'True if the rule is evaluated',
};

const rule = named('AlertRule', {
  id: ruleId,
  name: z.string().describe('Name'),
  kind: z.enum(alertKinds).describe(whatKinds),
  above: z.number().nullable().describe(described.above),
  recover: z.number().nullable().describe(described.recover),
  mount: z.string().nullable().describe(described.mount),
  for: z.number().describe(described.for),
  before: z.number().nullable().describe(described.before),
  machine_ids: z.array(z.string()).nullable().describe(described.machine_ids),
  tags: z.array(z.string()).nullable().describe(described.tags),
  repeat_every: z.number().nullable().describe(described.repeat_every),
  channel_ids: z.array(z.string()).nullable().describe(described.channel_ids),
  enabled: z.boolean().describe(described.enabled),
  created_at: timestamp.describe('Time of creation'),
  updated_at: timestamp.describe('Time of the last change by a request'),
});

const threshold = z.number().min(0).max(1_000_000);
const changeable = {
  above: threshold.nullable().optional().describe(described.above),
  recover: threshold.nullable().optional().describe(described.recover),
  mount: z
    .string()
    .max(4096)
    .regex(/^(\*|\/|(\/[^/\0]+)+)$/, 'must be an absolute path without a slash at its end, or *')
    .nullable()
    .optional()
    .describe(described.mount),
  for: milliseconds(0, 31 * day)
    .optional()
    .describe(described.for),
  before: milliseconds(0, 366 * day)
    .nullable()
    .optional()
    .describe(described.before),
  machine_ids: z.array(machineId).min(1).max(1000).nullable().optional().describe(described.machine_ids),
  tags: tagList(1).nullable().optional().describe(described.tags),
  repeat_every: milliseconds(60_000, 31 * day)
    .nullable()
    .optional()
    .describe(described.repeat_every),
  channel_ids: z.array(channelId).max(100).nullable().optional().describe(described.channel_ids),
  enabled: z.boolean().optional().describe(described.enabled),
};

const name = label(1, 100).describe('Name');

const ofItsMachines =
  'A key that is limited to certain machines sees and changes only rules about these machines.';

export const alertRules = {
  list: list('/alerts/rules', 'machines:read', {
    summary: 'List alert rules',
    description: ofItsMachines,
    sort: ['name', 'created_at', 'updated_at'],
    reply: rule,
  }),
  create: single('POST', '/alerts/rules', 'webhooks:write', {
    summary: 'Create an alert rule',
    description: `A key that is limited to certain machines cannot create rules about certificates and keys. ${ofItsMachines}`,
    body: z.strictObject({ name, kind: z.enum(alertKinds).describe(whatKinds), ...changeable }),
    example: { name: 'disk is full', kind: 'disk', above: 90, recover: 85, for: 600_000, tags: ['web'] },
    reply: rule,
    status: 201,
    idempotency: 'replay',
  }),
  get: single('GET', '/alerts/rules/{rule_id}', 'machines:read', {
    summary: 'Get an alert rule',
    reply: rule,
  }),
  update: single('PATCH', '/alerts/rules/{rule_id}', 'webhooks:write', {
    summary: 'Change an alert rule',
    description:
      'Open alerts that the changed rule no longer covers are resolved. If a request changes `above` but not `recover`, the broker sets `recover` to 90 % of the new `above` in two cases: `recover` was 90 % of the old `above`, or is higher than the new `above`. Otherwise `recover` stays the same.',
    body: z.strictObject({ name: name.optional(), ...changeable }),
    example: { repeat_every: 3_600_000, enabled: true },
    reply: rule,
  }),
  remove: single('DELETE', '/alerts/rules/{rule_id}', 'webhooks:write', {
    summary: 'Delete an alert rule, and resolve its alerts',
    reply: deleted,
  }),
};

const alert = named('Alert', {
  id: alertId,
  rule_id: ruleId,
  name: z.string().describe('Name of the rule when the alert opened'),
  kind: z.enum(alertKinds).describe('What the rule watches'),
  machine_id: machineId.nullable().describe('Id of the machine; null for keys and certificates'),
  subject: z.string().describe('Id of the machine, schedule or key; `tls` or `authority` for a certificate'),
  status: z.enum(alertStatuses).describe('Status of the alert; `held`: a maintenance window holds it back'),
  message: z.string().describe('The alert in words'),
  value: z
    .number()
    .nullable()
    .describe('Measured value when the alert opened; null if the rule does not compare a measured value'),
  created_at: timestamp.describe(
    'Time when the alert was created: the condition had then lasted for the minimum time of the rule (`for`)',
  ),
  opened_at: timestamp
    .nullable()
    .describe('Time when the alert opened; null if a maintenance window holds it back'),
  window_id: windowId.nullable().describe('Id of the first maintenance window that held the alert back'),
  acknowledged_at: timestamp.nullable().describe('Time of the acknowledgement'),
  acknowledged_by: z.string().nullable().describe('Id of the key that acknowledged the alert'),
  note: z.string().nullable().describe('Note of the acknowledgement'),
  repeats: z.number().describe('Number of times that the alert was repeated'),
  repeated_at: timestamp.nullable().describe('Time when the alert was last repeated'),
  resolved_at: timestamp.nullable().describe('Time when the alert was resolved'),
  reason: z
    .enum(['recovered', 'rule_removed', 'rule_changed', 'subject_removed'])
    .nullable()
    .describe('Why the alert was resolved'),
});

export const alerts = {
  list: list('/alerts', 'machines:read', {
    summary: 'List alerts',
    sort: ['created_at'],
    reply: alert,
  }),
  get: single('GET', '/alerts/{alert_id}', 'machines:read', { summary: 'Get an alert', reply: alert }),
  // The path /alerts/{alert_id}/acknowledge is not used, because a request for /alerts/rules/acknowledge would match
  // both this path and /alerts/rules/{rule_id}.
  acknowledge: single('PATCH', '/alerts/{alert_id}', 'machines:write', {
    summary: 'Acknowledge an alert, so that its notification is not repeated',
    body: z.strictObject({
      acknowledged: z.literal(true).describe('Always true'),
      note: text(1000).nullable().optional().describe('Note for other users'),
    }),
    example: { acknowledged: true, note: 'reported to the hosting company' },
    reply: alert,
  }),
};
