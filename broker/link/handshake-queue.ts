// Queues connections before their TLS handshake, because after a failure all agents connect at once. Source addresses
// take turns; other requests run between handshakes.
import type { Socket } from 'node:net';
import { after, monotonic } from '../../shared/clock.ts';
import { countConnection } from '../../shared/v8-garbage-collection.ts';
import type { ConnectionLimiter } from '../connection-limiter.ts';

const defaultLimits = {
  /**
   * Maximum number of connections that have begun the handshake but are not authenticated yet. It limits the length of
   * one turn of the event loop: their messages may all arrive in this turn, and each message takes up to 0.7 ms.
   */
  atOnce: 128,
  /** Maximum number of handshakes that begin in one turn of the event loop; each takes some 0.5 ms. */
  perTurn: 2,
  /**
   * Milliseconds within which a connection must authenticate if `atOnce` connections have begun and others wait.
   * Otherwise only the deadline of ConnectionLimiter counts.
   */
  stalledMs: 2_000,
};
/**
 * Maximum number of bytes that a connection may send while it waits. The limit is the largest size of a TLS record
 * (RFC 8446 section 5.1). A ClientHello is smaller.
 */
const mostBytes = 16 * 1024;

interface Waiting {
  socket: Socket;
  source: string;
  /** The part of the connection's first message that has arrived. */
  bytes: Buffer[];
}

export class HandshakeQueue {
  readonly #connections: ConnectionLimiter;
  readonly #begin: (socket: Socket) => void;
  readonly #limits: typeof defaultLimits;
  /** Waiting connections by source. The first source has the next turn. */
  readonly #waiting = new Map<string, Set<Waiting>>();
  /**
   * Connections that have not authenticated yet, each with the `monotonic` time at which its handshake began. The
   * oldest comes first.
   */
  readonly #begun = new Map<Socket, number>();
  #cancelTurn: (() => void) | undefined;
  #cancelRetry = (): void => {};

  /** `begin` starts the TLS handshake on a socket. */
  constructor(connections: ConnectionLimiter, begin: (socket: Socket) => void, limits = defaultLimits) {
    this.#connections = connections;
    this.#begin = begin;
    this.#limits = limits;
  }

  /**
   * Adds an accepted TCP connection. The limiter may close the connection at once. Otherwise the connection
   * starts to wait when its first bytes have arrived.
   */
  add(socket: Socket): void {
    const waiting: Waiting = { socket, source: '', bytes: [] };
    const source = this.#connections.accept(socket, () => this.#settle(waiting));
    if (source === undefined) return;
    waiting.source = source;
    socket.on('readable', () => this.#read(waiting));
  }

  #read(waiting: Waiting): void {
    const { socket, source, bytes } = waiting;
    // A stream reports its end only after its last byte was read. The bytes are read now, so that a connection that
    // ends leaves the queue.
    const chunk = socket.read() as Buffer | null;
    if (chunk === null) return;
    bytes.push(chunk);
    if (bytes.reduce((sum, { length }) => sum + length, 0) > mostBytes) return void socket.destroy();
    if (bytes.length > 1) return;
    this.#connections.wait(socket);
    const ofSource = this.#waiting.get(source) ?? new Set();
    this.#waiting.set(source, ofSource.add(waiting));
    this.#plan();
  }

  /**
   * Starts the next handshakes from a timer. If setImmediate() started them, each connection would occupy 16 KiB more
   * until it is closed.
   */
  #plan(): void {
    this.#cancelTurn ??= after(1, () => {
      this.#cancelTurn = undefined;
      this.#beginSome();
    });
  }

  #beginSome(): void {
    this.#cancelRetry();
    const { atOnce, perTurn } = this.#limits;
    for (let n = 0; n < perTurn && this.#waiting.size > 0; n += 1) {
      if (this.#begun.size >= atOnce && !this.#closeStalled()) return;
      const next = this.#next();
      if (next) this.#start(next);
    }
    if (this.#waiting.size > 0) this.#plan();
  }

  /**
   * If the oldest connection that has not authenticated has exceeded `stalledMs`, closes it and returns true. Otherwise
   * returns false, and tries again when the time is over.
   */
  #closeStalled(): boolean {
    const [[socket, begunAt] = [undefined, 0]] = this.#begun;
    const leftMs = begunAt + this.#limits.stalledMs - monotonic();
    if (leftMs > 0) this.#cancelRetry = after(leftMs, () => this.#plan());
    else socket?.destroy();
    if (leftMs <= 0 && socket) this.#begun.delete(socket);
    return leftMs <= 0;
  }

  /**
   * Removes and returns the first connection of the first source. The source then moves behind all others.
   */
  #next(): Waiting | undefined {
    const [[source, ofSource] = ['', new Set<Waiting>()]] = this.#waiting;
    const [next] = ofSource;
    if (next) this.#remove(next);
    if (this.#waiting.delete(source)) this.#waiting.set(source, ofSource);
    return next;
  }

  #start(waiting: Waiting): void {
    const { socket, bytes } = waiting;
    socket.removeAllListeners('readable');
    // The socket may have ended in this turn of the event loop. unshift() would then fail, so no handshake begins.
    if (socket.destroyed || socket.readableEnded) return;
    this.#connections.resume(socket);
    this.#begun.set(socket, monotonic());
    socket.unshift(Buffer.concat(bytes));
    countConnection();
    this.#begin(socket);
  }

  #remove(waiting: Waiting): void {
    const ofSource = this.#waiting.get(waiting.source);
    ofSource?.delete(waiting);
    if (ofSource?.size === 0) this.#waiting.delete(waiting.source);
  }

  /** Called when a connection has authenticated or was closed. */
  #settle(waiting: Waiting): void {
    this.#remove(waiting);
    if (this.#begun.delete(waiting.socket) && this.#waiting.size > 0) this.#plan();
  }

  close(): void {
    this.#cancelTurn?.();
    this.#cancelRetry();
  }
}
