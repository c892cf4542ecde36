// Reads what other brokers on the same database change: facts, events, owners of machines, and deliveries.
import type { Logger } from '../../shared/logger.ts';
import type { Cluster } from '../cluster/index.ts';
import type { Deliveries } from '../deliveries/index.ts';
import type { Events } from '../event-log.ts';
import type { Presence } from '../presence/index.ts';
import type { MachineFacts } from '../presence/stored-facts-and-metrics.ts';
import type { State } from '../state/index.ts';

interface Followers {
  state: State;
  events: Events;
  presence: Presence;
  machineFacts: MachineFacts;
}

/** Updates machine facts, events and presence after changes at other brokers, such as a new link. */
export function followOthers(
  cluster: Cluster,
  { state, events, presence, machineFacts }: Followers,
  log: Logger,
): void {
  machineFacts.followOthers(log);
  cluster.follow(() => events.refresh());
  // When another broker takes over a machine, the parts of this broker drop the machine in the order in which they
  // called join(). Presence joins last, because a machine's work must be dropped before its link.
  cluster.join({ adopt: async () => {}, drop: (machineId, spreadMs) => presence.lose(machineId, spreadMs) });
  presence.lookElsewhere((machineId) => cluster.isLinkedElsewhere(machineId));
  cluster.watch((machineIds) => presence.changedElsewhere(machineIds));
  // Facts of other brokers' machines are normally read at intervals. Those of a new machine are read immediately.
  state.watch(() => {
    const unread = [...state.machines.keys()].filter((id) => !machineFacts.of(id));
    const problem =
      'the stored facts of new machines could not be read; trying again at the next change of the state';
    machineFacts.readOthers(unread).catch((err: unknown) => log.debug({ err }, problem));
  });
  // If a machine is removed at another broker, this broker ends its link.
  state.watch(() => presence.removeAllBut(state.machines));
}

/**
 * Other brokers can add deliveries for the webhooks and channels to which this broker delivers. This function reads
 * such deliveries into the queues of this broker.
 */
export async function followDeliveries(
  cluster: Cluster,
  { store }: Deliveries,
  queues: readonly { lookAgain(ids: Iterable<string>): void }[],
): Promise<void> {
  let { last } = await store.since();
  cluster.follow(async () => {
    const { ids, last: next } = await store.since(last);
    last = next;
    for (const queue of queues) queue.lookAgain(ids);
  });
  // follow() finds only new deliveries. A redelivery changes an existing delivery, which only this regular check finds.
  cluster.claims.regularly(async (names) => {
    await store.readFailed();
    for (const queue of queues) queue.lookAgain(names);
  });
}
