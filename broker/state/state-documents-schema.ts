// Schemas and types of the declared documents.
import { z } from 'zod';
import { channelTypes } from '../../shared/api/alert-channels.ts';
import { alertKinds } from '../../shared/api/alerts.ts';
import { scopes } from '../../shared/api/route.ts';
import {
  channelId,
  joinTokenId,
  keyId,
  loginId,
  machineId,
  ruleId,
  savedCommandId,
  scheduleId,
  webhookId,
  windowId,
} from '../../shared/api/shared-schemas.ts';
import type { OutboxEntry } from '../history/history-database.ts';

/**
 * Version 0.1.0 stored tags with white space around them, so tags are trimmed here. Later versions trim the tags of
 * requests.
 */
const tags = z
  .array(z.string())
  .transform((values) => [...new Set(values.map((value) => value.trim()).filter((value) => value !== ''))]);

const machine = z.strictObject({
  id: machineId,
  name: z.string(),
  tags,
  /** Raw Ed25519 public key, in base64. */
  public_key: z.string(),
  join_token_id: joinTokenId,
  created_at: z.string(),
  /** The only version that upgrades may install. If the field is absent, they may install any version. */
  agent_pin: z.string().optional(),
  /** Present if upgrades skip the machine. */
  agent_hold: z.literal(true).optional(),
});
export type Machine = z.output<typeof machine>;

const key = z.strictObject({
  id: keyId,
  name: z.string(),
  /** SHA-256 of the whole key, in hexadecimal digits. */
  hash: z.string(),
  scopes: z.array(z.enum(scopes)),
  machine_ids: z.array(machineId).nullable(),
  tags: tags.nullable(),
  created_at: z.string(),
  expires_at: z.string().nullable(),
  /** Id of the key that created this one; null for a key that was created on the broker's machine. */
  created_by: keyId.nullable(),
  /** The secret before the last rotation, and the time until which it is still accepted. */
  previous: z.strictObject({ hash: z.string(), until: z.string() }).nullable(),
});
export type Key = z.output<typeof key>;

const login = z.strictObject({
  id: loginId,
  key_id: keyId,
  /** SHA-256 of the cookie's secret, in hexadecimal digits. */
  hash: z.string(),
  name: z.string().nullable(),
  address: z.string(),
  created_at: z.string(),
  /**
   * Time when the client last sent the API key itself: to log in, or to confirm the login (POST /logins/{id}/confirm).
   */
  confirmed_at: z.string(),
  /** Time of the last use, saved at most once per hour. The exact time of the last use is only in memory. */
  used_at: z.string(),
  /**
   * Time at which the login ends, because the secret that the client logged in with was replaced and is valid only
   * until then. Undefined if there is no such time.
   */
  secret_until: z.string().optional(),
});
export type Login = z.output<typeof login>;

const joinToken = z.strictObject({
  id: joinTokenId,
  name: z.string().nullable(),
  /** SHA-256 of the secret part, in hexadecimal digits. */
  hash: z.string(),
  tags: tags.nullable(),
  uses: z.number(),
  uses_left: z.number(),
  created_at: z.string(),
  expires_at: z.string(),
});
export type JoinToken = z.output<typeof joinToken>;

const parameterValue = z.union([z.string(), z.number(), z.boolean()]);

const savedCommand = z.strictObject({
  id: savedCommandId,
  name: z.string(),
  description: z.string().nullable(),
  /** The program and its arguments, in which `{{name}}` stands for a parameter. */
  argv: z.array(z.string()),
  parameters: z.array(
    z.strictObject({
      name: z.string(),
      type: z.enum(['string', 'integer', 'boolean', 'enum', 'path']),
      required: z.boolean(),
      default: parameterValue.nullable(),
      values: z.array(z.string()).nullable(),
      pattern: z.string().nullable(),
      min: z.number().nullable(),
      max: z.number().nullable(),
      description: z.string().nullable(),
    }),
  ),
  user: z.string().nullable(),
  cwd: z.string().nullable(),
  timeout: z.number().nullable(),
  /** Id of the key that last changed the saved command. */
  updated_by: keyId,
  created_at: z.string(),
  updated_at: z.string(),
});
export type SavedCommand = z.output<typeof savedCommand>;

const schedule = z.strictObject({
  id: scheduleId,
  name: z.string(),
  description: z.string().nullable(),
  /**
   * The machine of the schedule. If it is null, the schedule is for all machines that have all of `tags`. Older files
   * have no tags.
   */
  machine_id: machineId.nullable(),
  tags: tags.nullable().default(null),
  /** The shell line to run. If it is null, the schedule runs the saved command with the values in `parameters`. */
  command: z.string().nullable(),
  saved_command_id: savedCommandId.nullable().default(null),
  parameters: z.record(z.string(), parameterValue).nullable().default(null),
  /**
   * The schedule has either a cron expression or a path. With a path, it runs after changes of that file or directory.
   * Older files have no `on_change`.
   */
  cron: z.string().nullable(),
  on_change: z
    .strictObject({ path: z.string(), recursive: z.boolean(), settle: z.number() })
    .nullable()
    .default(null),
  timezone: z.string(),
  enabled: z.boolean(),
  /** Longest run time in milliseconds. */
  timeout: z.number().nullable(),
  notify: z.strictObject({ on_success: z.boolean(), on_failure: z.boolean() }).nullable(),
  overlap: z.enum(['skip', 'allow']),
  catch_up: z.enum(['none', 'last', 'all']),
  catch_up_window: z.number(),
  user: z.string().nullable(),
  cwd: z.string().nullable(),
  env: z.record(z.string(), z.string()).nullable(),
  /** Id of the key with whose rights the schedule runs. */
  requested_by: keyId,
  /** The machines that this key could use when it was revoked; undefined before that. */
  key_limits: z
    .strictObject({ machine_ids: z.array(machineId).nullable(), tags: tags.nullable() })
    .optional(),
  created_at: z.string(),
  updated_at: z.string(),
  /**
   * Due times and changes of the watched path before this time start no run. The field is set when the schedule is
   * created. It is set again, for example, when a request changes `cron`, `on_change` or `enabled`.
   */
  since: z.string(),
  /**
   * Cron expressions that were in force before the schedule's `since`, the oldest first. Each was in force from its own
   * `since` to its `until`. Some of their due times may have no row yet. The next change of the schedule's due times
   * removes the expressions that have no such due times.
   */
  replaced: z
    .array(z.strictObject({ cron: z.string(), timezone: z.string(), since: z.string(), until: z.string() }))
    .optional(),
});
export type Schedule = z.output<typeof schedule>;

const webhook = z.strictObject({
  id: webhookId,
  url: z.string(),
  events: z.array(z.string()),
  /** The encrypted secret (deliveries/secret-encryption.ts). */
  secret: z.string().nullable(),
  /**
   * True if the user has enabled the webhook. It may be disabled all the same, after failed deliveries: the history has
   * that information (see `armed`).
   */
  enabled: z.boolean(),
  /**
   * Number of updates that have set `enabled` to true. When all attempts of a delivery fail, the history stores this
   * number for the webhook. While both numbers are equal, the webhook is disabled. The next update that sets `enabled`
   * to true makes them differ.
   */
  armed: z.int(),
  machine_ids: z.array(machineId).nullable(),
  /** Id of the key that owns the webhook. The webhook sends only events that this key may read. */
  key_id: keyId,
  created_at: z.string(),
  updated_at: z.string(),
});
export type Webhook = z.output<typeof webhook>;

const alertRule = z.strictObject({
  id: ruleId,
  name: z.string(),
  kind: z.enum(alertKinds),
  /** `above`: the value above which the rule opens an alert. `recover`: the value at which the alert resolves. */
  above: z.number().nullable(),
  recover: z.number().nullable(),
  /** The mount point that a rule of the kind `disk` watches. `*` means the fullest file system, and null means `/`. */
  mount: z.string().nullable().default(null),
  /** Milliseconds for which the condition must last. */
  for: z.number(),
  /** How many milliseconds before an expiry the rule opens an alert. */
  before: z.number().nullable(),
  /**
   * The rule is about these machines and about those with one of these tags; if both fields are null, about all
   * machines.
   */
  machine_ids: z.array(machineId).nullable(),
  tags: tags.nullable(),
  repeat_every: z.number().nullable(),
  /** The channels that get the alerts of the rule; all channels if it is null. */
  channel_ids: z.array(channelId).nullable(),
  enabled: z.boolean(),
  created_at: z.string(),
  updated_at: z.string(),
});
export type AlertRule = z.output<typeof alertRule>;

const alertChannel = z.strictObject({
  id: channelId,
  name: z.string(),
  type: z.enum(channelTypes),
  /** The URL without its secret parts. */
  url: z.string(),
  /** The encrypted URL and secret, as JSON (deliveries/secret-encryption.ts). */
  sealed: z.string(),
  user: z.string().nullable(),
  from: z.string().nullable(),
  to: z.array(z.string()).nullable(),
  enabled: z.boolean(),
  /**
   * Number of updates that have set `enabled` to true. The delivery queue needs this number for webhooks and channels
   * alike. Failed deliveries disable only webhooks, never channels.
   */
  armed: z.int(),
  /** Id of the key that owns the channel. The channel sends only alerts that this key may read. */
  key_id: keyId,
  created_at: z.string(),
  updated_at: z.string(),
});
export type AlertChannel = z.output<typeof alertChannel>;

const maintenanceWindow = z.strictObject({
  id: windowId,
  name: z.string(),
  /**
   * The window holds back alerts about these machines and about those with one of these tags; if both fields are null,
   * about all machines.
   */
  machine_ids: z.array(machineId).nullable(),
  tags: tags.nullable(),
  /** Start and end of a window that takes place once. */
  starts_at: z.string().nullable(),
  ends_at: z.string().nullable(),
  /** Cron expression, time zone and length in milliseconds of a window that repeats. */
  cron: z.string().nullable(),
  timezone: z.string(),
  duration: z.number().nullable(),
  created_at: z.string(),
});
export type MaintenanceWindow = z.output<typeof maintenanceWindow>;

/** The collections of documents. A field with a default is absent in files of older brokers. */
const collections = {
  machines: z.array(machine),
  keys: z.array(key),
  logins: z.array(login).default([]),
  join_tokens: z.array(joinToken),
  schedules: z.array(schedule),
  webhooks: z.array(webhook),
  alert_rules: z.array(alertRule).default([]),
  alert_channels: z.array(alertChannel).default([]),
  maintenance_windows: z.array(maintenanceWindow).default([]),
  saved_commands: z.array(savedCommand).default([]),
};
export type Name = keyof typeof collections;
// The cast is safe: Object.keys() returns the names of the collections.
export const names = Object.keys(collections) as Name[];

/** Version of the format. Version 1, which Farhand 0.1.0 wrote, differs only in that it has no checksum. */
export const version = 2;
const file = z.strictObject({
  /**
   * Checksum of the text of the file (see serialize-state.ts). After the check, this field is removed from the
   * documents in memory.
   */
  checksum: z.string().optional(),
  version: z.literal([1, version]),
  install_id: z.string(),
  /** Counts commits. Generation 1 is a new installation without any declared document. */
  generation: z.int(),
  ...collections,
  outbox: z.array(
    z.custom<OutboxEntry>((value) => z.looseObject({ kind: z.string() }).safeParse(value).success),
  ),
});
export const documents = file.transform(({ checksum: _, ...declared }) => declared);
export type Documents = z.output<typeof documents>;

/** The documents of a new installation. */
export function newDocuments(install_id: string): Documents {
  const empty = Object.fromEntries(names.map((name) => [name, []]));
  return documents.parse({ version, install_id, generation: 1, ...empty, outbox: [] });
}

/**
 * The declared documents at one moment, such as after the last commit or at the start of a change. Each collection is a
 * map from ids to documents.
 */
export type Declared = { readonly [N in Name]: ReadonlyMap<string, Documents[N][number]> };

/** Returns maps of the documents by id. */
export function mapsOf(found: Documents): Declared {
  const maps = names.map((name) => [name, new Map(found[name].map((one) => [one.id, one]))]);
  // The cast is safe: the name of a collection decides the type of its documents.
  return Object.fromEntries(maps) as Declared;
}
