// Answers the broker's calls. A small answer that ends soon becomes a reply on the control stream. Any other answer
// gets a stream of its own.
import { status as grpcStatus } from '@grpc/grpc-js';
import type { Call__Output } from '../../proto/types/farhand/link/v1/Call.ts';
import type { Reply } from '../../proto/types/farhand/link/v1/Reply.ts';
import {
  type AgentCall,
  type AgentMethods,
  cancelledDetails,
  gaveUp,
  type Method,
  type MethodShape,
  messageOf,
  methods,
  receiveFrames,
  sendFrames,
  smallMessageBytes,
  toWire,
} from '../../shared/agent-rpcs.ts';
import { after } from '../../shared/clock.ts';
import { openTerminals, terminalClients } from '../../shared/command-and-terminal-limits.ts';
import { AppError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import { countTransferred } from '../../shared/v8-garbage-collection.ts';
import type { AuditedCall, AuditLog } from '../audit-log/index.ts';
import { type Capability, requiredCapabilities } from '../capabilities-by-rpc.ts';
import { coalesce } from './coalesce-short-answer.ts';
import type { AnswerStream, ControlStream, Dial } from './dial.ts';

export interface CallsOptions {
  handlers: AgentMethods;
  capabilities: readonly Capability[];
  line: Dial;
  control: ControlStream;
  log: Logger;
  auditLog: AuditLog;
}

/**
 * If this number of messages wait on the control stream, even a short answer of a streaming method gets a stream of its
 * own.
 */
const mostWaiting = 32;

/** Milliseconds within which the broker must end a stream after the agent has closed its side. */
const closingMs = 10_000;
/** Milliseconds within which the broker must end the stream of a call that it has cancelled. */
const givenUpMs = 1_000;
/** Maximum number of open streaming calls in each of the concurrency classes `short` and `bulk`. */
export const openCalls = 32;
/**
 * Maximum number of open calls: short and bulk calls, followed processes, terminals, their clients, watches and
 * unary calls. Cancelled calls count until the agent has ended them.
 */
const mostOpen = 2 * openCalls + 128 + openTerminals + terminalClients + 32 + 128;

/** Format of call ids. They are sent in headers, so only printable ASCII is allowed. */
const callId = /^[\x21-\x7e]{1,64}$/;

/**
 * The answers of this method contain the echo of key presses. They use the control stream's connection, so that they do
 * not wait behind long answers, which use the second connection.
 */
const onControlConnection: Method = 'AttachTerminal';

interface OpenCall {
  shape: MethodShape;
  call: Call__Output;
  entry: AuditedCall;
  abort: AbortController;
  /** The call's stream, if it has one. It also carries the error of a failed call. */
  stream?: AnswerStream;
}

type Handler = (request: unknown, call: AgentCall) => Promise<unknown> | AsyncIterable<unknown>;
type Frames = AsyncIterable<Buffer> | Iterable<Buffer>;

export class Calls {
  readonly #options: CallsOptions;
  readonly #open = new Map<string, AbortController>();

  constructor(options: CallsOptions) {
    this.#options = options;
  }

  take(call: Call__Output): void {
    const { auditLog, log } = this.#options;
    const { call_id, request_id, method, deadline_ms } = call;
    // A call with the id of an open call is ignored. If it ran, it would not count against the limits, and the broker
    // would mistake its answer for the answer to the first call.
    if (!callId.test(call_id) || this.#open.has(call_id)) {
      log.debug(
        { request_id, method },
        'ignored a call from the broker: the id of the call is invalid or in use',
      );
      return;
    }
    const shape = methods.get(method);
    const abort = new AbortController();
    const cancelDeadline = deadline_ms ? after(deadline_ms, () => abort.abort(timedOut())) : () => {};
    const refusal = this.#refusal(shape, call);
    const entry = auditLog.begin(call, refusal !== undefined);
    if (refusal) logRefused(entry, shape, call);
    log.debug({ request_id, call_id, method }, 'received a call from the broker');
    this.#open.set(call_id, abort);
    const open: OpenCall | undefined = shape && { shape, call, entry, abort };
    const answered = open && !refusal ? this.#answer(open) : Promise.reject(refusal);
    void answered
      .then(
        () => entry.ended('ok'),
        (error: unknown) => {
          entry.ended(resultOf(error, abort.signal));
          this.#failed(error, call, abort.signal, open?.stream !== undefined);
        },
      )
      .finally(() => {
        cancelDeadline();
        this.#open.delete(call_id);
      });
  }

  cancel(id: string): void {
    this.#open.get(id)?.abort(gaveUp);
  }

  /** Cancels every open call, because the link is lost. */
  close(): void {
    for (const abort of this.#open.values()) abort.abort(gone());
  }

  /** Checks capabilities and limits before the request is decoded. Returns the error of a refused call. */
  #refusal(shape: MethodShape | undefined, { method }: Call__Output): AppError | undefined {
    if (!shape)
      return new AppError('not_supported', `this agent does not support ${method}; upgrade it`, { method });
    const any = requiredCapabilities[shape.name];
    const [capability] = any;
    if (!any.some((one) => this.#options.capabilities.includes(one))) {
      const text = `the agent of this machine does not allow ${capability} (--allow)`;
      return new AppError('permission_denied', text, { capability });
    }
    if (this.#open.size < mostOpen) return undefined;
    return new AppError('unavailable', `${mostOpen} calls are open on this machine; try again later`);
  }

  /**
   * Sends the error of a failed call, unless its answer stream has already sent the error (`streamed`). Logs unexpected
   * errors.
   */
  #failed(error: unknown, call: Call__Output, signal: AbortSignal, streamed: boolean): void {
    const { call_id, request_id, method } = call;
    if (signal.aborted) return;
    if (!streamed) this.#send({ call_id, error: toWire(error) });
    if (error instanceof AppError && error.code !== 'internal_error') return;
    this.#options.log.error({ err: error, request_id, method }, 'a call from the broker failed');
  }

  async #answer(open: OpenCall): Promise<void> {
    const { shape, call, entry } = open;
    if (shape.clientStreams || call.request_follows)
      return this.#onStream(open, (stream) =>
        this.#responses(open, () =>
          shape.clientStreams ? requestsOf(open, stream) : largeRequest(open, stream),
        ),
      );
    const frames = this.#responses(open, () => requestOf(shape, call.request, entry));
    try {
      if (!shape.serverStreams) {
        for await (const response of frames) this.#reply(open, [response]);
        return;
      }
      const answer = await coalesce(frames);
      if (Array.isArray(answer) && this.#options.control.writableLength < mostWaiting)
        return this.#reply(open, answer);
      await this.#onStream(open, (stream) => {
        stream.resume();
        return answer;
      });
    } finally {
      await frames.return(undefined);
    }
  }

  #reply({ shape, call: { call_id }, abort }: OpenCall, frames: Buffer[]): void {
    if (abort.signal.aborted) return;
    for (const { length } of frames) countTransferred(length);
    const messages = frames.map(messageOf);
    const [response] = messages;
    if (shape.serverStreams || !response) this.#send({ call_id, messages: { messages } });
    else if (response.length <= smallMessageBytes) this.#send({ call_id, response });
    else throw new AppError('internal_error', `the answer is larger than ${smallMessageBytes} bytes`);
  }

  #send(reply: Reply): void {
    const { control } = this.#options;
    if (control.writable) control.write({ reply });
  }

  async #onStream(open: OpenCall, framesOf: (stream: AnswerStream) => Frames): Promise<void> {
    const { call, abort } = open;
    const { signal } = abort;
    const { line } = this.#options;
    // The control stream's connection carries the answer if it must be quick, or if the second connection is down.
    const shared = call.method === onControlConnection || !(await line.isSecondReady());
    signal.throwIfAborted();
    const stream = line.answer(call.call_id, shared);
    open.stream = stream;
    const status = new Promise((resolve) => stream.once('status', resolve));
    // The broker has `givenUpMs` to end the stream of a call that it has cancelled. If it does not, cancel() sends a
    // reset. Resets are avoided, because an HTTP/2 peer closes the connection after too many of them.
    const stop = (): void =>
      signal.reason === gaveUp ? void after(givenUpMs, () => stream.cancel()) : stream.cancel();
    signal.addEventListener('abort', stop, { once: true });
    // Without a listener, an error of the stream would end the process. The code that reads or writes the stream gets
    // the error too.
    stream.on('error', (error) => abort.abort(isGivenUp(error) ? gaveUp : gone()));
    try {
      await sendFrames(stream, framesOf(stream), signal);
    } finally {
      stream.end();
      stream.resume();
      // Waits until the broker ends the stream, because cancel() could cut off the agent's last frames.
      const cancelClosing = after(closingMs, () => stream.cancel());
      await status;
      cancelClosing();
      signal.removeEventListener('abort', stop);
    }
  }

  async *#responses({ shape, entry, abort }: OpenCall, request: () => unknown): AsyncGenerator<Buffer> {
    // The cast is safe: AgentMethods pairs each key with the request type that its shape decodes.
    const handler = this.#options.handlers[shape.key] as Handler;
    const result = handler(await request(), { signal: abort.signal });
    if (!shape.serverStreams) {
      const response = await result;
      entry.done();
      yield shape.frameResponse(response);
      return;
    }
    // The cast is safe: handlers of methods with a stream of responses return an AsyncIterable.
    for await (const response of result as AsyncIterable<unknown>) {
      entry.answered(response);
      yield shape.frameResponse(response);
    }
  }
}

/** Adds the request of a refused call to the audit log, if the request came with the call. */
function logRefused(entry: AuditedCall, shape: MethodShape | undefined, call: Call__Output): void {
  if (!shape || shape.clientStreams || call.request_follows) return;
  try {
    requestOf(shape, call.request, entry);
  } catch {
    // If the request cannot be decoded, the log entry has no fields of the request.
  }
}

function resultOf(error: unknown, signal: AbortSignal): string {
  if (!signal.aborted) return toWire(error).code;
  if (signal.reason === gaveUp) return 'gave_up';
  return signal.reason instanceof AppError && signal.reason.code === 'machine_timeout'
    ? 'machine_timeout'
    : 'link_lost';
}

function requestOf(shape: MethodShape, bytes: Buffer, entry: AuditedCall): unknown {
  const request = shape.decodeRequest(bytes);
  entry.asked(request);
  return request;
}

async function* requestsOf({ shape, entry }: OpenCall, stream: AnswerStream): AsyncGenerator<unknown> {
  let first = true;
  for await (const bytes of receiveFrames(stream, gone)) {
    yield first ? requestOf(shape, bytes, entry) : shape.decodeRequest(bytes);
    first = false;
  }
}

/** Reads a request that was too large for the control stream and follows on the call's own stream. */
async function largeRequest({ shape, entry }: OpenCall, stream: AnswerStream): Promise<unknown> {
  const first = await receiveFrames(stream, gone).next();
  stream.resume();
  if (first.done) throw new AppError('machine_error', 'the broker sent no request for this call');
  return requestOf(shape, first.value, entry);
}

/**
 * True if the error of a call's stream says that the broker has cancelled the call. The message Cancel may arrive
 * later than this error.
 */
function isGivenUp(error: Error): boolean {
  const cancelled = 'code' in error && error.code === grpcStatus.CANCELLED;
  return cancelled && 'details' in error && error.details === cancelledDetails;
}

function gone(): AppError {
  return new AppError('unavailable', 'the link to the broker was lost');
}

function timedOut(): AppError {
  return new AppError('machine_timeout', 'the operation did not end before its deadline');
}
