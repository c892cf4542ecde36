// One gRPC call: its client, its requests, incoming messages in order, and outgoing ones at the pace of the reader.
import type { ServerDuplexStream } from '@grpc/grpc-js';
import { z } from 'zod';
import type { StreamsDefinition } from '../../proto/types/farhand/client/v1/Streams.ts';
import type { Caller, Input } from '../../shared/api/index.ts';
import type { Route } from '../../shared/api/route.ts';
import { readStream } from '../../shared/backpressure.ts';
import { after, sleep } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { drained } from '../../shared/rpc.ts';
import { authenticate, type Client } from '../admission/authenticate.ts';
import { AuthorizedRequest, type Guard, nothing, type RequestWork } from '../admission/authorize.ts';
import { requestIdFrom } from '../admission/failure.ts';
import type { RawInput } from '../admission/parse-request.ts';
import type { Quota, Rates } from '../admission/rate-limits.ts';
import { type Proxies, peerAddress } from '../client-address.ts';
import type { Keys } from '../keys/index.ts';
import { trailersOf } from './status.ts';

/** Time for the first message of a call that begins with one. */
const firstMs = 30_000;
/** Between the two frames of a client that leaves. */
const leavingMs = 20;

const over = new AppError('unavailable', 'the call is over');
const stalled = new AppError(
  'unavailable',
  'this client stalled: it must read or send at least every 70 seconds',
);
const stopping = new AppError('unavailable', 'the broker is stopping: connect again later');
const left = new AppError('unavailable', 'the client went away');

type Rpcs = { [M in keyof StreamsDefinition as string extends M ? never : M]: StreamsDefinition[M] };
export type Method = keyof Rpcs;
/** A message from the client. */
export type Received<M extends Method> = ReturnType<Rpcs[M]['requestDeserialize']>;
/** A message to the client. */
export type Sent<M extends Method> = Parameters<Rpcs[M]['responseSerialize']>[0];

/** Of any rpc; `request` only where the client sends one message. */
export type Stream = ServerDuplexStream<unknown, unknown> & { request?: unknown };

/** What opens a call: the part that its first message must have, or its one request. */
type Opening<M extends Method> =
  Received<M> extends { start?: infer S }
    ? NonNullable<S>
    : Received<M> extends { open?: infer P }
      ? NonNullable<P>
      : Received<M>;

/** An rpc by the route whose rights it needs. */
export interface Rpc<M extends Method = Method, R extends Route = Route> {
  guard: Guard<R>;
  /** Which part the client's first message must have; absent where there is one request. */
  first?: 'start' | 'open';
  /** That, or the request, as REST has it, where its fields are not those of the route. */
  raw?(opening: Opening<M>): Partial<RawInput>;
  /** Resolves with the response where that is not a stream. */
  run(call: Call<M>, admitted: Admitted<R>, opening: Opening<M>): Promise<Sent<M> | undefined>;
}

/** A request that may do what it asks for. */
export interface Admitted<R extends Route> {
  input: Input<R>;
  caller: Caller;
}

/** The fields of a message as the parts of a request: what is empty is absent where that may be. */
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

/** A call under way. */
export class Call<M extends Method = Method> {
  readonly requestId: string;
  /** Fires when the client goes, its key may no longer, or the broker stops. */
  readonly gone = new AbortController();
  /** What the client sends, in order; reading slowly slows the client. Ends when it half-closes. */
  readonly messages: AsyncGenerator<Received<M>>;
  readonly #stream: Stream;
  readonly #address: string;
  #client: Client | undefined;
  /** One wait for all who send meanwhile. */
  #draining: Promise<void> | undefined;

  constructor(stream: Stream, proxies: Proxies) {
    this.#stream = stream;
    const forwarded = stream.metadata.get('x-forwarded-for').join(',');
    this.#address = proxies.clientOf(peerAddress(stream.getPeer()), forwarded);
    this.requestId = requestIdFrom(this.header('x-request-id'));
    this.messages = messagesOf(stream, this.gone.signal);
    stream.once('cancelled', () => this.gone.abort(left));
    if (stream.cancelled) this.gone.abort(left);
  }

  /** The client has left it, or may no longer: the client does not wait for its end. */
  get abandoned(): boolean {
    const { signal } = this.gone;
    return signal.aborted && signal.reason !== stopping && signal.reason !== over;
  }

  header(name: string): string {
    const [value] = this.#stream.metadata.get(name);
    return typeof value === 'string' ? value : '';
  }

  /** Throws rate_limited or unauthorized. */
  async authenticate(services: { keys: Keys; rates: Rates }): Promise<void> {
    this.#client = await authenticate(this.header('authorization'), this.#address, services);
  }

  /** From the rights of the caller to its record. */
  perform(rpc: Rpc<M>): Promise<Sent<M> | undefined> {
    let opening: Opening<M>;
    return this.request(rpc.guard, {
      read: () => ({ ...nothing }),
      readRest: async (raw) => {
        // The service decodes nothing else.
        opening = (rpc.first ? await this.#first(rpc.first) : this.#stream.request) as Opening<M>;
        Object.assign(raw, rpc.raw?.(opening) ?? partsOf(rpc.guard.route, opening));
      },
      lasts: true,
      act: (input, caller) => {
        this.#stream.sendMetadata(trailersOf(this.requestId));
        return rpc.run(this, { input, caller }, opening);
      },
    });
  }

  /** One request of this call; without `records` only its failure is on record. */
  request<R extends Route, T>(
    guard: Guard<R>,
    work: Omit<RequestWork<R, T>, 'gone'>,
    records = true,
    quota?: Quota,
  ): Promise<T> {
    if (!this.#client) throw new Error('a call is authenticated before it is authorized');
    const client = { ...this.#client, ...(quota && { quota }) };
    const request = new AuthorizedRequest(guard, client, this.requestId, records);
    return request.perform({ ...work, gone: this.gone });
  }

  async #first(name: 'start' | 'open'): Promise<unknown> {
    const refusal = new AppError('invalid_request', `the first message must hold ${name}`);
    const cancel = after(firstMs, () => this.gone.abort(refusal));
    const next = await this.messages.next().finally(cancel);
    const part: unknown = next.done ? undefined : Reflect.get(next.value, name);
    if (!part) throw refusal;
    return part;
  }

  /**
   * Of a client that has half-closed: rejects when it was leaving. Node's clients half-close what they cancel, a frame
   * earlier, and the two may arrive apart.
   */
  async assertConnected(): Promise<void> {
    await sleep(leavingMs, this.gone.signal);
    await awaitCancellation(this.gone.signal);
  }

  /** Resolves once the client has taken enough to be sent more. */
  async send(message: Sent<M>): Promise<void> {
    this.gone.signal.throwIfAborted();
    if (this.#stream.write(message)) return;
    this.#draining ??= drained(this.#stream, this.gone.signal).finally(() => {
      this.#draining = undefined;
    });
    await this.#draining;
  }

  /** What the client is waited for: its call is ended when that takes too long. */
  async within<T>(ms: number, turn: Promise<T>): Promise<T> {
    const cancel = after(ms, () => this.gone.abort(stalled));
    return turn.finally(cancel);
  }

  /** The broker stops. */
  stop(): void {
    this.gone.abort(stopping);
  }

  leave(): void {
    this.gone.abort(over);
  }
}

/** The service decodes nothing else than messages of its type. */
async function* messagesOf<Q>(stream: Stream, signal: AbortSignal): AsyncGenerator<Q> {
  yield* readStream<Q>(stream, signal);
  await awaitCancellation(signal);
}

/** A cancelled stream may end before its cancellation arrives. */
async function awaitCancellation(signal: AbortSignal): Promise<void> {
  await new Promise<void>((resolve) => setImmediate(resolve));
  signal.throwIfAborted();
}
