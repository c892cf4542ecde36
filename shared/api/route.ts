// What a REST route is: data only. Schemas every noun shares live here too, above all the ids that authorisation reads.
import * as z from 'zod';

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

/** Who may call: a scope, any valid key, or everybody (the few routes that need no key). */
export type Access = Scope | 'any key' | 'everybody';

/**
 * What a route answers: one object; a page of objects; one object with an array that grows while it is sent; a text of
 * its own type; the bytes of a file; objects as lines (NDJSON) or as server-sent events, for as long as they come; or a
 * WebSocket.
 */
export type Kind = 'single' | 'list' | 'growing' | 'raw' | 'bytes' | 'lines' | 'events' | 'socket';
/** What a body is that is not JSON: bytes as they are, or a form (multipart/form-data) with one part called file. */
export type Accepts = 'bytes' | 'form';

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
  /** Where the path starts: the versioned API, or the root for health and pages. */
  base: '/api/v1' | '';
  access: Access;
  kind: Answer;
  /** One line for the reference page and the CLI's help. */
  summary: string;
  /** More for the reference page, as Markdown. */
  description?: string;
  params: Params;
  query: Query;
  /** By name with underscores: `if_match` is If-Match. */
  headers: Headers;
  /** Absent: the route takes no JSON. Of a form: its fields, which are texts. */
  body: Body | undefined;
  /** The body is handed on as it comes. */
  accepts?: Accepts;
  /** Of `data`; for a list, lines and events of one item. Raw routes and those that answer bytes have none. */
  reply: Reply;
  /** Of a list: the fields of its items that path or query may name; only items that have each value are answered. */
  filters?: readonly string[];
  /** The array of `reply` that grows. */
  grows?: string;
  /** Of such a reply: the array, and the rest of the object. */
  parts?: { items: z.ZodType; rest: z.ZodType };
  status: 101 | 200 | 201;
  /**
   * For a POST that makes or starts something: takes an Idempotency-Key. 'replay' answers a repeat with the first
   * answer; 'secret' never stores the answer and refuses the repeat with the id it made.
   */
  idempotency?: 'replay' | 'secret';
  /** The operation that answers a repeat after a crash; the noun's `get` unless told. */
  again?: string;
  /** Largest body in bytes: 1 MiB unless told. */
  bodyLimit?: number;
  /** `machine_id` may be left out while exactly one machine is registered. */
  impliesMachine?: boolean;
  /** It may be long before it answers: the key is judged again meanwhile. */
  waits?: boolean;
  /** Of server-sent events: the one after which nothing comes. Without it they have no end. */
  lastEvent?: string;
}

const nothing = z.undefined();
export type Nothing = typeof nothing;
export type NoShape = Record<never, never>;

export type Draft<
  Q extends z.ZodRawShape,
  H extends z.ZodRawShape,
  B extends z.ZodType,
  R extends z.ZodType,
> = Pick<Route, 'method' | 'access' | 'summary'> & {
  path: string;
  params?: z.ZodRawShape;
  query?: Q;
  headers?: H;
  body?: B;
  reply: R;
  status?: 200 | 201;
} & Pick<Route, 'idempotency' | 'again' | 'bodyLimit' | 'impliesMachine' | 'waits' | 'lastEvent'>;

export interface Defaults<P extends z.ZodRawShape> {
  params?: P;
}

/** A route that answers one object. */
export function single<
  R extends z.ZodType,
  P extends z.ZodRawShape = NoShape,
  Q extends z.ZodRawShape = NoShape,
  H extends z.ZodRawShape = NoShape,
  B extends z.ZodType = Nothing,
>(draft: Draft<Q, H, B, R> & Defaults<P>): Route<P, Q, H, B, R, 'single'> {
  return build(draft, 'single');
}

/** A route that answers one object with an array of any length, which is sent as it comes. */
export function growing<
  R extends z.ZodObject,
  const G extends keyof z.output<R> & string,
  P extends z.ZodRawShape = NoShape,
  Q extends z.ZodRawShape = NoShape,
>(
  draft: Omit<Draft<Q, NoShape, Nothing, R>, 'method'> & Defaults<P> & { grows: G },
): Route<P, Q, NoShape, Nothing, R, 'growing'> & { grows: G } {
  const { grows, ...given } = draft;
  const { [grows]: items, ...others } = draft.reply.shape;
  // `grows` names a field of the reply.
  const parts = { items: items as z.ZodType, rest: z.object(others) };
  return { ...build({ ...given, method: 'GET' }, 'growing'), grows, parts };
}

/** A route whose body is not JSON but comes as it is. */
export function incoming<
  const A extends Accepts,
  R extends z.ZodType,
  P extends z.ZodRawShape = NoShape,
  Q extends z.ZodRawShape = NoShape,
  H extends z.ZodRawShape = NoShape,
  B extends z.ZodType = Nothing,
>(draft: Draft<Q, H, B, R> & Defaults<P> & { accepts: A }): Route<P, Q, H, B, R, 'single'> & { accepts: A } {
  return { ...build(draft, 'single'), accepts: draft.accepts };
}

/** A GET that answers a stream: the bytes of a file, lines, or events. */
export function outgoing<
  const K extends 'bytes' | 'lines' | 'events',
  R extends z.ZodType = Nothing,
  P extends z.ZodRawShape = NoShape,
  Q extends z.ZodRawShape = NoShape,
  H extends z.ZodRawShape = NoShape,
>(
  kind: K,
  draft: Omit<Draft<Q, H, Nothing, R>, 'method' | 'reply'> & Defaults<P> & { reply?: R },
): Route<P, Q, H, Nothing, R, K> {
  // Without a schema R is Nothing, as the type parameter's default says.
  return build({ ...draft, method: 'GET', reply: draft.reply ?? (nothing as unknown as R) }, kind);
}

/** A route that answers a text or file of its own type. */
export function raw<P extends z.ZodRawShape = NoShape>(
  draft: Pick<Route, 'path' | 'base' | 'access' | 'summary'> & Defaults<P>,
) {
  return {
    ...build<P, NoShape, NoShape, Nothing, Nothing, 'raw'>(
      { ...draft, method: 'GET', reply: nothing },
      'raw',
    ),
    base: draft.base,
  };
}

/** A GET that becomes a WebSocket. A browser can send no key with it: a ticket in its query is its right. */
export function socket<P extends z.ZodRawShape, Q extends z.ZodRawShape & { ticket: z.ZodType }>(
  draft: Pick<Route, 'path' | 'summary'> & { description: string; params: P; query: Q },
) {
  const { description, ...rest } = draft;
  return {
    ...build<P, Q, NoShape, Nothing, Nothing, 'socket'>(
      { ...rest, method: 'GET', access: 'everybody', reply: nothing },
      'socket',
    ),
    description,
    status: 101 as const,
  };
}

/** A route of a kind, with what its draft leaves out. */
export function build<
  P extends z.ZodRawShape,
  Q extends z.ZodRawShape,
  H extends z.ZodRawShape,
  B extends z.ZodType,
  R extends z.ZodType,
  K extends Kind,
>(draft: Draft<Q, H, B, R> & Defaults<P>, kind: K): Route<P, Q, H, B, R, K> {
  const { params, query, headers, body, ...rest } = draft;
  return {
    status: 200,
    base: '/api/v1',
    ...rest,
    kind,
    // An absent part is an empty shape, which is what the type parameter's default says.
    params: params ?? ({} as P),
    query: query ?? ({} as Q),
    headers: headers ?? ({} as H),
    body,
  };
}

/** How a schema that transforms shows in OpenAPI: exactly so, whatever its parts would show. */
export function shownAs(json: Readonly<Record<string, unknown>>) {
  return {
    override({ jsonSchema }: { jsonSchema: Record<string, unknown> }) {
      for (const key of Object.keys(jsonSchema)) delete jsonSchema[key];
      Object.assign(jsonSchema, json);
    },
  };
}

/** A whole number in a query string. */
export function queryNumber(min: number, max: number, description?: string) {
  const bounds = { minimum: min, ...(max < Number.MAX_SAFE_INTEGER && { maximum: max }) };
  return z
    .string()
    .regex(/^-?\d{1,15}$/, 'must be a whole number')
    .transform(Number)
    .refine((value) => value >= min && value <= max, `must be from ${min} to ${max}`)
    .meta(shownAs({ type: 'integer', ...bounds, ...(description && { description }) }));
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

/** The body of a change: at least one of these fields must be there, of all of them unless told. */
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
export const tags = z
  .array(tag.trim().min(1))
  .max(50)
  .transform((values) => [...new Set(values)])
  .meta(shownAs({ type: 'array', maxItems: 50, items: { type: 'string', minLength: 1, maxLength: 64 } }));

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

// Ids. dispatch finds these very schemas in a route, looks up what they name and checks the machine behind it,
// so a route that takes an id is authorised by naming its schema.
const id = (prefix: string) =>
  z
    .string()
    .min(1)
    .max(200)
    .meta({ examples: [`${prefix}_4fJ2kQ9ZtR7wXc0BvN1mLp`] });
export const machineId = id('mach').brand<'MachineId'>();
export type MachineId = z.output<typeof machineId>;
export const commandId = id('cmd').brand<'CommandId'>();
export type CommandId = z.output<typeof commandId>;
export const batchId = id('batch').brand<'BatchId'>();
export type BatchId = z.output<typeof batchId>;
export const sessionId = id('sess').brand<'SessionId'>();
export type SessionId = z.output<typeof sessionId>;
export const scheduleId = id('sched').brand<'ScheduleId'>();
export type ScheduleId = z.output<typeof scheduleId>;
export const runId = id('run').brand<'RunId'>();
export type RunId = z.output<typeof runId>;
export const keyId = id('key').brand<'KeyId'>();
export type KeyId = z.output<typeof keyId>;
export const joinTokenId = id('join').brand<'JoinTokenId'>();
export type JoinTokenId = z.output<typeof joinTokenId>;
export const webhookId = id('hook').brand<'WebhookId'>();
export type WebhookId = z.output<typeof webhookId>;
export const deliveryId = id('dlv').brand<'DeliveryId'>();

/** Every id schema and the noun that can tell what it names. */
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

/** An error body, for OpenAPI. */
export const errorBody = z
  .object({
    error: z.object({
      code: z.string(),
      message: z.string(),
      details: z.record(z.string(), z.unknown()),
    }),
  })
  .meta({ id: 'Error' });

/** Paths on a machine: absolute, or from the agent user's home; `~` is the home. */
export const path = z
  .string()
  .min(1)
  .max(32_768)
  .refine((value) => value.isWellFormed(), 'must be well-formed Unicode')
  .meta({ description: 'Absolute, or from the home of the agent’s user', examples: ['/etc/hostname'] });

/** Permission bits as 3 or 4 octal digits. */
export const mode = z
  .string()
  .regex(/^[0-7]{3,4}$/, 'must be 3 or 4 octal digits')
  .meta({ examples: ['0644'] });
