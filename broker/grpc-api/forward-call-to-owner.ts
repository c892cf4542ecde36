// Forwards a gRPC call to the broker that owns its machine. Passes the client's messages to that broker and
// its answers back, as fast as they are read.
import { status as grpcStatus, type Metadata, type StatusObject } from '@grpc/grpc-js';
import { drained, parseDetails, streamsService } from '../../shared/agent-rpcs.ts';
import { AppError, isCode } from '../../shared/errors.ts';
import type { Elsewhere, Forwarded, PeerCall } from '../cluster/peers/route-to-owner.ts';

interface ForwardedCall {
  /** Path of the rpc. */
  path: string;
  headers: Metadata;
  about: Forwarded;
  /** The first message of the client, and its further messages. */
  first: object;
  rest: AsyncIterable<object> | Iterable<object>;
  /** Fires when the client's call ends, for example because the client goes away or this broker stops. */
  signal: AbortSignal;
  /** Called when the other broker has accepted the call. */
  begin(): void;
  /** Sends an encoded answer. Resolves once the client has read enough to get another answer. */
  send(answer: Buffer): Promise<void>;
}

/**
 * Resolves at the end of the call. If the other broker answers with an error, throws that error. If it does not answer,
 * throws the error `unavailable`.
 */
export async function forwardCall(call: ForwardedCall, elsewhere: Elsewhere): Promise<void> {
  const { path, headers, about, signal, begin, send } = call;
  const method = Object.values(streamsService).find((one) => one.path === path);
  if (!method) throw new Error(`the service has no rpc with the path ${path}`);
  const far: PeerCall<object> = elsewhere.call(method, headers, about);
  const cancel = (): void => far.cancel();
  signal.addEventListener('abort', cancel, { once: true });
  if (signal.aborted) cancel();
  const ended = new Promise<StatusObject>((resolve) => far.once('status', resolve));
  far.once('metadata', begin);
  // This listener does nothing, because the status reports the same error. Without a listener, an error event
  // would end the process.
  far.on('error', () => undefined);
  sendAll(far, call).catch(cancel);
  try {
    // The cast is safe: the messages of this call are bytes, because they are not decoded. In grpc-js, their type is
    // any.
    for await (const answer of far as AsyncIterable<Buffer>) await send(answer);
  } catch {
    // This error is ignored: the status, which is checked below, has the error code and details.
    cancel();
  } finally {
    signal.removeEventListener('abort', cancel);
  }
  signal.throwIfAborted();
  const status = await ended;
  if (status.code !== grpcStatus.OK) throw errorOf(status);
}

async function sendAll(far: PeerCall<object>, { first, rest, signal }: ForwardedCall): Promise<void> {
  if (!far.write(first)) await drained(far, signal);
  for await (const message of rest) if (!far.write(message)) await drained(far, signal);
  far.end();
}

/**
 * The error of a failed call. If it has no error code of Farhand, the connection to the other broker was
 * lost.
 */
export function errorOf({ details: message, metadata }: StatusObject): AppError {
  const code = String(metadata.get('farhand-code')[0] ?? '');
  if (isCode(code))
    return new AppError(code, message, parseDetails(String(metadata.get('farhand-details')[0] ?? '')));
  const text = 'the broker that is responsible for this machine did not answer: try again';
  return new AppError('unavailable', text, { retry_after: 1 }, { cause: new Error(message) });
}
