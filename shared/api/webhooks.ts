// Webhooks over REST (spec 2.6, 4.4, 6): who is told what happened, and how that went.
import * as z from 'zod';
import { list } from './list.ts';
import { instant, machineId, type Scope, single, text, timestamp, webhookId } from './route.ts';

/** Each group of events that webhooks can be told of, and the scope that reading it needs. */
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
} as const satisfies Record<string, { scope: Scope; types: readonly string[] }>;

const families = Object.keys(groups) as (keyof typeof groups)[];
export const types = families.flatMap((name) => [...groups[name].types]);
const patterns = [...types, '*' as const, ...families.map((name) => `${name}.*` as const)];

/** What a webhook can be told of, each with its scope. */
export const scopeOfType: ReadonlyMap<string, Scope> = new Map(
  families.flatMap((name) => groups[name].types.map((type) => [type, groups[name].scope] as const)),
);

/** Whether a list of types and families (`machine.*`, `*`) names a type. */
export function names(events: readonly string[], type: string): boolean {
  return events.includes('*') || events.includes(type) || events.includes(`${type.split('.')[0]}.*`);
}

/** Every type that such a list stands for. */
export function typesOf(events: readonly string[]): string[] {
  return types.filter((type) => names(events, type));
}

const url = z
  .string()
  .min(1)
  .max(2048)
  .refine((value) => URL.canParse(value) && /^https?:$/.test(new URL(value).protocol), {
    error: 'must be an http or https URL',
    abort: true,
  })
  .refine((value) => {
    const { username, password } = new URL(value);
    return username === '' && password === '';
  }, 'must not hold a user name or password: sign with a secret')
  .meta({ format: 'uri', examples: ['https://example.org/hooks'] });

const events = z
  .array(z.enum(patterns))
  .min(1)
  .max(100)
  .transform((values) => [...new Set(values)])
  .describe('Types of events; * is all of them, machine.* all of that family');

/** Groups of four, the last one filled up: what every library decodes alike. */
const standardSecret = /^whsec_(?=.)(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$/;

const secret = text(255)
  .regex(/^[ -~]+$/, 'must be printable ASCII, and not empty')
  .refine(
    (value) => !value.startsWith('whsec_') || standardSecret.test(value),
    'after whsec_ there must be base64',
  )
  .meta({
    description:
      'Signs each delivery; never shown. Printable ASCII, for libraries differ in what bytes other characters are. ' +
      'After whsec_: base64, as Standard Webhooks has it',
  });

const machine_ids = z.array(machineId).min(1).max(1000).describe('Events of these machines alone');

const attempt = z.object({
  at: timestamp,
  status_code: z.number().nullable(),
  duration: z.number().describe('Milliseconds'),
  error: z.string().nullable(),
  answer: z
    .string()
    .optional()
    .describe('First 4 KiB, for keys with webhooks:write; never of an internal receiver'),
});

const statuses = ['pending', 'delivered', 'failed'] as const;

const delivery = z
  .object({
    id: z.string(),
    webhook_id: z.string(),
    event_id: z.string(),
    type: z.string(),
    status: z.enum(statuses),
    reason: z.string().nullable().describe('Why it failed'),
    attempts: z.array(attempt),
    created_at: timestamp,
    next_attempt_at: timestamp.nullable(),
  })
  .meta({ id: 'Delivery' });

const webhook = z
  .object({
    id: webhookId,
    url: z.string(),
    events: z.array(z.string()),
    enabled: z.boolean(),
    machine_ids: z.array(z.string()).nullable(),
    disabled_reason: z
      .enum(['attempts_failed', 'key_revoked', 'secret_unreadable'])
      .nullable()
      .describe('Why it is disabled, where nobody asked for that'),
    last_delivery: z
      .object({
        delivery_id: z.string(),
        event_id: z.string(),
        type: z.string(),
        delivered: z.boolean(),
        ...attempt.omit({ answer: true }).shape,
      })
      .nullable(),
    created_at: timestamp,
    updated_at: timestamp,
  })
  .meta({ id: 'Webhook' });

export const webhooks = {
  list: list('/webhooks', 'webhooks:read', {
    summary: 'List webhooks',
    sort: ['created_at', 'updated_at'],
    reply: webhook,
  }),
  create: single('POST', '/webhooks', 'webhooks:write', {
    summary: 'Make a webhook; it tells what the key that makes it may read, as long as that key lives',
    body: z.strictObject({
      url,
      events,
      secret: secret.optional(),
      enabled: z.boolean().default(true),
      machine_ids: machine_ids.optional(),
    }),
    reply: webhook,
    status: 201,
    idempotency: 'replay',
  }),
  get: single('GET', '/webhooks/{webhook_id}', 'webhooks:read', {
    summary: 'One webhook',
    reply: webhook,
  }),
  update: single('PATCH', '/webhooks/{webhook_id}', 'webhooks:write', {
    summary:
      'Change a webhook; enabled: true also forgives what failed, another url makes it that of this key',
    body: z.strictObject({
      url: url.optional(),
      events: events.optional(),
      secret: secret.nullable().optional(),
      enabled: z.boolean().optional(),
      machine_ids: machine_ids.nullable().optional(),
    }),
    reply: webhook,
  }),
  remove: single('DELETE', '/webhooks/{webhook_id}', 'webhooks:write', {
    summary: 'Remove a webhook at once',
    reply: z.object({ deleted: z.boolean() }),
  }),
  test: single('POST', '/webhooks/{webhook_id}/test', 'webhooks:write', {
    summary: 'Send a test event now, also to a disabled webhook; never retried, never counted',
    reply: z
      .object({
        delivered: z.boolean(),
        status_code: z.number().nullable(),
        duration: z.number().describe('Milliseconds'),
        error: z.string().optional(),
      })
      .meta({ id: 'TestDelivery' }),
    idempotency: 'replay',
    waits: true,
  }),
  deliveries: list('/webhooks/{webhook_id}/deliveries', 'webhooks:read', {
    summary: 'What was, or is to be, delivered, with every attempt',
    sort: ['created_at'],
    reply: delivery,
  }),
  redeliver: single('POST', '/webhooks/{webhook_id}/deliveries/{delivery_id}/redeliver', 'webhooks:write', {
    summary: 'Deliver one again',
    reply: delivery,
    idempotency: 'replay',
  }),
  redeliverSince: single('POST', '/webhooks/{webhook_id}/redeliver', 'webhooks:write', {
    summary: 'Deliver every event since then that this webhook was to get and did not',
    body: z.strictObject({ since: instant }),
    reply: z.object({ redelivered: z.number() }).meta({ id: 'Redelivered' }),
    idempotency: 'replay',
  }),
};
