// The parts of the broker that sessions use.
import type { Deed } from '../../shared/api/audit.ts';
import type { Caller, Journal } from '../../shared/api/route-table.ts';
import type { MachineId } from '../../shared/api/shared-schemas.ts';
import type { Cluster } from '../cluster/index.ts';
import type { Events } from '../event-log.ts';
import type { History } from '../history/history-database.ts';
import type { Presence } from '../presence/index.ts';
import type { MachineFacts } from '../presence/stored-facts-and-metrics.ts';
import type { State } from '../state/index.ts';

export interface SessionServices {
  /** The other brokers on the same database; undefined with a single broker. */
  cluster?: Pick<Cluster, 'join'> | undefined;
  state: State;
  history: History;
  events: Events;
  presence: Presence;
  machineFacts: MachineFacts;
  /** Adds a row to the audit log, in the transaction of the change. */
  audit(journal: Journal, deed: Deed): void;
  /**
   * Calls `end` once the key may no longer attach to sessions of the machine. The returned function stops the watch.
   */
  whileAttachable(
    intent: Pick<Caller, 'key_id' | 'login_id'> & { machine_id: MachineId },
    end: () => void,
  ): () => void;
}
