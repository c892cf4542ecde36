// A broker that cannot reach the database, although another broker can, asks its agents to link to another broker. If
// no broker can reach the database, the agents stay, because no other broker could take them.
import { every } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Presence } from '../presence/index.ts';
import type { Cluster } from './owners.ts';
import type { Peer } from './peers/owner-lookup.ts';

/** Path at the peer port. A broker that can reach the database answers with 204. */
export const hasDatabasePath = '/peer/has-database';
/** Milliseconds between two rounds in which all other brokers are asked. */
const askMs = 2_000;

interface Services {
  cluster: Pick<Cluster, 'isCutOff' | 'lastKnownPeers'>;
  presence: Pick<Presence, 'count' | 'drain'>;
  /** Asks another broker whether it can reach the database. Never rejects. */
  ask(peer: Peer): Promise<boolean>;
  /** The agents link to another broker at random times within this number of milliseconds. */
  spreadMs: number;
  log: Logger;
}

/** Begins to watch for the loss of the database. Call the returned function to stop. */
export function handOverWhenCutOff({ cluster, presence, ask, spreadMs, log }: Services): () => void {
  let isAsking = false;
  const look = async (): Promise<void> => {
    if (isAsking || !cluster.isCutOff || presence.count === 0) return;
    isAsking = true;
    const peer = await firstWithDatabase(cluster.lastKnownPeers(), ask);
    isAsking = false;
    if (!peer || !cluster.isCutOff) return;
    log.warn(
      { peer: peer.brokerId, machines: presence.count },
      'this broker cannot reach the database, but another broker can: the agents of this broker are asked to link to another broker',
    );
    presence.drain(spreadMs);
  };
  return every(askMs, () => {
    look().catch((err: unknown) => log.error({ err }, 'agents could not be asked to link to another broker'));
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
