// The peer port, to which other brokers forward requests. Its connections use TLS, and both sides must have
// the certificate of a broker.
import { once } from 'node:events';
import type { IncomingMessage, Server, ServerResponse } from 'node:http';
import type { AddressInfo, Socket } from 'node:net';
import { createServer, type TLSSocket } from 'node:tls';
import { Server as GrpcServer, ServerCredentials } from '@grpc/grpc-js';
import { sleep } from '../../../shared/clock.ts';
import { LogLimiter } from '../../../shared/log-limiter.ts';
import type { Logger } from '../../../shared/logger.ts';
import { type PeerLeaf, peerName } from '../../ca-and-broker-certificates.ts';
import { plainAddress } from '../../client-address.ts';
import { type ConnectionLimiter, logAcceptErrors } from '../../connection-limiter.ts';
import { messageBytes } from '../../link/control-stream.ts';

interface Refusal {
  from: string;
  reason: string;
}

/** Maximum number of gRPC calls in progress on one connection of a broker. */
const mostCalls = 10_000;

interface PeerPortOptions {
  host: string;
  port: number;
  leaf: PeerLeaf;
  /** Also closes a connection whose TLS handshake takes too long. */
  connections: ConnectionLimiter;
  /**
   * The HTTP server for requests of authenticated brokers. It gets its connections from the peer port and
   * does not listen itself.
   */
  http: Server;
  /** Adds the gRPC services for authenticated brokers. */
  addServices(server: GrpcServer): void;
  log: Logger;
}

/** Opens the peer port. Rejects with a system error if the port cannot listen on the address. */
export async function listenForPeers(options: PeerPortOptions) {
  const { host, port, leaf, connections, http, log } = options;
  const verified = { requestCert: true, rejectUnauthorized: true, ALPNProtocols: ['h2', 'http/1.1'] };
  // By default Node sets noDelay only for HTTP servers. Without noDelay, later pieces of an answer wait 40 ms for
  // acknowledgements.
  const server = createServer({ ...leaf, ...verified, noDelay: true });
  const grpc = grpcServer();
  options.addServices(grpc);
  const injector = grpc.createConnectionInjector(ServerCredentials.createInsecure());
  const sockets = new BrokerConnections(http);
  server.on('connection', (socket: Socket) => connections.accept(socket));
  server.on('secureConnection', (socket) => {
    socket.on('error', () => socket.destroy());
    if (!isBroker(socket)) return refuse(socket, 'the certificate is not that of a broker');
    connections.authenticate(socket);
    if (socket.alpnProtocol === 'h2') return injector.injectConnection(socket);
    sockets.add(socket);
    http.emit('connection', socket);
  });
  const text = 'connections to the peer port were refused: all brokers need the same authority.json';
  const refusals = new LogLimiter<Refusal>(1, (first, more) => log.warn({ ...first, more }, text));
  const refuse = (socket: Socket, reason: string): void => {
    const refusal = { from: plainAddress(socket.remoteAddress ?? ''), reason };
    if (refusals.take('', refusal)) log.warn(refusal, text);
    socket.destroy();
  };
  server.on('tlsClientError', (error: NodeJS.ErrnoException, socket) => {
    // A connection that breaks during the handshake says nothing about the certificate, so it is not logged as refused.
    if (error.code === 'ECONNRESET') socket.destroy();
    else refuse(socket, error.message);
  });
  logAcceptErrors(server, log);
  server.listen(port, host);
  await once(server, 'listening');
  return {
    // The cast is safe: a server that listens on a host and port has an address of this type.
    port: (server.address() as AddressInfo).port,
    /** Uses a newer certificate for new connections. */
    renew: (next: PeerLeaf): void => server.setSecureContext(next),
    /** Stops accepting connections. Resolves once requests in progress have ended, at most `ms` milliseconds later. */
    async close(ms: number): Promise<void> {
      const closed = new Promise<void>((resolve) => server.close(() => resolve()));
      await sockets.close(ms);
      await connections.close();
      grpc.forceShutdown();
      refusals.close();
      await closed;
    },
  };
}

function grpcServer(): GrpcServer {
  return new GrpcServer({
    'grpc.enable_channelz': 0,
    'grpc.max_concurrent_streams': mostCalls,
    'grpc.max_receive_message_length': messageBytes,
    'grpc.max_send_message_length': messageBytes,
  });
}

/**
 * True if the peer's certificate has the name `peerName`. The same authority also issues the certificates of the gRPC
 * port and of the REST API, which have other names.
 */
function isBroker(socket: TLSSocket): boolean {
  return socket.getPeerX509Certificate()?.checkHost(peerName, { subject: 'never' }) !== undefined;
}

/**
 * The connections of brokers. Node's own list of idle connections is empty for a server that does not listen, so this
 * class records which connections are busy.
 */
class BrokerConnections {
  /** Open connections. The value is true while a request is in progress. */
  readonly #busy = new Map<Socket, boolean>();
  readonly #empty = new AbortController();
  #closing = false;

  constructor(http: Server) {
    for (const event of ['request', 'checkContinue', 'checkExpectation'])
      http.prependListener(event, ({ socket }: IncomingMessage, response: ServerResponse) => {
        this.#busy.set(socket, true);
        response.once('close', () => this.#finish(socket));
      });
    http.prependListener('upgrade', ({ socket }: IncomingMessage) => void this.#busy.set(socket, true));
  }

  add(socket: Socket): void {
    this.#busy.set(socket, false);
    socket.once('close', () => {
      this.#busy.delete(socket);
      if (this.#closing && this.#busy.size === 0) this.#empty.abort();
    });
  }

  async close(ms: number): Promise<void> {
    this.#closing = true;
    for (const [socket, busy] of this.#busy) if (!busy) socket.destroy();
    if (this.#busy.size > 0) await sleep(ms, this.#empty.signal);
    for (const socket of this.#busy.keys()) socket.destroy();
  }

  #finish(socket: Socket): void {
    if (this.#busy.has(socket)) this.#busy.set(socket, false);
    if (this.#closing) socket.end();
  }
}
