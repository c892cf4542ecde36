// What travels over the WebSocket of a terminal, and the route that becomes one. Clients of any language read it in OpenAPI.
import * as z from 'zod';
import { signals } from '../signals.ts';
import { socket, text } from './route.ts';
import { clientId, cols, rows, sessionStatuses } from './sessions.ts';

/** Largest message of a client, in bytes. */
export const maxMessageBytes = 1024 * 1024;

/** What a client says in text; bytes that it sends as binary are typed as they are. */
export const clientMessage = z.discriminatedUnion('type', [
  z.strictObject({ type: z.literal('input'), data: z.string() }),
  z.strictObject({ type: z.literal('resize'), cols, rows }),
  z.strictObject({ type: z.literal('signal'), signal: z.enum(signals) }),
]);
export type ClientMessage = z.output<typeof clientMessage>;

/** What the broker says in text; binary is output. A newer broker may say more: pass over what is not known. */
export const brokerMessage = z.discriminatedUnion('type', [
  z.object({ type: z.literal('ready'), client_id: clientId, offset: z.number(), cols, rows }),
  z.object({ type: z.literal('status'), status: z.enum(sessionStatuses) }),
  z.object({ type: z.literal('size'), cols, rows }),
  z.object({ type: z.literal('refused'), message: z.string() }),
  z.object({
    type: z.literal('end'),
    exit_code: z.number().nullable(),
    signal: z.string().nullable(),
    reason: z.string().nullable(),
  }),
]);
export type BrokerMessage = z.output<typeof brokerMessage>;

/** Why the broker closes the WebSocket of a terminal, by its code. */
export const closeCodes = {
  ended: 1000,
  stopping: 1001,
  detached: 4001,
  forbidden: 4003,
  fell_behind: 4008,
} as const;

const description = `Open the \`stream_url\` of an attach as a WebSocket: it needs no key, its ticket is good once within 30
seconds. A browser may open it from the broker’s own pages only (\`Origin\`).

From the broker, **binary** messages are output, byte by byte as the terminal wrote it; a character may be split over two.
**Text** messages are JSON:

- \`{"type":"ready","client_id":"cli_…","offset":0,"cols":80,"rows":24}\` comes once, before
  any output: that begins at this offset. While the machine is away it waits.
- \`{"type":"status","status":"GRACE_PERIOD"}\`: the machine is away; \`CONNECTED\`: it is back.
- \`{"type":"size","cols":100,"rows":30}\`: another client has changed the size.
- \`{"type":"refused","message":"…"}\`: what this client did was not done; an observer’s input, for one.
- \`{"type":"end","exit_code":0,"signal":null,"reason":null}\`: the session is over; nothing follows but the close.

To the broker, **binary** messages are typed as they are. **Text** messages are JSON:

- \`{"type":"input","data":"ls\\n"}\`: typed as UTF-8.
- \`{"type":"resize","cols":100,"rows":30}\`: the size of this client’s window, 1 to 1000 each.
- \`{"type":"signal","signal":"SIGINT"}\`: for what runs in the foreground (${signals.join(', ')}).

A message is at most 1 MiB. One that is none of these closes the WebSocket with 1008 and the reason; the session goes on.

Closed by the broker: 1000 the session ended, 1001 the broker stops, 1008 a wrong message, 4001 detached, 4003 the key may
no longer, 4008 it did not read fast enough, or nobody took what it typed for 25 seconds (attach again). Whoever closes it is
detached. The broker pings every 15 seconds; a client that neither answers nor says anything for 30 is let go.`;

/** Apart from the other routes of sessions, whose schemas this one needs. */
export const terminal = socket('/sessions/{session_id}/stream', {
  summary: 'The terminal of a session, as a WebSocket',
  description,
  query: { ticket: text(200).describe('As in stream_url') },
});
