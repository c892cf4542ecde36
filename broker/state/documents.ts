// The documents that state.json holds, with their fields.
import { z } from 'zod';
import { joinTokenId, keyId, machineId, scheduleId, scopes, webhookId } from '../../shared/api/route.ts';
import type { OutboxEntry } from '../history.ts';

/** Version 0.1.0 stored white space around tags; later versions trim it in requests. */
const tags = z
  .array(z.string())
  .transform((values) => [...new Set(values.map((value) => value.trim()).filter((value) => value !== ''))]);

const machine = z.strictObject({
  id: machineId,
  name: z.string(),
  tags,
  /** Ed25519, raw, base64. */
  public_key: z.string(),
  join_token_id: joinTokenId,
  created_at: z.string(),
});
export type Machine = z.output<typeof machine>;

const key = z.strictObject({
  id: keyId,
  name: z.string(),
  /** SHA-256 of the whole key, hexadecimal. */
  hash: z.string(),
  scopes: z.array(z.enum(scopes)),
  machine_ids: z.array(machineId).nullable(),
  tags: tags.nullable(),
  created_at: z.string(),
  expires_at: z.string().nullable(),
  // Older states have none of these.
  /** The key that made it; null in older states. */
  created_by: keyId.nullable().default(null),
  /** The secret before the last rotation, while it is accepted. */
  previous: z.strictObject({ hash: z.string(), until: z.string() }).nullable().default(null),
});
export type Key = z.output<typeof key>;

const joinToken = z.strictObject({
  id: joinTokenId,
  name: z.string().nullable(),
  /** SHA-256 of the secret part, hexadecimal. */
  hash: z.string(),
  tags: tags.nullable(),
  uses: z.number(),
  uses_left: z.number(),
  created_at: z.string(),
  expires_at: z.string(),
});
export type JoinToken = z.output<typeof joinToken>;

const schedule = z.strictObject({
  id: scheduleId,
  name: z.string(),
  description: z.string().nullable(),
  machine_id: machineId,
  command: z.string(),
  cron: z.string(),
  timezone: z.string(),
  enabled: z.boolean(),
  /** Milliseconds. */
  timeout: z.number().nullable(),
  notify: z.strictObject({ on_success: z.boolean(), on_failure: z.boolean() }).nullable(),
  overlap: z.enum(['skip', 'allow']),
  catch_up: z.enum(['none', 'last', 'all']),
  catch_up_window: z.number(),
  user: z.string().nullable(),
  cwd: z.string().nullable(),
  env: z.record(z.string(), z.string()).nullable(),
  /** The key that last changed it. */
  requested_by: keyId,
  created_at: z.string(),
  updated_at: z.string(),
  /** When it was made, or its times were last changed: earlier times do not count. */
  since: z.string(),
});
export type Schedule = z.output<typeof schedule>;

const webhook = z.strictObject({
  id: webhookId,
  url: z.string(),
  events: z.array(z.string()),
  /** Encrypted (webhooks/secret-vault.ts). */
  secret: z.string().nullable(),
  /** As declared; history records whether it failed too often since. */
  enabled: z.boolean(),
  /** Counts how often it was enabled: failures before the last time do not count. */
  armed: z.int(),
  machine_ids: z.array(machineId).nullable(),
  /** The owner: only events that this key may read are delivered. */
  key_id: keyId,
  created_at: z.string(),
  updated_at: z.string(),
});
export type Webhook = z.output<typeof webhook>;

/** 1, which 0.1.0 wrote, is the same without a checksum. */
export const version = 2;
const file = z.strictObject({
  /** See state-file.ts; not in memory. */
  checksum: z.string().optional(),
  version: z.literal([1, version]),
  install_id: z.string(),
  /** Counts commits; 1 is a new installation without any declared document. */
  generation: z.int(),
  machines: z.array(machine),
  keys: z.array(key),
  join_tokens: z.array(joinToken),
  // Older states have none of these two.
  schedules: z.array(schedule).default([]),
  webhooks: z.array(webhook).default([]),
  outbox: z.array(
    z.custom<OutboxEntry>((value) => z.looseObject({ kind: z.string() }).safeParse(value).success),
  ),
});
export const documents = file.transform(({ checksum: _, ...declared }) => declared);
export type Documents = z.output<typeof documents>;

export const names = ['machines', 'keys', 'join_tokens', 'schedules', 'webhooks'] as const;
export type Name = (typeof names)[number];
/** The declared documents by id: committed, or before a change that is not committed yet. */
export type Declared = { readonly [N in Name]: ReadonlyMap<string, Documents[N][number]> };
