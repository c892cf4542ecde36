// Calls to one machine: the stub that nouns use, made of small calls on the control stream and one stream per large call.
import type { ServerDuplexStream } from '@grpc/grpc-js';
import { status as grpcStatus } from '@grpc/grpc-js';
import type { AnswerRequest__Output } from '../../proto/types/farhand/link/v1/AnswerRequest.ts';
import type { AnswerResponse } from '../../proto/types/farhand/link/v1/AnswerResponse.ts';
import type { ConnectResponse } from '../../proto/types/farhand/link/v1/ConnectResponse.ts';
import type { Reply__Output } from '../../proto/types/farhand/link/v1/Reply.ts';
import { after } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { passing } from '../../shared/heap.ts';
import { newId } from '../../shared/ids.ts';
import {
  type AgentStub,
  type CallOptions,
  cancelledDetails,
  frameOf,
  fromWire,
  type Lane,
  type MethodShape,
  methods,
  receiveFrames,
  sendFrames,
  smallMessageBytes,
} from '../../shared/rpc.ts';
import { Patience } from './patience.ts';

export type AnswerStream = ServerDuplexStream<AnswerRequest__Output, AnswerResponse>;

/** Streaming calls that wait for their answer, by call id: the id is valid once and only here. */
export type Switchboard = Map<string, (stream: AnswerStream) => void>;

export interface Calls {
  stub: AgentStub;
  /** A whole answer; says whether anybody waited for it. */
  reply(reply: Reply__Output): boolean;
  /** The link is gone: every open call fails with machine_offline. */
  close(): void;
  readonly open: number;
}

/** What the machine can do, and the way to it. */
export interface CallsOptions {
  machineId: string;
  /** Methods named in hello: another one is not_supported. */
  methods: readonly string[];
  /** Streaming calls open at once, by lane: stalled downloads must not keep a listing waiting. */
  maxOpen: Readonly<Record<Lane, number>>;
  /** Longest silence of the machine in the middle of a streaming call, in milliseconds. */
  idleMs: number;
  send(message: ConnectResponse): void;
  switchboard: Switchboard;
}

const unaryDeadlineMs = 30_000;
/** Why the sending side of a call stops that is over: nobody sees it, and an error costs its stack. */
const settled = new AppError('unavailable', 'the call is over');
const answerWithinMs = 10_000;
/** Small calls that may wait at once; past it the machine is too busy to take more. */
const maxPending = 1024;

/** Calls given up whose late answers are not held against the machine. */
const mostGiven = 4_096;

interface Pending {
  settle(reply: Reply__Output | AppError): void;
}

export function openCalls(settings: CallsOptions): Calls {
  const { machineId, methods: offered, send, switchboard } = settings;
  const pending = new Map<string, Pending>();
  /** Streaming calls that wait for either way of being answered. */
  const announced = new Map<string, (reply: Reply__Output) => void>();
  const lanes: Record<Lane, Set<AbortController>> = {
    short: new Set(),
    bulk: new Set(),
    process: new Set(),
    terminal: new Set(),
    watch: new Set(),
  };
  /** Given up a while ago: the machine may have answered before it heard of that. */
  const given = new Set<string>();
  let closed = false;

  function remember(call_id: string): void {
    given.add(call_id);
    const [oldest = ''] = given;
    if (given.size > mostGiven) given.delete(oldest);
  }

  const lost = (): AppError =>
    new AppError(
      'machine_offline',
      'the link to the machine was lost during this call; its outcome is unknown',
      {
        machine_id: machineId,
      },
    );
  const late = (): AppError =>
    new AppError('machine_timeout', 'the machine did not answer in time', { machine_id: machineId });

  function refuse(shape: MethodShape): void {
    if (closed) throw lost();
    if (!offered.includes(shape.name)) {
      throw new AppError('not_supported', 'the agent on this machine is too old for this: update it', {
        machine_id: machineId,
        method: shape.name,
      });
    }
  }

  function announce(
    { name: method }: MethodShape,
    call_id: string,
    request: Buffer,
    { deadline_ms = 0, request_id, caller }: CallOptions,
    request_follows = false,
  ): void {
    const whose = caller && { key_id: caller.key_id, key_name: caller.key_name };
    send({
      call: { call_id, method, request, request_follows, deadline_ms, request_id, caller: whose ?? null },
    });
  }

  function unary(shape: MethodShape, request: unknown, options: CallOptions): Promise<Buffer> {
    refuse(shape);
    options.signal?.throwIfAborted();
    const bytes = shape.encodeRequest(request);
    if (bytes.length > smallMessageBytes)
      throw new AppError('payload_too_large', 'this request is too large');
    if (pending.size >= maxPending) throw busy();
    const call_id = newId('call');
    const deadline_ms = options.deadline_ms ?? unaryDeadlineMs;
    return new Promise((resolve, reject) => {
      const settle = (reply: Reply__Output | AppError): void => {
        pending.delete(call_id);
        cancelDeadline();
        options.signal?.removeEventListener('abort', giveUp);
        if (reply instanceof AppError) reject(reply);
        else if (reply.error) reject(fromWire(reply.error));
        else if (reply.response) resolve(reply.response);
        else reject(unsuitable());
      };
      const abandon = (reason: AppError): void => {
        settle(reason);
        remember(call_id);
        if (!closed) send({ cancel: { call_id } });
      };
      const giveUp = (): void => abandon(abortError(options.signal));
      const cancelDeadline = after(deadline_ms, () => abandon(late()));
      options.signal?.addEventListener('abort', giveUp, { once: true });
      pending.set(call_id, { settle });
      announce(shape, call_id, bytes, { ...options, deadline_ms });
    });
  }

  /** One streaming call from notice to End; yields the encoded responses. `requests` absent: there is but one. */
  async function* exchange(
    shape: MethodShape,
    request: Buffer,
    requests: AsyncIterable<Buffer> | undefined,
    options: CallOptions,
  ): AsyncGenerator<Buffer> {
    // Not held for as long as the answer takes.
    let first = request;
    refuse(shape);
    const lane = lanes[options.lane ?? 'short'];
    if (lane.size >= settings.maxOpen[options.lane ?? 'short']) throw busy();
    const abort = new AbortController();
    const giveUp = (): void => abort.abort(abortError(options.signal));
    options.signal?.addEventListener('abort', giveUp, { once: true });
    if (options.signal?.aborted) giveUp();
    const cancelDeadline = options.deadline_ms
      ? after(options.deadline_ms, () => abort.abort(late()))
      : () => {};
    lane.add(abort);
    const call_id = newId('call');
    let stream: AnswerStream | undefined;
    /** The machine has said its last word: nothing is left to be cancelled. */
    let complete = false;
    const stop = (): void => cancel(stream, !closed);
    try {
      const large = requests === undefined && first.length > smallMessageBytes;
      const answer = await answered(call_id, abort.signal, () =>
        announce(shape, call_id, large ? Buffer.alloc(0) : first, options, large),
      );
      if ('call_id' in answer) {
        complete = true;
        yield* messagesOf(answer, requests === undefined && !large);
        return;
      }
      stream = answer;
      abort.signal.addEventListener('abort', stop, { once: true });
      // Neither a cancel of the agent nor its death ends our reading side; after our own end this tells nothing new.
      stream.once('cancelled', () => abort.abort(lost()));
      const patience = new Patience(options.idle_ms ?? settings.idleMs, abort);
      const outgoing = requests ?? (large ? only(frameOf(first)) : none());
      first = Buffer.alloc(0);
      void sendRequests(stream, patience.whileSending(outgoing), abort);
      try {
        yield* receiveFrames(patience.whileReceiving(stream), lost);
      } finally {
        patience.end();
        complete = patience.toldFailure;
      }
      complete = true;
    } catch (error) {
      throw abort.signal.aborted && !complete ? abort.signal.reason : error;
    } finally {
      cancelDeadline();
      options.signal?.removeEventListener('abort', giveUp);
      abort.signal.removeEventListener('abort', stop);
      lane.delete(abort);
      finish(call_id, stream, complete);
      // It is the sending that hears this, and an abort is dear.
      if (stream) abort.abort(settled);
    }
  }

  /** The agent half-closes first, we end last; whatever is not complete is cancelled on both streams. */
  function finish(call_id: string, stream: AnswerStream | undefined, complete: boolean): void {
    if (complete) stream?.end();
    else {
      if (!closed) send({ cancel: { call_id } });
      cancel(stream, !closed);
    }
  }

  /** The stream that the machine opens for a call, or the whole answer in a reply: whichever comes first. */
  function answered(
    call_id: string,
    signal: AbortSignal,
    notify: () => void,
  ): Promise<AnswerStream | Reply__Output> {
    return new Promise((resolve, reject) => {
      const settle = (): void => {
        switchboard.delete(call_id);
        announced.delete(call_id);
        cancelWait();
        signal.removeEventListener('abort', aborted);
      };
      const fail = (reason: unknown): void => {
        if (announced.has(call_id)) remember(call_id);
        settle();
        reject(reason);
      };
      const take = (answer: AnswerStream | Reply__Output): void => {
        settle();
        resolve(answer);
      };
      const aborted = (): void => fail(signal.reason);
      const cancelWait = after(answerWithinMs, () => fail(late()));
      if (signal.aborted) return aborted();
      signal.addEventListener('abort', aborted, { once: true });
      switchboard.set(call_id, take);
      announced.set(call_id, take);
      notify();
    });
  }

  /** `asked`: the machine has been sent all there is; without that it can have no answer but an error. */
  function* messagesOf({ error, messages: all }: Reply__Output, asked: boolean): Generator<Buffer> {
    if (error) throw fromWire(error);
    if (!all || !asked) throw unsuitable();
    for (const message of all.messages) {
      passing(message.length);
      yield message;
    }
  }

  function unsuitable(): AppError {
    return new AppError('machine_error', 'the machine’s answer is of another kind than its call', {
      machine_id: machineId,
    });
  }

  function busy(): AppError {
    return new AppError('unavailable', 'too many calls are open on this machine: try again later', {
      machine_id: machineId,
    });
  }

  async function collectOne(shape: MethodShape, responses: AsyncGenerator<Buffer>): Promise<unknown> {
    let answer: Buffer | undefined;
    for await (const bytes of responses) answer = bytes;
    if (!answer)
      throw new AppError('machine_error', 'the machine ended without an answer', { machine_id: machineId });
    return decode(shape, answer);
  }

  function decode(shape: MethodShape, bytes: Buffer): unknown {
    try {
      return shape.decodeResponse(bytes);
    } catch {
      throw new AppError('machine_error', 'the machine’s answer cannot be read', { machine_id: machineId });
    }
  }

  function stubMethod(shape: MethodShape) {
    if (!shape.serverStreams && !shape.clientStreams) {
      return async (request: unknown, options: CallOptions) =>
        decode(shape, await unary(shape, request, options));
    }
    return (request: unknown, options: CallOptions) => {
      const requests = shape.clientStreams ? encodeAll(shape, request as AsyncIterable<unknown>) : undefined;
      const first = shape.clientStreams ? Buffer.alloc(0) : shape.encodeRequest(request);
      const responses = exchange(shape, first, requests, options);
      return shape.serverStreams ? decodeAll(shape, responses, decode) : collectOne(shape, responses);
    };
  }

  return {
    // Built from the very service that AgentStub is derived from, one method per rpc.
    stub: Object.fromEntries(
      [...methods.values()].map((shape) => [shape.key, stubMethod(shape)]),
    ) as unknown as AgentStub,
    reply(reply) {
      const waiting = pending.get(reply.call_id);
      const streaming = announced.get(reply.call_id);
      waiting?.settle(reply);
      streaming?.(reply);
      return waiting !== undefined || streaming !== undefined || given.delete(reply.call_id);
    },
    get open() {
      return Object.values(lanes).reduce((sum, lane) => sum + lane.size, pending.size);
    },
    close() {
      closed = true;
      for (const call of [...pending.values()]) call.settle(lost());
      for (const lane of Object.values(lanes)) for (const abort of [...lane]) abort.abort(lost());
    },
  };
}

/** Sends the requests until the answer is complete; a source that fails gives the whole call up with its own error. */
function sendRequests(
  stream: AnswerStream,
  requests: AsyncIterable<Buffer>,
  abort: AbortController,
): Promise<void> {
  return sendFrames(stream, requests, abort.signal).catch((error: unknown) => {
    if (!abort.signal.aborted) abort.abort(error);
  });
}

/**
 * destroy() would leave the agent's side open; an error status ends both, and wakes whoever reads. It tells the
 * agent whether we gave the call up or lost the link; grpc-js itself says CANCELLED with other details.
 */
function cancel(stream: AnswerStream | undefined, gaveUp: boolean): void {
  const code = gaveUp ? grpcStatus.CANCELLED : grpcStatus.UNAVAILABLE;
  if (stream && !stream.destroyed)
    stream.emit('error', { code, details: gaveUp ? cancelledDetails : 'lost' });
}

async function* encodeAll(shape: MethodShape, requests: AsyncIterable<unknown>): AsyncGenerator<Buffer> {
  for await (const request of requests) yield shape.frameRequest(request);
}

async function* decodeAll(
  shape: MethodShape,
  responses: AsyncGenerator<Buffer>,
  decode: (shape: MethodShape, bytes: Buffer) => unknown,
): AsyncGenerator<unknown> {
  for await (const bytes of responses) yield decode(shape, bytes);
}

async function* only(bytes: Buffer): AsyncGenerator<Buffer> {
  yield bytes;
}

async function* none(): AsyncGenerator<Buffer> {}

function abortError(signal: AbortSignal | undefined): AppError {
  const reason: unknown = signal?.reason;
  return reason instanceof AppError ? reason : new AppError('unavailable', 'the caller went away');
}
