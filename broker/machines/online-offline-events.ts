// Records the events machine.online and machine.offline two seconds after a change. A shorter interruption causes no
// event.
import { after, iso } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Cluster } from '../cluster/index.ts';
import type { Events } from '../event-log.ts';
import type { History } from '../history/history-database.ts';
import { allOf, reachableOnly } from '../list-pages-and-filters.ts';
import type { Presence } from '../presence/index.ts';
import type { MachineFacts } from '../presence/stored-facts-and-metrics.ts';
import type { Machine, State } from '../state/index.ts';

const settleMs = 2_000;
/**
 * Milliseconds within which agents must connect after a start of the broker, or after the broker has taken over their
 * machines. Without a link by then, a machine counts as offline.
 */
const graceAtStartMs = 45_000;

const tables = [
  'CREATE TABLE announced (machine_id TEXT PRIMARY KEY, online INTEGER NOT NULL) WITHOUT ROWID',
];

interface Services {
  state: State;
  history: History;
  events: Events;
  presence: Presence;
  /** The other brokers of the database; undefined if there is a single broker. */
  cluster?: Pick<Cluster, 'join'> | undefined;
  machineFacts: MachineFacts;
}

/** Watches presence and records the events, until the returned function is called. */
export async function recordMachineEvents(services: Services, log: Logger): Promise<() => void> {
  const { state, history, presence, cluster } = services;
  await history.migrate('announced', tables);
  const recorded = new Map<string, boolean>();
  const waiting = new Map<string, () => void>();
  let stopped = false;

  function recordIn(ms: number, machineId: string): void {
    if (stopped) return;
    waiting.get(machineId)?.();
    const cancel = after(ms, () => {
      waiting.delete(machineId);
      record(machineId).catch((error: unknown) => {
        log.error(
          { err: error, machine_id: machineId },
          'the event machine.online or machine.offline could not be written; trying again',
        );
        recordIn(settleMs, machineId);
      });
    });
    waiting.set(machineId, cancel);
  }

  async function record(machineId: string): Promise<void> {
    const machine = state.machines.get(machineId);
    const online = presence.online(machineId);
    if (!machine || !history.owns(machineId) || (recorded.get(machineId) ?? false) === online) return;
    // Set before the write, so that a change during the write is compared with the event that is being written.
    recorded.set(machineId, online);
    await writeEvent(services, machine, online).catch((error: unknown) => {
      recorded.set(machineId, !online);
      throw error;
    });
  }

  /** Reads the last recorded event of these machines, or of all machines. Another broker may have recorded it. */
  async function load(machineIds?: readonly string[]): Promise<void> {
    const [where, values] = allOf([reachableOnly(machineIds)]);
    const rows = await history.all(`SELECT machine_id, online FROM announced WHERE ${where}`, ...values);
    for (const id of machineIds ?? []) recorded.delete(id);
    for (const row of rows) {
      const id = String(row.machine_id);
      recorded.set(id, row.online === 1);
      if (row.online === 1) recordIn(graceAtStartMs, id);
    }
  }

  if (cluster) cluster.join({ adopt: load, drop: (machineId) => waiting.get(machineId)?.() });
  else await load();
  const stopWatching = presence.watch((machineId) => recordIn(settleMs, machineId));

  return () => {
    stopped = true;
    stopWatching();
    for (const cancel of waiting.values()) cancel();
  };
}

/** Writes the event, and the row by which a broker that starts later knows it. */
function writeEvent(
  { history, events, machineFacts }: Services,
  machine: Machine,
  online: boolean,
): Promise<void> {
  const { id } = machine;
  const { last_seen, hostname, ip, agent_version } = machineFacts.of(id) ?? {};
  const data = { last_seen: iso(last_seen), hostname, ip, agent_version };
  return history.write((transaction) => {
    transaction.about(id);
    transaction.put('announced', 'machine_id', { machine_id: id, online: Number(online) });
    events.emit(transaction, online ? 'machine.online' : 'machine.offline', machine, data);
  });
}
