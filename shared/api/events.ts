// The event log over REST (spec 6).
import * as z from 'zod';
import { list } from './list.ts';
import { machineId, outgoing, type Scope, shownAs, timestamp } from './route.ts';
import { groups, types as webhookTypes } from './webhooks.ts';

/** What can happen: spec 6.1, and what only the event log has. */
export const eventTypes = [...webhookTypes, 'machine.removed', 'machine.fenced', 'webhook.disabled'] as const;
export type EventType = (typeof eventTypes)[number];

/** The scope that reading events of a family needs. */
const scopeOfFamily = new Map<string, Scope>([
  ...Object.entries(groups).map(([family, { scope }]) => [family, scope] as const),
  ['webhook', 'webhooks:read'],
]);

/** What somebody with these scopes may read. */
export function readableTypes(may: (scope: Scope) => boolean): EventType[] {
  return eventTypes.filter((type) => {
    const scope = scopeOfFamily.get(type.slice(0, type.indexOf('.')));
    return scope !== undefined && may(scope);
  });
}

const event = z
  .object({
    id: z.string(),
    type: z.enum(eventTypes),
    timestamp,
    data: z.record(z.string(), z.unknown()),
  })
  .meta({ id: 'Event' });

/** The types that a text names: types and families such as `session.*`, with commas; undefined where it names none. */
function typesIn(text: string): EventType[] | undefined {
  const named = text.split(',').map((one) => matching(one.trim()));
  return named.some(({ length }) => length === 0) ? undefined : [...new Set(named.flat())];
}

function matching(name: string): EventType[] {
  if (name === '*') return [...eventTypes];
  return eventTypes.filter(
    (type) => type === name || (name.endsWith('.*') && type.startsWith(name.slice(0, -1))),
  );
}

const types = z
  .string()
  .max(1000)
  .transform((text, context) => {
    const found = typesIn(text);
    if (found) return found;
    context.addIssue({
      code: 'custom',
      message: 'must be types of events, such as command.completed,session.*',
    });
    return z.NEVER;
  })
  .meta(
    shownAs({
      type: 'string',
      description: 'Those alone: types and families such as session.*, with commas',
    }),
  );

export const events = {
  list: list('/events', 'machines:read', {
    summary:
      'List events in the order they were recorded: those of families that the key has the scope for, such as commands:read',
    query: { machine_id: machineId.optional() },
    sort: ['created_at'],
    reply: event,
  }),
  stream: outgoing('events', '/events/stream', 'machines:read', {
    summary:
      'Follow events as they happen; Last-Event-ID tells those after it first, while it is kept; families as in the list',
    query: { types: types.optional(), machine_id: machineId.optional() },
    headers: { last_event_id: z.string().min(1).max(200).optional() },
    reply: event,
  }),
};
