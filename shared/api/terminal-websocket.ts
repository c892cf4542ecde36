// The messages on a terminal's WebSocket, and the REST route that opens this WebSocket.
import * as z from 'zod';
import { signals } from '../signals.ts';
import { socket } from './define-route.ts';
import { text } from './shared-schemas.ts';
import { cols, rows, type sessionStatuses } from './terminal-sessions.ts';

export const maxMessageBytes = 1024 * 1024;

/** Schema of a client's text messages for the terminal. The client's binary messages are input for the terminal too. */
export const actionMessage = z.discriminatedUnion('type', [
  z.strictObject({ type: z.literal('input'), data: z.string() }),
  z.strictObject({ type: z.literal('resize'), cols, rows }),
  z.strictObject({ type: z.literal('signal'), signal: z.enum(signals) }),
]);

/** Schema of the text message by which a client reports the output that it has processed. */
export const receivedMessage = z.strictObject({
  type: z.literal('received'),
  offset: z.number().int().min(0),
});
export type ClientMessage = z.output<typeof actionMessage> | z.output<typeof receivedMessage>;

/**
 * A text message from the broker. Binary messages from the broker are output of the terminal. A newer broker may send
 * other types of text messages, which clients ignore.
 */
export type BrokerMessage =
  /** The terminal is ready. Sent only once, before any output. Delayed while the machine is offline. */
  | {
      type: 'ready';
      client_id: string;
      /** Offset of the first byte of output that the client gets. */
      offset: number;
      cols: number;
      rows: number;
      /**
       * Offset up to which an operator has already got the output. A terminal emulator must not answer the queries in
       * this output again, such as the one for the position of the cursor: the shell would take the answer for typed
       * text. Undefined from a broker of version 0.1.0.
       */
      answered?: number | undefined;
      /**
       * Maximum number of bytes that the broker sends beyond the last offset that the client has reported as processed.
       * It applies after the client's first report. Undefined for clients that cannot report: gRPC clients, and clients
       * of a broker of version 0.1.0.
       */
      window?: number | undefined;
    }
  /** `status` is GRACE_PERIOD after the machine went offline, and CONNECTED when it is online again. */
  | { type: 'status'; status: (typeof sessionStatuses)[number] }
  | { type: 'size'; cols: number; rows: number }
  /** An action of the client was refused, or its input may be lost. `message` gives the reason. */
  | { type: 'refused'; message: string }
  | { type: 'end'; exit_code: number | null; signal: string | null; reason: string | null };

const description = `Open the \`stream_url\` of an attach as a WebSocket. It needs no API key: its ticket is valid once, within 30 seconds.
A browser may open it only from the broker’s own pages (\`Origin\`).

**Binary messages from the broker** are output, exactly as the terminal wrote it. A character may be split over two
messages.

**Text messages from the broker** are JSON:

- \`{"type":"ready","client_id":"cli_…","offset":0,"cols":80,"rows":24,"answered":0,"window":262144}\` comes once, before any output.
  The output begins at \`offset\`. While the machine is offline, \`ready\` is delayed. \`answered\` is the offset up to which
  an operator has already got the output: a terminal emulator must not answer queries of programs before this offset.
- \`{"type":"status","status":"GRACE_PERIOD"}\`: the machine is offline; \`CONNECTED\`: it is back.
- \`{"type":"size","cols":100,"rows":30}\`: another client changed the size.
- \`{"type":"refused","message":"…"}\`: a message of this client had no effect, such as input of an observer.
- \`{"type":"end","exit_code":0,"signal":null,"reason":null}\`: the session ended, and the WebSocket closes.

**Binary messages to the broker** are input. **Text messages to the broker** are JSON:

- \`{"type":"input","data":"ls\\n"}\`: input as UTF-8.
- \`{"type":"resize","cols":100,"rows":30}\`: the size of this client’s window, 1 to 1000 each.
- \`{"type":"signal","signal":"SIGINT"}\`: signal the foreground process (${signals.join(', ')}).
- \`{"type":"received","offset":131072}\`: the client has processed the output up to this offset. After the first
  such message, the broker sends at most \`window\` bytes beyond the last reported offset. A client that sends none gets
  output as fast as its connection accepts it.

A message of any other form closes the WebSocket with 1008, and a message of more than 1 MiB with 1009. The session
goes on.

| close code | reason |
|---|---|
| 1000 | the session ended |
| 1001 | the broker stops, or another broker takes over the machine |
| 1008 | the client sent an invalid message |
| 1009 | the client sent a message of more than 1 MiB |
| 4001 | detached |
| 4003 | the key may no longer attach to the session |
| 4008 | the client read too slowly, or its input was not accepted for 25 seconds; attach again |

A client that closes the WebSocket is detached. The broker pings every 15 seconds, and closes after 30 seconds without a
message or pong.`;

export const terminal = socket('/sessions/{session_id}/stream', {
  summary: 'Open the terminal of a session as a WebSocket',
  description,
  query: { ticket: text(200).describe('Ticket from `stream_url`') },
});
