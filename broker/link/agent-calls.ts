// Calls to one machine: small ones travel on its control stream, each larger one on a separate stream.
import { status as grpcStatus, type ServerDuplexStream } from '@grpc/grpc-js';
import type { AnswerRequest__Output } from '../../proto/types/farhand/link/v1/AnswerRequest.ts';
import type { AnswerResponse } from '../../proto/types/farhand/link/v1/AnswerResponse.ts';
import type { ConnectResponse } from '../../proto/types/farhand/link/v1/ConnectResponse.ts';
import type { Reply__Output } from '../../proto/types/farhand/link/v1/Reply.ts';
import {
  type AgentStub,
  type CallOptions,
  cancelledDetails,
  fromWire,
  type Lane,
  type MethodShape,
  methods,
  receiveFrames,
  sendFrames,
  smallMessageBytes,
} from '../../shared/agent-rpcs.ts';
import { after } from '../../shared/clock.ts';
import { AppError, type Code } from '../../shared/errors.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import { countTransferred } from '../../shared/v8-garbage-collection.ts';
import { CallLimits } from './call-limits.ts';

export type AnswerStream = ServerDuplexStream<AnswerRequest__Output, AnswerResponse>;

/**
 * The streaming calls that have no answer yet, by call id. Each value is called at most once, with the stream of the
 * machine's answer.
 */
export type AnswerWaiters = Map<string, (stream: AnswerStream) => void>;

/** The methods and limits of the machine, and its control stream. */
export interface CallsOptions {
  machineId: string;
  /** Methods that the agent listed in its hello. Calls of any other method fail with not_supported. */
  methods: readonly string[];
  /**
   * Maximum number of short streaming calls that may be open at once. Bulk calls, such as transfers and searches, have
   * a separate limit of the same number.
   */
  openCalls: number;
  /** Longest silence of the machine in the middle of a streaming call, in milliseconds. */
  idleMs: number;
  send(message: ConnectResponse): void;
  answerWaiters: AnswerWaiters;
}

const unaryDeadlineMs = 30_000;
const answerWithinMs = 10_000;
/**
 * After the last request of a transfer, the idle timeout is multiplied by this factor, because the machine's disk may
 * need long to flush everything.
 */
const syncFactor = 10;
const noBytes = Buffer.alloc(0);
/** The abort reason of an ended call. All calls share this error, because each new error would cost a stack trace. */
const finished = new AppError('unavailable', 'the call has ended');

/** A call from its request to its end. */
interface OpenCall {
  id: string;
  /** Aborted if the caller cancels, a time limit is exceeded, a request cannot be read or the link is lost. */
  abort: AbortController;
  end(): void;
}

type FirstAnswer = AnswerStream | Reply__Output;

/**
 * The calls to one machine. The prototype has a method for each rpc of the service, because a set of methods for each
 * machine would cost 6 KiB.
 */
export class Calls {
  readonly #options: CallsOptions;
  /** Calls that have no answer yet, by id. */
  readonly #waiting = new Map<string, (answer: Reply__Output) => void>();
  /** All calls that have not ended, including those that wait for a slot of their class. */
  readonly #open = new Set<AbortController>();
  readonly #limits: CallLimits;
  #closed = false;

  constructor(options: CallsOptions) {
    this.#options = options;
    this.#limits = new CallLimits(options.machineId, options.openCalls);
  }

  static {
    for (const shape of methods.values())
      Object.defineProperty(Calls.prototype, shape.key, {
        value(this: Calls, request: unknown, options: CallOptions) {
          const responses = this.#responses(shape, request, options);
          return shape.serverStreams ? responses : this.#lastOf(responses);
        },
      });
  }

  /** This object, typed as a stub that has a method for each rpc of the service. */
  get stub(): AgentStub {
    // The cast is safe: AgentStub is derived from the same service.
    return this as unknown as AgentStub;
  }

  /** Passes a whole answer to its call. An answer for which no call waits is ignored. */
  reply(reply: Reply__Output): void {
    this.#waiting.get(reply.call_id)?.(reply);
  }

  /** Handles the loss of the link: every open call fails with machine_offline. */
  close(): void {
    this.#closed = true;
    for (const abort of [...this.#open]) abort.abort(this.#lost());
  }

  async #lastOf(responses: AsyncGenerator<unknown>): Promise<unknown> {
    let last: unknown;
    for await (const response of responses) last = response;
    return (
      last ??
      Promise.reject(
        this.#error('machine_error', 'the machine ended the call without an answer; look at its agent’s log'),
      )
    );
  }

  /** Makes one call, and yields its decoded responses. */
  async *#responses(shape: MethodShape, request: unknown, options: CallOptions): AsyncGenerator<unknown> {
    this.#assertOffered(shape);
    const { name: method, clientStreams } = shape;
    const unary = !clientStreams && !shape.serverStreams;
    const { lane = unary ? 'control' : 'short', deadline_ms = unary ? unaryDeadlineMs : 0 } = options;
    let message = clientStreams ? noBytes : shape.encodeRequest(request);
    const large = message.length > smallMessageBytes;
    if (unary && large) throw this.#tooLarge(message.length);
    const outgoing = clientStreams
      ? encodeAll(shape, request as AsyncIterable<unknown>)
      : encodeAll(shape, large ? [request] : []);
    if (large) message = noBytes;
    // The reference to a large request is dropped, so that the request does not stay in memory until the
    // answer ends.
    request = undefined;
    const { request_id, caller, idle_ms = this.#options.idleMs } = options;
    const call = await this.#begin(lane, options.signal, deadline_ms);
    try {
      const answer = await this.#firstAnswer(call, unary ? undefined : this.#options.answerWaiters, {
        ...{ method, request: message, request_follows: large, deadline_ms, request_id },
        caller: caller ? { key_id: caller.key_id, key_name: caller.key_name } : null,
      });
      if ('call_id' in answer) {
        if (answer.error) throw fromWire(answer.error);
        // The machine gets a large or streamed request only on an answer stream. If it replies without opening this
        // stream, it has not received the request. Only an error is then a valid reply.
        const whole = clientStreams || large ? undefined : answer.messages?.messages;
        const messages = unary ? answer.response && [answer.response] : whole;
        if (!messages)
          throw this.#error(
            'machine_error',
            'the machine’s answer does not fit the request: update its agent',
          );
        for (const bytes of messages) {
          countTransferred(bytes.length);
          yield this.#decode(shape, bytes);
        }
      } else {
        for await (const bytes of this.#exchange(call, answer, outgoing, idle_ms))
          yield this.#decode(shape, bytes);
      }
    } finally {
      call.end();
    }
  }

  /** Exchanges messages on the answer stream of the call, until the answer ends. */
  async *#exchange(
    call: OpenCall,
    stream: AnswerStream,
    outgoing: AsyncIterable<Buffer>,
    idleMs: number,
  ): AsyncGenerator<Buffer> {
    const { abort } = call;
    const idle = createIdleTimeout(idleMs, abort);
    const stop = (): void => endWithError(stream, !this.#closed);
    abort.signal.addEventListener('abort', stop, { once: true });
    // Without this listener, reading would not end when the agent cancels or dies.
    stream.once('cancelled', () => abort.abort(this.#lost()));
    // If the source of the requests fails, its error aborts the whole call.
    void sendFrames(stream, idle.whileSending(outgoing), abort.signal).catch((error: unknown) => {
      if (!abort.signal.aborted) abort.abort(error);
    });
    let complete = false;
    let cut = false;
    try {
      yield* receiveFrames(idle.whileReceiving(stream), () => {
        cut = true;
        return this.#lost();
      });
      complete = true;
    } catch (error) {
      if (abort.signal.aborted) throw abort.signal.reason;
      // If the connection was not cut, the machine itself has ended the answer with this error. The answer is then
      // complete.
      complete = !cut;
      throw error;
    } finally {
      idle.end();
      abort.signal.removeEventListener('abort', stop);
      // After a complete answer, the agent has closed its side already.
      if (complete) stream.end();
      else {
        this.#cancel(call.id);
        endWithError(stream, !this.#closed);
      }
      // Stops sendFrames(), which may still be sending requests of this call.
      abort.abort(finished);
    }
  }

  /**
   * Waits for a free slot in the call's concurrency class. Rejects if no slot becomes free in time, or if the call was
   * aborted.
   */
  async #begin(lane: Lane, signal: AbortSignal | undefined, deadlineMs: number): Promise<OpenCall> {
    const abort = new AbortController();
    const giveUp = (): void => {
      const reason: unknown = signal?.reason;
      abort.abort(reason instanceof AppError ? reason : new AppError('unavailable', 'the request has ended'));
    };
    const forget = (): void => {
      signal?.removeEventListener('abort', giveUp);
      this.#open.delete(abort);
    };
    signal?.addEventListener('abort', giveUp, { once: true });
    if (signal?.aborted) giveUp();
    this.#open.add(abort);
    try {
      abort.signal.throwIfAborted();
      const release = await this.#limits.enter(lane, abort);
      const cancelDeadline =
        deadlineMs > 0 ? after(deadlineMs, () => abort.abort(this.#timedOut())) : () => {};
      // The abort ends the call. A caller may leave an answer half read, as after a HEAD request, and #responses() then
      // never reaches its `finally`.
      const end = (): void => {
        cancelDeadline();
        forget();
        release();
      };
      abort.signal.addEventListener('abort', end, { once: true });
      // A disconnect may cancel this call in the same turn of the event loop in which another call of the client passes
      // on the slot.
      if (abort.signal.aborted) end();
      return { id: newId('call'), abort, end: () => abort.abort(finished) };
    } catch (error) {
      forget();
      throw error;
    }
  }

  /** Sends the call. Resolves with the machine's first answer: a reply with the whole answer, or a stream. */
  async #firstAnswer(
    { id, abort }: OpenCall,
    answerWaiters: AnswerWaiters | undefined,
    call: NonNullable<ConnectResponse['call']>,
  ): Promise<FirstAnswer> {
    abort.signal.throwIfAborted();
    const { promise, resolve, reject } = Promise.withResolvers<FirstAnswer>();
    const stopWaiting = (): void => {
      this.#waiting.delete(id);
      answerWaiters?.delete(id);
    };
    const take = (answer: FirstAnswer): void => {
      stopWaiting();
      resolve(answer);
    };
    const fail = (): void => {
      stopWaiting();
      this.#cancel(id);
      reject(abort.signal.reason);
    };
    // A unary call needs no timer here, because its deadline also limits the wait for its answer.
    const cancelTimeout = answerWaiters && after(answerWithinMs, () => abort.abort(this.#timedOut()));
    abort.signal.addEventListener('abort', fail, { once: true });
    this.#waiting.set(id, take);
    answerWaiters?.set(id, take);
    this.#options.send({ call: { call_id: id, ...call } });
    return promise.finally(() => {
      cancelTimeout?.();
      abort.signal.removeEventListener('abort', fail);
    });
  }

  #decode(shape: MethodShape, bytes: Buffer): unknown {
    try {
      return shape.decodeResponse(bytes);
    } catch {
      throw this.#error('machine_error', 'the machine’s answer could not be decoded: update its agent');
    }
  }

  #assertOffered({ name: method }: MethodShape): void {
    if (this.#closed) throw this.#lost();
    if (this.#options.methods.includes(method)) return;
    const text = 'the agent on this machine is too old for this request: update the agent';
    throw this.#error('not_supported', text, { method });
  }

  #cancel(call_id: string): void {
    if (!this.#closed) this.#options.send({ cancel: { call_id } });
  }

  #lost(): AppError {
    const text = 'the connection to the machine was lost; whether the request took effect is unknown';
    return this.#error('machine_offline', text);
  }

  #timedOut(): AppError {
    return this.#error('machine_timeout', 'the machine did not answer in time; look at its agent’s log');
  }

  #tooLarge(bytes: number): AppError {
    const text = `the request has ${bytes} bytes, but the machine accepts at most ${smallMessageBytes}: shorten it`;
    return this.#error('payload_too_large', text);
  }

  #error(code: Code, text: string, details: object = {}): AppError {
    return new AppError(code, text, { machine_id: this.#options.machineId, ...details });
  }
}

/** Ends both sides of the stream with an error and wakes the reader. destroy() would leave the agent's side open. */
function endWithError(stream: AnswerStream, gaveUp: boolean): void {
  const code = gaveUp ? grpcStatus.CANCELLED : grpcStatus.UNAVAILABLE;
  // By `cancelledDetails` the agent recognizes that the broker has cancelled the call. The code CANCELLED alone is not
  // enough, because a lost link can also end with this code.
  if (!stream.destroyed) stream.emit('error', { code, details: gaveUp ? cancelledDetails : 'lost' });
}

async function* encodeAll(
  shape: MethodShape,
  requests: AsyncIterable<unknown> | Iterable<unknown>,
): AsyncGenerator<Buffer> {
  for await (const request of requests) yield shape.frameRequest(request);
}

/**
 * Aborts a streaming call if its machine neither reads nor sends for `ms` milliseconds; 0 means never. Delays of the
 * broker itself do not count.
 */
function createIdleTimeout(ms: number, abort: AbortController) {
  let cancel = (): void => {};
  let ended = false;
  function start(times = 1): void {
    cancel();
    if (ms === 0 || ended) return;
    const message =
      'the machine stopped reading and sending data before its answer was complete; try again, or look at its agent’s log';
    cancel = after(ms * times, () => abort.abort(new AppError('machine_timeout', message)));
  }
  return {
    /**
     * Yields requests. The timer runs while the machine reads a request, and after the last one. It is
     * stopped while the source prepares the next request.
     */
    async *whileSending(requests: AsyncIterable<Buffer>): AsyncGenerator<Buffer> {
      let sent = 0;
      cancel();
      for await (const request of requests) {
        sent += 1;
        start();
        yield request;
        cancel();
      }
      start(sent > 1 ? syncFactor : 1);
    },
    /** Yields frames. The idle timeout does not run while the reader handles a frame. */
    async *whileReceiving<T>(frames: AsyncIterable<T>): AsyncGenerator<T> {
      for await (const frame of frames) {
        cancel();
        yield frame;
        start();
      }
    },
    /** Switches the timeout off for the rest of the call. */
    end(): void {
      ended = true;
      cancel();
    },
  };
}
