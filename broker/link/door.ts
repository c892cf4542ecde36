// The door agents and clients come through: TLS, limits, and five seconds to prove oneself.
import type { EventEmitter } from 'node:events';
import type { AddressInfo, ListenOptions, Socket } from 'node:net';
import { createServer as createTlsServer, type TLSSocket } from 'node:tls';
import {
  status as grpcStatus,
  type Metadata,
  Server,
  ServerCredentials,
  type ServerDuplexStream,
  type ServerUnaryCall,
  type sendUnaryData,
} from '@grpc/grpc-js';
import type { AnswerRequest__Output } from '../../proto/types/farhand/link/v1/AnswerRequest.ts';
import type { AnswerResponse } from '../../proto/types/farhand/link/v1/AnswerResponse.ts';
import type { EnrollRequest__Output } from '../../proto/types/farhand/link/v1/EnrollRequest.ts';
import type { EnrollResponse } from '../../proto/types/farhand/link/v1/EnrollResponse.ts';
import type { LinkHandlers } from '../../proto/types/farhand/link/v1/Link.ts';
import { AppError } from '../../shared/errors.ts';
import { callKey, linkService, shortenQueues } from '../../shared/rpc.ts';
import { type Proxies, peerAddress } from '../address.ts';
import type { Rates } from '../admission/rates.ts';
import { type ConnectionLimiter, logAcceptErrors } from '../connections.ts';
import type { Events } from '../events.ts';
import type { History } from '../history.ts';
import type { JoinTokens } from '../join-tokens.ts';
import type { Authority } from './authority.ts';
import {
  type ConnectRooms,
  type ConnectSettings,
  type ConnectStream,
  serveConnect,
  textOf,
} from './connect.ts';
import { openFences } from './fences.ts';
import { openNotices } from './notices.ts';
import { renewLeaves } from './renewal.ts';
import { widenWindows } from './windows.ts';

export interface DoorOptions {
  host: string;
  port: number;
  connections: ConnectionLimiter;
  /** Milliseconds for the handshake of TLS. */
  handshakeMs: number;
  /** Whether this `authorization` holds a good API key. */
  hasKey(authorization: string): boolean;
  /** Milliseconds between pings, and until one that is not answered ends the connection: clients have no other heartbeat. */
  pingMs: number;
  pongMs: number;
}

export interface DoorRooms extends Omit<ConnectRooms, 'notices' | 'fences'> {
  history: History;
  events: Events;
  authority: Authority;
  joinTokens: JoinTokens;
  proxies: Proxies;
  rates: Rates;
}

/** What else is served here: adds itself to the server, and says which peers have shown that they belong here. */
export type Beside = (server: Server, proven: (peer: string) => void) => void;

export interface Door {
  readonly port: number;
  /** Takes no more connections, ends the open ones, resolves when all is closed. */
  close(): Promise<void>;
}

const headerBytes = 16 * 1024;
/** More than all lanes of a machine have in all. */
const streamsPerConnection = 512;
const sessionMegabytes = 64;
/** Connections that wait to be taken: where they find no room their clients try again a second later. */
const backlog = 4_096;

/** Opens the door. Rejects with a system error when the address cannot be had. */
export async function openDoor(
  rooms: DoorRooms,
  options: DoorOptions,
  settings: ConnectSettings,
  beside: Beside,
): Promise<Door> {
  const { authority, log } = rooms;
  shortenQueues();
  const leaf = await authority.leaf();
  const notices = openNotices(log);
  const fences = openFences(rooms, log);
  const { connections } = options;
  const stopGuarding = connections.guardCalls(options.hasKey);
  const server = new Server({
    'grpc.max_concurrent_streams': streamsPerConnection,
    'grpc.max_receive_message_length': settings.messageBytes,
    'grpc.max_send_message_length': settings.messageBytes,
    'grpc.max_metadata_size': headerBytes,
    'grpc-node.max_session_memory': sessionMegabytes,
    'grpc.max_connection_idle_ms': 60_000,
    'grpc.keepalive_time_ms': options.pingMs,
    'grpc.keepalive_timeout_ms': options.pongMs,
  });
  server.addService(linkService, handlers(connections, { ...rooms, notices, fences }, settings));
  beside(server, (peer) => connections.authenticate(peer));

  // We end TLS ourselves: the sockets are then ours to cut, and a leaf can be renewed while running.
  const injector = server.createConnectionInjector(ServerCredentials.createInsecure());
  const listener = createTlsServer({
    ALPNProtocols: ['h2'],
    handshakeTimeout: options.handshakeMs,
    ...leaf,
  });
  logAcceptErrors(listener, log);
  listener.on('connection', (socket: Socket) => connections.accept(socket));
  listener.on('secureConnection', (socket: TLSSocket) => {
    socket.on('error', () => socket.destroy());
    injector.injectConnection(socket);
  });
  listener.on('tlsClientError', (_error, socket) => socket.destroy());
  await listening(listener, options).catch((error: unknown) => {
    stopGuarding();
    throw error;
  });

  const narrow = widenWindows();
  const stopRenewing = renewLeaves(
    () => authority.leaf(),
    (leaf) => listener.setSecureContext(leaf),
    log,
  );
  return {
    port: (listener.address() as AddressInfo).port,
    async close() {
      stopRenewing();
      narrow();
      const closed = new Promise<void>((resolve) => listener.close(() => resolve()));
      stopGuarding();
      await connections.close();
      server.forceShutdown();
      await closed;
      notices.close();
      fences.close();
    },
  };
}

function listening(
  listener: EventEmitter & { listen(options: ListenOptions): unknown },
  { host, port }: DoorOptions,
) {
  return new Promise<void>((resolve, reject) => {
    listener.once('error', reject);
    listener.once('listening', () => {
      listener.off('error', reject);
      resolve();
    });
    listener.listen({ port, host, backlog });
  });
}

function handlers(
  connections: ConnectionLimiter,
  rooms: DoorRooms & ConnectRooms,
  settings: ConnectSettings,
): LinkHandlers {
  const { joinTokens, proxies, rates } = rooms;
  const addressOf = (call: { getPeer(): string; metadata: Metadata }): string =>
    proxies.clientOf(peerAddress(call.getPeer()), call.metadata.get('x-forwarded-for').join(','));
  return {
    Enroll(
      call: ServerUnaryCall<EnrollRequest__Output, EnrollResponse>,
      reply: sendUnaryData<EnrollResponse>,
    ) {
      const address = addressOf(call);
      const enrolled = joinTokens.enroll(call.request, address).catch(async (error: unknown) => {
        if (error instanceof AppError && error.code === 'unauthorized') await rates.strike(address);
        throw error;
      });
      enrolled.then(
        (response) => {
          connections.authenticate(call.getPeer());
          reply(null, response);
        },
        (error: unknown) => reply({ code: enrolStatus(error), details: textOf(error) }),
      );
    },
    Connect(stream: ConnectStream) {
      const address = addressOf(stream);
      const peer = stream.getPeer();
      const connection = {
        authenticate: () => connections.authenticate(peer),
        closeSoon: () => connections.closeSoon(peer),
      };
      serveConnect(stream, address, connection, rooms, settings).catch((error: unknown) => {
        rooms.notices.stranger(address, { err: error }, 'a link broke off before its hello');
        stream.emit('error', { code: grpcStatus.INTERNAL, details: textOf(error) });
      });
    },
    Answer(stream: ServerDuplexStream<AnswerRequest__Output, AnswerResponse>) {
      const [id] = stream.metadata.get(callKey);
      const accept = typeof id === 'string' ? rooms.switchboard.get(id) : undefined;
      if (!accept)
        return void stream.emit('error', { code: grpcStatus.NOT_FOUND, details: 'no call has this id' });
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
