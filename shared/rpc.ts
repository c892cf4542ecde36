// The wire contract in code: derives typed stubs and handlers from the protos, and frames a
// streaming call the same way at both of its ends.
import type { EventEmitter } from 'node:events';
import { setDefaultHighWaterMark } from 'node:stream';
import type { AgentDefinition, AgentHandlers } from '../proto/types/farhand/agent/v1/Agent.ts';
import type { StreamsDefinition } from '../proto/types/farhand/client/v1/Streams.ts';
import type { LinkDefinition } from '../proto/types/farhand/link/v1/Link.ts';
import { AppError, isCode } from './errors.ts';
import { countTransferred } from './garbage-collection.ts';
import { serviceOf, type WireMethod } from './wire.ts';

// The generated types describe exactly these services.
const loadedLink = serviceOf('farhand.link.v1.Link') as unknown as LinkDefinition;
const agentService = serviceOf('farhand.agent.v1.Agent');

/** The streaming service that clients call at the broker. */
export const streamsService = serviceOf('farhand.client.v1.Streams') as unknown as StreamsDefinition;

/** The link service as grpc-js takes it; frames of Answer may come to it encoded. */
export const linkService: LinkDefinition = {
  ...loadedLink,
  Answer: {
    ...loadedLink.Answer,
    requestSerialize: orEncoded(loadedLink.Answer.requestSerialize),
    responseSerialize: orEncoded(loadedLink.Answer.responseSerialize),
  },
};

function orEncoded<T>(encode: (frame: T) => Buffer): (frame: T) => Buffer {
  return (frame) => (Buffer.isBuffer(frame) ? frame : encode(frame));
}

/** Raised when either side must refuse the other's way of speaking. */
export const protocolVersion = 1;
/** The metadata key of Answer that holds the call's id. */
export const callKey = 'farhand-call';
/** Name in the link certificate; no address sits in it, so that a broker may move. */
export const linkServerName = 'farhand-broker';
/** Bytes under way to either side that have not been read yet: at 50 ms of round trip 6 MiB carry 55 MiB/s. */
export const windowBytes = 6 * 1024 * 1024;
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

/** An rpc of agent.proto, by its name there: "ReadFile". */
export type Method = keyof Definitions & string;

/** An API key, as the log of a machine names it. */
export interface Asking {
  key_id: string;
  key_name: string;
}

/** Options of every call of a stub. */
export interface CallOptions {
  /** Of the outside request, for the logs of both sides. */
  request_id: string;
  /** Whose key is behind it, for the log of the machine; absent where the broker acts by itself. */
  caller?: Asking | undefined;
  /** Gives the call up on both sides. */
  signal?: AbortSignal;
  /** Milliseconds allowed in all; by default unary calls have 30 s, streaming ones no limit. */
  deadline_ms?: number;
  /** Streaming calls: longest silence in milliseconds while waiting for a frame; 60 s by default, 0: no limit. */
  idle_ms?: number;
  /** Which streaming calls it competes with for a place: short ones by default. */
  lane?: Lane;
}

/** Why AgentCall.signal fires when the broker wants no answer any more; any other reason: it might, but cannot say. */
export const gaveUp = new AppError('unavailable', 'the caller gave up');

/** With status CANCELLED, how a broker ends the stream of a call that it has given up. */
export const cancelledDetails = 'cancelled';

/** Small ones; transfers of any size; those that follow processes; terminals and their clients; watches of files. */
export type Lane = 'short' | 'bulk' | 'process' | 'terminal' | 'watch';

/** The call that an agent's handler answers. */
export interface AgentCall {
  call_id: string;
  request_id: string;
  /** Fires when the broker gave up, the deadline passed or the link is gone. */
  signal: AbortSignal;
}

/** The machine as the broker sees it: one method per rpc. Rejects with AppError. */
export type AgentStub = {
  [M in Method as Uncapitalize<M>]: (
    request: ClientStreams<M> extends true ? AsyncIterable<RequestIn<M>> : RequestIn<M>,
    options: CallOptions,
  ) => ServerStreams<M> extends true ? AsyncIterable<ResponseOut<M>> : Promise<ResponseOut<M>>;
};

/** All handlers of the agent; a forgotten rpc does not compile. */
export type AgentMethods = {
  [M in Method as Uncapitalize<M>]: (
    request: ClientStreams<M> extends true ? AsyncIterable<RequestOut<M>> : RequestOut<M>,
    call: AgentCall,
  ) => ServerStreams<M> extends true ? AsyncIterable<ResponseIn<M>> : Promise<ResponseIn<M>>;
};

/** One rpc without its types, for the code that carries any of them. */
export interface MethodShape {
  /** As in agent.proto: "ReadFile". */
  name: Method;
  /** As in stub and handlers: "readFile". */
  key: keyof AgentStub;
  clientStreams: boolean;
  serverStreams: boolean;
  encodeRequest(request: unknown): Buffer;
  decodeRequest(bytes: Buffer): unknown;
  encodeResponse(response: unknown): Buffer;
  decodeResponse(bytes: Buffer): unknown;
  /** A whole frame of Answer. The bytes of a chunk are copied just once, and are free again when it returns. */
  frameRequest(request: unknown): Buffer;
  frameResponse(response: unknown): Buffer;
}

/** Every rpc of agent.proto by name. */
export const methods: ReadonlyMap<string, MethodShape> = new Map(
  // Its messages are objects; which ones, AgentStub and AgentMethods say.
  Object.entries(agentService).map(([name, definition]) => [name, shapeOf(name, definition)]),
);

function shapeOf(name: string, definition: WireMethod): MethodShape {
  // The generated types describe these messages; AgentStub and AgentMethods name them.
  const encodeRequest = definition.requestSerialize as (request: unknown) => Buffer;
  const encodeResponse = definition.responseSerialize as (response: unknown) => Buffer;
  return {
    // The entries of the loaded service are exactly the rpcs that the generated types name.
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
 * Encodes a message as Frame{message}. Protobuf's wire format is a tag, a length and the bytes (Encoding, "Length-
 * Delimited Records"), so a chunk needs two such heads before it and no detour through two encoders.
 */
function framerOf(
  chunk: number | undefined,
  encode: (message: unknown) => Buffer,
): (message: unknown) => Buffer {
  return (message) => {
    const bytes = chunk === undefined ? undefined : (message as { chunk?: Uint8Array }).chunk;
    return bytes && chunk ? wrapped([1, chunk], bytes) : frameOf(encode(message));
  };
}

/** The frame of an encoded message. */
export function frameOf(message: Buffer): Buffer {
  return wrapped([1], message);
}

/** The message in a frame of our own making, behind its tag and length. */
export function messageOf(frame: Buffer): Buffer {
  let lengthEnds = 1;
  while ((frame[lengthEnds] ?? 0) >= 0x80) lengthEnds += 1;
  return frame.subarray(lengthEnds + 1);
}

/** Fields inside each other, outermost first, around some bytes. */
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

/** Without what is null or absent: messages have no null. */
export function present<T extends object>(fields: T): { [K in keyof T]?: NonNullable<T[K]> } {
  const entries = Object.entries(fields).filter(([, value]) => value !== null && value !== undefined);
  // What is left of the same fields.
  return Object.fromEntries(entries) as { [K in keyof T]?: NonNullable<T[K]> };
}

/** Every stream of objects in this process then holds two: Node's default of sixteen would keep 4 MiB for every slow reader. */
export function shortenQueues(): void {
  setDefaultHighWaterMark(true, 2);
}

/** An error as it crosses the link. */
export interface WireError {
  code?: string;
  message?: string;
  details?: string;
}

/** A frame of Answer, the same in both directions. */
export interface Frame {
  message?: Buffer;
  end?: object | null;
  error?: WireError | null;
}

/** The part of a gRPC stream that frames are written to. */
export interface FrameSink extends EventEmitter {
  write(frame: Frame): boolean;
}

export function toWire(error: unknown): Required<WireError> {
  const known =
    error instanceof AppError ? error : new AppError('internal_error', 'unexpected failure, see the log');
  return { code: known.code, message: known.message, details: JSON.stringify(known.details) };
}

/** Codes that only a broker may use: from a machine they break the contract. */
const ours =
  /^(unauthorized|forbidden|rate_limited|idempotency_mismatch|route_not_found|method_not_allowed)$/;
const longestMessage = 2_000;
const longestDetails = 64 * 1024;

/** Reads an error of the far end; whatever breaks the contract becomes machine_error. */
export function fromWire(error: WireError): AppError {
  const { code = '', message = '', details = '' } = error;
  if (!isCode(code) || ours.test(code)) {
    const details = { code: code.slice(0, 100) };
    return new AppError('machine_error', 'the machine answered with an unknown error code', details);
  }
  return new AppError(code, message.slice(0, longestMessage), parseDetails(details));
}

/** Ours are flat objects and lists; a deeply nested one cannot be serialized. */
const mostBrackets = 1_000;

function parseDetails(text: string): Record<string, unknown> {
  if (text.length > longestDetails || text.split(/[[{]/).length > mostBrackets) return {};
  try {
    const details: unknown = JSON.parse(text || '{}');
    return typeof details === 'object' && details !== null ? { ...details } : {};
  } catch {
    return {};
  }
}

/**
 * Writes every frame, encoded by frameRequest or frameResponse, and then End, at the pace of the slower of source and reader.
 * A failure of the source goes out as an Error frame and is thrown; when the signal fires it throws its reason.
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
      // The link service passes on encoded frames.
      if (!sink.write(frame as Frame)) await drained(sink, signal);
    }
    signal.throwIfAborted();
    sink.write({ end: {} });
  } catch (error) {
    if (!signal.aborted) sink.write({ error: toWire(error) });
    throw error;
  }
}

/** Resolves when a stream takes more; rejects with the signal's reason. */
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
 * The messages of the far end until its End frame. An Error frame is thrown as AppError; a stream that stops
 * without End was cut (a killed peer's stream ends without an error), which is thrown as `lost`.
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
