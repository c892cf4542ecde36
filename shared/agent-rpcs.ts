// Derives the types of the agent's rpcs from the protos, and encodes the frames of streaming rpcs.
import type { EventEmitter } from 'node:events';
import { setDefaultHighWaterMark } from 'node:stream';
import type { AgentDefinition, AgentHandlers } from '../proto/types/farhand/agent/v1/Agent.ts';
import type { StreamsDefinition } from '../proto/types/farhand/client/v1/Streams.ts';
import type { LinkDefinition } from '../proto/types/farhand/link/v1/Link.ts';
import { AppError, isCode } from './errors.ts';
import { serviceOf, type WireMethod } from './grpc-service-from-proto.ts';
import { countTransferred } from './v8-garbage-collection.ts';

// The casts are safe: the generated types describe exactly these services.
const loadedLink = serviceOf('farhand.link.v1.Link') as unknown as LinkDefinition;
const agentService = serviceOf('farhand.agent.v1.Agent');

/** The agent's rpcs that write files. A broker also serves these rpcs to other brokers, for copies between machines. */
export const fileWriterService = {
  writeFile: methodOf('WriteFile'),
  writeArchive: methodOf('WriteArchive'),
};

function methodOf(name: string): WireMethod {
  const method = agentService[name];
  if (!method) throw new Error(`agent.proto has no rpc ${name}`);
  return method;
}

/** The streaming service that clients call at the broker. */
export const streamsService = serviceOf('farhand.client.v1.Streams') as unknown as StreamsDefinition;

/** The link service as grpc-js needs it. Its rpc Answer also accepts frames that are already encoded. */
export const linkService: LinkDefinition = {
  ...loadedLink,
  Answer: {
    ...loadedLink.Answer,
    requestSerialize: orEncoded(loadedLink.Answer.requestSerialize),
    responseSerialize: orEncoded(loadedLink.Answer.responseSerialize),
  },
};

/** Wraps an encoder, so that it returns a Buffer unchanged: a Buffer is a message that is already encoded. */
export function orEncoded<T>(encode: (frame: T) => Buffer): (frame: T) => Buffer {
  return (frame) => (Buffer.isBuffer(frame) ? frame : encode(frame));
}

/**
 * Version of the protocol between agent and broker. A broker refuses agents with a higher version than its own. A new
 * field needs no new version, because both sides ignore unknown fields.
 */
export const protocolVersion = 1;
/** The metadata key of Answer that contains the call's id. */
export const callKey = 'farhand-call';
/** Name in the broker's link certificate. It is no address, so that the broker's address may change. */
export const linkServerName = 'farhand-broker';
/** Largest request or reply on the control stream, in bytes. */
export const smallMessageBytes = 64 * 1024;

type Known<T> = {
  [K in keyof T as string extends K ? never : number extends K ? never : K]: T[K];
};
type Definitions = Known<AgentDefinition>;
type CallOf<M extends Method> = Parameters<Extract<AgentHandlers[M], (...rest: never) => unknown>>[0];
type ClientStreams<M extends Method> = CallOf<M> extends { request: unknown } ? false : true;
type ServerStreams<M extends Method> = CallOf<M> extends { write: unknown } ? true : false;
type RequestIn<M extends Method> = Parameters<Definitions[M]['requestSerialize']>[0];
type RequestOut<M extends Method> = ReturnType<Definitions[M]['requestDeserialize']>;
type ResponseIn<M extends Method> = Parameters<Definitions[M]['responseSerialize']>[0];
type ResponseOut<M extends Method> = ReturnType<Definitions[M]['responseDeserialize']>;

/** Name of an rpc in agent.proto, such as "ReadFile". */
export type Method = keyof Definitions & string;

/** The API key that caused a call, for the machine's audit log. */
export interface Asking {
  key_id: string;
  key_name: string;
}

export interface CallOptions {
  /** Id of the HTTP or gRPC request that caused the call, for the logs of agent and broker. */
  request_id: string;
  /** API key that caused the call, for the machine's audit log; absent if the broker acts by itself. */
  caller?: Asking | undefined;
  /** Cancels the call at the broker and the agent when the signal fires. */
  signal?: AbortSignal;
  /** Milliseconds for the whole call; by default 30 s for unary calls, no limit for streaming calls. */
  deadline_ms?: number;
  /** Longest wait for the next frame of a streaming call, in milliseconds. The default is 60 s; 0 means no limit. */
  idle_ms?: number;
  /** Concurrency class of the call. The default is `control` for a unary call and `short` for a streaming one. */
  lane?: Lane;
}

/**
 * Reason of AgentCall.signal when the broker has cancelled the call and needs no result. After any other reason, such
 * as a lost link, the broker may still need the result.
 */
export const gaveUp = new AppError('unavailable', 'the caller cancelled the call');

/**
 * Details of the gRPC status CANCELLED with which a broker ends the stream of a call that it has cancelled. Without
 * these details, the agent could mistake a lost link, which can also end with CANCELLED, for a cancelled call.
 */
export const cancelledDetails = 'cancelled';

/** Concurrency class of a call. The open calls of one class on a machine share a limit. */
export type Lane =
  // The default of unary calls, including those for processes, such as SignalProcess.
  | 'control'
  // Unary calls for one entry of the file system.
  | 'single'
  // Unary file operations that may take hours, such as a copy.
  | 'long'
  // The default of streaming calls, for lists and small contents.
  | 'short'
  // File transfers and searches.
  | 'bulk'
  // Output of processes.
  | 'process'
  | 'terminal'
  | 'watch';

/** A call of the broker, as a handler of the agent gets it. */
export interface AgentCall {
  /** Fires when the broker cancels the call, its deadline passes or the link is lost. */
  signal: AbortSignal;
}

/** The agent's rpcs as the broker calls them: one method per rpc. Calls reject with AppError. */
export type AgentStub = {
  [M in Method as Uncapitalize<M>]: (
    request: ClientStreams<M> extends true ? AsyncIterable<RequestIn<M>> : RequestIn<M>,
    options: CallOptions,
  ) => ServerStreams<M> extends true ? AsyncIterable<ResponseOut<M>> : Promise<ResponseOut<M>>;
};

/** The agent's handlers, one per rpc: a missing handler does not compile. */
export type AgentMethods = {
  [M in Method as Uncapitalize<M>]: (
    request: ClientStreams<M> extends true ? AsyncIterable<RequestOut<M>> : RequestOut<M>,
    call: AgentCall,
  ) => ServerStreams<M> extends true ? AsyncIterable<ResponseIn<M>> : Promise<ResponseIn<M>>;
};

/** One rpc without its message types, for code that forwards any rpc. */
export interface MethodShape {
  /** Name in agent.proto, such as "ReadFile". */
  name: Method;
  /** Name in AgentStub and AgentMethods, such as "readFile". */
  key: keyof AgentStub;
  clientStreams: boolean;
  serverStreams: boolean;
  encodeRequest(request: unknown): Buffer;
  decodeRequest(bytes: Buffer): unknown;
  encodeResponse(response: unknown): Buffer;
  decodeResponse(bytes: Buffer): unknown;
  /** Encodes a message as a complete frame of the rpc Answer. Copies the bytes, so the caller may reuse its buffer. */
  frameRequest(request: unknown): Buffer;
  frameResponse(response: unknown): Buffer;
}

/**
 * Every rpc of agent.proto by name, with messages of the type `unknown`. AgentStub and AgentMethods have the exact
 * types.
 */
export const methods: ReadonlyMap<string, MethodShape> = new Map(
  Object.entries(agentService).map(([name, definition]) => [name, shapeOf(name, definition)]),
);

function shapeOf(name: string, definition: WireMethod): MethodShape {
  // The casts are safe: AgentStub and AgentMethods accept only the message types that are generated from agent.proto.
  const encodeRequest = definition.requestSerialize as (request: unknown) => Buffer;
  const encodeResponse = definition.responseSerialize as (response: unknown) => Buffer;
  return {
    // The casts are safe: the entries of the service are exactly the rpcs that the generated types name.
    name: name as Method,
    key: (name.charAt(0).toLowerCase() + name.slice(1)) as keyof AgentStub,
    clientStreams: definition.requestStream,
    serverStreams: definition.responseStream,
    encodeRequest,
    decodeRequest: definition.requestDeserialize,
    encodeResponse,
    decodeResponse: definition.responseDeserialize,
    frameRequest: framerOf(definition.requestChunk, encodeRequest),
    frameResponse: framerOf(definition.responseChunk, encodeResponse),
  };
}

/**
 * Returns a function that encodes a message, and wraps it in a Frame as the field `message`. `chunk`: protobuf field
 * number of `chunk` in the encoded message; undefined if the message has no such field.
 */
function framerOf(
  chunk: number | undefined,
  encode: (message: unknown) => Buffer,
): (message: unknown) => Buffer {
  return (message) => {
    const bytes = chunk === undefined ? undefined : (message as { chunk?: Uint8Array }).chunk;
    // A chunk is encoded without protobufjs, so that its bytes are copied only once. Its frame is the tags and lengths
    // of the fields `message` and `chunk`, then the bytes (protobuf.dev, Encoding).
    return bytes && chunk ? wrapped([1, chunk], bytes) : frameOf(encode(message));
  };
}

export function frameOf(message: Buffer): Buffer {
  return wrapped([1], message);
}

/** Returns the message in a frame: the bytes after the tag and the length of its field. */
export function messageOf(frame: Buffer): Buffer {
  let lengthEnds = 1;
  while ((frame[lengthEnds] ?? 0) >= 0x80) lengthEnds += 1;
  return frame.subarray(lengthEnds + 1);
}

/** Wraps bytes in nested protobuf fields, given by their numbers, outermost first. */
function wrapped(fields: number[], bytes: Uint8Array): Buffer {
  const heads: number[] = [];
  for (const field of fields.reverse()) {
    heads.unshift(...varint((field << 3) | 2), ...varint(heads.length + bytes.length));
  }
  const frame = Buffer.allocUnsafeSlow(heads.length + bytes.length);
  frame.set(heads);
  frame.set(bytes, heads.length);
  return frame;
}

function varint(value: number): number[] {
  return value < 0x80 ? [value] : [(value & 0x7f) | 0x80, ...varint(value >>> 7)];
}

/** Returns an object without its null and undefined fields, because protobuf messages have no null. */
export function present<T extends object>(fields: T): { [K in keyof T]?: NonNullable<T[K]> } {
  const entries = Object.entries(fields).filter(([, value]) => value !== null && value !== undefined);
  // The cast is safe: the entries are those fields of T that have a value.
  return Object.fromEntries(entries) as { [K in keyof T]?: NonNullable<T[K]> };
}

/**
 * Limits the queue of every object stream in this process to 2 objects. With Node's default of 16, each slow reader
 * would take up to 4 MiB.
 */
export function shortenQueues(): void {
  setDefaultHighWaterMark(true, 2);
}

/** An error in the form that agent and broker send to each other. */
export interface WireError {
  code?: string;
  message?: string;
  details?: string;
}

/** A frame of the Answer stream, in either direction. */
export interface Frame {
  message?: Buffer;
  end?: object | null;
  error?: WireError | null;
}

/** The members of a gRPC stream that sendFrames() uses to write frames. */
export interface FrameSink extends EventEmitter {
  write(frame: Frame): boolean;
}

export function toWire(error: unknown): Required<WireError> {
  const known =
    error instanceof AppError
      ? error
      : new AppError('internal_error', 'an unexpected error occurred on the machine; see the agent’s log');
  return { code: known.code, message: known.message, details: JSON.stringify(known.details) };
}

/** Error codes that only a broker may send; an agent that sends one breaks the protocol. */
const ours =
  /^(unauthorized|forbidden|rate_limited|idempotency_mismatch|route_not_found|method_not_allowed)$/;
const longestMessage = 2_000;
const longestDetails = 64 * 1024;

/** Replaces NUL characters, which PostgreSQL cannot store. Otherwise the end of a command could never be stored. */
export const withoutNul = (text: string): string => text.replaceAll('\0', '\ufffd');

/** Converts a received error. A code that is unknown, or that only a broker may send, becomes machine_error. */
export function fromWire(error: WireError): AppError {
  const { code = '', message = '', details = '' } = error;
  if (!isCode(code) || ours.test(code)) {
    const details = { code: code.slice(0, 100) };
    return new AppError(
      'machine_error',
      'the agent reported an error with a code that this broker does not accept; check whether the agent is newer than the broker',
      details,
    );
  }
  return new AppError(code, withoutNul(message.slice(0, longestMessage)), parseDetails(details));
}

/**
 * Maximum number of opening brackets in error details. Details of Farhand are flat, and JSON.stringify fails for deeply
 * nested values.
 */
const mostBrackets = 1_000;

/** Parses error details. Returns an empty object for a text that is too long, too deeply nested or no JSON object. */
export function parseDetails(text: string): Record<string, unknown> {
  if (text.length > longestDetails || text.split(/[[{]/).length > mostBrackets) return {};
  try {
    const details: unknown = JSON.parse(text || '{}');
    return typeof details === 'object' && !Array.isArray(details) ? { ...details } : {};
  } catch {
    return {};
  }
}

/**
 * Writes all encoded frames, then an End frame. If `frames` throws, sends the error as an Error frame and rethrows it.
 * Throws the signal's reason when the signal fires.
 */
export async function sendFrames(
  sink: FrameSink,
  frames: AsyncIterable<Buffer> | Iterable<Buffer>,
  signal: AbortSignal,
): Promise<void> {
  try {
    for await (const frame of frames) {
      signal.throwIfAborted();
      countTransferred(frame.length);
      // The cast is safe: the link service accepts encoded frames.
      if (!sink.write(frame as Frame)) await drained(sink, signal);
    }
    signal.throwIfAborted();
    sink.write({ end: {} });
  } catch (error) {
    if (!signal.aborted) sink.write({ error: toWire(error) });
    throw error;
  }
}

/** Resolves when the stream accepts data again; rejects with the signal's reason when the signal fires. */
export function drained(sink: EventEmitter, signal: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const settle = (): void => {
      sink.off('drain', settle);
      signal.removeEventListener('abort', settle);
      if (signal.aborted) reject(signal.reason);
      else resolve();
    };
    sink.once('drain', settle);
    signal.addEventListener('abort', settle, { once: true });
    if (signal.aborted) settle();
  });
}

/**
 * Yields the messages of the received frames until the End frame. Throws the error of an Error frame as AppError. If
 * the stream stops without an End frame, throws the error that `lost` returns.
 */
export async function* receiveFrames(
  frames: AsyncIterable<Frame>,
  lost: () => AppError,
): AsyncGenerator<Buffer> {
  const iterator = frames[Symbol.asyncIterator]();
  for (;;) {
    const next = await iterator.next().catch((error: unknown) => {
      throw error instanceof AppError ? error : lost();
    });
    if (next.done) throw lost();
    const frame = next.value;
    if (frame.end) return;
    if (frame.error) throw fromWire(frame.error);
    if (frame.message) {
      countTransferred(frame.message.length);
      yield frame.message;
    }
  }
}
