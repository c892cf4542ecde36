// One gRPC call: authenticates its client, authorizes its requests, reads its messages in order, and sends
// replies at the pace of the reader.
import { status as grpcStatus, Metadata, type ServerDuplexStream } from '@grpc/grpc-js';
import { z } from 'zod';
import type { StreamsDefinition } from '../../proto/types/farhand/client/v1/Streams.ts';
import { drained } from '../../shared/agent-rpcs.ts';
import type { Route } from '../../shared/api/route.ts';
import type { Caller, Handlers, Input } from '../../shared/api/route-table.ts';
import { after, sleep } from '../../shared/clock.ts';
import { AppError, type Code, codes } from '../../shared/errors.ts';
import { requestIdFrom } from '../../shared/ids-and-secrets.ts';
import type { Logger } from '../../shared/logger.ts';
import { readStream } from '../../shared/wait-for-change.ts';
import { type Proxies, peerAddress } from '../client-address.ts';
import type { Elsewhere, Peers } from '../cluster/peers/route-to-owner.ts';
import type { Commands } from '../commands/command-handlers.ts';
import { authenticate, type Client } from '../request-checks/authenticate.ts';
import {
  type AccessServices,
  AuthorizedRequest,
  type Guard,
  nothing,
  type RequestWork,
} from '../request-checks/authorize-and-perform.ts';
import type { Idempotency } from '../request-checks/idempotency.ts';
import type { RawInput } from '../request-checks/parse-api-request.ts';
import type { Quota, Rates } from '../request-checks/rate-limits.ts';
import type { Sessions } from '../sessions/session-handlers.ts';
import { forwardCall } from './forward-call-to-owner.ts';

/** Longest wait in milliseconds for the first message of a call whose requests are a stream. */
const firstMs = 30_000;
/**
 * Milliseconds to wait for a cancel after the client has half-closed the call. A Node client that cancels a call also
 * half-closes it, and the half-close may arrive before the cancel.
 */
const leavingMs = 20;

const over = new AppError('unavailable', 'the call has ended');
const stalled = new AppError('unavailable', 'the client neither read nor sent for 70 s: call again');
const stopping = new AppError('unavailable', 'the broker is stopping: connect again later');
const left = new AppError('unavailable', 'the client disconnected');

/** The parts of the broker that the rpcs use. */
export interface StreamsServices extends AccessServices {
  handlers: Handlers;
  commands: Pick<Commands, 'follow'>;
  sessions: Pick<Sessions, 'join'>;
  idempotency: Idempotency;
  proxies: Proxies;
  rates: Rates;
  /** The other brokers, which answer calls about their machines; undefined if there are none. */
  peers?: Peers | undefined;
  log: Logger;
  /** Longest wait in milliseconds for a client that neither reads nor sends during a transfer. */
  stalledMs: number;
}

type Rpcs = { [M in keyof StreamsDefinition as string extends M ? never : M]: StreamsDefinition[M] };
export type Method = keyof Rpcs;
/** A message from the client. */
export type Received<M extends Method> = ReturnType<Rpcs[M]['requestDeserialize']>;
/** A message to the client. */
export type Sent<M extends Method> = Parameters<Rpcs[M]['responseSerialize']>[0];

/** The stream of any rpc; `request` is set only for rpcs where the client sends one message. */
export type Stream = ServerDuplexStream<unknown, unknown> & { request?: unknown };

/**
 * The part of the first message that opens a call. If the requests are a stream, this is the field `start` or `open`,
 * otherwise the whole message.
 */
type Opening<M extends Method> =
  Received<M> extends { start?: infer S }
    ? NonNullable<S>
    : Received<M> extends { open?: infer P }
      ? NonNullable<P>
      : Received<M>;

/** The first message of a call, and the part of it that opens the call. */
interface Opened<M extends Method> {
  message: Received<M>;
  opening: Opening<M>;
}

/** An rpc. A call of it needs the same rights as a request of the REST route in `guard`. */
export interface Rpc<M extends Method = Method, R extends Route = Route> {
  guard: Guard<R>;
  /** The field that the client's first message must have; undefined for rpcs with a single request. */
  first?: 'start' | 'open';
  /** Converts `opening` to the parts of a REST request; needed if its fields differ from the route's. */
  raw?(opening: Opening<M>): Partial<RawInput>;
  /** Runs the call; resolves with the response unless the response is a stream. */
  run(call: Call<M>, admitted: Admitted<R>, opening: Opening<M>): Promise<Sent<M> | undefined>;
}

/** An authorized request. */
export interface Admitted<R extends Route> {
  input: Input<R>;
  caller: Caller;
}

/** Converts the fields of a message to the parts of a request. Empty fields are left out if they are optional. */
export function partsOf({ params, query, headers }: Route, message: object): Partial<RawInput> {
  const named = (shape: Route['query']): [string, unknown][] =>
    Object.entries(message).filter(([name, value]) => {
      const schema = Object.hasOwn(shape, name) && shape[name];
      if (!schema || value === null || value === undefined) return false;
      return String(value) !== '' || !z.safeParse(schema, undefined).success;
    });
  return {
    params: Object.fromEntries(named(params)),
    query: Object.fromEntries(named(query).map(([name, value]) => [name, String(value)])),
    headers: Object.fromEntries(named(headers)),
  };
}

/** A call that has not ended. */
export class Call<M extends Method = Method> {
  readonly requestId: string;
  /**
   * Fires when the call ends, the broker stops or the key loses the rights. Also fires when the client goes away,
   * stalls or sends an invalid message, and when a message cannot be handled.
   */
  readonly gone = new AbortController();
  /**
   * The client's messages in order, until the client half-closes. If they are read slowly, the client is
   * slowed down.
   */
  readonly messages: AsyncGenerator<Received<M>>;
  readonly #stream: Stream;
  readonly #services: StreamsServices;
  #client: Client | undefined;
  #opened: Promise<Opened<M>> | undefined;
  /** Waits for the client to read. All messages sent meanwhile share this promise. */
  #draining: Promise<void> | undefined;

  constructor(stream: Stream, services: StreamsServices) {
    this.#stream = stream;
    this.#services = services;
    this.requestId = requestIdFrom(this.header('x-request-id'));
    this.messages = messagesOf(stream, this.gone.signal);
    stream.once('cancelled', () => this.gone.abort(left));
    if (stream.cancelled) this.gone.abort(left);
  }

  /**
   * True if the call was aborted early, for example because the client has disconnected, stalled or lost its rights.
   * False after a regular end, and after a stop of the broker.
   */
  get abandoned(): boolean {
    const { signal } = this.gone;
    return signal.aborted && signal.reason !== stopping && signal.reason !== over;
  }

  header(name: string): string {
    const [value] = this.#stream.metadata.get(name);
    return typeof value === 'string' ? value : '';
  }

  /**
   * Finds the key of the call, and counts the call toward the key's rate limit. Throws unauthorized for a wrong key,
   * and rate_limited for an address with too many wrong keys. `forwardedClient` finds the client of a call that another
   * broker has authenticated.
   */
  async authenticate(forwardedClient?: (headers: Metadata) => Promise<Client>): Promise<void> {
    const { metadata } = this.#stream;
    const forwarded = metadata.get('x-forwarded-for').join(',');
    const address = this.#services.proxies.clientOf(peerAddress(this.#stream.getPeer()), forwarded);
    this.#client = await (forwardedClient?.(metadata) ??
      authenticate(this.header('authorization'), address, this.#services));
  }

  /** Returns the other broker that owns the machine of the call; undefined if this broker answers the call. */
  async elsewhere({ first, raw, guard }: Rpc<M>, peers: Peers): Promise<Elsewhere | undefined> {
    if (this.#client?.quota?.refusal) return undefined;
    try {
      const { opening } = await this.#open(first);
      const parts = raw?.(opening) ?? partsOf(guard.route, opening);
      const subject = await peers.subjectOf(guard.parser.ids({ ...nothing, ...parts }));
      return subject && peers.elsewhere(subject);
    } catch {
      // Without a readable first message the machine is unknown, and so is its owner. This broker then refuses the call
      // and writes its audit record.
      return undefined;
    }
  }

  /** Forwards the call to another broker. Resolves with the response, unless the response is a stream (`streams`). */
  async forward({ first }: Rpc<M>, elsewhere: Elsewhere, streams: boolean): Promise<Sent<M> | undefined> {
    if (!this.#client) throw new Error('call authenticate() before forward()');
    const { metadata: headers } = this.#stream;
    const about = { client: this.#client, requestId: this.requestId };
    let response: Sent<M> | undefined;
    const call = {
      ...{ path: this.#stream.getPath(), headers, about, signal: this.gone.signal },
      first: (await this.#open(first)).message,
      rest: first ? this.messages : [],
      begin: () => this.#stream.sendMetadata(trailersOf(this.requestId)),
      send: async (answer: Buffer): Promise<void> => {
        // `answer` is a message that the other broker has encoded. The cast is safe: the service sends encoded messages
        // unchanged.
        const message = answer as unknown as Sent<M>;
        if (streams) await this.send(message);
        else response = message;
      },
    };
    await forwardCall(call, elsewhere);
    return response;
  }

  /** Authorizes the call, runs it, and writes its audit record. */
  perform(rpc: Rpc<M>): Promise<Sent<M> | undefined> {
    let opening: Opening<M>;
    return this.request(rpc.guard, {
      read: () => ({ ...nothing }),
      readRest: async (raw) => {
        ({ opening } = await this.#open(rpc.first));
        Object.assign(raw, rpc.raw?.(opening) ?? partsOf(rpc.guard.route, opening));
      },
      lasts: true,
      act: (input, caller) => {
        this.#stream.sendMetadata(trailersOf(this.requestId));
        return rpc.run(this, { input, caller }, opening);
      },
    });
  }

  /** Authorizes and runs one request of this call. */
  request<R extends Route, T>(
    guard: Guard<R>,
    work: Omit<RequestWork<R, T>, 'gone'>,
    quota?: Quota,
  ): Promise<T> {
    if (!this.#client) throw new Error('call authenticate() before request()');
    const client = { ...this.#client, ...(quota && { quota }) };
    const request = new AuthorizedRequest(guard, client, this.requestId);
    return request.perform({ ...work, gone: this.gone });
  }

  /** Reads the first message of the call, once. Further uses of #open() return the same promise. */
  #open(first: Rpc['first']): Promise<Opened<M>> {
    this.#opened ??= first ? this.#first(first) : this.#single();
    return this.#opened;
  }

  async #single(): Promise<Opened<M>> {
    // The casts are safe: the service decodes only messages of the type Received<M>. This rpc has a single request, so
    // `opening` is the whole message.
    const message = this.#stream.request as Received<M>;
    return { message, opening: message as Opening<M> };
  }

  async #first(name: 'start' | 'open'): Promise<Opened<M>> {
    const refusal = new AppError('invalid_request', `the first message must have the field ${name}`);
    const cancel = after(firstMs, () => this.gone.abort(refusal));
    const next = await this.messages.next().finally(cancel);
    const part: unknown = next.done ? undefined : Reflect.get(next.value, name);
    if (next.done || !part) throw refusal;
    // The cast is safe: the service decodes only messages of this type.
    return { message: next.value, opening: part as Opening<M> };
  }

  /** Waits `leavingMs` for a cancel that may follow the client's half-close. Rejects if the call was aborted. */
  async assertConnected(): Promise<void> {
    await sleep(leavingMs, this.gone.signal);
    await awaitCancellation(this.gone.signal);
  }

  /** Sends a message. Resolves once the client has read enough for another. */
  async send(message: Sent<M>): Promise<void> {
    this.gone.signal.throwIfAborted();
    if (this.#stream.write(message)) return;
    this.#draining ??= drained(this.#stream, this.gone.signal).finally(() => {
      this.#draining = undefined;
    });
    await this.#draining;
  }

  /**
   * Waits for `work`, such as sending a message, which a slow client can delay. Aborts the call if it takes longer than
   * `stalledMs`.
   */
  async unlessStalled<T>(work: Promise<T>): Promise<T> {
    const cancel = after(this.#services.stalledMs, () => this.gone.abort(stalled));
    return work.finally(cancel);
  }

  /** Aborts the call because the broker stops. */
  stop(): void {
    this.gone.abort(stopping);
  }

  end(): void {
    this.gone.abort(over);
  }
}

/** Yields the messages of a stream. `Q` is the type of message that the rpc decodes. */
async function* messagesOf<Q>(stream: Stream, signal: AbortSignal): AsyncGenerator<Q> {
  yield* readStream<Q>(stream, signal);
  await awaitCancellation(signal);
}

/**
 * Waits one turn of the event loop, then throws if the client has cancelled the call. Without this wait, a cancelled
 * call could look complete, because the end of its messages may arrive before the cancel.
 */
async function awaitCancellation(signal: AbortSignal): Promise<void> {
  await new Promise<void>((resolve) => setImmediate(resolve));
  signal.throwIfAborted();
}

/** gRPC status by the HTTP status that REST uses for the same error. */
const statuses: Readonly<Record<(typeof codes)[Code], grpcStatus>> = {
  400: grpcStatus.INVALID_ARGUMENT,
  401: grpcStatus.UNAUTHENTICATED,
  403: grpcStatus.PERMISSION_DENIED,
  404: grpcStatus.NOT_FOUND,
  405: grpcStatus.UNIMPLEMENTED,
  409: grpcStatus.FAILED_PRECONDITION,
  412: grpcStatus.FAILED_PRECONDITION,
  413: grpcStatus.RESOURCE_EXHAUSTED,
  416: grpcStatus.OUT_OF_RANGE,
  422: grpcStatus.INVALID_ARGUMENT,
  429: grpcStatus.RESOURCE_EXHAUSTED,
  500: grpcStatus.INTERNAL,
  501: grpcStatus.UNIMPLEMENTED,
  503: grpcStatus.UNAVAILABLE,
  507: grpcStatus.RESOURCE_EXHAUSTED,
};

/** gRPC status by error code, where gRPC distinguishes more than HTTP. */
const finer: Partial<Record<Code, grpcStatus>> = {
  already_exists: grpcStatus.ALREADY_EXISTS,
  file_busy: grpcStatus.ABORTED,
  machine_timeout: grpcStatus.DEADLINE_EXCEEDED,
};

/**
 * Maximum number of characters of an error message, and of its details. Clients accept 8 KiB of metadata in all by
 * default.
 */
const longestMessage = 1_000;
const longestDetails = 4_000;

/** The gRPC status of an error, with the code and details of Farhand in its metadata. */
export function refusalOf(error: AppError, requestId: string) {
  const metadata = trailersOf(requestId);
  metadata.set('farhand-code', error.code);
  metadata.set('farhand-details', detailsOf(error));
  return {
    code: finer[error.code] ?? statuses[codes[error.code]],
    // grpc-js cannot encode half a character, which slice() may leave at the end.
    details: error.message.slice(0, longestMessage).toWellFormed(),
    metadata,
  };
}

export function trailersOf(requestId: string): Metadata {
  const metadata = new Metadata();
  metadata.set('farhand-request-id', requestId);
  return metadata;
}

/** Details as JSON in ASCII, because metadata must be ASCII. */
function detailsOf({ details }: AppError): string {
  const text = JSON.stringify(details).replaceAll(
    /[^\x20-\x7e]/g,
    (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, '0')}`,
  );
  return text.length > longestDetails ? '{}' : text;
}
