// The type of a REST route, and the schemas that several routes share, above all the ids that authorization reads.
import * as z from 'zod';
import type { Code } from '../errors.ts';

export const scopes = [
  'machines:read',
  'machines:write',
  'files:read',
  'files:write',
  'commands:read',
  'commands:execute',
  'sessions:read',
  'sessions:attach',
  'schedules:read',
  'schedules:write',
  'webhooks:read',
  'webhooks:write',
  'admin',
] as const;
export type Scope = (typeof scopes)[number];

/** Who may call: keys with a scope, any valid key, or everybody (the few routes without a key). */
export type Access = Scope | 'any key' | 'everybody';

/**
 * The answer of a route. single: one object; list: a page of objects; growing: one object with an array of any length,
 * sent as it is read; raw: a text with its own media type; bytes: a file; lines: objects as NDJSON; events: server-sent
 * events; socket: a WebSocket.
 */
export type Kind = 'single' | 'list' | 'growing' | 'raw' | 'bytes' | 'lines' | 'events' | 'socket';
/** A body other than JSON: plain bytes, or a form (multipart/form-data) with one part called file. */
export type Accepts = 'bytes' | 'form';
/** Headers that only some answers have; the others are on every answer. */
export type ReplyHeader = 'ETag' | 'X-Output-Offset' | 'X-Last-Event-Id';

export interface Route<
  Params extends z.ZodRawShape = z.ZodRawShape,
  Query extends z.ZodRawShape = z.ZodRawShape,
  Headers extends z.ZodRawShape = z.ZodRawShape,
  Body extends z.ZodType = z.ZodType,
  Reply extends z.ZodType = z.ZodType,
  Answer extends Kind = Kind,
> {
  method: 'GET' | 'POST' | 'PUT' | 'PATCH' | 'DELETE';
  /** Below `base`, parameters in braces: `/machines/{machine_id}`. */
  path: string;
  /** The versioned API, or the root for health, metrics and pages. */
  base: '/api/v1' | '';
  access: Access;
  kind: Answer;
  /** One imperative line for the reference page and the CLI's help. */
  summary: string;
  /** More for the reference page, as Markdown. */
  description?: string;
  params: Params;
  query: Query;
  /** Request headers by name with underscores: `if_match` is If-Match. */
  headers: Headers;
  /** Absent: the route takes no JSON. Of a form: its fields, which are texts. */
  body: Body | undefined;
  /** A JSON body that works, for the reference page; a test sends it. */
  example?: Readonly<Record<string, unknown>>;
  /** The body is passed to the handler as a stream. */
  accepts?: Accepts;
  /** Schema of `data`, or of one item of a list or stream. Raw and bytes routes have none. */
  reply: Reply;
  /** Media types of a raw or bytes route. */
  types?: readonly string[];
  replyHeaders?: readonly ReplyHeader[];
  /** Error codes besides those that follow from access, ids and body. */
  errors?: readonly Code[];
  /** Of a list: the item fields to filter by, from path or query. */
  filters?: readonly string[];
  /** Of a growing route: the name of its array. */
  grows?: string;
  /** Of a growing route: the schema of the array, and of the object without it. */
  parts?: { items: z.ZodType; rest: z.ZodType };
  status: 101 | 200 | 201;
  /**
   * The route takes an Idempotency-Key. `replay`: a repeat gets the first answer; `secret`: the answer is never stored,
   * and a repeat is refused with the id of the object made.
   */
  idempotency?: 'replay' | 'secret';
  /** The operation that answers a repeat after a crash; default: the `get` of the same resource. */
  again?: string;
  /** Largest body in bytes; default 1 MiB. */
  bodyLimit?: number;
  /** `machine_id` is optional while exactly one machine is registered. */
  impliesMachine?: boolean;
  /** The answer may take long: the key is checked again before it is sent. */
  waits?: boolean;
  /** Of server-sent events: the last event. Without one the stream has no end. */
  lastEvent?: string;
}

/** Errors of every call that the agent of a machine answers. */
export const machineErrors = [
  'machine_offline',
  'machine_timeout',
  'machine_error',
  'not_supported',
  'permission_denied',
] as const satisfies Code[];

/** Metadata that sets the OpenAPI form of a schema that transforms, in place of the derived one. */
export function shownAs(json: Readonly<Record<string, unknown>>) {
  return {
    override({ jsonSchema }: { jsonSchema: Record<string, unknown> }) {
      const { description } = jsonSchema;
      for (const key of Object.keys(jsonSchema)) delete jsonSchema[key];
      Object.assign(jsonSchema, json, description && { description });
    },
  };
}

/** A whole number in a query string. */
export function queryNumber(minimum: number, maximum = Number.MAX_SAFE_INTEGER) {
  const bounds = { minimum, ...(maximum < Number.MAX_SAFE_INTEGER && { maximum }) };
  return z
    .string()
    .regex(/^-?\d{1,15}$/, 'must be a whole number')
    .transform(Number)
    .refine((value) => value >= minimum && value <= maximum, `must be from ${minimum} to ${maximum}`)
    .meta(shownAs({ type: 'integer', ...bounds }));
}

/** `true` or `false` in a query string, nothing else. */
export const queryBoolean = z
  .enum(['true', 'false'])
  .transform((value) => value === 'true')
  .meta(shownAs({ type: 'boolean' }));

// biome-ignore lint/suspicious/noControlCharactersInRegex: control characters are what is refused
const control = /[\u0000-\u001f\u007f-\u009f]/;

/** Text where a name is meant: no control characters, no lone surrogates (SQLite would change those silently). */
export function label(min: number, max: number) {
  return z
    .string()
    .min(min)
    .max(max)
    .refine(
      (text) => text.isWellFormed() && !control.test(text),
      'must not hold control characters or lone surrogates',
    );
}

/** Text that is well-formed Unicode without NUL: what can cross to a process or a database unchanged. */
export function text(max: number) {
  return z
    .string()
    .max(max)
    .refine((value) => value.isWellFormed() && !value.includes('\0'), 'must not hold NUL or lone surrogates');
}

/** A body that must have at least one of these fields, by default of all its fields. */
export function someOf<B extends z.ZodObject>(
  body: B,
  fields: readonly string[] = Object.keys(body.shape),
): B {
  const given = (sent: Record<string, unknown>): boolean => fields.some((name) => sent[name] !== undefined);
  const error = `must hold at least one of ${fields.join(', ')}`;
  return body.refine(given, { error, when: ({ issues }) => issues.length === 0 }).meta({ minProperties: 1 });
}

const tag = label(1, 64).refine((value) => !value.includes(','), 'must not hold a comma');
/** At most 50 tags, trimmed as filters trim them, unique and in the order given. */
export const tagList = (least: number) =>
  z
    .array(tag.trim().min(1))
    .min(least, 'must hold at least one')
    .max(50)
    .transform((values) => [...new Set(values)])
    .meta(
      shownAs({
        type: 'array',
        ...(least && { minItems: least }),
        maxItems: 50,
        items: { type: 'string', minLength: 1, maxLength: 64 },
      }),
    );
export const tags = tagList(0);

export const timestamp = z.string().meta({ format: 'date-time', examples: ['2026-11-21T10:00:00.000Z'] });

/** Date.parse takes February 30 for March 2. */
const isDay = (text: string): boolean =>
  Number(text.slice(8, 10)) <=
  new Date(Date.UTC(Number(text.slice(0, 4)), Number(text.slice(5, 7)), 0)).getUTCDate();

/** With an offset from UTC it may lie in a year of five digits, which ISO 8601 writes otherwise. */
const isOfFourDigits = (text: string): boolean => new Date(text).toISOString().length === 24;

/** An instant given in ISO 8601, of the years 0000 to 9999 in UTC. */
export const instant = z
  .string()
  .refine(
    (value) =>
      /^\d{4}-\d\d-\d\dT/.test(value) &&
      !Number.isNaN(Date.parse(value)) &&
      isDay(value) &&
      isOfFourDigits(value),
    'must be an ISO 8601 timestamp',
  )
  .transform((value) => new Date(value))
  .meta(shownAs({ type: 'string', format: 'date-time' }));

/** A whole number of milliseconds in a body. */
export const milliseconds = (min: number, max: number) => z.int().min(min).max(max);

// Ids. Requests are authorized by these schemas: the broker finds them in a route, looks up the object each id names, and
// checks that the key reaches its machine.
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
export const joinTokenId = id('join', 'join token').brand<'JoinTokenId'>();
export type JoinTokenId = z.output<typeof joinTokenId>;
export const webhookId = id('hook', 'webhook').brand<'WebhookId'>();
export type WebhookId = z.output<typeof webhookId>;
const deliveryId = id('dlv', 'delivery').brand<'DeliveryId'>();

/** Every id schema by the noun that it names. */
export const idSchemas = {
  machine: machineId,
  command: commandId,
  batch: batchId,
  schedule: scheduleId,
  run: runId,
  session: sessionId,
  key: keyId,
  join_token: joinTokenId,
  webhook: webhookId,
  delivery: deliveryId,
} as const;
export type IdNoun = keyof typeof idSchemas;

/** An object schema with a name, which becomes a component of the OpenAPI document. */
export const named = <S extends z.core.$ZodLooseShape>(id: string, shape: S) => z.object(shape).meta({ id });

/** The answer of most deletions. */
export const deleted = z.object({ deleted: z.boolean().describe('Always true') });

/** Paths on a machine: absolute, or from the agent user's home; `~` is the home. */
export const path = z
  .string()
  .min(1)
  .max(32_768)
  .refine((value) => value.isWellFormed(), 'must be well-formed Unicode')
  .meta({
    description: 'Path on the machine: absolute, or relative to the home directory (`~`) of the agent’s user',
    examples: ['/etc/hostname'],
  });

/** Permission bits as 3 or 4 octal digits. */
export const mode = z
  .string()
  .regex(/^[0-7]{3,4}$/, 'must be 3 or 4 octal digits')
  .meta({ description: 'Permission bits as 3 or 4 octal digits', examples: ['0644'] });
