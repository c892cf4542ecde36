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

type ParamNames<Path> = Path extends `${string}{${infer Name}}${infer Rest}`
  ? Name | ParamNames<Rest>
  : never;
/** The params of a path: `{machine_id}` takes the id of a machine, any other name a text. */
export type PathParams<Path> = {
  [N in ParamNames<Path>]: N extends `${infer Noun extends IdNoun}_id`
    ? (typeof idSchemas)[Noun]
    : z.ZodString;
};

function paramsOf<Path extends string>(path: Path): PathParams<Path> {
  const shape = [...path.matchAll(/\{(\w+?)(_id)?\}/g)].map(([, noun = '', id = '']) => [
    noun + id,
    id && Object.hasOwn(idSchemas, noun) ? idSchemas[noun as IdNoun] : z.string(),
  ]);
  // The names and schemas that the type reads from the same path.
  return Object.fromEntries(shape) as PathParams<Path>;
}

/** What a route has besides its method, path and access. */
export type Draft<
  Q extends z.ZodRawShape,
  H extends z.ZodRawShape,
  B extends z.ZodType,
  R extends z.ZodType,
> = Pick<Route, 'summary'> &
  Partial<Pick<Route, 'base' | 'status' | 'description'>> &
  Pick<Route, 'idempotency' | 'again' | 'bodyLimit' | 'impliesMachine' | 'waits' | 'lastEvent'> & {
    query?: Q;
    headers?: H;
    body?: B;
    reply: R;
  };

/** A route that answers one object. */
export function single<
  const P extends string,
  R extends z.ZodType,
  Q extends z.ZodRawShape = NoShape,
  H extends z.ZodRawShape = NoShape,
  B extends z.ZodType = Nothing,
>(method: Route['method'], path: P, access: Access, draft: Draft<Q, H, B, R>) {
  return build('single', method, path, access, draft);
}

/** A route that answers one object with an array of any length, which is sent as it comes. */
export function growing<
  const P extends string,
  R extends z.ZodObject,
  const G extends keyof z.output<R> & string,
  Q extends z.ZodRawShape = NoShape,
>(path: P, access: Access, draft: Draft<Q, NoShape, Nothing, R> & { grows: G }) {
  const { grows, ...given } = draft;
  const { [grows]: items, ...others } = draft.reply.shape;
  // `grows` names a field of the reply.
  const parts = { items: items as z.ZodType, rest: z.object(others) };
  return { ...build('growing', 'GET', path, access, given), grows, parts };
}

/** A route whose body is not JSON but comes as it is. */
export function incoming<
  const A extends Accepts,
  const P extends string,
  R extends z.ZodType,
  Q extends z.ZodRawShape = NoShape,
  H extends z.ZodRawShape = NoShape,
  B extends z.ZodType = Nothing,
>(accepts: A, method: Route['method'], path: P, access: Access, draft: Draft<Q, H, B, R>) {
  return { ...build('single', method, path, access, draft), accepts };
}

/** A GET that answers a stream: the bytes of a file, lines, or events. */
export function outgoing<
  const K extends 'bytes' | 'lines' | 'events',
  const P extends string,
  R extends z.ZodType = Nothing,
  Q extends z.ZodRawShape = NoShape,
  H extends z.ZodRawShape = NoShape,
>(kind: K, path: P, access: Access, draft: Omit<Draft<Q, H, Nothing, R>, 'reply'> & { reply?: R }) {
  // Without a schema R is Nothing, as the type parameter's default says.
  return build(kind, 'GET', path, access, { ...draft, reply: draft.reply ?? (nothing as unknown as R) });
}

/** A route that answers a text or file of its own type. */
export function raw<const P extends string>(
  path: P,
  access: Access,
  summary: string,
  base: Route['base'] = '',
) {
  return build('raw', 'GET', path, access, { summary, base, reply: nothing });
}

/** A GET that becomes a WebSocket. A browser can send no key with it: a ticket in its query is its right. */
export function socket<const P extends string, Q extends z.ZodRawShape & { ticket: z.ZodType }>(
  path: P,
  draft: Pick<Route, 'summary' | 'description'> & { query: Q },
) {
  return build('socket', 'GET', path, 'everybody', { ...draft, reply: nothing, status: 101 });
}

/** A route of a kind, with what its draft leaves out. */
export function build<
  K extends Kind,
  P extends string,
  R extends z.ZodType,
  Q extends z.ZodRawShape = NoShape,
  H extends z.ZodRawShape = NoShape,
  B extends z.ZodType = Nothing,
>(
  kind: K,
  method: Route['method'],
  path: P,
  access: Access,
  draft: Draft<Q, H, B, R>,
): Route<PathParams<P>, Q, H, B, R, K> {
  const { query, headers, body, ...rest } = draft;
  return {
    status: 200,
    base: '/api/v1',
    ...rest,
    kind,
    method,
    path,
    access,
    params: paramsOf(path),
    // An absent part is an empty shape, which is what the type parameter's default says.
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
export const tagList = (least: number) =>
  z
    .array(tag.trim().min(1))
    .min(least)
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
const deliveryId = id('dlv').brand<'DeliveryId'>();

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
