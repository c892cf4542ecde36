// The tables of upgrades and of their machines, and the types of their rows.
import type { Api, Reply } from '../../shared/api/route-table.ts';
import type { KeyId, MachineId, UpgradeId } from '../../shared/api/shared-schemas.ts';
import type { MachineUpgradeStatus, UpgradeReason } from '../../shared/api/upgrades.ts';
import type { Row } from '../history/history-database.ts';

type Served = Reply<Api['upgrades']['get']>;

/** An upgrade as the history stores it; times are in milliseconds since 1970. */
export interface Upgrade
  extends Omit<
    Served,
    'total' | 'counts' | 'created_at' | 'finished_at' | 'next_wave_at' | 'current_wave' | 'waves'
  > {
  id: UpgradeId;
  requested_by: KeyId;
  created_at: number;
  finished_at: number | null;
  next_wave_at: number | null;
  /** Number of the last wave that has begun, from 1; 0 before the first one. */
  current_wave: number;
  waves: number;
  /** Number of machines that have failed. */
  failures: number;
}

/** A machine of an upgrade. */
export interface Member {
  upgrade_id: UpgradeId;
  machine_id: MachineId;
  /** Number of the machine's wave, from 1; 0 if the machine was skipped when the upgrade was created. */
  wave: number;
  status: MachineUpgradeStatus;
  reason: UpgradeReason | null;
  message: string | null;
  from_version: string;
  commands: number | null;
  created_at: number;
  started_at: number | null;
  /**
   * Time until which the broker waits for a machine that is offline or restarts, in milliseconds since 1970; null if
   * the broker does not wait.
   */
  until: number | null;
  finished_at: number | null;
}

/** SQL that creates the tables, one element for each migration step. */
export const tables = [
  `CREATE TABLE upgrades (
    id TEXT NOT NULL UNIQUE, status TEXT NOT NULL, version TEXT NOT NULL, wave TEXT NOT NULL, pause INTEGER NOT NULL,
    max_failures INTEGER NOT NULL, running TEXT NOT NULL, wait_for INTEGER NOT NULL, queue_for INTEGER NOT NULL,
    probe_timeout INTEGER NOT NULL, current_wave INTEGER NOT NULL, waves INTEGER NOT NULL, next_wave_at INTEGER,
    failures INTEGER NOT NULL, created_at INTEGER NOT NULL, finished_at INTEGER, requested_by TEXT NOT NULL
  );
  CREATE INDEX upgrades_by_time ON upgrades (created_at);
  CREATE INDEX upgrades_open ON upgrades (id) WHERE finished_at IS NULL;
  CREATE TABLE upgrade_machines (
    upgrade_id TEXT NOT NULL, machine_id TEXT NOT NULL, wave INTEGER NOT NULL, status TEXT NOT NULL, reason TEXT,
    message TEXT, from_version TEXT NOT NULL, commands INTEGER, created_at INTEGER NOT NULL, started_at INTEGER,
    until INTEGER, finished_at INTEGER
  );
  CREATE UNIQUE INDEX upgrade_machines_by_id ON upgrade_machines (upgrade_id, machine_id);
  CREATE UNIQUE INDEX upgrade_machines_open ON upgrade_machines (machine_id) WHERE finished_at IS NULL;
  CREATE INDEX upgrade_machines_by_wave ON upgrade_machines (upgrade_id, wave, status) WHERE finished_at IS NULL;
  CREATE INDEX upgrade_machines_by_status ON upgrade_machines (upgrade_id, status);
  CREATE INDEX upgrade_machines_by_machine ON upgrade_machines (machine_id)`,
];

export const upgradeColumns =
  'id, status, version, wave, pause, max_failures, running, wait_for, queue_for, probe_timeout, current_wave, waves, next_wave_at, failures, created_at, finished_at, requested_by';
export const memberColumns =
  'upgrade_id, machine_id, wave, status, reason, message, from_version, commands, created_at, started_at, until, finished_at';

/** Converts a row to an upgrade. Each of its fields is stored in the column of the same name. */
export function upgradeFromRow(row: Row): Upgrade {
  return row as unknown as Upgrade;
}

/** Converts a row to a machine of an upgrade. Each of its fields is stored in the column of the same name. */
export function memberFromRow(row: Row): Member {
  return row as unknown as Member;
}
