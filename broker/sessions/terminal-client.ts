// A client of a terminal over any transport: a WebSocket or a gRPC stream.
import { actionMessage, type BrokerMessage } from '../../shared/api/terminal-websocket.ts';
import { fieldError } from '../../shared/errors.ts';

/** An action of a terminal client. The client's transport has already checked the form of the message. */
export type Action =
  | { input: Uint8Array }
  | { size: { cols: number; rows: number } }
  /** The signal is sent to the process group in the foreground of the terminal. */
  | { signal: NodeJS.Signals };

/** Converts a client's JSON message to an action. Throws validation_failed. */
export function actionOf(message: unknown): Action {
  const { data, error } = actionMessage.safeParse(message);
  if (!data) {
    const [issue] = error.issues;
    throw fieldError('message', issue?.path.join('.') ?? '', issue?.message ?? 'not valid');
  }
  if (data.type === 'input') return { input: Buffer.from(data.data) };
  if (data.type === 'signal') return { signal: data.signal };
  return { size: { cols: data.cols, rows: data.rows } };
}

/**
 * A message to a client, except terminal output and the end of the session: those are sent with output() and close().
 */
export type Notice = Exclude<BrokerMessage, { type: 'end' }>;

export type CloseReason =
  | { why: 'ended'; exit_code: number | null; signal: string | null; reason: string | null }
  /** `forbidden`: the key lost the right to attach. `stopping`: the broker stops, or another owns the machine. */
  | { why: 'detached' | 'forbidden' | 'fell_behind' | 'stopping' };

/** The connection of one client. Attachment reads `actions`, and calls close() at the end unless `gone` has fired. */
export interface ClientPort {
  /** Sends output. Resolves when the client has received it, as far as the transport knows. Never rejects. */
  output(bytes: Uint8Array): Promise<void>;
  /** Sends a notice. Resolves and never rejects, like output(). */
  notify(notice: Notice): Promise<void>;
  /** The client's actions, in order. They end when the client disconnects. A slow reader slows the client down. */
  actions: AsyncIterable<Action>;
  /** Fires when the client disconnects. */
  gone: AbortSignal;
  close(closeReason: CloseReason): void;
}
