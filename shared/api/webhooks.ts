// REST routes of webhooks: subscriptions to events, and their deliveries.
import * as z from 'zod';
import { list } from './define-list-route.ts';
import { single } from './define-route.ts';
import { families, webhookTypes } from './events.ts';
import { deleted, instant, machineId, named, text, timestamp, webhookId } from './shared-schemas.ts';

const patterns = [...webhookTypes, '*' as const, ...families.map((name) => `${name}.*` as const)];

const receiver = 'URL that receives the events';
/** True if a URL contains neither a user name nor a password. */
export const hasNoUser = (text: string): boolean => !new URL(text).username && !new URL(text).password;
const url = z
  .string()
  .min(1)
  .max(2048)
  .refine((value) => value.isWellFormed() && !/\s/.test(value), {
    error: 'must not contain spaces, line breaks or lone surrogates',
    abort: true,
  })
  .refine((value) => URL.canParse(value) && /^https?:$/.test(new URL(value).protocol), {
    error: 'must be an http or https URL',
    abort: true,
  })
  .refine(hasNoUser, 'must not contain a user name or password; set `secret` to sign deliveries instead')
  .meta({ description: receiver, format: 'uri', examples: ['https://example.org/hooks'] });

const events = z
  .array(z.enum(patterns))
  .min(1)
  .max(100)
  .transform((values) => [...new Set(values)])
  .describe('Event types to deliver; `*` for all, `machine.*` for all of a family');

/** Matches `whsec_` and base64. Padding is required, because decoders treat missing padding differently. */
const standardSecret = /^whsec_(?=.)(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$/;

const secret = text(255)
  .regex(/^[ -~]+$/, 'must be printable ASCII, and not empty')
  .refine(
    (value) => !value.startsWith('whsec_') || standardSecret.test(value),
    'must be base64 with padding after whsec_',
  )
  .meta({
    description:
      'Secret that signs deliveries: printable ASCII, or `whsec_` and base64. No answer contains it',
  });

const machine_ids = z.array(machineId).min(1).max(1000).describe('Only events of these machines');

const ofMachines = 'Only events of these machines; null: of all machines';

const attempt = z.object({
  at: timestamp.describe('Time of this attempt'),
  status_code: z.number().nullable().describe('HTTP status of the answer; null if there was no answer'),
  duration: z.number().describe('Milliseconds until the answer or failure'),
  error: z.string().nullable().describe('Why the attempt failed'),
  answer: z.string().optional().describe('First 4 KiB of the answer; needs `webhooks:write`'),
});

const statuses = ['pending', 'delivered', 'failed'] as const;

export const delivery = named('Delivery', {
  id: z.string().describe('Id of the delivery'),
  webhook_id: z.string().describe('Id of the webhook'),
  event_id: z.string().describe('Id of the event'),
  type: z.string().describe('Event type'),
  status: z.enum(statuses).describe('`failed`: no further attempt is made'),
  reason: z.string().nullable().describe('Why the delivery failed'),
  attempts: z.array(attempt).describe('Attempts, oldest first'),
  created_at: timestamp.describe('Time of creation'),
  next_attempt_at: timestamp.nullable().describe('Time of the next attempt'),
});

export const lastDelivery = z.object({
  delivery_id: z.string().describe('Id of the delivery'),
  event_id: z.string().describe('Id of the event'),
  type: z.string().describe('Event type'),
  delivered: z.boolean().describe('True if the receiver accepted the event'),
  ...attempt.omit({ answer: true }).shape,
});

export const testDelivery = named('TestDelivery', {
  delivered: z.boolean().describe('True if the receiver accepted the event'),
  status_code: z.number().nullable().describe('HTTP status of the answer; null if none came'),
  duration: z.number().describe('Milliseconds until the answer or failure'),
  error: z.string().optional().describe('Why the delivery failed'),
});

const disabledReason = z.enum(['attempts_failed', 'key_revoked', 'secret_unreadable']);
const webhook = named('Webhook', {
  id: webhookId,
  url: z.string().describe(receiver),
  events: z.array(z.string()).describe('Event types, and families of event types such as `command.*`'),
  enabled: z.boolean().describe('True if a user has enabled delivery and the broker has not disabled it'),
  machine_ids: z.array(z.string()).nullable().describe(ofMachines),
  disabled_reason: disabledReason
    .nullable()
    .describe('Why the broker disabled the webhook; null if the broker did not disable it'),
  last_delivery: lastDelivery
    .nullable()
    .describe(
      'The latest attempt to deliver an event; null: there was none, or the key may not read that event',
    ),
  created_at: timestamp.describe('Time of creation'),
  updated_at: timestamp.describe('Time of the last change by a request'),
});

export const webhooks = {
  list: list('/webhooks', 'webhooks:read', {
    summary: 'List webhooks',
    sort: ['created_at', 'updated_at'],
    reply: webhook,
  }),
  create: single('POST', '/webhooks', 'webhooks:write', {
    summary: 'Create a webhook',
    description:
      'The webhook has the rights of the key that creates it: it delivers events that this key may read, until the key is revoked.',
    body: z.strictObject({
      url,
      events,
      secret: secret.optional(),
      enabled: z.boolean().default(true).describe('True to deliver events'),
      machine_ids: machine_ids.optional(),
    }),
    example: { url: 'https://example.org/hooks', events: ['machine.*', 'command.failed'] },
    reply: webhook,
    status: 201,
    idempotency: 'replay',
  }),
  get: single('GET', '/webhooks/{webhook_id}', 'webhooks:read', { summary: 'Get a webhook', reply: webhook }),
  update: single('PATCH', '/webhooks/{webhook_id}', 'webhooks:write', {
    summary: 'Change a webhook',
    description:
      '`enabled: true` also sets the count of failed attempts to 0. With a new `url`, the webhook delivers only what the key of this request may read.',
    body: z.strictObject({
      url: url.optional(),
      events: events.optional(),
      secret: secret
        .nullable()
        .optional()
        .describe('New secret for signatures; null: deliveries are not signed'),
      enabled: z.boolean().optional().describe('True to deliver events'),
      machine_ids: machine_ids.nullable().optional().describe(ofMachines),
    }),
    example: { events: ['*'], enabled: true },
    reply: webhook,
  }),
  remove: single('DELETE', '/webhooks/{webhook_id}', 'webhooks:write', {
    summary: 'Delete a webhook at once',
    reply: deleted,
  }),
  test: single('POST', '/webhooks/{webhook_id}/test', 'webhooks:write', {
    summary: 'Send a test event',
    description:
      'Works for a disabled webhook too. A test event that cannot be delivered is not sent again, and does not disable the webhook.',
    reply: testDelivery,
    idempotency: 'replay',
    waits: true,
  }),
  deliveries: list('/webhooks/{webhook_id}/deliveries', 'webhooks:read', {
    summary: 'List the deliveries of a webhook, with every attempt',
    sort: ['created_at'],
    reply: delivery,
  }),
  redeliver: single('POST', '/webhooks/{webhook_id}/deliveries/{delivery_id}/redeliver', 'webhooks:write', {
    summary: 'Repeat a delivery',
    reply: delivery,
    idempotency: 'replay',
  }),
  redeliverSince: single('POST', '/webhooks/{webhook_id}/redeliver', 'webhooks:write', {
    summary: 'Deliver all undelivered events since a given time',
    body: z.strictObject({ since: instant.describe('Only events at this time or later') }),
    example: { since: '2026-11-21T10:00:00.000Z' },
    reply: named('Redelivered', { redelivered: z.number().describe('Number of deliveries repeated') }),
    idempotency: 'replay',
  }),
};
