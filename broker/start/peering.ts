// Connects a broker with the other brokers of its database: the client and the server of the peer port.
import { ConnectionLimiter, connectionLimits } from '../connection-limiter.ts';
import type { StreamsService } from '../grpc-api/index.ts';
import { type AppOptions, createHttpServer } from '../http/server.ts';
import { renewLeaves } from '../link/certificate-authority.ts';
import type { Opening, Parts } from './create-parts.ts';

export type Peering = Awaited<ReturnType<typeof createPeering>>;

type Services = Pick<Parts, 'authority' | 'lookups' | 'state' | 'cluster'> & {
  owners: NonNullable<Parts['owners']>;
};

/**
 * Creates the client for other brokers. The code of client and server is loaded only here, because most
 * brokers run alone.
 */
export async function createPeering(
  { closers, log }: Opening,
  { owners, lookups, state, authority, cluster }: Services,
) {
  const [{ Peers }, { PeerClient }, { PeerCalls }, { listenForPeers }, forwarded] = await Promise.all([
    import('../cluster/peers/route-to-owner.ts'),
    import('../cluster/peers/peer-http-client.ts'),
    import('../cluster/peers/peer-grpc-client.ts'),
    import('../cluster/peers/peer-port.ts'),
    import('../cluster/peers/forwarded-client-header.ts'),
  ]);
  const leaf = await authority.peer();
  const clients = { http: new PeerClient(leaf, log), grpc: new PeerCalls(leaf) };
  closers.push(() => {
    clients.http.close();
    clients.grpc.close();
  });
  const peers = new Peers({ owners, lookups, state }, clients);
  const { clientHeader, describedClient } = forwarded;
  const clientOf = (header: unknown) =>
    describedClient(typeof header === 'string' ? header : '', { state, cluster });
  return {
    peers,
    /** Opens the peer port. Rejects with a system error if the port cannot listen on the address. */
    async listen(
      app: AppOptions,
      streams: StreamsService,
      where: { host: string; port: number },
      silentMs: number,
    ) {
      const limits = connectionLimits().http;
      const connections = new ConnectionLimiter({ ...limits, isShared: () => true });
      const http = createHttpServer(
        { ...app, peers: peers.atPeerPort },
        {
          connections,
          forwardedClient: ({ headers }) => clientOf(headers[clientHeader]),
          silentMs,
          hsts: false,
        },
      );
      const port = await listenForPeers({
        ...{ ...where, leaf, handshakeMs: silentMs, connections, http, log },
        addServices: (server) =>
          streams.addTo(server, {
            peers: peers.atPeerPort,
            forwardedClient: (call) => clientOf(call.get(clientHeader)[0]),
          }),
      });
      const renew = (next: typeof leaf): void => {
        for (const one of [port, clients.http, clients.grpc]) one.renew(next);
      };
      closers.push(renewLeaves(() => authority.peer(), renew, log));
      return port;
    },
  };
}
