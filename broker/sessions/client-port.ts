// A client of a terminal, independent of its transport: a WebSocket or a gRPC stream.
import { clientMessage } from '../../shared/api/terminal.ts';
import { fieldError } from '../../shared/errors.ts';

/** What a client does. Its transport has checked the form. */
export type Action =
  | { input: Uint8Array }
  | { size: { cols: number; rows: number } }
  /** For the process group in the foreground. */
  | { signal: NodeJS.Signals };

/** What a message asks for that is no bytes. Throws validation_failed. */
export function actionOf(message: unknown): Action {
  const { data, error } = clientMessage.safeParse(message);
  if (!data) {
    const [issue] = error.issues;
    throw fieldError('message', issue?.path.join('.') ?? '', issue?.message ?? 'not valid');
  }
  if (data.type === 'input') return { input: Buffer.from(data.data) };
  if (data.type === 'signal') return { signal: data.signal };
  return { size: { cols: data.cols, rows: data.rows } };
}

/** What a client gets besides output. */
export type Notice =
  /** Once, before any output: where that begins. While its machine is away the client waits for it. */
  | { type: 'ready'; client_id: string; offset: number; cols: number; rows: number }
  /** GRACE_PERIOD while its machine is away, then CONNECTED. */
  | { type: 'status'; status: string }
  /** Another client has changed the size. */
  | { type: 'size'; cols: number; rows: number }
  /** What it did was not done. */
  | { type: 'refused'; message: string };

/** Why a client is closed: the session has ended, it was detached, its key may no longer attach, it fell behind, the broker stops. */
export type CloseReason =
  | { why: 'ended'; exit_code: number | null; signal: string | null; reason: string | null }
  | { why: 'detached' | 'forbidden' | 'fell_behind' | 'stopping' };

/** One client's connection. Sessions read `actions`, and end every port with close() unless `gone` fired before. */
export interface ClientPort {
  /** Resolves once the client has taken enough of it to be given more. Never rejects. */
  output(bytes: Uint8Array): Promise<void>;
  /** The same. */
  notify(notice: Notice): Promise<void>;
  /** What the client does, in order; reading slowly slows the client. Ends when it goes. */
  actions: AsyncIterable<Action>;
  /** The client went away. */
  gone: AbortSignal;
  close(closeReason: CloseReason): void;
}
