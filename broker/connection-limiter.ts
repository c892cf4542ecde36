// Limits the connections of one port: how many may be open, and how much an unauthenticated one may send.
import { subscribe, unsubscribe } from 'node:diagnostics_channel';
import { readFileSync } from 'node:fs';
import type { IncomingHttpHeaders, ServerHttp2Stream } from 'node:http2';
import type { Server, Socket } from 'node:net';
import { after, every, monotonic, sleep } from '../shared/clock.ts';
import { LogLimiter } from '../shared/log-limiter.ts';
import type { Logger } from '../shared/logger.ts';
import { plainAddress, sourceOf } from './client-address.ts';

export interface ConnectionLimits {
  /** Maximum number of connections open at once. */
  connections: number;
  /**
   * Maximum number of open connections that have not yet presented an API key, a machine's key, a call id or a
   * join token.
   */
  unauthenticated: number;
}

export interface LimiterOptions extends ConnectionLimits {
  /** Milliseconds until an unauthenticated connection is closed; no limit by default. */
  deadlineMs?: number;
  /**
   * Milliseconds for which a new unauthenticated connection is protected: it is not closed to admit a newer one. 0 by
   * default. Agents need this time to authenticate if all of them connect at once. If the limit `connections` is
   * reached, protected connections may be closed too.
   */
  graceMs?: number;
  /**
   * True if many clients share this address, as behind a proxy. An address that is not shared may have at most a
   * quarter of the connections that the limit `unauthenticated` allows.
   */
  isShared(address: string): boolean;
}

interface Connection {
  socket: Socket;
  peer: string;
  source: string;
  authenticated: boolean;
  /**
   * Time from which the age of the connection is counted, in milliseconds of monotonic(): when the connection was
   * accepted, or when its wait for the TLS handshake ended.
   */
  acceptedAt: number;
  onSettled(): void;
  /**
   * HTTP port: number of requests in progress. gRPC port: number of calls that began before the connection had
   * authenticated.
   */
  requests: number;
  cancelDeadline(): void;
}

/**
 * Maximum number of requests in progress on one connection. Programs usually wait for an answer before the next
 * request.
 */
const mostRequests = 16;
/** Maximum number of calls on a gRPC connection that has not authenticated. A hello or an enrolment is one call. */
const mostCalls = 32;
/** Maximum number of bytes from a gRPC connection that has not authenticated. A hello or an enrolment is a few KiB. */
const mostBytes = 256 * 1024;
const checkBytesMs = 10;
/**
 * Milliseconds between the last message and the close of a connection, so that the message arrives before the close.
 */
const leavingMs = 300;
/**
 * Node publishes each new stream on this channel before data of the stream is read; grpc-js has no such hook.
 */
const channel = 'http2.server.stream.created';
/**
 * Number of file descriptors reserved for the broker's databases, command output and webhooks. If a quarter of the
 * process's maximum is less, only that quarter is reserved.
 */
const ownFiles = 1_024;
const mostHttp = 4_096;

/** Divides the maximum number of open files of this process between the HTTP port and the gRPC port. */
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

/** The soft limit of open files, which Node has raised to the hard limit (proc_pid_limits(5)). */
function openFilesLimit(): number {
  const limit = /^Max open files +(\d+)/m.exec(readFileSync('/proc/self/limits', 'latin1'))?.[1];
  return limit === undefined ? Number.POSITIVE_INFINITY : Number(limit);
}

/** Logs the errors of accepting a connection. Without this listener, the first such error would end the process. */
export function logAcceptErrors(server: Server, log: Logger): void {
  const text = 'a connection could not be accepted; its client has to connect again';
  const lines = new LogLimiter<Error>(1, (err, more) => log.error({ err, more }, text));
  server.once('listening', () =>
    server.on('error', (err) => {
      if (lines.take('', err)) log.error({ err }, text);
    }),
  );
}

export class ConnectionLimiter {
  readonly #options: LimiterOptions;
  /** The unauthenticated connections by peer (address and port), the least recently used first. */
  readonly #unauthenticated = new Map<string, Connection>();
  readonly #authenticated = new Map<string, Connection>();
  /**
   * Connections that wait for their TLS handshake, oldest first. They count only toward the limit of all
   * connections.
   */
  readonly #waiting = new Map<string, Connection>();
  /** Number of unauthenticated connections by source. */
  readonly #bySource = new Map<string, number>();
  #guarded = false;
  #stopChecking: (() => void) | undefined;

  constructor(options: LimiterOptions) {
    this.#options = options;
  }

  /**
   * Adds an accepted connection, before TLS. Returns its source (see sourceOf()), or undefined if the connection is
   * refused. Calls `onSettled` once: when the connection has authenticated or was closed.
   */
  accept(socket: Socket, onSettled: () => void = nothing): string | undefined {
    // An error without a listener ends the process. Node has a listener of its own, but removes it when a request has
    // the method CONNECT.
    socket.on('error', () => socket.destroy());
    const peer = peerOf(socket);
    // Refuses a connection that is closed already, or that has the address and port of an open connection. grpc-js
    // cannot distinguish two such connections.
    if (socket.remoteAddress === undefined || this.#find(peer)?.socket.destroyed === false)
      return void socket.destroy();
    const address = plainAddress(socket.remoteAddress);
    const source = sourceOf(address);
    this.#closeForNew(address, source);
    // At the limit of all connections, an old one is closed to admit the new one. The first choice is the least
    // recently used unauthenticated connection, then one that waits for its TLS handshake, then one without requests in
    // progress. If there is none, the new connection is refused.
    if (this.#size >= this.#options.connections && !this.#close(this.#dispensable(source)))
      return void socket.destroy();
    const connection: Connection = {
      ...{ socket, peer, source, authenticated: false, acceptedAt: monotonic(), requests: 0 },
      onSettled,
      cancelDeadline: nothing,
    };
    this.#addUnauthenticated(connection);
    socket.on('close', () => {
      this.#forget(connection);
      settle(connection);
    });
    return source;
  }

  /**
   * Marks an unauthenticated connection as waiting for its TLS handshake. It has no deadline until resume() is
   * called.
   */
  wait(socket: Socket): void {
    const connection = this.#unauthenticated.get(peerOf(socket));
    if (!connection) return;
    this.#forget(connection);
    this.#waiting.set(connection.peer, connection);
  }

  /** Ends a connection's wait for its TLS handshake. Its deadline to authenticate begins now. */
  resume(socket: Socket): void {
    const connection = this.#waiting.get(peerOf(socket));
    if (!connection) return;
    this.#waiting.delete(connection.peer);
    connection.acceptedAt = monotonic();
    this.#addUnauthenticated(connection);
  }

  #addUnauthenticated(connection: Connection): void {
    const { deadlineMs } = this.#options;
    const { peer, source, socket } = connection;
    if (deadlineMs !== undefined) connection.cancelDeadline = after(deadlineMs, () => socket.destroy());
    this.#unauthenticated.set(peer, connection);
    this.#bySource.set(source, (this.#bySource.get(source) ?? 0) + 1);
    if (this.#guarded) this.#stopChecking ??= every(checkBytesMs, () => this.#checkBytes());
  }

  /**
   * Marks the start of a request; the returned function marks its end. If the connection has too many requests in
   * progress, closes the connection and returns undefined.
   */
  begin(socket: Socket): (() => void) | undefined {
    const connection = this.#find(peerOf(socket));
    if (!connection || connection.requests >= mostRequests) return void socket.destroy();
    this.#use(connection, 1);
    return () => this.#use(connection, -1);
  }

  /** Marks a connection as authenticated. `peer` is a socket, or the name that grpc-js gives to the peer. */
  authenticate(peer: Socket | string): void {
    const connection = this.#unauthenticated.get(typeof peer === 'string' ? peer : peerOf(peer));
    if (!connection) return;
    this.#forget(connection);
    this.#authenticated.set(connection.peer, connection);
    connection.authenticated = true;
    settle(connection);
  }

  /** Returns the accepted TCP socket below a TLS socket. */
  tcpSocketBelow(socket: Socket): Socket | undefined {
    return this.#find(peerOf(socket))?.socket;
  }

  /**
   * Closes a connection that is broken. If a write fails below TLS, Node may lose the error and stop reading. It then
   * never reports the end of the connection (github.com/nodejs/node/issues/55804). An empty write to the TCP socket
   * sends nothing, but fails if the connection is broken.
   */
  probe(peer: string): void {
    this.#find(peer)?.socket.write('');
  }

  /** Closes a connection after a delay, in which last messages can still be sent. */
  closeSoon(peer: string): void {
    after(leavingMs, () => this.#find(peer)?.socket.destroy());
  }

  /**
   * Limits the calls and bytes of each unauthenticated gRPC connection; the returned function removes the limit on
   * calls. `hasKey` checks an `authorization` header.
   */
  guardCalls(hasKey: (authorization: string) => boolean): () => void {
    // The cast is safe: Node documents this type for the channel's messages.
    const look = (message: unknown): void =>
      this.#checkCall(message as { stream: ServerHttp2Stream; headers: IncomingHttpHeaders }, hasKey);
    this.#guarded = true;
    subscribe(channel, look);
    return () => void unsubscribe(channel, look);
  }

  /** Closes all connections after a delay, in which last messages can still be sent. */
  async close(): Promise<void> {
    this.#stopChecking?.();
    const maps = [this.#unauthenticated, this.#authenticated, this.#waiting];
    const all = maps.flatMap((map) => [...map.values()]);
    const closed = new AbortController();
    for (const { socket, cancelDeadline } of all) {
      cancelDeadline();
      socket.once('close', () => this.#size === 0 && closed.abort());
    }
    if (all.length > 0) await sleep(leavingMs, closed.signal);
    for (const { socket } of all) socket.destroy();
  }

  get #size(): number {
    return this.#unauthenticated.size + this.#authenticated.size + this.#waiting.size;
  }

  #find(peer: string): Connection | undefined {
    return this.#unauthenticated.get(peer) ?? this.#authenticated.get(peer) ?? this.#waiting.get(peer);
  }

  #closeForNew(address: string, source: string): void {
    const { unauthenticated, isShared } = this.#options;
    const all = this.#unauthenticated;
    const own = this.#bySource.get(source) ?? 0;
    if (own >= Math.ceil(unauthenticated / 4) && !isShared(address)) this.#closeOld(firstOf(all, source));
    else if (all.size >= unauthenticated) this.#closeOld(all.values().next().value);
  }

  #closeOld(connection: Connection | undefined): void {
    const { graceMs = 0 } = this.#options;
    if (connection && monotonic() - connection.acceptedAt >= graceMs) this.#close(connection);
  }

  #dispensable(source: string): Connection | undefined {
    const [unauthenticated] = this.#unauthenticated.values();
    const [waiting] = this.#waiting.values();
    return (
      unauthenticated ??
      firstOf(this.#waiting, source) ??
      waiting ??
      [...this.#authenticated.values()].find(({ requests }) => requests === 0)
    );
  }

  #close(connection: Connection | undefined): boolean {
    if (!connection) return false;
    this.#forget(connection);
    connection.socket.destroy();
    return true;
  }

  #forget(connection: Connection): void {
    const { peer, source } = connection;
    connection.cancelDeadline();
    connection.cancelDeadline = nothing;
    if (this.#unauthenticated.get(peer) === connection) {
      const left = (this.#bySource.get(source) ?? 0) - 1;
      if (left > 0) this.#bySource.set(source, left);
      else this.#bySource.delete(source);
    }
    for (const all of [this.#unauthenticated, this.#authenticated, this.#waiting])
      if (all.get(peer) === connection) all.delete(peer);
  }

  #use(connection: Connection, requests: number): void {
    const all = connection.authenticated ? this.#authenticated : this.#unauthenticated;
    connection.requests += requests;
    if (all.get(connection.peer) !== connection) return;
    all.delete(connection.peer);
    all.set(connection.peer, connection);
  }

  /**
   * Checks a new call. The channel reports the calls of all HTTP/2 servers of this process, so calls on other ports are
   * ignored.
   */
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
    // Compressed calls are refused until the connection has authenticated, because a few bytes can expand to megabytes.
    // Agents do not compress such calls.
    const packed = (headers['grpc-encoding'] ?? 'identity') !== 'identity';
    if (connection.requests <= mostCalls && !packed) return;
    // The HTTP/2 session is destroyed too. With only the socket closed, Node would still handle the data that arrived
    // in the same packet as these headers.
    stream.session?.destroy();
    this.#close(connection);
  }

  /**
   * Closes unauthenticated connections that have sent too many bytes, because grpc-js buffers their messages. The
   * socket's property bytesRead is the only count of these bytes.
   */
  #checkBytes(): void {
    for (const connection of this.#unauthenticated.values())
      if (connection.socket.bytesRead > mostBytes) this.#close(connection);
    if (this.#unauthenticated.size > 0) return;
    this.#stopChecking?.();
    this.#stopChecking = undefined;
  }
}

const nothing = (): void => {};

function settle(connection: Connection): void {
  connection.onSettled();
  connection.onSettled = nothing;
}

/** Returns the first connection of a source, in the order of the map. */
function firstOf(connections: Map<string, Connection>, source: string): Connection | undefined {
  for (const connection of connections.values()) if (connection.source === source) return connection;
  return undefined;
}

/**
 * Returns the name of a peer, in the form of grpc-js. A TLS socket and the accepted TCP socket below it have the
 * same name.
 */
function peerOf({ remoteAddress, remotePort }: Pick<Socket, 'remoteAddress' | 'remotePort'>): string {
  return `${remoteAddress}:${remotePort}`;
}
