// One call of a client from its metadata to its status: who calls, what comes in order, what goes out at the reader's pace.
import type { EventEmitter } from 'node:events';
import type { Readable } from 'node:stream';
import type { Metadata } from '@grpc/grpc-js';
import { after, sleep } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import { Wake } from '../../shared/pace.ts';
import { drained } from '../../shared/rpc.ts';
import { type Proxies, peerAddress } from '../address.ts';
import { count, type Visitor } from '../admission/access.ts';
import { requestIdFrom, toldFailure } from '../admission/failure.ts';
import type { Admitted, Entrance, RawInput, Visit } from '../admission/index.ts';
import type { Rates } from '../admission/rates.ts';
import type { Keys } from '../keys/index.ts';
import { type Refusal, refusalOf, trailersOf } from './status.ts';

/** Time for the first message of a call that begins with one. */
const firstMs = 30_000;
/** Between the two frames of a client that leaves. */
const leavingMs = 20;

const over = new AppError('unavailable', 'the call is over');
const stalled = new AppError('unavailable', 'this client kept a transfer waiting for too long');
const stopping = new AppError('unavailable', 'the broker stops: come back');

/** What the calls of grpc-js have in common. */
export interface Surface extends EventEmitter {
  metadata: Metadata;
  cancelled: boolean;
  getPath(): string;
  getPeer(): string;
  sendMetadata(metadata: Metadata): void;
}

/** The part of a gRPC stream that messages are written to. */
interface Sink<R> extends EventEmitter {
  write(message: R): boolean;
}

/** All calls that are open. */
export interface Calls {
  /** Serves one call to its end; `finish` gives it its status, once. */
  serve<Q, R>(
    surface: Surface,
    ways: { messages?: Readable; sink?: Sink<R> },
    run: (call: Call<Q, R>) => Promise<void>,
    finish: (refusal: Refusal | undefined, trailers: Metadata) => void,
  ): Promise<void>;
  /** Ends every call, and refuses those to come. */
  stop(): void;
}

/** Who may call, and how often. */
export interface CallRooms {
  keys: Keys;
  proxies: Proxies;
  rates: Rates;
  log: Logger;
}

/** `proven`: a connection has shown a good key. */
export function openCalls(rooms: CallRooms, proven: (peer: string) => void): Calls {
  const open = new Set<AbortController>();
  let stopped = false;
  return {
    async serve(surface, ways, run, finish) {
      const requestId = requestIdFrom(textIn(surface.metadata, 'x-request-id'));
      const gone = new AbortController();
      const leave = (): void => gone.abort(new AppError('unavailable', 'the client went away'));
      surface.once('cancelled', leave);
      if (surface.cancelled) leave();
      open.add(gone);
      const call = new Call(surface, requestId, gone, ways, rooms.proxies) as Parameters<typeof run>[0];
      try {
        await call.enter(rooms);
        proven(surface.getPeer());
        if (stopped) throw stopping;
        await run(call);
        await call.settle();
        finish(undefined, trailersOf(requestId));
      } catch (error) {
        const why: unknown = gone.signal.aborted ? gone.signal.reason : error;
        const about = { request_id: requestId, path: surface.getPath() };
        await call.settle(why);
        finish(refusalOf(toldFailure(why, about, rooms.log), requestId), trailersOf(requestId));
      } finally {
        open.delete(gone);
        surface.off('cancelled', leave);
        gone.abort(over);
        call.leave();
      }
    },
    stop() {
      stopped = true;
      for (const gone of open) gone.abort(stopping);
    },
  };
}

/** A call under way; it takes messages Q and sends messages R. */
export class Call<Q, R> {
  readonly requestId: string;
  /** Fires when the client goes, its key may no longer, or the broker stops. */
  readonly gone: AbortController;
  /** What the client sends, in order; reading slowly slows the client. Ends when it half-closes. */
  readonly messages: AsyncGenerator<Q>;
  readonly #surface: Surface;
  readonly #sink: Sink<R> | undefined;
  readonly #leaves: (() => void)[] = [];
  readonly #visits: Visit<unknown>[] = [];
  /** Who calls; their key once the call is counted. */
  visitor: Visitor;
  /** One wait for all who send meanwhile. */
  #draining: Promise<void> | undefined;

  constructor(
    surface: Surface,
    requestId: string,
    gone: AbortController,
    { messages, sink }: { messages?: Readable; sink?: Sink<R> },
    proxies: Proxies,
  ) {
    const forwarded = surface.metadata.get('x-forwarded-for').join(',');
    this.visitor = { address: proxies.clientOf(peerAddress(surface.getPeer()), forwarded), key: undefined };
    this.requestId = requestId;
    this.gone = gone;
    this.messages = messages ? messagesOf(messages, gone.signal) : nothing();
    this.#surface = surface;
    this.#sink = sink;
  }

  /** The client has left it, or may no longer: nobody waits for its end. */
  get abandoned(): boolean {
    const { signal } = this.gone;
    return signal.aborted && signal.reason !== stopping && signal.reason !== over;
  }

  header(name: string): string {
    return textIn(this.#surface.metadata, name);
  }

  /** Counts it and looks for its key, once. Throws rate_limited or unauthorized. */
  async enter(rooms: CallRooms): Promise<void> {
    const { address } = this.visitor;
    const asker = { authorization: this.header('authorization'), local: false, address };
    this.visitor = await count(asker, rooms);
    rooms.keys.admit(this.visitor.key, address);
  }

  knock<I>(entrance: Entrance<I>): Visit<I> {
    const visit = entrance.knock(this.visitor, this.requestId);
    this.#visits.push(visit);
    return visit;
  }

  /** May it do that? Judged again until the call is over, unless it is done at once. */
  admit<I>(
    visit: Visit<I>,
    parts: Partial<RawInput>,
    { lasts = true } = {},
  ): Pick<Admitted<I>, 'input' | 'caller'> {
    const raw = { params: {}, query: {}, headers: {}, body: undefined, ...parts };
    visit.identify(raw);
    const { leave, ...admitted } = visit.admit(raw, { gone: this.gone, lasts });
    if (lasts) this.#leaves.push(leave);
    this.#surface.sendMetadata(trailersOf(this.requestId));
    return admitted;
  }

  /** The message that a call begins with. */
  async first<T>(partOf: (message: Q) => T | null | undefined, name: string): Promise<T> {
    const refusal = new AppError('invalid_request', `the first message must be ${name}`);
    const cancel = after(firstMs, () => this.gone.abort(refusal));
    const next = await this.messages.next().finally(cancel);
    const part = next.done ? undefined : partOf(next.value);
    if (part === undefined || part === null) throw refusal;
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
  async send(message: R): Promise<void> {
    this.gone.signal.throwIfAborted();
    if (!this.#sink || this.#sink.write(message)) return;
    this.#draining ??= drained(this.#sink, this.gone.signal).finally(() => {
      this.#draining = undefined;
    });
    await this.#draining;
  }

  /** What the client is waited for: it is let go when that takes too long. */
  async within<T>(ms: number, turn: Promise<T>): Promise<T> {
    const cancel = after(ms, () => this.gone.abort(stalled));
    return turn.finally(cancel);
  }

  /** All that it asked for is on record when this resolves. */
  async settle(error?: unknown): Promise<void> {
    await Promise.all(this.#visits.map((visit) => visit.settle(error)));
  }

  leave(): void {
    for (const leave of this.#leaves) leave();
  }
}

async function* nothing(): AsyncGenerator<never> {}

/** Not by the stream's own iterator: that destroys it when it fails, and its status would be lost. */
async function* messagesOf<Q>(stream: Readable, signal: AbortSignal): AsyncGenerator<Q> {
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

function textIn(metadata: Metadata, name: string): string {
  const [value] = metadata.get(name);
  return typeof value === 'string' ? value : '';
}
