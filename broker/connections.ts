// Limits the connections of one port: how many may be open, and what unauthenticated ones may cost.
import { subscribe, unsubscribe } from 'node:diagnostics_channel';
import { readFileSync } from 'node:fs';
import type { IncomingHttpHeaders, ServerHttp2Stream } from 'node:http2';
import type { Server, Socket } from 'node:net';
import { after, every, sleep } from '../shared/clock.ts';
import { LogLimiter } from '../shared/log-limiter.ts';
import type { Logger } from '../shared/logger.ts';
import { plainAddress, sourceOf } from './client-address.ts';

export interface ConnectionLimits {
  /** Connections open at once. */
  connections: number;
  /** Those of them that have presented no key, machine key, call id or join token. */
  unauthenticated: number;
}

export interface LimiterOptions extends ConnectionLimits {
  /** Milliseconds until an unauthenticated connection is closed; none by default. */
  deadlineMs?: number;
  /** Whether many clients share an address, as a proxy's; of any other a quarter of the unauthenticated may come. */
  isShared(address: string): boolean;
}

interface Connection {
  socket: Socket;
  peer: string;
  source: string;
  authenticated: boolean;
  /** HTTP: requests under way. gRPC: all calls until it is authenticated. */
  requests: number;
  cancelDeadline(): void;
}

/** Requests that may wait on one connection: programs send the next after an answer, and none sends so many at once. */
const pipelined = 16;
/** Calls and bytes of an unauthenticated gRPC connection: a hello or an enrolment is one call of a few KiB. */
const mostCalls = 32;
const mostBytes = 256 * 1024;
const checkBytesMs = 10;
/** Time for last messages before a connection is closed. */
const leavingMs = 300;
/** Node publishes a stream here before anything on it is read; grpc-js itself has no such hook. */
const channel = 'http2.server.stream.created';
/** Files of the broker's own: databases, output of commands, webhooks. At most a quarter of all. */
const ownFiles = 1_024;
const mostHttp = 4_096;

/** The share of each port in the files that this process may open. */
export function connectionLimits(files = openFilesLimit()): {
  http: ConnectionLimits;
  grpc: ConnectionLimits;
} {
  const free = files - Math.min(ownFiles, Math.ceil(files / 4));
  const http = Math.min(mostHttp, Math.floor(free / 2));
  const limits = (connections: number, most: number): ConnectionLimits => ({
    connections,
    unauthenticated: Math.min(most, Math.ceil(connections / 2)),
  });
  return { http: limits(http, 1_024), grpc: limits(free - http, 512) };
}

/** The soft limit, which Node has raised to the hard one (proc_pid_limits(5)). */
function openFilesLimit(): number {
  const limit = /^Max open files +(\d+)/m.exec(readFileSync('/proc/self/limits', 'latin1'))?.[1];
  return limit === undefined ? Number.POSITIVE_INFINITY : Number(limit);
}

/** Without a listener the first connection that the system refuses would end the process. */
export function logAcceptErrors(server: Server, log: Logger): void {
  const text = 'a connection could not be accepted';
  const lines = new LogLimiter<Error>(1, 60_000, (err, more) => log.error({ err, more }, text));
  server.once('listening', () =>
    server.on('error', (err) => {
      if (lines.take('', err)) log.error({ err }, text);
    }),
  );
}

export class ConnectionLimiter {
  readonly #options: LimiterOptions;
  /** By peer, the least recently used first. */
  readonly #unauthenticated = new Map<string, Connection>();
  readonly #authenticated = new Map<string, Connection>();
  #guarded = false;
  #stopChecking: (() => void) | undefined;

  constructor(options: LimiterOptions) {
    this.#options = options;
  }

  /**
   * Takes a connection in as it was accepted, before TLS. Where there are too many, another one is closed: the least
   * recently used unauthenticated one, else an idle one. Where none can be, this one is.
   */
  accept(socket: Socket): void {
    // An error without a listener ends the process, and Node takes its own away with CONNECT.
    socket.on('error', () => socket.destroy());
    const peer = peerOf(socket);
    // Closed meanwhile, or its port is in use towards another address of ours: grpc-js takes such two for one.
    if (socket.remoteAddress === undefined || this.#find(peer)?.socket.destroyed === false)
      return void socket.destroy();
    const address = plainAddress(socket.remoteAddress);
    const source = sourceOf(address);
    this.#makeRoom(address, source);
    const { connections, deadlineMs } = this.#options;
    if (this.#size >= connections && !this.#close(this.#dispensable())) return void socket.destroy();
    const cancelDeadline = deadlineMs === undefined ? () => {} : after(deadlineMs, () => socket.destroy());
    const connection = { socket, peer, source, authenticated: false, requests: 0, cancelDeadline };
    this.#unauthenticated.set(peer, connection);
    if (this.#guarded) this.#stopChecking ??= every(checkBytesMs, () => this.#checkBytes());
    socket.once('close', () => this.#forget(connection));
  }

  /** A request begins here; the result ends it. Undefined: too many wait on this connection, and it is closed. */
  begin(socket: Socket): (() => void) | undefined {
    const connection = this.#find(peerOf(socket));
    if (!connection || connection.requests >= pipelined) return void socket.destroy();
    this.#use(connection, 1);
    return () => this.#use(connection, -1);
  }

  /** `peer`: a socket, or as grpc-js names it. */
  authenticate(peer: Socket | string): void {
    const connection = this.#unauthenticated.get(typeof peer === 'string' ? peer : peerOf(peer));
    if (!connection) return;
    connection.cancelDeadline();
    this.#unauthenticated.delete(connection.peer);
    this.#authenticated.set(connection.peer, connection);
    connection.authenticated = true;
  }

  /** The accepted socket below one of TLS. */
  below(socket: Socket): Socket | undefined {
    return this.#find(peerOf(socket))?.socket;
  }

  /** Closes a connection once its last messages had time to go out. */
  closeSoon(peer: string): void {
    after(leavingMs, () => this.#find(peer)?.socket.destroy());
  }

  /** Bounds what an unauthenticated gRPC connection costs; the result stops that. `hasKey`: of an `authorization`. */
  guardCalls(hasKey: (authorization: string) => boolean): () => void {
    // What Node documents to come on this channel.
    const look = (message: unknown): void =>
      this.#checkCall(message as { stream: ServerHttp2Stream; headers: IncomingHttpHeaders }, hasKey);
    this.#guarded = true;
    subscribe(channel, look);
    return () => void unsubscribe(channel, look);
  }

  /** Last messages get a moment to go out, then all connections are closed. */
  async close(): Promise<void> {
    this.#stopChecking?.();
    const all = [...this.#unauthenticated.values(), ...this.#authenticated.values()];
    const closed = new AbortController();
    for (const { socket, cancelDeadline } of all) {
      cancelDeadline();
      socket.once('close', () => this.#size === 0 && closed.abort());
    }
    if (all.length > 0) await sleep(leavingMs, closed.signal);
    for (const { socket } of all) socket.destroy();
  }

  get #size(): number {
    return this.#unauthenticated.size + this.#authenticated.size;
  }

  #find(peer: string): Connection | undefined {
    return this.#unauthenticated.get(peer) ?? this.#authenticated.get(peer);
  }

  #makeRoom(address: string, source: string): void {
    const { unauthenticated, isShared } = this.#options;
    const all = this.#unauthenticated;
    const own = isShared(address) ? [] : [...all.values()].filter((one) => one.source === source);
    if (own.length >= Math.ceil(unauthenticated / 4)) this.#close(own[0]);
    else if (all.size >= unauthenticated) this.#close(all.values().next().value);
  }

  #dispensable(): Connection | undefined {
    const [unauthenticated] = this.#unauthenticated.values();
    return unauthenticated ?? [...this.#authenticated.values()].find(({ requests }) => requests === 0);
  }

  #close(connection: Connection | undefined): boolean {
    if (!connection) return false;
    this.#forget(connection);
    connection.socket.destroy();
    return true;
  }

  #forget(connection: Connection): void {
    connection.cancelDeadline();
    for (const all of [this.#unauthenticated, this.#authenticated])
      if (all.get(connection.peer) === connection) all.delete(connection.peer);
  }

  #use(connection: Connection, requests: number): void {
    const all = connection.authenticated ? this.#authenticated : this.#unauthenticated;
    connection.requests += requests;
    if (all.get(connection.peer) !== connection) return;
    all.delete(connection.peer);
    all.set(connection.peer, connection);
  }

  /** The channel is one for all HTTP/2 servers of this process. */
  #checkCall(
    { stream, headers }: { stream: ServerHttp2Stream; headers: IncomingHttpHeaders },
    hasKey: (authorization: string) => boolean,
  ): void {
    const socket = stream.session?.socket;
    const connection = socket && this.#unauthenticated.get(peerOf(socket));
    if (!connection || connection.socket.localPort !== socket.localPort) return;
    connection.requests += 1;
    if (hasKey(headers.authorization ?? '')) {
      this.authenticate(connection.peer);
      return;
    }
    // grpc-js unpacks before anybody may object, and a small bomb costs megabytes; no hello or enrolment of ours is packed.
    const packed = (headers['grpc-encoding'] ?? 'identity') !== 'identity';
    if (connection.requests <= mostCalls && !packed) return;
    // At once: the socket alone would still hand on what came with these headers.
    stream.session?.destroy();
    this.#close(connection);
  }

  /** grpc-js takes messages in as they come, from anybody: the bytes on the wire are what can be counted. */
  #checkBytes(): void {
    for (const connection of this.#unauthenticated.values())
      if (connection.socket.bytesRead > mostBytes) this.#close(connection);
    if (this.#unauthenticated.size > 0) return;
    this.#stopChecking?.();
    this.#stopChecking = undefined;
  }
}

/** As grpc-js names them; with TLS the accepted socket and the one that asks are two, with the same ends. */
function peerOf({ remoteAddress, remotePort }: Pick<Socket, 'remoteAddress' | 'remotePort'>): string {
  return `${remoteAddress}:${remotePort}`;
}
