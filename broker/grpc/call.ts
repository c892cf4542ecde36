// One call of a client: who calls, what may be done, what comes in order, what goes out at the reader's pace.
import type { ServerDuplexStream } from '@grpc/grpc-js';
import type { StreamsDefinition } from '../../proto/types/farhand/client/v1/Streams.ts';
import { after, sleep } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { Wake } from '../../shared/pace.ts';
import { drained } from '../../shared/rpc.ts';
import { type Proxies, peerAddress } from '../address.ts';
import { count, type Visitor } from '../admission/access.ts';
import { requestIdFrom } from '../admission/failure.ts';
import type { Admitted, Entrance, RawInput, Visit } from '../admission/index.ts';
import type { Rates } from '../admission/rates.ts';
import type { Keys } from '../keys/index.ts';
import { trailersOf } from './status.ts';

/** Time for the first message of a call that begins with one. */
const firstMs = 30_000;
/** Between the two frames of a client that leaves. */
const leavingMs = 20;

const over = new AppError('unavailable', 'the call is over');
const stalled = new AppError('unavailable', 'this client kept a transfer waiting for too long');
const stopping = new AppError('unavailable', 'the broker stops: come back');
const left = new AppError('unavailable', 'the client went away');

type Rpcs = { [M in keyof StreamsDefinition as string extends M ? never : M]: StreamsDefinition[M] };
export type Method = keyof Rpcs;
/** A message from the client. */
export type Received<M extends Method> = ReturnType<Rpcs[M]['requestDeserialize']>;
/** A message to the client. */
export type Sent<M extends Method> = Parameters<Rpcs[M]['responseSerialize']>[0];

/** Of any rpc: only those with one request have that, and what it does not stream nobody reads or writes. */
export type Stream = ServerDuplexStream<unknown, unknown> & { request?: unknown };

/** An rpc by the route whose rights it needs. */
export interface Rpc<M extends Method = Method, I = unknown, O = unknown> {
  entrance: Entrance<I>;
  /** Which part the client's first message must have; absent where there is one request. */
  first?: { name: string; of(message: Received<M>): O | null | undefined };
  /** That, or the request, as REST has it. */
  raw(opening: O): Partial<RawInput>;
  /** Resolves with the response where that is not a stream. */
  run(call: Call<M>, admitted: Entered<I>, opening: O): Promise<Sent<M> | undefined>;
}

/** A request that may do what it asks for. */
export type Entered<I> = Pick<Admitted<I>, 'input' | 'caller'>;

/** Without what is null or absent: messages have no null. */
export function present<T extends object>(fields: T): { [K in keyof T]?: NonNullable<T[K]> } {
  const entries = Object.entries(fields).filter(([, value]) => value !== null && value !== undefined);
  // What is left of the same fields.
  return Object.fromEntries(entries) as { [K in keyof T]?: NonNullable<T[K]> };
}

/** A call under way. */
export class Call<M extends Method = Method> {
  readonly requestId: string;
  /** Fires when the client goes, its key may no longer, or the broker stops. */
  readonly gone = new AbortController();
  /** What the client sends, in order; reading slowly slows the client. Ends when it half-closes. */
  readonly messages: AsyncGenerator<Received<M>>;
  /** Who calls; their key once the call is counted. */
  visitor: Visitor;
  readonly #stream: Stream;
  readonly #leaves: (() => void)[] = [];
  readonly #visits: Visit<unknown>[] = [];
  /** One wait for all who send meanwhile. */
  #draining: Promise<void> | undefined;

  constructor(stream: Stream, proxies: Proxies) {
    this.#stream = stream;
    const forwarded = stream.metadata.get('x-forwarded-for').join(',');
    this.visitor = { address: proxies.clientOf(peerAddress(stream.getPeer()), forwarded), key: undefined };
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

  /** Counts it and looks for its key, once. Throws rate_limited or unauthorized. */
  async enter(services: { keys: Keys; rates: Rates }): Promise<void> {
    const { address } = this.visitor;
    const asker = { authorization: this.header('authorization'), local: false, address };
    this.visitor = await count(asker, services);
    services.keys.admit(this.visitor.key, address);
  }

  /** From the rights of the caller to the last message. */
  async perform(rpc: Rpc<M>): Promise<Sent<M> | undefined> {
    const visit = this.knock(rpc.entrance);
    const opening = rpc.first ? await this.#first(rpc.first) : this.#stream.request;
    return rpc.run(this, this.admit(visit, rpc.raw(opening)), opening);
  }

  knock<I>(entrance: Entrance<I>): Visit<I> {
    const visit = entrance.knock(this.visitor, this.requestId);
    this.#visits.push(visit);
    return visit;
  }

  /** May it do that? Judged again until the call is over, unless it is done at once. */
  admit<I>(visit: Visit<I>, parts: Partial<RawInput>, { lasts = true } = {}): Entered<I> {
    const raw = { params: {}, query: {}, headers: {}, body: undefined, ...parts };
    visit.identify(raw);
    const { leave, ...entered } = visit.admit(raw, { gone: this.gone, lasts });
    if (lasts) this.#leaves.push(leave);
    this.#stream.sendMetadata(trailersOf(this.requestId));
    return entered;
  }

  async #first({ name, of }: NonNullable<Rpc<M>['first']>): Promise<unknown> {
    const refusal = new AppError('invalid_request', `the first message must be ${name}`);
    const cancel = after(firstMs, () => this.gone.abort(refusal));
    const next = await this.messages.next().finally(cancel);
    const part = next.done ? undefined : of(next.value);
    if (!part) throw refusal;
    return part;
  }

  /**
   * Of a client that has half-closed: rejects when it was leaving. Node's clients half-close what they cancel, a frame
   * earlier, and the two may arrive apart.
   */
  async stayed(): Promise<void> {
    await sleep(leavingMs, this.gone.signal);
    await untilTold(this.gone.signal);
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

  /** What the client is waited for: it is let go when that takes too long. */
  async within<T>(ms: number, turn: Promise<T>): Promise<T> {
    const cancel = after(ms, () => this.gone.abort(stalled));
    return turn.finally(cancel);
  }

  /** The broker stops. */
  stop(): void {
    this.gone.abort(stopping);
  }

  /** All that it asked for is on record when this resolves. */
  async settle(error?: unknown): Promise<void> {
    await Promise.all(this.#visits.map((visit) => visit.settle(error)));
  }

  leave(): void {
    this.gone.abort(over);
    for (const leave of this.#leaves) leave();
  }
}

/** Not by the stream's own iterator: that destroys it when it fails, and its status would be lost. */
async function* messagesOf<Q>(stream: Stream, signal: AbortSignal): AsyncGenerator<Q> {
  const changed = new Wake();
  let ended = false;
  stream.on('readable', () => changed.wake());
  stream.once('end', () => {
    ended = true;
    changed.wake();
  });
  for (;;) {
    signal.throwIfAborted();
    // The service decodes nothing else.
    const message = stream.read() as Q | null;
    if (message !== null) yield message;
    else if (!ended) await changed.wait(signal);
    else return await untilTold(signal);
  }
}

/** A stream that is cut may end before it is known to be cut. */
async function untilTold(signal: AbortSignal): Promise<void> {
  await new Promise<void>((resolve) => setImmediate(resolve));
  signal.throwIfAborted();
}
