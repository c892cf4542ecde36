// The type of a REST route: its path, who may call it, its schemas, and the form of its answer.
import type * as z from 'zod';
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

/** Who may call the route: keys with a scope, any valid key, or clients without a key. */
export type Access = Scope | 'any key' | 'everybody';

export type Kind =
  // One object.
  | 'single'
  // A page of objects.
  | 'list'
  // One object with an array of any length. The broker sends elements while it still reads the others.
  | 'growing'
  // A text with its own media type.
  | 'raw'
  // A file.
  | 'bytes'
  // Objects as NDJSON.
  | 'lines'
  // Server-sent events.
  | 'events'
  // A WebSocket.
  | 'socket';
/** Format of a body that is not JSON: plain bytes, or multipart/form-data with one part called file. */
export type Accepts = 'bytes' | 'form';
/** Headers that only some answers have. */
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
  /** Path below `base`, with parameters in braces: `/machines/{machine_id}`. */
  path: string;
  /** Prefix of the path: the versioned API, or the root for health, metrics and pages. */
  base: '/api/v1' | '';
  access: Access;
  kind: Answer;
  /** What the route does, in one imperative line, for the reference page and the CLI's help. */
  summary: string;
  /** Further text for the reference page, as Markdown. */
  description?: string;
  params: Params;
  query: Query;
  /** Request headers by name with underscores: `if_match` is If-Match. */
  headers: Headers;
  /** Schema of the JSON body, or of the text fields of a form; undefined if the route takes neither. */
  body: Body | undefined;
  /** A valid JSON body for the reference page. A test sends it. */
  example?: Readonly<Record<string, unknown>>;
  /** Format of a body that is not JSON. The handler gets this body as a stream. */
  accepts?: Accepts;
  /** Schema of `data` in the answer, or of one item of a list or stream. Raw and bytes routes have none. */
  reply: Reply;
  /** Media types of a successful answer. Set only for routes of the kinds `raw` and `bytes`. */
  types?: readonly string[];
  replyHeaders?: readonly ReplyHeader[];
  /** Error codes of the route, besides those that follow from its access, ids and body. */
  errors?: readonly Code[];
  /** Names of the fields by which a list can be filtered, in the path or query. Set only for lists. */
  filters?: readonly string[];
  /** Schema of further fields in `meta` of a list. */
  listMeta?: z.ZodObject;
  /**
   * Name of the array that is sent in pieces. Set for `growing` routes, and for `single` routes whose answer may be
   * long.
   */
  grows?: string;
  /** Schemas of the array's items, and of the object without the array. Set together with `grows`. */
  parts?: { items: z.ZodType; rest: z.ZodType };
  status: 101 | 200 | 201;
  /**
   * Answer to a repeated request; set if the route takes an Idempotency-Key.
   * - `replay`: the first answer
   * - `secret`: an error with the created object's id, because answers with secrets are never stored
   */
  idempotency?: 'replay' | 'secret';
  /**
   * Operation that answers a repeated request if the first answer cannot be sent again; by default `get` of the same
   * noun. It is needed if the first answer was not stored, for example because it was too long, or if the key may no
   * longer use all machines of the created object.
   */
  again?: string;
  /** Maximum number of bytes of a body; default 1 MiB. */
  bodyLimit?: number;
  /** True if `machine_id` may be omitted while the broker has only one machine. */
  impliesMachine?: boolean;
  /** True if the answer may take long. The key is then checked again before the answer is sent. */
  waits?: boolean;
  /**
   * True if the route requires a recent login: one that was created or confirmed in the last 15 minutes. Requests with
   * an API key need no login. The route `logins.confirm` confirms a login with its API key.
   */
  confirmed?: boolean;
  /** Name of the last server-sent event; absent if the stream has no end. */
  lastEvent?: string;
}

/** Error codes of every route whose answer comes from an agent. */
export const machineErrors = [
  'machine_offline',
  'machine_timeout',
  'machine_error',
  'not_supported',
  'permission_denied',
] as const satisfies Code[];

/** Converts a field name to a header name: `if_match` to `If-Match`. */
export function headerName(name: string): string {
  return name
    .split('_')
    .map((word) => word.charAt(0).toUpperCase() + word.slice(1))
    .join('-');
}
