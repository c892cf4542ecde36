// Answers the broker's calls: small and short ones by a reply on the control stream, the others on a stream of their own.
import { status as grpcStatus } from '@grpc/grpc-js';
import type { Call__Output } from '../../proto/types/farhand/link/v1/Call.ts';
import type { Reply } from '../../proto/types/farhand/link/v1/Reply.ts';
import { LogLimiter } from '../../shared/log-limiter.ts';
import { after } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { passing } from '../../shared/heap.ts';
import { openTerminals, terminalClients } from '../../shared/limits.ts';
import type { Logger } from '../../shared/logger.ts';
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
} from '../../shared/rpc.ts';
import type { Activity, Entry } from '../activity/index.ts';
import { type Capability, needed } from '../capabilities.ts';
import type { AnswerStream, Dial } from './dial.ts';
import { gather } from './gather.ts';

export interface Answers {
  take(call: Call__Output): void;
  cancel(callId: string): void;
  /** The link is gone: every open call is cancelled. */
  close(): void;
}

export interface AnswersOptions {
  handlers: AgentMethods;
  capabilities: readonly Capability[];
  /** Short calls, and as many that move bytes. */
  maxOpen: number;
  line: Dial;
  log: Logger;
  activity: Activity;
  reply(reply: Reply): void;
  /** False when replies pile up: answers that can take another way do so then. */
  roomy(): boolean;
}

/** How long the broker has to end a stream after our half-close. */
const closingMs = 10_000;
/** The same after it has given the call up. */
const partingMs = 1_000;
/** Lanes of the broker beside the short and the bulk one: calls that last, and watches. */
const mostLasting = 128 + openTerminals + terminalClients;
const mostWatching = 32;
/** Calls that take no place in a lane: answered by a reply, and those whose end the broker has not heard of yet. */
const mostSmall = 128;

/** Ids as the broker makes them: they go into headers. */
const callId = /^[\x21-\x7e]{1,64}$/;
/** Warnings about calls that are refused: so many of each in a minute, and then a number. */
const mostWarnings = 10;
const minute = 60_000;

/** Somebody sits there and waits for each key. */
const quick = new Set<string>(['AttachTerminal'] satisfies Method[]);

/** A call that is answered. */
interface Taken {
  shape: MethodShape;
  call: Call__Output;
  entry: Entry;
  abort: AbortController;
}

type Handler = (request: unknown, call: AgentCall) => Promise<unknown> | AsyncIterable<unknown>;

export function openAnswers(options: AnswersOptions): Answers {
  const { handlers, capabilities, maxOpen, line, log, activity, reply, roomy } = options;
  const open = new Map<string, AbortController>();
  const warnings = new LogLimiter<string>(mostWarnings, minute, (text, more) => log.warn({ more }, text));

  function warn({ request_id, method }: Call__Output, text: string): void {
    if (warnings.take(text, text)) log.warn({ request_id, method }, text);
  }

  function take(call: Call__Output): void {
    // One id twice would go round the caps; its answer belongs to the first.
    if (!callId.test(call.call_id) || open.has(call.call_id)) {
      warn(call, 'the broker’s id of a call is taken, or none: nothing is done');
      return;
    }
    const shape = methods.get(call.method);
    const abort = new AbortController();
    const cancelDeadline = call.deadline_ms
      ? after(call.deadline_ms, () => abort.abort(timedOut()))
      : () => {};
    const refusal = refuse(shape, call);
    const entry = activity.begin(call, refusal !== undefined);
    if (refusal) tellRefused(entry, shape, call);
    log.debug({ request_id: call.request_id, call_id: call.call_id, method: call.method }, 'call');
    open.set(call.call_id, abort);
    const answer =
      shape && !refusal
        ? start({ shape, call, entry, abort })
        : orReplied(call, abort.signal, Promise.reject(refusal));
    answer
      .then(
        () => entry.ended('ok'),
        (error: unknown) => {
          entry.ended(resultOf(error, abort.signal));
          report(error, call, abort.signal);
        },
      )
      .finally(() => {
        cancelDeadline();
        open.delete(call.call_id);
      });
  }

  /** The owner's lock, and the caps; nothing of the request has been read yet. */
  function refuse(shape: MethodShape | undefined, call: Call__Output): AppError | undefined {
    if (!shape)
      return new AppError('not_supported', 'this agent is too old for this: update it', {
        method: call.method,
      });
    const any = needed[shape.name];
    const [capability] = any;
    if (!any.some((one) => capabilities.includes(one))) {
      warn(call, 'refused: the owner of this machine does not allow it');
      return new AppError('permission_denied', `the owner of this machine does not allow ${capability}`, {
        capability,
      });
    }
    if (open.size >= 2 * maxOpen + mostLasting + mostWatching + mostSmall)
      return new AppError('unavailable', 'too many calls are open on this machine');
    return undefined;
  }

  function start(taken: Taken): Promise<void> {
    const { shape, call } = taken;
    if (shape.clientStreams || call.request_follows) return long(taken);
    return shape.serverStreams ? brief(taken) : unary(taken);
  }

  async function long(taken: Taken): Promise<void> {
    const { call, abort } = taken;
    const shared = await shares(call, abort.signal);
    abort.signal.throwIfAborted();
    await stream(call, abort, shared, (answer) => responses(taken, () => requestIn(taken, answer)));
  }

  async function unary(taken: Taken): Promise<void> {
    const { call, abort } = taken;
    const response = await orReplied(call, abort.signal, respond(taken));
    if (!abort.signal.aborted) reply({ call_id: call.call_id, response });
  }

  async function respond({ shape, call, entry, abort }: Taken): Promise<Buffer> {
    const { call_id, request_id } = call;
    const { signal } = abort;
    const request = requestOf(shape, call.request, entry);
    const answer = await handlerOf(shape)(request, { call_id, request_id, signal });
    entry.done();
    const response = shape.encodeResponse(answer);
    if (response.length > smallMessageBytes) throw new AppError('internal_error', 'the answer is too large');
    return response;
  }

  /** A failure that comes before anything else is the whole answer. */
  async function orReplied<T>(
    { call_id }: Call__Output,
    signal: AbortSignal,
    answer: Promise<T>,
  ): Promise<T> {
    try {
      return await answer;
    } catch (error) {
      if (!signal.aborted) reply({ call_id, error: toWire(error) });
      throw error;
    }
  }

  /** An answer that may be over in a moment: then it is one reply, if the control stream has room; else a stream. */
  async function brief(taken: Taken): Promise<void> {
    const { shape, call, entry, abort } = taken;
    const { signal } = abort;
    const frames = responses(taken, () => requestOf(shape, call.request, entry));
    const gathered = await orReplied(call, signal, gather(frames));
    const small = Array.isArray(gathered) && roomy();
    const shared = !small && (await shares(call, signal));
    if (signal.aborted) return void (await frames.return(undefined));
    if (small) {
      for (const { length } of gathered) passing(length);
      return reply({ call_id: call.call_id, messages: { messages: gathered.map(messageOf) } });
    }
    await stream(call, abort, shared, (answer) => {
      // Nothing of interest comes in: read on, so that the end is noticed.
      answer.resume();
      return gathered;
    });
  }

  /** Whether an answer shares the control stream's connection: it has to be quick, or there is no other. */
  async function shares({ method }: Call__Output, signal: AbortSignal): Promise<boolean> {
    return quick.has(method) || !(await line.stands(signal));
  }

  async function stream(
    call: Call__Output,
    abort: AbortController,
    shared: boolean,
    frames: (answer: AnswerStream) => AsyncIterable<Buffer> | Iterable<Buffer>,
  ): Promise<void> {
    const answer = line.answer(call.call_id, shared);
    const status = new Promise((resolve) => answer.once('status', resolve));
    const { signal } = abort;
    // HTTP/2 ends a connection that resets too many streams: the broker that gave a call up ends its stream as well.
    const stop = (): void =>
      signal.reason === gaveUp ? void after(partingMs, () => answer.cancel()) : answer.cancel();
    signal.addEventListener('abort', stop, { once: true });
    // Errors reach whoever reads or writes; without a listener they would end the process.
    answer.on('error', (error) => abort.abort(isGivenUp(error) ? gaveUp : gone()));
    try {
      await sendFrames(answer, frames(answer), signal);
    } finally {
      answer.end();
      answer.resume();
      await ended(status, signal);
      signal.removeEventListener('abort', stop);
      answer.cancel();
    }
  }

  async function* responses(
    { shape, call, entry, abort }: Taken,
    request: () => unknown,
  ): AsyncGenerator<Buffer> {
    const { call_id, request_id } = call;
    const result = handlerOf(shape)(await request(), { call_id, request_id, signal: abort.signal });
    if (!shape.serverStreams) {
      const response = await result;
      entry.done();
      yield shape.frameResponse(response);
      return;
    }
    // A server-streaming handler of AgentMethods returns an AsyncIterable.
    for await (const response of result as AsyncIterable<unknown>) {
      entry.answered(response);
      yield shape.frameResponse(response);
    }
  }

  function handlerOf(shape: MethodShape): Handler {
    // AgentMethods pairs each key with the request type that this very shape decodes.
    return handlers[shape.key].bind(handlers) as Handler;
  }

  function report(error: unknown, call: Call__Output, signal: AbortSignal): void {
    if (signal.aborted || (error instanceof AppError && error.code !== 'internal_error')) return;
    log.error({ err: error, request_id: call.request_id, method: call.method }, 'a call failed');
  }

  return {
    take,
    cancel: (callId) => open.get(callId)?.abort(gaveUp),
    close() {
      for (const abort of open.values()) abort.abort(gone());
      warnings.close();
    },
  };
}

/** What was refused is told all the same, as far as it came along. */
function tellRefused(entry: Entry, shape: MethodShape | undefined, call: Call__Output): void {
  if (!shape || shape.clientStreams || call.request_follows) return;
  try {
    entry.asked(shape.decodeRequest(call.request));
  } catch {
    // Of what cannot be read only the method is told.
  }
}

/** How a failed call ended, for the machine's own log. */
function resultOf(error: unknown, signal: AbortSignal): string {
  if (!signal.aborted) return toWire(error).code;
  if (signal.reason === gaveUp) return 'gave_up';
  return signal.reason instanceof AppError && signal.reason.code === 'machine_timeout'
    ? 'machine_timeout'
    : 'link_lost';
}

function requestOf(shape: MethodShape, bytes: Buffer, entry: Entry): unknown {
  const request = shape.decodeRequest(bytes);
  entry.asked(request);
  return request;
}

/** What comes in on the stream: all requests of a streaming client, or one that was too large for its notice. */
function requestIn(taken: Taken, answer: AnswerStream): unknown {
  return taken.shape.clientStreams ? requestsOf(taken, answer) : largeRequest(taken, answer);
}

async function* requestsOf({ shape, entry }: Taken, answer: AnswerStream): AsyncGenerator<unknown> {
  let first = true;
  for await (const bytes of receiveFrames(answer, gone)) {
    yield first ? requestOf(shape, bytes, entry) : shape.decodeRequest(bytes);
    first = false;
  }
}

async function largeRequest({ shape, entry }: Taken, answer: AnswerStream): Promise<unknown> {
  const first = await receiveFrames(answer, gone).next();
  answer.resume();
  if (first.done) throw new AppError('machine_error', 'the request is missing');
  return requestOf(shape, first.value, entry);
}

/** The broker ends last; we wait for that a while, so that our last frames are not cut off. */
function ended(status: Promise<unknown>, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const settle = (): void => {
      cancel();
      signal.removeEventListener('abort', aborted);
      resolve();
    };
    const aborted = (): void => {
      if (signal.reason !== gaveUp) settle();
    };
    const cancel = after(closingMs, settle);
    void status.then(settle);
    signal.addEventListener('abort', aborted, { once: true });
    if (signal.aborted) aborted();
  });
}

/** The notice of it on the control stream may come later than the end of the call's own. */
function isGivenUp(error: Error): boolean {
  const told = 'code' in error && error.code === grpcStatus.CANCELLED;
  return told && 'details' in error && error.details === cancelledDetails;
}

function gone(): AppError {
  return new AppError('unavailable', 'the link to the broker was lost');
}

function timedOut(): AppError {
  return new AppError('machine_timeout', 'the call took longer than it may');
}
