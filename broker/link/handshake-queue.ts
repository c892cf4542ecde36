// Queue of new connections before their TLS handshake. After a failure a whole fleet connects at once. It then waits
// here instead of being refused, each source has its turn, and other requests are served between the handshakes.
import type { Socket } from 'node:net';
import { after, monotonic } from '../../shared/clock.ts';
import type { ConnectionLimiter } from '../connection-limiter.ts';

const defaultLimits = {
  /**
   * Most connections that may prove themselves at once, from the handshake to a good hello, key or call id. The
   * messages of all these may arrive in one turn of the event loop, each of which takes up to 0.7 ms.
   */
  atOnce: 128,
  /** Most handshakes that begin in one turn of the event loop; each takes some 0.5 ms. */
  perTurn: 8,
  /** While others wait, a connection has this long to prove itself, and otherwise the deadline of the limiter. */
  stalledMs: 2_000,
};
/** Most bytes of a connection that waits: a ClientHello is smaller than a TLS record (RFC 8446 section 5.1). */
const mostBytes = 16 * 1024;

interface Waiting {
  socket: Socket;
  source: string;
  /** What has arrived of its first message. */
  bytes: Buffer[];
}

export class HandshakeQueue {
  readonly #connections: ConnectionLimiter;
  readonly #begin: (socket: Socket) => void;
  readonly #limits: typeof defaultLimits;
  /** Connections by source. The next turn is that of the first source. */
  readonly #waiting = new Map<string, Set<Waiting>>();
  /** When each handshake began of the connections that have not proven themselves, the oldest first. */
  readonly #begun = new Map<Socket, number>();
  #turn: NodeJS.Immediate | undefined;
  #cancelRetry = (): void => {};

  /** `begin` starts the TLS handshake on a socket. */
  constructor(connections: ConnectionLimiter, begin: (socket: Socket) => void, limits = defaultLimits) {
    this.#connections = connections;
    this.#begin = begin;
    this.#limits = limits;
  }

  /** Adds an accepted TCP connection, unless the limiter closes it. It waits once its first bytes are there. */
  add(socket: Socket): void {
    const source = this.#connections.accept(socket, () => this.#settle(socket));
    if (source === undefined) return;
    const waiting: Waiting = { socket, source, bytes: [] };
    const read = (): void => this.#read(waiting);
    socket.on('readable', read);
    socket.once('close', () => {
      this.#remove(waiting);
      this.#settle(socket);
    });
  }

  #read(waiting: Waiting): void {
    const { socket, source, bytes } = waiting;
    // The bytes are taken out, because the end of a stream is reported only after its last byte was read.
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

  #plan(): void {
    this.#turn ??= setImmediate(() => {
      this.#turn = undefined;
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

  /** Closes the oldest connection that has not proven itself in time. If there is none, tries again later. */
  #closeStalled(): boolean {
    const [[socket, begunAt] = [undefined, 0]] = this.#begun;
    const leftMs = begunAt + this.#limits.stalledMs - monotonic();
    if (leftMs > 0) this.#cancelRetry = after(leftMs, () => this.#plan());
    else socket?.destroy();
    if (leftMs <= 0 && socket) this.#begun.delete(socket);
    return leftMs <= 0;
  }

  /** Takes the first connection of the first source, whose next turn comes after those of all others. */
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
    // It may have left in this turn, in which nothing can be put back into its stream any more.
    if (socket.destroyed || socket.readableEnded) return;
    this.#connections.resume(socket);
    this.#begun.set(socket, monotonic());
    socket.unshift(Buffer.concat(bytes));
    // The listener for the end of the socket refers to this object as long as the link lasts.
    waiting.bytes = [];
    this.#begin(socket);
  }

  #remove(waiting: Waiting): void {
    const ofSource = this.#waiting.get(waiting.source);
    ofSource?.delete(waiting);
    if (ofSource?.size === 0) this.#waiting.delete(waiting.source);
  }

  /** Called when a connection has proven itself or was closed. */
  #settle(socket: Socket): void {
    if (this.#begun.delete(socket) && this.#waiting.size > 0) this.#plan();
  }

  close(): void {
    clearImmediate(this.#turn);
    this.#cancelRetry();
  }
}
