// Schemas that several routes share, such as those of ids, texts and times.
import * as z from 'zod';
import { formatDuration } from '../duration.ts';

/**
 * Returns metadata that makes the OpenAPI document describe a schema as `json`, which is a JSON Schema. Without it, a
 * number in a query would be described as text.
 */
function jsonSchemaOf(json: Readonly<Record<string, unknown>>) {
  return {
    override({ jsonSchema }: { jsonSchema: Record<string, unknown> }) {
      const { description } = jsonSchema;
      for (const key of Object.keys(jsonSchema)) delete jsonSchema[key];
      Object.assign(jsonSchema, json, description && { description });
    },
  };
}

export function queryNumber(minimum: number, maximum = Number.MAX_SAFE_INTEGER) {
  const bounds = { minimum, ...(maximum < Number.MAX_SAFE_INTEGER && { maximum }) };
  return z
    .string()
    .regex(/^-?\d{1,16}$/, 'must be a whole number')
    .transform(Number)
    .refine((value) => value >= minimum && value <= maximum, `must be from ${minimum} to ${maximum}`)
    .meta(jsonSchemaOf({ type: 'integer', ...bounds }));
}

/**
 * Adds checks to the schema of a body with a text and its `encoding`. The text must be base64 if `encoding` is base64,
 * and well-formed Unicode otherwise. `name`: name of the field with the text.
 */
export function encoded<N extends string, T extends z.ZodType<Record<N | 'encoding', string>>>(
  name: N,
  body: T,
) {
  return body
    .refine((given) => given.encoding === 'base64' || given[name].isWellFormed(), {
      path: [name],
      message: 'must be well-formed Unicode; send other bytes with encoding base64',
    })
    .refine((given) => given.encoding !== 'base64' || z.base64().safeParse(given[name]).success, {
      path: [name],
      message: 'must be base64',
    });
}

/** Schema of a text that `parse` converts. If `parse` returns undefined, the text is refused with `error`. */
export const parsedText = <T>(max: number, parse: (text: string) => T | undefined, error: string) =>
  z
    .string()
    .max(max)
    .transform((text, context) => {
      const parsed = parse(text);
      if (parsed !== undefined) return parsed;
      context.addIssue({ code: 'custom', message: error });
      return z.NEVER;
    })
    .meta(jsonSchemaOf({ type: 'string' }));

/** Schema of a query parameter that is `true` or `false`, nothing else. */
export const queryBoolean = z
  .enum(['true', 'false'])
  .transform((value) => value === 'true')
  .meta(jsonSchemaOf({ type: 'boolean' }));

// biome-ignore lint/suspicious/noControlCharactersInRegex: control characters are what is refused
const control = /[\u0000-\u001f\u007f-\u009f]/;

/** Schema of a name: text without control characters or lone surrogates. SQLite would change a lone surrogate. */
export function label(min: number, max: number) {
  return z
    .string()
    .min(min)
    .max(max)
    .refine(
      (text) => text.isWellFormed() && !control.test(text),
      'must be well-formed Unicode without control characters',
    );
}

/** Schema of well-formed Unicode text without NUL. Processes and databases receive such text unchanged. */
export function text(max: number) {
  return z
    .string()
    .max(max)
    .refine(
      (value) => value.isWellFormed() && !value.includes('\0'),
      'must be well-formed Unicode without NUL',
    );
}

/** Adds the check that a body has at least one of `fields`, by default of all its fields. */
export function someOf<B extends z.ZodObject>(
  body: B,
  fields: readonly string[] = Object.keys(body.shape),
): B {
  const given = (sent: Record<string, unknown>): boolean => fields.some((name) => sent[name] !== undefined);
  const error = `must contain at least one of ${fields.join(', ')}`;
  return body.refine(given, { error, when: ({ issues }) => issues.length === 0 }).meta({ minProperties: 1 });
}

const tag = label(1, 64).refine((value) => !value.includes(','), 'must not contain a comma');
/** Schema of `least` to 50 unique tags, trimmed, in the order given. */
export const tagList = (least: number) =>
  z
    .array(tag.trim().min(1))
    .min(least, 'must contain at least one tag')
    .max(50)
    .transform((values) => [...new Set(values)])
    .meta(
      jsonSchemaOf({
        type: 'array',
        ...(least && { minItems: least }),
        maxItems: 50,
        items: { type: 'string', minLength: 1, maxLength: 64 },
      }),
    );
export const tags = tagList(0);
/** Schema of a query parameter that selects machines by their tags. */
export const allOfTags = z
  .string()
  .max(4096)
  .optional()
  .describe('Only machines with all of these tags, comma-separated');

export const timestamp = z.string().meta({ format: 'date-time', examples: ['2026-11-21T10:00:00.000Z'] });

/** True if the day exists in its month; Date.parse would read February 30 as March 2. */
const isDay = (text: string): boolean =>
  Number(text.slice(8, 10)) <=
  new Date(Date.UTC(Number(text.slice(0, 4)), Number(text.slice(5, 7)), 0)).getUTCDate();

/**
 * True if the year in UTC has four digits. A zone offset can turn year 9999 into 10000, which toISOString() writes with
 * six digits.
 */
const isOfFourDigits = (text: string): boolean => new Date(text).toISOString().length === 24;

/** Schema of an instant in ISO 8601, in the years 0000 to 9999 of UTC. */
export const instant = z
  .string()
  .refine(
    (value) =>
      /^\d{4}-\d\d-\d\dT/.test(value) &&
      !Number.isNaN(Date.parse(value)) &&
      isDay(value) &&
      isOfFourDigits(value),
    'must be an ISO 8601 time, such as 2026-11-21T10:00:00Z',
  )
  .transform((value) => new Date(value))
  .meta(jsonSchemaOf({ type: 'string', format: 'date-time' }));

export const endStatuses = ['completed', 'failed', 'timeout', 'cancelled'] as const;

export const day = 86_400_000;
export const milliseconds = (min: number, max: number) =>
  z
    .int()
    .min(min, `must be at least ${min} milliseconds (${formatDuration(min)})`)
    .max(max, `must be at most ${max} milliseconds (${formatDuration(max)})`);

// Schemas of ids. Authorization finds them in a route, looks up the object of each id, and checks that the key may use
// that object's machine.
const id = (prefix: string, noun: string) =>
  z
    .string()
    .min(1)
    .max(200)
    .meta({ description: `Id of the ${noun}`, examples: [`${prefix}_4fJ2kQ9ZtR7wXc0BvN1mLp`] });
export const machineId = id('mach', 'machine').brand<'MachineId'>();
export type MachineId = z.output<typeof machineId>;
export const commandId = id('cmd', 'command').brand<'CommandId'>();
export type CommandId = z.output<typeof commandId>;
export const batchId = id('batch', 'batch').brand<'BatchId'>();
export type BatchId = z.output<typeof batchId>;
export const sessionId = id('sess', 'session').brand<'SessionId'>();
export type SessionId = z.output<typeof sessionId>;
export const scheduleId = id('sched', 'schedule').brand<'ScheduleId'>();
export type ScheduleId = z.output<typeof scheduleId>;
export const runId = id('run', 'schedule run').brand<'RunId'>();
export type RunId = z.output<typeof runId>;
export const keyId = id('key', 'API key').brand<'KeyId'>();
export type KeyId = z.output<typeof keyId>;
export const loginId = id('login', 'login').brand<'LoginId'>();
export type LoginId = z.output<typeof loginId>;
export const joinTokenId = id('join', 'join token').brand<'JoinTokenId'>();
export type JoinTokenId = z.output<typeof joinTokenId>;
export const webhookId = id('hook', 'webhook').brand<'WebhookId'>();
export type WebhookId = z.output<typeof webhookId>;
const deliveryId = id('dlv', 'delivery').brand<'DeliveryId'>();
export const alertId = id('alert', 'alert').brand<'AlertId'>();
export type AlertId = z.output<typeof alertId>;
export const ruleId = id('rule', 'alert rule').brand<'RuleId'>();
export type RuleId = z.output<typeof ruleId>;
export const channelId = id('chan', 'channel').brand<'ChannelId'>();
export type ChannelId = z.output<typeof channelId>;
export const windowId = id('win', 'maintenance window').brand<'WindowId'>();
export type WindowId = z.output<typeof windowId>;
export const upgradeId = id('upg', 'upgrade').brand<'UpgradeId'>();
export type UpgradeId = z.output<typeof upgradeId>;
export const savedCommandId = id('saved', 'saved command').brand<'SavedCommandId'>();
export type SavedCommandId = z.output<typeof savedCommandId>;

/** Every id schema by the noun of its object. */
export const idSchemas = {
  machine: machineId,
  saved_command: savedCommandId,
  command: commandId,
  batch: batchId,
  schedule: scheduleId,
  run: runId,
  session: sessionId,
  key: keyId,
  login: loginId,
  join_token: joinTokenId,
  webhook: webhookId,
  delivery: deliveryId,
  alert: alertId,
  rule: ruleId,
  channel: channelId,
  window: windowId,
  upgrade: upgradeId,
} as const;
export type IdNoun = keyof typeof idSchemas;

/** An object schema with a name, which becomes a component of the OpenAPI document. */
export const named = <S extends z.core.$ZodLooseShape>(id: string, shape: S) => z.object(shape).meta({ id });

/** An object schema with a description, for a field of another object. */
export const group = <S extends z.core.$ZodLooseShape>(description: string, shape: S) =>
  z.object(shape).describe(description);

/** The answer of most routes that delete an object. */
export const deleted = z.object({ deleted: z.boolean().describe('Always true') });

/** Schema of a path on a machine: absolute, or relative to the home of the agent's user; `~` is that home. */
export const path = z
  .string()
  .min(1)
  .max(32_768)
  .refine((value) => value.isWellFormed(), 'must be well-formed Unicode')
  .meta({
    description: 'Path on the machine: absolute, or relative to the home directory (`~`) of the agent’s user',
    examples: ['/etc/hostname'],
  });

export const mode = z
  .string()
  .regex(/^[0-7]{3,4}$/, 'must be 3 or 4 octal digits')
  .meta({ description: 'Permission bits as 3 or 4 octal digits', examples: ['0644'] });
