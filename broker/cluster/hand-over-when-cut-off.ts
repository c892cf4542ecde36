// Checks whether this broker cannot reach the database but another broker can. If so, sends this broker's agents to
// other brokers, and ends the streams and terminals of its clients.
import { every } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import { databaseUnavailable } from '../history/group-commit.ts';
import type { Cluster } from './index.ts';
import type { Peer } from './peers/owner-interfaces.ts';

/** Path at the peer port. A broker that can reach the database answers with 204. */
export const hasDatabasePath = '/peer/has-database';
/**
 * While this broker cannot reach the database, it asks the other brokers at this interval, in milliseconds, whether
 * they can.
 */
const askMs = 2_000;

interface Services {
  cluster: Pick<Cluster, 'isCutOff' | 'lastKnownPeers' | 'ownCount' | 'handOver'>;
  /**
   * Modules that serve streams about many machines, such as events. Streams about a single machine are not in this
   * list, because `cluster.handOver` ends them.
   */
  streams: readonly { endStreams(error: unknown): void }[];
  /** Asks another broker whether it can reach the database. Never rejects. */
  ask(peer: Peer): Promise<boolean>;
  /**
   * Maximum number of milliseconds until an agent links to another broker. Each agent waits a random time up to this
   * limit.
   */
  spreadMs: number;
  log: Logger;
}

/**
 * Regularly checks whether agents and clients must go to another broker, and if so ends their links and streams. Call
 * the returned function to stop.
 */
export function handOverWhenCutOff({ cluster, streams, ask, spreadMs, log }: Services): () => void {
  let isAsking = false;
  let hasHandedOver = false;
  const look = async (): Promise<void> => {
    if (!cluster.isCutOff) hasHandedOver = false;
    if (isAsking || !cluster.isCutOff || (hasHandedOver && cluster.ownCount === 0)) return;
    isAsking = true;
    const peer = await firstWithDatabase(cluster.lastKnownPeers(), ask);
    isAsking = false;
    // If no broker can reach the database, agents and clients stay connected.
    if (!peer || !cluster.isCutOff) return;
    log.warn(
      { peer: peer.brokerId, machines: cluster.ownCount },
      'this broker cannot reach the database, but another broker can: this broker ends its links and streams, so that agents and clients connect to another broker',
    );
    hasHandedOver = true;
    cluster.handOver(spreadMs);
    for (const part of streams) part.endStreams(databaseUnavailable());
  };
  return every(askMs, () => {
    look().catch((err: unknown) =>
      log.error({ err }, 'agents could not be asked to link to another broker; trying again in 2 s'),
    );
  });
}

/** Returns the first broker that reports that it can reach the database; undefined if none can. Never rejects. */
async function firstWithDatabase(peers: readonly Peer[], ask: Services['ask']): Promise<Peer | undefined> {
  const asked = peers.map(async (peer) => {
    if (await ask(peer)) return peer;
    throw new Error(`${peer.brokerId} cannot reach the database`);
  });
  return await Promise.any(asked).catch(() => undefined);
}
