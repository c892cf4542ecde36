// REST routes of API keys.
import * as z from 'zod';
import { list } from './define-list-route.ts';
import { single } from './define-route.ts';
import { login } from './logins.ts';
import { scopes } from './route.ts';
import {
  channelId,
  day,
  deleted,
  instant,
  keyId,
  label,
  machineId,
  milliseconds,
  named,
  savedCommandId,
  scheduleId,
  tagList,
  timestamp,
  webhookId,
} from './shared-schemas.ts';

const key = named('ApiKey', {
  id: keyId,
  name: z.string().describe('Name'),
  scopes: z.array(z.enum(scopes)).describe('Scopes'),
  machine_ids: z
    .array(machineId)
    .nullable()
    .describe('Ids of machines that the key may use; null: `tags` alone decides'),
  tags: z
    .array(z.string())
    .nullable()
    .describe(
      'The key may use machines with any of these tags, and those in `machine_ids`. If both fields are null, it may use all machines',
    ),
  created_at: timestamp.describe('Time of creation'),
  created_by: z.string().nullable().describe('Id of the API key that created this key, if known'),
  expires_at: timestamp.nullable().describe('Time when the key expires; null: never'),
  last_used_at: timestamp.nullable().describe('Time of the last use of the key, exact to a minute'),
  last_used_ip: z
    .string()
    .nullable()
    .describe('IP address of the client that used the key last; null: no known use'),
});

const newKey = key
  .extend({ key: z.string().describe('The secret key; no other answer contains it') })
  .meta({ id: 'NewApiKey' });

const scopeList = z.array(z.enum(scopes)).min(1).max(scopes.length).describe('Scopes; `admin` includes all');
const machineIds = z.array(machineId).min(1).max(10_000).describe('Ids of machines that the key may use');
const grace = milliseconds(0, 7 * day);
// A key with an empty list could use no machine, so at least one tag is required.
const limitingTags = tagList(1);
const reach =
  'The key may use machines with any of these tags, and those in `machine_ids`. If neither limit is set, it may use all machines';

export const keys = {
  create: single('POST', '/api-keys', 'admin', {
    summary: 'Create an API key',
    description:
      'Only this answer contains the secret key. The rights of a key may not exceed those of the key that creates it.',
    body: z.strictObject({
      name: label(1, 100).describe('Name'),
      scopes: scopeList,
      machine_ids: machineIds.optional(),
      tags: limitingTags.optional().describe(reach),
      expires_at: instant.optional().describe('Time when the key expires; default: never'),
    }),
    example: { name: 'deploy', scopes: ['machines:read', 'files:write'], tags: ['web'] },
    reply: newKey,
    status: 201,
    idempotency: 'secret',
    confirmed: true,
  }),
  list: list('/api-keys', 'admin', { summary: 'List API keys', sort: ['name', 'created_at'], reply: key }),
  get: single('GET', '/api-keys/{key_id}', 'admin', { summary: 'Get an API key', reply: key }),
  me: single('GET', '/auth/me', 'any key', {
    summary: 'Get the API key of this request',
    reply: key
      .extend({
        login: login
          .optional()
          .describe('The login, if the request was authorized by a login’s cookie; otherwise absent'),
      })
      .meta({ id: 'CurrentApiKey' }),
  }),
  update: single('PATCH', '/api-keys/{key_id}', 'admin', {
    summary: 'Change an API key',
    description:
      'The key of the request must have all rights of the changed key: the old rights and the new ones.',
    body: z.strictObject({
      name: label(1, 100).optional().describe('Name'),
      scopes: scopeList.optional(),
      machine_ids: machineIds
        .nullable()
        .optional()
        .describe('Ids of machines that the key may use; null: no limit by ids'),
      tags: limitingTags.nullable().optional().describe(`${reach}; null: no limit by tags`),
      expires_at: instant.nullable().optional().describe('Time when the key expires; null: never'),
    }),
    example: { name: 'deploy 2', expires_at: null },
    reply: key,
    confirmed: true,
  }),
  rotate: single('POST', '/api-keys/{key_id}/rotate', 'admin', {
    summary: 'Replace the secret of an API key',
    description:
      'Only this answer contains the new secret. The key’s id, rights and open streams stay. Its logins end when the old secret becomes invalid (see `grace`), except the login that sends this request.',
    body: z.strictObject({
      expires_at: instant
        .nullable()
        .optional()
        .describe('Time when the key expires; null: never; default: unchanged'),
      grace: grace.default(0).describe('Milliseconds for which the old secret stays valid'),
    }),
    example: { grace: 60_000 },
    reply: newKey,
    idempotency: 'secret',
    confirmed: true,
  }),
  remove: single('DELETE', '/api-keys/{key_id}', 'admin', {
    summary: 'Revoke an API key at once',
    reply: deleted.extend({
      schedules: z
        .array(scheduleId)
        .describe(
          'Ids of the revoked key’s enabled schedules, except those that the key of this request may not see. The broker no longer starts the revoked key’s schedules automatically. To reactivate a schedule, change it in a request with another key. If the schedule has `tags`, that request must contain its machines (`tags` or `machine_id`) and its command (`command` or `saved_command_id`), even if they stay the same',
        ),
      webhooks: z
        .array(webhookId)
        .describe(
          'Ids of the enabled webhooks of the revoked key. They send nothing more; to use one again, enable it with another key',
        ),
      alert_channels: z
        .array(channelId)
        .describe(
          'Ids of the enabled alert channels of the revoked key. They send nothing more; to use one again, enable it with another key',
        ),
      saved_commands: z
        .array(savedCommandId)
        .describe(
          'Ids of the saved commands whose last change was made with the revoked key. Other keys can still run these commands: check what each of them runs',
        ),
    }),
  }),
};
