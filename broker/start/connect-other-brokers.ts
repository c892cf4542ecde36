// Connects a broker with the other brokers on its database, through the clients and the server of the peer port.

import { renewLeaves } from '../ca-and-broker-certificates.ts';
import { handOverWhenCutOff } from '../cluster/hand-over-when-cut-off.ts';
import type { Owners, Peer } from '../cluster/peers/owner-interfaces.ts';
import { ConnectionLimiter, connectionLimits } from '../connection-limiter.ts';
import type { StreamsService } from '../grpc-api/index.ts';
import type { AppOptions } from '../http/application.ts';
import { createHttpServer } from '../http/server.ts';
import type { Opening, Parts } from './create-parts.ts';
import type { PeerClients } from './create-peer-clients.ts';

export type Peering = Awaited<ReturnType<typeof createPeering>>;

type ClientFinder = NonNullable<Parameters<StreamsService['addTo']>[1]['forwardedClient']>;

type Services = Pick<
  Parts,
  'authority' | 'lookups' | 'state' | 'cluster' | 'presence' | 'events' | 'live'
> & {
  owners: Owners;
  clients: PeerClients;
  /** An agent that is asked to reconnect waits a random time of at most this many milliseconds. */
  spreadMs: number;
};

/** Creates the parts that forward requests to other brokers and accept requests from them. */
export async function createPeering(
  { closers, log }: Opening,
  { owners, clients, lookups, state, authority, cluster, presence, events, live, spreadMs }: Services,
) {
  const [{ Peers }, { listenForPeers }, forwarded, { machineHeader }, { addFileWriter }] = await Promise.all([
    import('../cluster/peers/route-to-owner.ts'),
    import('../cluster/peers/peer-port.ts'),
    import('../cluster/peers/forwarded-client-header.ts'),
    import('../cluster/peers/grpc-calls-to-peers.ts'),
    import('../grpc-api/write-files-for-brokers.ts'),
  ]);
  const leaf = await authority.peer();
  if (cluster) {
    const ask = (peer: Peer): Promise<boolean> => clients.http.hasDatabase(peer);
    closers.push(handOverWhenCutOff({ cluster, streams: [events, live], ask, spreadMs, log }));
  }
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
      const connections = new ConnectionLimiter({ ...limits, deadlineMs: silentMs, isShared: () => true });
      const http = createHttpServer(
        { ...app, peers: peers.atPeerPort },
        {
          connections,
          forwardedClient: ({ headers }) => clientOf(headers[clientHeader]),
          hasDatabase: cluster && (() => cluster.hasDatabase()),
          silentMs,
          hsts: false,
        },
      );
      const port = await listenForPeers({
        ...{ ...where, leaf, connections, http, log },
        addServices(server) {
          const forwardedClient: ClientFinder = (call) => clientOf(call.get(clientHeader)[0]);
          streams.addTo(server, { peers: peers.atPeerPort, forwardedClient });
          addFileWriter(server, { presence, state, machineHeader, clientOf: forwardedClient, log });
        },
      });
      const renew = (next: typeof leaf): void => {
        for (const one of [port, clients.http, clients.grpc]) one.renew(next);
      };
      closers.push(renewLeaves(() => authority.peer(), renew, log));
      return port;
    },
  };
}
