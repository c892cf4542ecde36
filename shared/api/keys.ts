// API keys over REST (spec 5).
import * as z from 'zod';
import {
  instant,
  keyId,
  label,
  list,
  machineId,
  scheduleId,
  scopes,
  single,
  tags,
  timestamp,
} from './route.ts';

const key = z
  .object({
    id: keyId,
    name: z.string(),
    scopes: z.array(z.enum(scopes)),
    machine_ids: z.array(machineId).nullable(),
    tags: z.array(z.string()).nullable(),
    created_at: timestamp,
    expires_at: timestamp.nullable(),
  })
  .meta({ id: 'ApiKey' });

export const keys = {
  create: single({
    method: 'POST',
    path: '/api-keys',
    access: 'admin',
    summary: 'Make an API key; it is shown once and never stronger than the key that makes it',
    body: z.strictObject({
      name: label(1, 100),
      scopes: z.array(z.enum(scopes)).min(1).max(scopes.length),
      machine_ids: z.array(machineId).min(1).max(10_000).optional(),
      tags: tags.optional(),
      expires_at: instant.optional(),
    }),
    reply: key.extend({ key: z.string() }).meta({ id: 'NewApiKey' }),
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
  me: single({
    method: 'GET',
    path: '/auth/me',
    access: 'any key',
    summary: 'The key of this very request',
    reply: key,
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
    }),
  }),
};
