// The REST handlers of upgrades. An upgrade installs another version of the agent on many machines, a wave at a time.

import type { Api, Caller, Handlers, Reply } from '../../shared/api/route-table.ts';
import type { MachineId, UpgradeId } from '../../shared/api/shared-schemas.ts';
import { upgrades as routes } from '../../shared/api/upgrades.ts';
import { iso, isoOrNull, now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import type { Logger } from '../../shared/logger.ts';
import { version as brokerVersion } from '../../shared/version.ts';
import { isRefusal, packageFor } from '../agent-packages/can-machine-upgrade.ts';
import type { Row } from '../history/history-database.ts';
import { allOf, type Condition, filtersOf, pageOfRows, reachableOnly } from '../list-pages-and-filters.ts';
import { machinesNamedOrTagged } from '../machines/machines-by-id-or-tag.ts';
import { Rollout } from './upgrade-in-waves.ts';
import type { UpgradeServices } from './upgrade-one-machine.ts';
import { inOtherUpgrade, UpgradeRecords, upgradeToJson } from './upgrade-records.ts';
import {
  type Member,
  memberColumns,
  memberFromRow,
  type Upgrade,
  upgradeColumns,
  upgradeFromRow,
} from './upgrade-tables.ts';

type Served = Reply<Api['upgrades']['get']>;

export class Upgrades {
  readonly #services: UpgradeServices;
  readonly #records: UpgradeRecords;
  readonly #rollout: Rollout;

  private constructor(services: UpgradeServices, records: UpgradeRecords, log: Logger) {
    this.#services = services;
    this.#records = records;
    this.#rollout = new Rollout(services, records, log);
  }

  /**
   * Opens the stored upgrades. An upgrade is deleted `keepMs` milliseconds after it began, but not before it has ended.
   */
  static async open(services: UpgradeServices, keepMs: number, log: Logger): Promise<Upgrades> {
    return new Upgrades(services, await UpgradeRecords.open(services, keepMs), log);
  }

  /** Continues the upgrades that an earlier broker process began. */
  start(): Promise<void> {
    return this.#rollout.start();
  }

  stop(): void {
    this.#rollout.stop();
  }

  /** Returns the machines of an upgrade; no machines if the upgrade does not exist. */
  machinesOf(id: string): Promise<MachineId[]> {
    return this.#records.machinesOf(id);
  }

  readonly handlers: Handlers['upgrades'] = {
    create: async (input, caller) => {
      const { machine_ids, tags, version = brokerVersion, ...plan } = input;
      const machines = machinesNamedOrTagged({ machine_ids, tags }, caller, this.#services.state);
      const id = newId('upgrade') as UpgradeId;
      const created_at = now();
      const members = this.#members(id, machines, version, await this.#records.busyMachines());
      const waves = divide(members, plan.wave);
      const upgrade: Upgrade = {
        ...{ id, status: 'running', version, ...plan, current_wave: 0, waves, next_wave_at: null },
        ...{ failures: 0, created_at, finished_at: null, requested_by: caller.key_id },
      };
      await this.#records.insert(upgrade, members, (transaction, some, more) =>
        caller.commit(transaction, { upgrade_id: id }, some, more),
      );
      this.#rollout.begin(upgrade);
      return this.#serialize(upgrade, caller);
    },
    list: async (input, caller) => {
      const reachable = caller.reachable();
      const page = await pageOfRows(
        this.#records.history,
        { table: 'upgrades', columns: upgradeColumns },
        [
          reachable && hasMember(reachableOnly(reachable)),
          input.machine_id && hasMember(['machine_id = ?', input.machine_id]),
          ...filtersOf(routes.list, input, { machine_id: undefined }),
        ],
        input,
      );
      const items = page.items.map((row) => this.#serialize(upgradeFromRow(row), caller));
      return { items: await Promise.all(items), total: page.total };
    },
    get: async ({ upgrade_id }, caller) => this.#serialize(await this.#records.get(upgrade_id), caller),
    machines: async (input, caller) => {
      const { upgrade_id, ...query } = input;
      const { items, total } = await pageOfRows(
        this.#records.history,
        { table: 'upgrade_machines', columns: memberColumns, tie: ['machine_id'] },
        [
          ['upgrade_id = ?', upgrade_id],
          reachableOnly(caller.reachable()),
          ...filtersOf(routes.machines, query),
        ],
        query,
      );
      const seesWaves = !(await this.#records.hasOthers(upgrade_id, caller.reachable()));
      const toJson = (row: Row) => this.#memberToJson(memberFromRow(row), seesWaves);
      return { items: items.map(toJson), total };
    },
    cancel: async ({ upgrade_id: id }, caller) => {
      const { status } = await this.#records.get(id);
      if (!(await this.machinesOf(id)).every((machine) => caller.reaches(machine))) {
        const message = `upgrade ${id} has machines that this key is not allowed to use: to cancel it, use a key that may use all of them`;
        throw new AppError('forbidden', message, { upgrade_id: id });
      }
      if (status === 'running') {
        await this.#records.cancel(id, (transaction) => caller.commit(transaction));
        this.#rollout.advance(id);
      }
      return this.#serialize(await this.#records.get(id), caller);
    },
  };

  async #serialize(upgrade: Upgrade, caller: Caller): Promise<Served> {
    const reachable = caller.reachable();
    const counts = await this.#records.counts(upgrade.id, reachable);
    return upgradeToJson(upgrade, counts, !(await this.#records.hasOthers(upgrade.id, reachable)));
  }

  #memberToJson({ upgrade_id: _, until: __, ...member }: Member, seesWaves: boolean) {
    return {
      ...member,
      wave: seesWaves ? member.wave : null,
      machine_name: this.#services.state.machines.get(member.machine_id)?.name ?? '',
      created_at: iso(member.created_at),
      started_at: isoOrNull(member.started_at),
      finished_at: isoOrNull(member.finished_at),
    };
  }

  /**
   * Creates the list of the machines of a new upgrade. Machines that cannot be upgraded have the status `skipped` from
   * the beginning.
   */
  #members(
    upgrade_id: UpgradeId,
    machines: readonly MachineId[],
    version: string,
    busy: ReadonlySet<string>,
  ): Member[] {
    const { state, machineFacts, packages, cluster } = this.#services;
    const catalog = packages.catalog();
    const created_at = now();
    const of = { upgrade_id, wave: 0, commands: null, created_at, started_at: null, until: null };
    return machines.flatMap((machine_id): Member[] => {
      const machine = state.machines.get(machine_id);
      if (!machine) return [];
      const facts = machineFacts.of(machine_id);
      const found = packageFor(machine, facts, version, catalog);
      // Only the broker that owns a machine has the current facts of the machine. Machines of other brokers are
      // therefore not refused here; their owners check them when the wave begins.
      const isElsewhere = cluster?.ownerElsewhere(machine_id) !== undefined;
      const refused =
        isRefusal(found) && !isElsewhere ? found : busy.has(machine_id) ? inOtherUpgrade : undefined;
      const from_version = facts?.agent_version ?? '';
      const one = { ...of, machine_id, from_version };
      if (refused) return [{ ...one, status: 'skipped', ...refused, finished_at: created_at }];
      return [{ ...one, status: 'waiting', reason: null, message: null, finished_at: null }];
    });
  }
}

/** Sets the wave of each machine that can be upgraded. Returns the number of waves. */
function divide(members: Member[], wave: string): number {
  const upgraded = members.filter(({ status }) => status === 'waiting');
  const amount = Number.parseInt(wave, 10);
  const size = wave.endsWith('%') ? Math.max(1, Math.ceil((upgraded.length * amount) / 100)) : amount;
  upgraded.forEach((member, at) => {
    member.wave = Math.floor(at / size) + 1;
  });
  return Math.ceil(upgraded.length / size);
}

/** Returns an SQL condition that is true for upgrades with at least one machine that meets the condition `such`. */
function hasMember(such: Condition): Condition {
  const [where, values] = allOf([['upgrade_id = upgrades.id'], such]);
  return [`EXISTS (SELECT 1 FROM upgrade_machines WHERE ${where})`, ...values];
}
