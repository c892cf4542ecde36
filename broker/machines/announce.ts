// machine.online and machine.offline: an event each way, two seconds after the new state, so that flapping stays quiet.
import { after, iso } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Events } from '../events.ts';
import type { History } from '../history.ts';
import type { Presence } from '../link/presence.ts';
import type { State } from '../state/index.ts';
import type { Vitals } from './vitals.ts';

const settleMs = 2_000;
/** After a broker start every agent gets this long to come back before it counts as gone. */
const graceAtStartMs = 45_000;

const tables = [
  'CREATE TABLE announced (machine_id TEXT PRIMARY KEY, online INTEGER NOT NULL) WITHOUT ROWID',
];

/** Watches presence and records events; the result stops it. */
export function announce(
  rooms: { state: State; history: History; events: Events; presence: Presence; vitals: Vitals },
  log: Logger,
): () => void {
  const { state, history, events, presence, vitals } = rooms;
  history.migrate('announced', tables);
  const rows = history.sql('SELECT machine_id, online FROM announced').all();
  const announced = new Map(rows.map((row) => [String(row.machine_id), row.online === 1]));
  const waiting = new Map<string, () => void>();
  let stopped = false;

  function settle(machineId: string, ms: number): void {
    waiting.get(machineId)?.();
    waiting.set(
      machineId,
      after(ms, () => {
        waiting.delete(machineId);
        tell(machineId).catch((error: unknown) => {
          log.error({ err: error, machine_id: machineId }, 'event not recorded; trying again');
          if (!stopped) settle(machineId, settleMs);
        });
      }),
    );
  }

  async function tell(machineId: string): Promise<void> {
    const machine = state.machines.get(machineId);
    const online = presence.online(machineId);
    if (!machine || (announced.get(machineId) ?? false) === online) return;
    const facts = vitals.of(machineId);
    await history.write((transaction) => {
      history.sql('INSERT OR REPLACE INTO announced VALUES (?, ?)').run(machineId, online ? 1 : 0);
      events.emit(transaction, online ? 'machine.online' : 'machine.offline', machine, {
        last_seen: iso(facts?.last_seen),
        hostname: facts?.hostname,
        ip: facts?.ip,
        agent_version: facts?.agent_version,
      });
    });
    announced.set(machineId, online);
  }

  const stopWatching = presence.watch((machineId) => settle(machineId, settleMs));
  for (const [machineId, online] of announced) if (online) settle(machineId, graceAtStartMs);

  return () => {
    stopped = true;
    stopWatching();
    for (const cancel of waiting.values()) cancel();
  };
}
