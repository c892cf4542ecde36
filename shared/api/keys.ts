// API keys over REST (spec 5).
import * as z from 'zod';
import { list } from './list.ts';
import {
  instant,
  keyId,
  label,
  machineId,
  milliseconds,
  scheduleId,
  scopes,
  shownAs,
  single,
  tags,
  timestamp,
  webhookId,
} from './route.ts';

const key = z
  .object({
    id: keyId,
    name: z.string(),
    scopes: z.array(z.enum(scopes)),
    machine_ids: z.array(machineId).nullable(),
    tags: z.array(z.string()).nullable(),
    created_at: timestamp,
    created_by: z.string().nullable().meta({ description: 'The key that made it, as far as that is known' }),
    expires_at: timestamp.nullable(),
    last_used_at: timestamp
      .nullable()
      .meta({ description: 'Within a minute, after a restart of the broker' }),
    last_used_ip: z.string().nullable().meta({ description: 'Empty over the broker’s own socket file' }),
  })
  .meta({ id: 'ApiKey' });

const newKey = key.extend({ key: z.string() }).meta({ id: 'NewApiKey' });

const scopeList = z.array(z.enum(scopes)).min(1).max(scopes.length);
const machineIds = z.array(machineId).min(1).max(10_000);
/** A limit to no tag at all would be a key that reaches nothing. */
const limitingTags = tags
  .refine((values) => values.length > 0, 'must hold at least one')
  .meta(
    shownAs({
      type: 'array',
      minItems: 1,
      maxItems: 50,
      items: { type: 'string', minLength: 1, maxLength: 64 },
    }),
  );
const day = 86_400_000;

export const keys = {
  create: single({
    method: 'POST',
    path: '/api-keys',
    access: 'admin',
    summary: 'Make an API key; it is shown once and never stronger than the key that makes it',
    body: z.strictObject({
      name: label(1, 100),
      scopes: scopeList,
      machine_ids: machineIds.optional(),
      tags: limitingTags.optional(),
      expires_at: instant.optional(),
    }),
    reply: newKey,
    status: 201,
    idempotency: 'secret',
  }),
  list: list({
    path: '/api-keys',
    access: 'admin',
    summary: 'List API keys',
    sort: ['name', 'created_at'],
    defaultSort: '-created_at',
    reply: key,
  }),
  get: single({
    method: 'GET',
    path: '/api-keys/{key_id}',
    access: 'admin',
    summary: 'Get an API key',
    params: { key_id: keyId },
    reply: key,
  }),
  me: single({
    method: 'GET',
    path: '/auth/me',
    access: 'any key',
    summary: 'The key of this very request',
    reply: key,
  }),
  update: single({
    method: 'PATCH',
    path: '/api-keys/{key_id}',
    access: 'admin',
    summary:
      'Change what an API key may; neither before nor after is it stronger than the key that changes it',
    params: { key_id: keyId },
    body: z.strictObject({
      name: label(1, 100).optional(),
      scopes: scopeList.optional(),
      machine_ids: machineIds.nullable().optional().meta({ description: 'null lifts the limit' }),
      tags: limitingTags.nullable().optional().meta({ description: 'null lifts the limit' }),
      expires_at: instant.nullable().optional().meta({ description: 'null: never' }),
    }),
    reply: key,
  }),
  rotate: single({
    method: 'POST',
    path: '/api-keys/{key_id}/rotate',
    access: 'admin',
    summary: 'Give an API key a new secret, shown once; its id and rights stay, and so does what it has open',
    params: { key_id: keyId },
    body: z.strictObject({
      expires_at: instant.nullable().optional().meta({ description: 'null: never; as before unless told' }),
      grace: milliseconds(0, 7 * day)
        .default(0)
        .meta({ description: 'Milliseconds that the secret before stays good; one before that never does' }),
    }),
    reply: newKey,
    idempotency: 'secret',
  }),
  remove: single({
    method: 'DELETE',
    path: '/api-keys/{key_id}',
    access: 'admin',
    summary: 'Revoke an API key at once',
    params: { key_id: keyId },
    reply: z.object({
      deleted: z.boolean(),
      schedules: z
        .array(scheduleId)
        .meta({ description: 'Those it changed last: they do not run until another key changes them' }),
      webhooks: z
        .array(webhookId)
        .meta({ description: 'Those it owns: they tell nothing until another key enables them' }),
    }),
  }),
};
