// Sizes the HTTP/2 flow-control windows of links. A window is the number of bytes that the peer may send before this
// process reads them.
//
// - A near peer (round trip up to 0.4 ms) has a fixed window.
// - A distant peer's window grows while data is read quickly, and shrinks while unread data takes memory.
import { subscribe } from 'node:diagnostics_channel';
import type { Http2Session, Http2Stream, IncomingHttpHeaders } from 'node:http2';
import { linkService } from './agent-rpcs.ts';
import { every, monotonic } from './clock.ts';

const mebibyte = 1024 * 1024;
/**
 * Window of each stream of an idle distant peer, and of a peer whose round trip is unknown. It is small, because many
 * calls may begin at once.
 */
export const firstBytes = mebibyte / 8;
/**
 * Window of each stream of a near peer. Twice this size would make downloads a tenth faster, but delay key presses and
 * double the memory of stalled readers.
 */
const nearBytes = mebibyte / 2;
/** Window of a whole connection to a near peer, in bytes. */
const connectionBytes = mebibyte;
const largestBytes = 64 * mebibyte;
/**
 * Maximum sum of the windows of the distant peers whose data is read quickly. Each of these peers has an equal share.
 */
const allBytes = largestBytes;
/**
 * Maximum sum of the windows of a distant peer that has more than `fewStreams` calls. It is smaller than
 * `largestBytes`, because unread data of all these calls stays in memory.
 */
const sharedBytes = 16 * mebibyte;
const fewStreams = 4;
/**
 * The calls of a distant peer share all of `sharedBytes` if their number is above `fewStreams` and at most this. With
 * more calls, the limit falls in proportion: twice this number of calls share half of `sharedBytes`.
 */
const someStreams = 8;
/** A distant peer's share of `allBytes` is at least this many bytes, even if other peers use up `allBytes`. */
const leastBytes = 4 * mebibyte;
/**
 * Window of a whole connection to a distant peer, in bytes. It is practically unlimited, because a limit would save no
 * memory: Node frees space in this window when bytes arrive, not when a reader takes them.
 */
const unlimitedBytes = 2 ** 31 - 1;
/**
 * Maximum sum of a peer's windows, in bytes for each millisecond of its round trip. A transfer of 500 MiB/s sends 0.5
 * MiB in a millisecond. Its windows must hold twice that, because nghttp2 extends a window only after half of it is
 * read. The limit is somewhat higher.
 */
const bytesPerMs = 1.28 * mebibyte;
/**
 * The windows of a peer together hold this many times the bytes that are read per round trip. nghttp2 extends a window
 * only after half of it is read. So a factor of 2 permits only the present speed, and a larger factor lets a transfer
 * become faster.
 */
const tripsPerWindow = 6;
const lookMs = 25;
/** Number of pings that measure the round trip. The shortest time counts, because a busy machine answers late. */
const pings = 3;

interface Peer {
  session: Http2Session;
  /** Streams of open calls. All have the same window. */
  streams: Set<Http2Stream>;
  window: number;
  roundTripMs: number;
  /**
   * Bytes read in a round trip: the latest value, and a mean of recent values. The mean is needed because a busy
   * process reads in bursts.
   */
  readPerTrip: [number, number];
  last: Status;
}

/** State of a connection at the time `at`: how many bytes it had received, and how many were still unread. */
interface Status {
  at: number;
  received: number;
  unread: number;
}

type Role = 'client' | 'server';

/** The roles for which controlFlow() has been called. */
const controlled = new Set<Role>();

/**
 * Sizes the windows of the links that this process dials (`client`) or accepts (`server`), until the process ends. The
 * first call for a role covers all of its HTTP/2 sessions, so further calls do nothing.
 */
export function controlFlow(role: Role): void {
  if (controlled.has(role)) return;
  controlled.add(role);
  const control = new WindowControl();
  subscribe(`http2.${role}.stream.created`, control.opened);
}

/** Sizes the windows of one role. Node's diagnostics channels are the only access to the HTTP/2 sessions of grpc-js. */
class WindowControl {
  readonly #sessions = new WeakSet<Http2Session>();
  /**
   * One entry for each session that has carried an answer stream. A fleet's 10,000 control connections normally carry
   * none, and have no entry.
   */
  readonly #peers = new WeakMap<Http2Session, Peer>();
  /**
   * Distant peers whose windows #look() adjusts: those with open calls, and those whose window is not yet back at
   * `firstBytes` after their last call.
   */
  readonly #busy = new Set<Peer>();
  #stopLooking = (): void => {};

  readonly opened = (message: unknown): void => {
    // The cast is safe: Node documents this type for the messages of the channel.
    const { stream, headers } = message as { stream: Http2Stream; headers: IncomingHttpHeaders };
    const { session } = stream;
    if (!session) return;
    if (!this.#sessions.has(session)) whenConnected(session, setUp);
    this.#sessions.add(session);
    if (headers[':path'] !== linkService.Answer.path) return;
    const peer = this.#peers.get(session) ?? newPeer(session);
    this.#peers.set(session, peer);
    peer.streams.add(stream);
    stream.once('close', () => peer.streams.delete(stream));
    if (peer.roundTripMs < Number.POSITIVE_INFINITY) this.#join(peer);
    else whenConnected(session, () => void this.#begin(peer));
  };

  async #begin(peer: Peer): Promise<void> {
    for (let n = 0; n < pings; n += 1) {
      peer.roundTripMs = Math.min(peer.roundTripMs, await pinged(peer.session));
      this.#join(peer);
    }
  }

  #join(peer: Peer): void {
    if (peer.streams.size === 0 || this.#busy.has(peer) || peer.session.destroyed) return;
    if (resizeNear(peer)) return;
    this.#busy.add(peer);
    peer.session.setLocalWindowSize(unlimitedBytes);
    peer.last = statusOf(peer);
    peer.readPerTrip = [0, 0];
    if (this.#busy.size === 1) this.#stopLooking = every(lookMs, () => this.#look());
  }

  #look(): void {
    const busy = [...this.#busy];
    // Unread data takes memory, so it reduces the sum of windows that the peers share. Up to `nearBytes` of unread data
    // for each stream is normal, and does not count.
    const held = sum(busy, (peer) => Math.max(0, unreadOf(peer) - nearBytes * peer.streams.size));
    const readers = busy.filter((peer) => wantedBy(peer) > nearBytes).length;
    const share = Math.max(leastBytes, (allBytes - held) / Math.max(1, readers));
    for (const peer of busy) {
      resize(peer, windowFor(peer, share));
      const idle = peer.streams.size === 0 && peer.window === firstBytes;
      if (idle || peer.session.destroyed) this.#busy.delete(peer);
    }
    if (this.#busy.size === 0) this.#stopLooking();
  }
}

/** Calls `run` once the session is connected. Windows cannot be set earlier, but a client can open streams earlier. */
function whenConnected(session: Http2Session, run: (session: Http2Session) => void): void {
  if (session.connecting) session.once('connect', () => !session.destroyed && run(session));
  else if (!session.destroyed) run(session);
}

function setUp(session: Http2Session): void {
  session.setLocalWindowSize(connectionBytes);
  session.settings({ initialWindowSize: firstBytes });
}

const newPeer = (session: Http2Session): Peer => ({
  session,
  streams: new Set(),
  window: firstBytes,
  roundTripMs: Number.POSITIVE_INFINITY,
  readPerTrip: [0, 0],
  last: { at: monotonic(), received: 0, unread: 0 },
});

const largestOf = ({ roundTripMs, streams }: Peer): number =>
  Math.min(limitOf(streams.size), roundTripMs * bytesPerMs);
const unreadOf = ({ streams }: Peer): number => sum([...streams], (stream) => stream.readableLength);

const statusOf = (peer: Peer): Status => ({
  at: monotonic(),
  received: peer.session.destroyed ? 0 : peer.session.socket.bytesRead,
  unread: unreadOf(peer),
});

/** Returns the sum of windows, in bytes, that suits the speed at which this process now reads a peer's data. */
const wantedBy = ({ readPerTrip }: Peer): number => tripsPerWindow * Math.max(...readPerTrip);

/**
 * Returns the window that each stream of a peer should have now. `share`: maximum sum of the peer's windows in bytes.
 */
function windowFor(peer: Peer, share: number): number {
  const { last, window, streams, roundTripMs } = peer;
  if (streams.size === 0) return firstBytes;
  const now = statusOf(peer);
  const read = now.received - last.received - (now.unread - last.unread);
  const perTrip = (read * roundTripMs) / (now.at - last.at);
  peer.last = now;
  peer.readPerTrip = [perTrip, (3 * peer.readPerTrip[1] + perTrip) / 4];
  const wanted = Math.min(wantedBy(peer), largestOf(peer), share) / streams.size;
  const least = streams.size > fewStreams ? firstBytes : nearBytes;
  // One step may enlarge a window to any size, but shrinks the window of a peer with calls by at most half.
  const next = Math.max(least, window / 2, wanted);
  return next > window || next <= window / 2 || next === least ? next : window;
}

/** Maximum sum of the windows of a distant peer with this many calls, in bytes. */
function limitOf(calls: number): number {
  return calls <= fewStreams ? largestBytes : (sharedBytes * someStreams) / Math.max(someStreams, calls);
}

/** Sets the window of a near peer to its fixed size, and returns true. Returns false for a distant peer. */
function resizeNear(peer: Peer): boolean {
  const isNear = largestOf(peer) <= nearBytes;
  if (isNear) resize(peer, nearBytes);
  return isNear;
}

function resize(peer: Peer, window: number): void {
  const { session } = peer;
  // The window stays while the peer has not acknowledged the previous change. The next look at the windows tries again.
  if (window === peer.window || session.destroyed || session.pendingSettingsAck) return;
  peer.window = window;
  session.settings({ initialWindowSize: Math.round(window) });
}

/** Milliseconds of one round trip; 0 for a closed session. */
function pinged(session: Http2Session): Promise<number> {
  return new Promise((resolve) => {
    if (session.destroyed) return resolve(0);
    session.ping((error, ms) => resolve(error ? 0 : ms));
  });
}

function sum<T>(all: readonly T[], sizeOf: (one: T) => number): number {
  return all.reduce((total, one) => total + sizeOf(one), 0);
}
