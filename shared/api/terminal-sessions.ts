// REST routes of sessions. A session is a terminal on a machine. It outlives its clients.
import * as z from 'zod';
import { cwd, environment, requestedBy } from './commands.ts';
import { list } from './define-list-route.ts';
import { single } from './define-route.ts';
import { machineErrors } from './route.ts';
import { day, machineId, milliseconds, sessionId, text, timestamp } from './shared-schemas.ts';

export const sessionStatuses = ['PENDING', 'CONNECTED', 'GRACE_PERIOD', 'DISCONNECTED'] as const;
const attachModes = ['operator', 'observer'] as const;

const clientId = z
  .string()
  .min(1)
  .max(200)
  .meta({ description: 'Id of the attached client', examples: ['cli_4fJ2kQ9ZtR7wXc0BvN1mLp'] });
export const cols = z.int().min(1).max(1000).describe('Width in characters');
export const rows = z.int().min(1).max(1000).describe('Height in characters');

const outlives = 'Milliseconds that the session stays open while its machine is offline';
const listed = z.object({
  session_id: sessionId,
  id: sessionId.describe('Same as `session_id`'),
  status: z.enum(sessionStatuses).describe('`GRACE_PERIOD`: the machine is offline; `DISCONNECTED` is final'),
  machine_id: machineId,
  machine_hostname: z.string().describe('Host name of the machine'),
  shell: z.string().nullable().describe('Program; null: the login shell of the agent’s user'),
  created_at: timestamp.describe('Time of creation'),
  connected_at: timestamp.nullable().describe('Time when the terminal first ran on the machine'),
  last_heartbeat_at: timestamp.nullable().describe('Time of the last message from the machine'),
  grace_period: z.number().describe(outlives),
  grace_period_started_at: timestamp
    .nullable()
    .describe('Time when the link to the machine was lost; null while it is online'),
  ended_at: timestamp.nullable().describe('Time of the end'),
  exit_code: z.number().nullable().describe('Exit code; 128 + n if killed by signal n; null before the end'),
  signal: z.string().nullable().describe('Name of the signal that killed the program; null if none did'),
  reason: z.string().nullable().describe('Why the session could not start, or why the broker ended it'),
  cols: z.number().describe('Width in characters'),
  rows: z.number().describe('Height in characters'),
  attached_count: z.number().describe('Number of attached clients'),
  requested_by: requestedBy,
});

const attachMode = z.enum(attachModes).describe('`operator`: reads and types; `observer`: only reads');
const attachedClient = z.object({
  client_id: clientId,
  key_name: z.string().describe('Name of the client’s API key'),
  mode: attachMode,
  attached_at: timestamp.describe('Time when the client attached'),
});

const session = listed.meta({ id: 'Session' });
const detailed = listed
  .extend({ attached_clients: z.array(attachedClient).describe('Attached clients') })
  .meta({ id: 'SessionDetail' });

export const sessions = {
  create: single('POST', '/sessions', 'sessions:attach', {
    summary: 'Create a session: start a terminal on a machine',
    errors: machineErrors,
    body: z.strictObject({
      machine_id: machineId,
      shell: text(4096).min(1).optional().describe('Program; default: the login shell of the agent’s user'),
      args: z.array(text(131_072)).max(4096).optional().describe('Arguments of the program'),
      cwd: cwd.optional(),
      env: environment.optional(),
      cols: cols.default(80),
      rows: rows.default(24),
      grace_period: milliseconds(0, day).default(30_000).describe(outlives),
    }),
    example: { machine_id: 'mach_4fJ2kQ9ZtR7wXc0BvN1mLp', cols: 120, rows: 40 },
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
    summary: 'Get a session and its attached clients',
    reply: detailed,
  }),
  end: single('DELETE', '/sessions/{session_id}', 'sessions:attach', {
    summary: 'End a session and every process in it',
    reply: detailed,
  }),
  attach: single('POST', '/sessions/{session_id}/attach', 'sessions:attach', {
    summary: 'Attach to a session',
    description: 'Open `stream_url` as a WebSocket within 30 seconds.',
    example: { mode: 'observer' },
    errors: ['conflict'],
    body: z.strictObject({
      mode: attachMode.default('operator'),
      offset: z
        .int()
        .min(0)
        .optional()
        .describe(
          'Offset of the first byte of output that the client gets. Without it, the client gets the last 256 KiB',
        ),
    }),
    reply: z.object({
      session_id: sessionId,
      client_id: clientId,
      mode: attachMode,
      attached_at: timestamp.describe('Time when the client attached'),
      stream_url: z.string().describe('URL of the WebSocket; valid once, within 30 seconds'),
    }),
    idempotency: 'secret',
  }),
  detach: single('POST', '/sessions/{session_id}/detach', 'sessions:attach', {
    summary: 'Detach a client; the session goes on',
    body: z.strictObject({
      client_id: clientId
        .optional()
        .describe('Id of the client; may be omitted if exactly one client of this API key is attached'),
    }),
    example: { client_id: 'cli_4fJ2kQ9ZtR7wXc0BvN1mLp' },
    errors: ['client_not_found'],
    reply: z.object({ detached: z.boolean().describe('Always true') }),
  }),
};
