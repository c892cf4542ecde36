// REST routes of the event log, and the data of each event type.
import * as z from 'zod';
import { list } from './define-list-route.ts';
import { outgoing } from './define-route.ts';
import type { Scope } from './route.ts';
import { machineId, named, parsedText, timestamp } from './shared-schemas.ts';

/** The event types to which webhooks can subscribe, by family, with the scope that a key needs to read them. */
export const groups = {
  session: {
    scope: 'sessions:read',
    types: [
      'session.created',
      'session.connected',
      'session.client_attached',
      'session.client_detached',
      'session.grace_period',
      'session.disconnected',
    ],
  },
  machine: {
    scope: 'machines:read',
    types: ['machine.online', 'machine.offline', 'machine.registered'],
  },
  command: {
    scope: 'commands:read',
    types: ['command.started', 'command.completed', 'command.failed', 'command.timeout'],
  },
  file: { scope: 'files:read', types: ['file.uploaded', 'file.downloaded', 'file.deleted'] },
  schedule: { scope: 'schedules:read', types: ['schedule.completed', 'schedule.failed'] },
  alert: {
    scope: 'machines:read',
    types: ['alert.opened', 'alert.acknowledged', 'alert.repeated', 'alert.resolved'],
  },
  upgrade: {
    scope: 'machines:read',
    types: [
      'upgrade.started',
      'upgrade.wave_started',
      'upgrade.machine_upgraded',
      'upgrade.machine_failed',
      'upgrade.finished',
    ],
  },
} as const satisfies Record<string, { scope: Scope; types: readonly string[] }>;

export const families = Object.keys(groups) as (keyof typeof groups)[];
export const webhookTypes = families.flatMap((name) => [...groups[name].types]);

/** The scope that a key needs to read each event type. */
export const scopeOfType: ReadonlyMap<string, Scope> = new Map(
  families.flatMap((name) => groups[name].types.map((type) => [type, groups[name].scope] as const)),
);

/** True if a list of types and families (`machine.*`, `*`) includes a type. */
export function names(events: readonly string[], type: string): boolean {
  return events.includes('*') || events.includes(type) || events.includes(`${type.split('.')[0]}.*`);
}

/** Every type that a list of types and families includes. */
export function typesOf(events: readonly string[]): string[] {
  return webhookTypes.filter((type) => names(events, type));
}

/** All event types: those to which webhooks can subscribe, and four that occur only in the event log. */
export const eventTypes = [
  ...webhookTypes,
  'machine.removed',
  'machine.fenced',
  'webhook.disabled',
  'alert.notified',
] as const;
export type EventType = (typeof eventTypes)[number];

/** Event types about a webhook or an alert channel. A key needs webhooks:read to read them. */
const aboutReceivers: readonly EventType[] = ['webhook.disabled', 'alert.notified'];

/** The event types that a key with these scopes may read. */
export function readableTypes(may: (scope: Scope) => boolean): EventType[] {
  return eventTypes.filter((type) =>
    may(scopeOfType.get(type) ?? (aboutReceivers.includes(type) ? 'webhooks:read' : 'machines:read')),
  );
}

const envelope = {
  id: z.string().meta({ description: 'Id of the event', examples: ['evt_4fJ2kQ9ZtR7wXc0BvN1mLp'] }),
  timestamp: timestamp.describe('Time of the event'),
};

const ofMachine = z.object({
  machine_id: z.string().describe('Id of the machine'),
  machine_name: z.string().describe('Name of the machine; empty if the machine was removed'),
});
const ofSession = ofMachine.extend({
  session_id: z.string().describe('Id of the session'),
  status: z.string().describe('Status of the session'),
  client_id: z
    .string()
    .optional()
    .describe('Id of the client; only in events about a client of the terminal'),
  mode: z
    .enum(['operator', 'observer'])
    .optional()
    .describe(
      '`operator`: the client reads and types; `observer`: it only reads. Only in events about a client of the terminal',
    ),
});
const ofRun = ofMachine.extend({
  command_id: z.string().nullable().describe('Id of the command; null if none was created'),
  schedule_id: z.string().nullable().describe('Id of the schedule that created the command, if any'),
  status: z.string().describe('Status of the command or run'),
  exit_code: z.number().nullable().describe('Exit code; null before the end'),
  duration: z.number().nullable().describe('Milliseconds from start to end; null before the end'),
});
/** Schemas of the data of events to which webhooks can subscribe, by family (the first part of the event's type). */
const dataOfFamily = {
  machine: ofMachine.extend({
    last_seen: timestamp.describe('Time of the last message from the machine’s agent'),
    hostname: z.string().optional().describe('Host name'),
    ip: z.string().optional().describe('Address from which the agent connected'),
    agent_version: z.string().optional().describe('Version of the agent on the machine'),
  }),
  session: ofSession,
  command: ofRun.extend({
    command: z.string().describe('Command line; only its beginning if the command is part of a batch'),
  }),
  schedule: ofRun.extend({
    name: z.string().describe('Name of the schedule'),
    run_id: z.string().describe('Id of the schedule run'),
  }),
  file: ofMachine.extend({
    path: z.string().describe('Path on the machine'),
    path_encoding: z
      .literal('base64')
      .optional()
      .describe('`base64` if `path` is in base64, because the path is not UTF-8; otherwise absent'),
    size: z.number().optional().describe('Bytes'),
    recursive: z.boolean().optional().describe('True if a directory was deleted with its content'),
  }),
  // Alerts about keys and certificates have no machine.
  alert: ofMachine.partial().extend({
    alert_id: z.string().describe('Id of the alert'),
    rule_id: z.string().describe('Id of the rule'),
    name: z.string().describe('Name of the rule'),
    kind: z.string().describe('What the rule watches'),
    subject: z
      .string()
      .describe('Id of the machine, schedule or key; `tls` or `authority` for a certificate'),
    status: z.string().describe('Status of the alert'),
    message: z.string().describe('The alert in words'),
    value: z
      .number()
      .nullable()
      .describe('Measured value when the alert opened; null if the rule does not compare a measured value'),
    reason: z.string().nullable().describe('Why the alert was resolved; null if it is not resolved yet'),
  }),
  // Some of these events are about the whole upgrade, and name no machine.
  upgrade: ofMachine.partial().extend({
    upgrade_id: z.string().describe('Id of the upgrade'),
    version: z.string().describe('Version that the machines get'),
    status: z.string().describe('Status of the machine, or of the upgrade'),
    wave: z
      .number()
      .optional()
      .describe(
        'Number of the current wave, from 1; 0 before the first wave; absent in events about one machine',
      ),
    waves: z.number().optional().describe('Number of waves; absent in events about one machine'),
    from_version: z
      .string()
      .optional()
      .describe('Version before the upgrade; only in events about one machine'),
    reason: z
      .string()
      .nullable()
      .optional()
      .describe('Code of the reason why the upgrade of the machine failed; only in events about one machine'),
    message: z
      .string()
      .nullable()
      .optional()
      .describe('Why the upgrade of the machine failed, in words; only in events about one machine'),
  }),
};
const isFamily = (name: string): name is keyof typeof dataOfFamily => Object.hasOwn(dataOfFamily, name);

/** Schema of the body of a webhook delivery for an event type, or for `test`. */
export function deliveryBody(type: string): z.ZodObject {
  const family = type.replace(/\..*/, '');
  const test = z.object({ message: z.string().describe('Text of the test event') });
  const data = isFamily(family) ? dataOfFamily[family] : test;
  return z.object({ ...envelope, type: z.literal(type).describe('Event type'), data: data.describe('Data') });
}

export const event = named('Event', {
  ...envelope,
  type: z.enum(eventTypes).describe('Event type'),
  data: z.record(z.string(), z.unknown()).describe('Data of the event type, as described under Webhooks'),
});

/**
 * Returns the types in a comma-separated text of types and families such as `session.*`; undefined if one of them is
 * unknown.
 */
function typesIn(text: string): EventType[] | undefined {
  const named = text.split(',').map((one) => eventTypes.filter((type) => names([one.trim()], type)));
  return named.some(({ length }) => length === 0) ? undefined : [...new Set(named.flat())];
}

const types = parsedText(
  1000,
  typesIn,
  'must be event types, separated by commas, such as command.completed,session.*',
);

export const events = {
  list: list('/events', 'machines:read', {
    summary: 'List events in the order in which they were recorded',
    description:
      'Lists only events that the key may read: `command.*` events need `commands:read`, and so on.',
    query: { machine_id: machineId.optional().describe('Only events of this machine') },
    sort: ['created_at'],
    reply: event,
  }),
  stream: outgoing('events', '/events/stream', 'machines:read', {
    summary: 'Follow events as they happen',
    description:
      'Sends only events that the key may read, as the list does. Events are stored for 72 hours by default.',
    query: {
      types: types.optional().describe('Only these types and families (`session.*`), comma-separated'),
      machine_id: machineId.optional().describe('Only events of this machine'),
    },
    headers: {
      last_event_id: z
        .string()
        .min(1)
        .max(200)
        .optional()
        .describe('Id of the last event received, to resume after it'),
    },
    replyHeaders: ['X-Last-Event-Id'],
    reply: event,
  }),
};
