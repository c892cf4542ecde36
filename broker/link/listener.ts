// The gRPC port for agents and clients: TLS, connection limits, and the time limit for authentication.
import { once } from 'node:events';
import { type AddressInfo, createServer } from 'node:net';
import {
  createServer as createTlsServer,
  type SecureContextOptions,
  type TLSSocket,
  type Server as TlsServer,
} from 'node:tls';
import {
  status as grpcStatus,
  type Metadata,
  Server,
  ServerCredentials,
  type ServerUnaryCall,
  type sendUnaryData,
} from '@grpc/grpc-js';
import type { EnrollRequest__Output } from '../../proto/types/farhand/link/v1/EnrollRequest.ts';
import type { EnrollResponse } from '../../proto/types/farhand/link/v1/EnrollResponse.ts';
import type { LinkHandlers } from '../../proto/types/farhand/link/v1/Link.ts';
import { controlFlow } from '../../shared/adapt-http2-windows.ts';
import { callKey, linkService, shortenQueues } from '../../shared/agent-rpcs.ts';
import { AppError } from '../../shared/errors.ts';
import { type Authority, renewLeaves } from '../ca-and-broker-certificates.ts';
import { type Proxies, peerAddress } from '../client-address.ts';
import { logAcceptErrors } from '../connection-limiter.ts';
import type { Events } from '../event-log.ts';
import { TurnLimit } from '../event-loop-turn-limit.ts';
import type { History } from '../history/history-database.ts';
import type { JoinTokens } from '../join-tokens-and-enrolment.ts';
import type { Rates } from '../request-checks/rate-limits.ts';
import type { AnswerStream } from './agent-calls.ts';
import {
  type ConnectStream,
  type LinkServices,
  messageBytes,
  serveConnect,
  textOf,
} from './control-stream.ts';
import { HandshakeQueue } from './handshake-queue.ts';
import { Heartbeats } from './heartbeats.ts';
import { type Pings, pingConnections } from './http2-ping-client-and-answer-connections.ts';
import { createLinkLimits } from './link-rate-limits.ts';
import type { LinkSettings } from './link-times-and-limits.ts';

export interface ListenerOptions {
  host: string;
  port: number;
  /** True if this `authorization` header has a valid API key. */
  hasKey(authorization: string): boolean;
  pings: Pings;
}

export interface ListenerServices
  extends Omit<LinkServices, 'limits' | 'heartbeats' | 'hellos' | 'answerWaiters'> {
  history: History;
  events: Events;
  authority: Authority;
  joinTokens: JoinTokens;
  proxies: Proxies;
  rates: Rates;
}

/**
 * Adds a service that checks API keys itself. The service passes the address of each authenticated client to
 * `authenticate`. All other clients are soon disconnected.
 */
type AddService = (server: Server, authenticate: (peer: string) => void) => void;

const headerBytes = 16 * 1024;
/** Maximum number of streams on a connection: more than all calls of a machine together can open. */
const streamsPerConnection = 512;
const sessionMegabytes = 64;
/** Maximum number of hellos that are checked in one turn of the event loop; each takes some 0.5 ms. */
const hellosPerTurn = 8;
/**
 * Maximum number of connections that the system queues until they are accepted. Further clients retry after a
 * second.
 */
export const backlog = 4_096;

/** Starts the gRPC port. Rejects with a system error when it cannot listen on the address. */
export async function startListener(
  services: ListenerServices,
  options: ListenerOptions,
  settings: LinkSettings,
  addService: AddService,
) {
  const { authority, connections, log } = services;
  const { host, port } = options;
  shortenQueues();
  controlFlow('server');
  const limits = createLinkLimits(services);
  const heartbeats = new Heartbeats(settings);
  const server = grpcServer();
  const own = { limits, heartbeats, hellos: new TurnLimit(hellosPerTurn), answerWaiters: new Map() };
  server.addService(linkService, handlers({ ...services, ...own }, settings));
  addService(server, (peer) => connections.authenticate(peer));
  const tls = tlsServer(server, await authority.leaf());
  // The listening server only accepts connections. `tls` begins the TLS handshake of a connection when its turn comes
  // in the queue.
  const queue = new HandshakeQueue(connections, (socket) => void tls.emit('connection', socket));
  const listener = createServer((socket) => queue.add(socket));
  logAcceptErrors(listener, log);
  listener.listen({ port, host, backlog });
  await once(listener, 'listening');
  const applyLeaf = (leaf: SecureContextOptions): void => tls.setSecureContext(leaf);
  const stops = [
    connections.guardCalls(options.hasKey),
    pingConnections(options.pings),
    renewLeaves(() => authority.leaf(), applyLeaf, log),
  ];
  return {
    port: (listener.address() as AddressInfo).port,
    /** Stops accepting connections and ends the open ones. Resolves when all are closed. */
    async close(): Promise<void> {
      for (const stop of stops) stop();
      queue.close();
      const closed = new Promise<void>((resolve) => listener.close(() => resolve()));
      await connections.close();
      server.forceShutdown();
      await closed;
      limits.close();
    },
  };
}

function grpcServer(): Server {
  return new Server({
    // Turns off statistics that need some objects and timers for each connection.
    'grpc.enable_channelz': 0,
    'grpc.max_concurrent_streams': streamsPerConnection,
    'grpc.max_receive_message_length': messageBytes,
    'grpc.max_send_message_length': messageBytes,
    'grpc.max_metadata_size': headerBytes,
    'grpc-node.max_session_memory': sessionMegabytes,
    'grpc.max_connection_idle_ms': 60_000,
  });
}

/**
 * TLS is terminated here and not in grpc-js, so that the broker can cut sockets and renew its certificate
 * while running.
 */
function tlsServer(server: Server, leaf: SecureContextOptions): TlsServer {
  const injector = server.createConnectionInjector(ServerCredentials.createInsecure());
  // A callback is used here, because a list of protocols would need another buffer for each connection.
  const ALPNCallback = ({ protocols }: { protocols: string[] }) => protocols.find((name) => name === 'h2');
  // ConnectionLimiter closes a connection whose handshake takes too long.
  const tls = createTlsServer({ ALPNCallback, ...leaf });
  tls.on('secureConnection', (socket: TLSSocket) => {
    socket.on('error', () => socket.destroy());
    injector.injectConnection(socket);
  });
  tls.on('tlsClientError', (_error, socket) => socket.destroy());
  return tls;
}

function handlers(services: ListenerServices & LinkServices, settings: LinkSettings): LinkHandlers {
  const { connections, joinTokens, proxies, rates, answerWaiters, cluster } = services;
  const addressOf = (call: { getPeer(): string; metadata: Metadata }): string =>
    proxies.clientOf(peerAddress(call.getPeer()), call.metadata.get('x-forwarded-for').join(','));
  return {
    Enroll(
      call: ServerUnaryCall<EnrollRequest__Output, EnrollResponse>,
      reply: sendUnaryData<EnrollResponse>,
    ) {
      const address = addressOf(call);
      const enrolled = joinTokens.enroll(call.request, address).catch(async (error: unknown) => {
        if (error instanceof AppError && error.code === 'unauthorized') await rates.countWrongKey(address);
        throw error;
      });
      enrolled.then(
        async (response) => {
          connections.authenticate(call.getPeer());
          await cluster?.takeNew(response.machine_id ?? '');
          reply(null, response);
        },
        (error: unknown) => reply({ code: enrolStatus(error), details: textOf(error) }),
      );
    },
    Connect(stream: ConnectStream) {
      void serveConnect(stream, addressOf(stream), services, settings);
    },
    Answer(stream: AnswerStream) {
      const [id] = stream.metadata.get(callKey);
      const accept = typeof id === 'string' ? answerWaiters.get(id) : undefined;
      if (!accept)
        return void stream.emit('error', {
          code: grpcStatus.NOT_FOUND,
          details: 'no call has this id',
        });
      connections.authenticate(stream.getPeer());
      accept(stream);
    },
  };
}

function enrolStatus(error: unknown): grpcStatus {
  if (!(error instanceof AppError)) return grpcStatus.UNAVAILABLE;
  if (error.code === 'rate_limited') return grpcStatus.RESOURCE_EXHAUSTED;
  return error.code === 'unauthorized' ? grpcStatus.UNAUTHENTICATED : grpcStatus.INVALID_ARGUMENT;
}
