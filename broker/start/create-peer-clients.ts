// The clients with which a broker calls the peer ports of other brokers.
import { every } from '../../shared/clock.ts';
import type { Authority } from '../ca-and-broker-certificates.ts';
import type { Owners } from '../cluster/peers/owner-interfaces.ts';
import type { StoreOpening } from './open-state-and-history.ts';

export type PeerClients = Awaited<ReturnType<typeof createPeerClients>>;

/**
 * Milliseconds between two checks of whether other brokers can be reached. A broker is checked only while an HTTP
 * request to it is in progress. gRPC connections are checked by pings instead.
 */
const checkMs = 4_000;

/** Creates the clients that call other brokers. Their code is loaded only here, because most brokers run alone. */
export async function createPeerClients(
  { closers, log }: Pick<StoreOpening, 'closers' | 'log'>,
  authority: Authority,
  owners: Owners,
) {
  const [{ PeerClient }, { PeerCalls }, { createOtherBrokers }] = await Promise.all([
    import('../cluster/peers/forward-http-to-peer.ts'),
    import('../cluster/peers/grpc-calls-to-peers.ts'),
    import('../cluster/peers/call-owning-broker.ts'),
  ]);
  const leaf = await authority.peer();
  const clients = { http: new PeerClient(leaf, owners, log), grpc: new PeerCalls(leaf, owners) };
  const stopWatching = owners.watch(() => {
    clients.http.endLost();
    clients.grpc.endLost();
  });
  const stopChecking = every(checkMs, () => void clients.http.endUnreachable());
  closers.push(() => {
    stopChecking();
    stopWatching();
    clients.http.close();
    clients.grpc.close();
  });
  return { ...clients, others: createOtherBrokers(owners, clients) };
}
