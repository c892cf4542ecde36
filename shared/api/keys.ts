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
  single,
  tagList,
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
    created_by: z.string().nullable().describe('The key that made it, as far as that is known'),
    expires_at: timestamp.nullable(),
    last_used_at: timestamp.nullable().describe('Within a minute, after a restart of the broker'),
    last_used_ip: z.string().nullable().describe('Empty over the broker’s own socket file'),
  })
  .meta({ id: 'ApiKey' });

const newKey = key.extend({ key: z.string() }).meta({ id: 'NewApiKey' });

const scopeList = z.array(z.enum(scopes)).min(1).max(scopes.length);
const machineIds = z.array(machineId).min(1).max(10_000);
/** A limit to no tag at all would be a key that reaches nothing. */
const limitingTags = tagList(1);
const day = 86_400_000;

export const keys = {
  create: single('POST', '/api-keys', 'admin', {
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
  list: list('/api-keys', 'admin', {
    summary: 'List API keys',
    sort: ['name', 'created_at'],
    reply: key,
  }),
  get: single('GET', '/api-keys/{key_id}', 'admin', {
    summary: 'Get an API key',
    reply: key,
  }),
  me: single('GET', '/auth/me', 'any key', {
    summary: 'The key of this very request',
    reply: key,
  }),
  update: single('PATCH', '/api-keys/{key_id}', 'admin', {
    summary:
      'Change what an API key may; neither before nor after is it stronger than the key that changes it',
    body: z.strictObject({
      name: label(1, 100).optional(),
      scopes: scopeList.optional(),
      machine_ids: machineIds.nullable().optional().describe('null lifts the limit'),
      tags: limitingTags.nullable().optional().describe('null lifts the limit'),
      expires_at: instant.nullable().optional().describe('null: never'),
    }),
    reply: key,
  }),
  rotate: single('POST', '/api-keys/{key_id}/rotate', 'admin', {
    summary: 'Give an API key a new secret, shown once; its id and rights stay, and so does what it has open',
    body: z.strictObject({
      expires_at: instant.nullable().optional().describe('null: never; as before unless told'),
      grace: milliseconds(0, 7 * day)
        .default(0)
        .describe('Milliseconds that the secret before stays good; one before that never does'),
    }),
    reply: newKey,
    idempotency: 'secret',
  }),
  remove: single('DELETE', '/api-keys/{key_id}', 'admin', {
    summary: 'Revoke an API key at once',
    reply: z.object({
      deleted: z.boolean(),
      schedules: z
        .array(scheduleId)
        .describe('Those it changed last: they do not run until another key changes them'),
      webhooks: z
        .array(webhookId)
        .describe('Those it owns: they tell nothing until another key enables them'),
    }),
  }),
};
