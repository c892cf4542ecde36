// Open connections of the door, and who of them has yet to show that they belong here: those may cost next to nothing.
import { subscribe, unsubscribe } from 'node:diagnostics_channel';
import type { IncomingHttpHeaders, ServerHttp2Stream } from 'node:http2';
import type { Socket } from 'node:net';
import { after, every, sleep } from '../../shared/clock.ts';
import type { Guest } from './connect.ts';

export interface GuestLimits {
  /** Milliseconds a connection has until it has shown a machine's key, a call id, a join token or an API key. */
  proofMs: number;
  /** Connections that may be unproven at once; past it the oldest of them is cut. */
  maxUnproven: number;
  /** Whether this `authorization` holds a good API key. */
  hasKey(authorization: string): boolean;
}

/** Time that last messages have to go out before a connection is cut. */
const leavingMs = 300;
/** Calls, and bytes in all, of a connection that has proven nothing: a greeting or an enrolment is one call of a few KiB. */
const unprovenCalls = 32;
const unprovenBytes = 256 * 1024;
const lookMs = 10;
/** Where Node tells of a stream before anybody reads what is sent on it; grpc-js tells nobody. */
const channel = 'http2.server.stream.created';

interface Unproven {
  calls: number;
  forget(): void;
}

export class Guests {
  readonly #sockets = new Map<string, Socket>();
  readonly #unproven = new Map<string, Unproven>();
  readonly #limits: GuestLimits;
  readonly #unsubscribe: () => void;
  #stopWeighing: (() => void) | undefined;

  constructor(limits: GuestLimits) {
    this.#limits = limits;
    // What Node documents to come on this channel.
    const look = (message: unknown): void =>
      this.#called(message as { stream: ServerHttp2Stream; headers: IncomingHttpHeaders });
    subscribe(channel, look);
    this.#unsubscribe = () => void unsubscribe(channel, look);
  }

  arrive(socket: Socket): void {
    this.#makeRoom();
    const peer = peerOf(socket);
    // Somebody may come twice from one port, to two addresses of ours: grpc-js would take the two for one.
    this.#sockets.get(peer)?.destroy();
    this.proven(peer);
    this.#sockets.set(peer, socket);
    const forget = after(this.#limits.proofMs, () => socket.destroy());
    this.#unproven.set(peer, { calls: 0, forget });
    this.#stopWeighing ??= every(lookMs, () => this.#weigh());
    socket.on('error', () => socket.destroy());
    socket.once('close', () => {
      if (this.#sockets.get(peer) !== socket) return;
      this.#sockets.delete(peer);
      this.proven(peer);
    });
  }

  proven(peer: string): void {
    this.#unproven.get(peer)?.forget();
    this.#unproven.delete(peer);
  }

  guest(peer: string): Guest {
    return {
      proven: () => this.proven(peer),
      leave: () => void after(leavingMs, () => this.#sockets.get(peer)?.destroy()),
    };
  }

  /** Last messages get a moment to leave; then whoever stays is cut. */
  async dismiss(): Promise<void> {
    this.#unsubscribe();
    this.#stopWeighing?.();
    for (const { forget } of this.#unproven.values()) forget();
    const left = new AbortController();
    for (const socket of this.#sockets.values()) {
      socket.once('close', () => {
        if (this.#sockets.size === 0) left.abort();
      });
    }
    if (this.#sockets.size > 0) await sleep(leavingMs, left.signal);
    for (const socket of this.#sockets.values()) socket.destroy();
  }

  /** Whoever has idled longest goes: an honest agent needs milliseconds, a crowd that holds places has none left. */
  #makeRoom(): void {
    if (this.#unproven.size < this.#limits.maxUnproven) return;
    const [oldest = ''] = this.#unproven.keys();
    this.#cut(oldest);
  }

  #cut(peer: string): void {
    this.#sockets.get(peer)?.destroy();
    this.proven(peer);
  }

  /** The channel tells of every HTTP/2 server in this process; only our own peers are known here. */
  #called({ stream, headers }: { stream: ServerHttp2Stream; headers: IncomingHttpHeaders }): void {
    const socket = stream.session?.socket;
    const peer = socket ? peerOf(socket) : '';
    const unproven = this.#unproven.get(peer);
    if (!unproven || this.#sockets.get(peer)?.localPort !== socket?.localPort) return;
    unproven.calls += 1;
    if (this.#limits.hasKey(headers.authorization ?? '')) {
      this.proven(peer);
      return;
    }
    if (unproven.calls <= unprovenCalls && !packs(headers)) return;
    // At once: the socket alone would still hand on what came with these headers.
    stream.session?.destroy();
    this.#cut(peer);
  }

  /** grpc-js takes messages as they come, whoever sends them: the bytes on the wire are what we can see. */
  #weigh(): void {
    for (const peer of this.#unproven.keys()) {
      if ((this.#sockets.get(peer)?.bytesRead ?? 0) > unprovenBytes) this.#cut(peer);
    }
    if (this.#unproven.size > 0) return;
    this.#stopWeighing?.();
    this.#stopWeighing = undefined;
  }
}

/** grpc-js unpacks before anybody may object, and a small bomb costs megabytes; no greeting or enrolment of ours is packed. */
function packs(headers: IncomingHttpHeaders): boolean {
  return (headers['grpc-encoding'] ?? 'identity') !== 'identity';
}

/** As grpc-js names them. */
function peerOf({ remoteAddress, remotePort }: Pick<Socket, 'remoteAddress' | 'remotePort'>): string {
  return `${remoteAddress}:${remotePort}`;
}
