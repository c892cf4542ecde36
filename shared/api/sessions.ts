// Sessions over REST (spec 2.9, 4.5): terminals that outlive their clients.
import * as z from 'zod';
import { environment } from './commands.ts';
import { list } from './list.ts';
import { machineId, milliseconds, sessionId, single, text, timestamp } from './route.ts';

export const sessionStatuses = ['PENDING', 'CONNECTED', 'GRACE_PERIOD', 'DISCONNECTED'] as const;
const attachModes = ['operator', 'observer'] as const;

export const clientId = z
  .string()
  .min(1)
  .max(200)
  .meta({ examples: ['cli_4fJ2kQ9ZtR7wXc0BvN1mLp'] });
/** Of a terminal, in characters. */
export const cols = z.int().min(1).max(1000);
export const rows = z.int().min(1).max(1000);

const day = 86_400_000;

const listed = z.object({
  session_id: sessionId,
  id: sessionId.describe('The same as session_id'),
  status: z.enum(sessionStatuses),
  machine_id: machineId,
  machine_hostname: z.string(),
  shell: z.string().nullable().describe('null: the login shell of the agent’s user'),
  created_at: timestamp,
  connected_at: timestamp.nullable(),
  last_heartbeat_at: timestamp.nullable().describe('When its machine was last heard of'),
  grace_period: z.number().describe('Milliseconds that it outlives its link'),
  grace_period_started_at: timestamp.nullable(),
  ended_at: timestamp.nullable(),
  exit_code: z.number().nullable().describe('128 + n when killed by signal n'),
  signal: z.string().nullable(),
  reason: z.string().nullable().describe('Why it could not start, or why it was ended'),
  cols: z.number(),
  rows: z.number(),
  attached_count: z.number(),
  requested_by: z.string().nullable().describe('Id of the key'),
});

const attachedClient = z.object({
  client_id: clientId,
  key_name: z.string(),
  mode: z.enum(attachModes),
  attached_at: timestamp,
});

const session = listed.meta({ id: 'Session' });
const detailed = listed.extend({ attached_clients: z.array(attachedClient) }).meta({ id: 'SessionDetail' });

export const sessions = {
  create: single('POST', '/sessions', 'sessions:attach', {
    summary: 'Open a terminal on a machine',
    body: z.strictObject({
      machine_id: machineId,
      shell: text(4096).min(1).optional().describe('A program; the login shell unless told'),
      args: z.array(text(131_072)).max(4096).optional(),
      cwd: text(4096).min(1).optional(),
      env: environment.optional(),
      cols: cols.default(80),
      rows: rows.default(24),
      grace_period: milliseconds(0, day)
        .default(30_000)
        .describe('Milliseconds that it outlives the link to its machine'),
    }),
    reply: detailed,
    status: 201,
    idempotency: 'replay',
    waits: true,
  }),
  list: list('/sessions', 'sessions:read', {
    summary: 'List sessions',
    sort: ['created_at', 'machine_hostname', 'status'],
    reply: session,
  }),
  get: single('GET', '/sessions/{session_id}', 'sessions:read', {
    summary: 'Get a session and who is attached to it',
    reply: detailed,
  }),
  end: single('DELETE', '/sessions/{session_id}', 'sessions:attach', {
    summary: 'End a session and everything that runs in it',
    reply: detailed,
  }),
  attach: single('POST', '/sessions/{session_id}/attach', 'sessions:attach', {
    summary: 'Attach to a session: its terminal is at stream_url',
    body: z.strictObject({
      mode: z.enum(attachModes).default('operator'),
      offset: z.int().min(0).optional().describe('First byte of output wanted; the last 256 KiB unless told'),
    }),
    reply: z.object({
      session_id: sessionId,
      client_id: clientId,
      mode: z.enum(attachModes),
      attached_at: timestamp,
      stream_url: z.string().describe('Of a WebSocket; good once, within 30 seconds'),
    }),
    idempotency: 'secret',
  }),
  detach: single('POST', '/sessions/{session_id}/detach', 'sessions:attach', {
    summary: 'Detach a client; the session goes on',
    body: z.strictObject({ client_id: clientId.optional() }),
    reply: z.object({ detached: z.boolean() }),
  }),
};
