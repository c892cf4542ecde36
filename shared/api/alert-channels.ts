// REST routes of the channels through which alerts are sent, and of their deliveries.
import * as z from 'zod';
import { list } from './define-list-route.ts';
import { single } from './define-route.ts';
import { channelId, deleted, label, named, text, timestamp } from './shared-schemas.ts';
import { delivery, hasNoUser, lastDelivery, testDelivery } from './webhooks.ts';

export const channelTypes = ['webhook', 'slack', 'discord', 'ntfy', 'email'] as const;
export type ChannelType = (typeof channelTypes)[number];

const described = {
  type: 'Service that gets the alerts',
  user: 'User name for the mail server; null: the server needs none',
  from: 'Sender of e-mails',
  to: 'Recipients of e-mails',
  enabled: 'True if alerts are sent through the channel',
};

const channel = named('AlertChannel', {
  id: channelId,
  name: z.string().describe('Name'),
  type: z.enum(channelTypes).describe(described.type),
  url: z.string().describe('URL, without its secret parts'),
  user: z.string().nullable().describe(described.user),
  from: z.string().nullable().describe(described.from),
  to: z.array(z.string()).nullable().describe(described.to),
  enabled: z.boolean().describe(described.enabled),
  disabled_reason: z
    .enum(['key_revoked', 'secret_unreadable'])
    .nullable()
    .describe('Why the broker disabled the channel; null if it did not'),
  last_delivery: lastDelivery
    .nullable()
    .describe('The latest attempt to send an alert through the channel; null: there was none'),
  created_at: timestamp.describe('Time of creation'),
  updated_at: timestamp.describe('Time of the last change by a request'),
});

const isAddress = (value: string): boolean => URL.canParse(value) && new URL(value).hostname !== '';
const url = z
  .string()
  .min(1)
  .max(2048)
  .refine((value) => isAddress(value) && /^(https?|smtps?):$/.test(new URL(value).protocol), {
    error: 'must be an http or https URL, or smtp://HOST:PORT or smtps://HOST:PORT for e-mail',
    abort: true,
  })
  .refine(hasNoUser, 'must not contain a user name or password; set user and secret instead')
  .meta({
    description:
      'Where alerts are sent. `slack`, `discord`: the URL of an incoming webhook. `ntfy`: the URL of a topic. `webhook`: the URL of the receiver. `email`: the URL of the mail server, with `smtps://` for TLS or `smtp://` for STARTTLS',
    format: 'uri',
    examples: ['https://example.org/alerts'],
  });

const mailbox = label(3, 320)
  .refine(
    (value) => /^[^\s@<>,;]+@[^\s@<>,;]+$/.test(value),
    'must be an e-mail address, such as ops@example.org',
  )
  .meta({ examples: ['ops@example.org'] });

const changeable = {
  user: label(1, 255).nullable().optional().describe(described.user),
  from: mailbox.nullable().optional().describe(described.from),
  to: z.array(mailbox).min(1).max(50).nullable().optional().describe(described.to),
  enabled: z.boolean().optional().describe(described.enabled),
};

const secret = text(1024)
  .regex(/^[ -~]+$/, 'must be printable ASCII, and not empty')
  .nullable()
  .optional()
  .describe(
    'Password of the mail server, access token of ntfy, or secret that signs the deliveries of a webhook. No answer contains it',
  );
const name = label(1, 100).describe('Name');

const ofChannel = delivery
  .omit({ webhook_id: true })
  .extend({ channel_id: channelId })
  .meta({ id: 'ChannelDelivery' });

const one = '/alerts/channels/{channel_id}';

export const alertChannels = {
  list: list('/alerts/channels', 'webhooks:read', {
    summary: 'List the channels through which alerts are sent',
    sort: ['name', 'created_at', 'updated_at'],
    reply: channel,
  }),
  create: single('POST', '/alerts/channels', 'webhooks:write', {
    summary: 'Create a channel for alerts',
    description:
      'The channel has the rights of the key that creates it: it sends alerts about machines that this key may use, until the key is revoked. The key needs two scopes: `webhooks:write` and `machines:read`.',
    body: z.strictObject({
      name,
      type: z.enum(channelTypes).describe(described.type),
      url,
      secret,
      ...changeable,
    }),
    example: { name: 'ops', type: 'slack', url: 'https://hooks.slack.com/services/T000/B000/XXXX' },
    reply: channel,
    status: 201,
    idempotency: 'replay',
  }),
  get: single('GET', one, 'webhooks:read', { summary: 'Get a channel', reply: channel }),
  update: single('PATCH', one, 'webhooks:write', {
    summary: 'Change a channel',
    description:
      'With a new `url` or new recipients (`to`), the channel gets the rights of the key of this request. If the new `url` leads to another server, and a password or token is stored, the request must contain `secret` too.',
    body: z.strictObject({ name: name.optional(), url: url.optional(), secret, ...changeable }),
    example: { name: 'operations', enabled: true },
    reply: channel,
  }),
  remove: single('DELETE', one, 'webhooks:write', {
    summary: 'Delete a channel that no alert rule names',
    reply: deleted,
    errors: ['conflict'],
  }),
  test: single('POST', '/alerts/channels/{channel_id}/test', 'webhooks:write', {
    summary: 'Send a test message',
    description:
      'Works for a disabled channel too. A test message that cannot be delivered is not sent again.',
    reply: testDelivery,
    idempotency: 'replay',
    waits: true,
  }),
  deliveries: list('/alerts/channels/{channel_id}/deliveries', 'webhooks:read', {
    summary: 'List the deliveries of a channel, with every attempt',
    sort: ['created_at'],
    reply: ofChannel,
  }),
  redeliver: single(
    'POST',
    '/alerts/channels/{channel_id}/deliveries/{delivery_id}/redeliver',
    'webhooks:write',
    {
      summary: 'Repeat a delivery of a channel',
      reply: ofChannel,
      idempotency: 'replay',
    },
  ),
};
