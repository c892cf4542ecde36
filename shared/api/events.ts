// The event log over REST (spec 6).
import { z } from 'zod';
import { instant, list, machineId, timestamp } from './route.ts';

/**
 * What can happen: spec 6.1, and what only the event log tells (`machine.fenced`, `machine.removed`,
 * `webhook.disabled`).
 */
export const eventTypes = [
  'machine.online',
  'machine.offline',
  'machine.registered',
  'machine.removed',
  'machine.fenced',
  'session.created',
  'session.connected',
  'session.client_attached',
  'session.client_detached',
  'session.grace_period',
  'session.disconnected',
  'command.started',
  'command.completed',
  'command.failed',
  'command.timeout',
  'file.uploaded',
  'file.downloaded',
  'file.deleted',
  'schedule.completed',
  'schedule.failed',
  'webhook.disabled',
] as const;
export type EventType = (typeof eventTypes)[number];

const event = z
  .object({
    id: z.string(),
    type: z.enum(eventTypes),
    timestamp,
    data: z.record(z.string(), z.unknown()),
  })
  .meta({ id: 'Event' });

export const events = {
  list: list({
    path: '/events',
    access: 'machines:read',
    summary: 'List recent events',
    query: {
      type: z.enum(eventTypes).optional(),
      machine_id: machineId.optional(),
      since: instant.optional(),
    },
    sort: ['created_at'],
    defaultSort: '-created_at',
    reply: event,
  }),
};
