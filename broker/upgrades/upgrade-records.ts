// Stores upgrades and their machines in the history. A step of a machine and the event about it are committed together.
import type { EventType } from '../../shared/api/events.ts';
import type { Api, Journal, Reply } from '../../shared/api/route-table.ts';
import type { MachineId, UpgradeId } from '../../shared/api/shared-schemas.ts';
import { iso, isoOrNull, now } from '../../shared/clock.ts';
import type { Events } from '../event-log.ts';
import { notFound } from '../find-or-not-found.ts';
import { type History, type HistoryTransaction, textIn } from '../history/history-database.ts';
import { allOf, reachableOnly } from '../list-pages-and-filters.ts';
import type { State } from '../state/index.ts';
import {
  type Member,
  memberColumns,
  memberFromRow,
  tables,
  type Upgrade,
  upgradeColumns,
  upgradeFromRow,
} from './upgrade-tables.ts';

type Served = Reply<Api['upgrades']['get']>;

/**
 * An upgrade that is not stored completely after this number of milliseconds is removed at the next start of a broker.
 */
const incompleteMs = 600_000;
const sliceSize = 250;

interface RecordContext {
  state: State;
  history: History;
  events: Events;
}

export class UpgradeRecords {
  readonly history: History;
  readonly #context: RecordContext;

  private constructor(context: RecordContext) {
    this.#context = context;
    this.history = context.history;
  }

  /** Opens the tables. An upgrade is deleted `keepMs` milliseconds after it began, but not before it has ended. */
  static async open(context: RecordContext, keepMs: number): Promise<UpgradeRecords> {
    const { history } = context;
    await history.migrate('upgrades', tables);
    const where = 'finished_at IS NOT NULL';
    history.retain({ table: 'upgrades', column: 'created_at', keepMs, where });
    history.retain({ table: 'upgrade_machines', column: 'created_at', keepMs, where });
    const records = new UpgradeRecords(context);
    await records.#removeIncomplete();
    return records;
  }

  /**
   * Stores the machines of an upgrade in slices, and the upgrade itself with the last slice. Calls `commit` with the
   * machines of each slice.
   */
  async insert(
    upgrade: Upgrade,
    members: readonly Member[],
    commit: (transaction: HistoryTransaction, machines: MachineId[], more: boolean) => void,
  ): Promise<void> {
    try {
      for (let at = 0, more = true; more; at += sliceSize) {
        const slice = members.slice(at, at + sliceSize);
        more = at + sliceSize < members.length;
        await this.history.write(async (transaction) => {
          // Another request may have stored an upgrade of these machines in the meantime.
          const busy = await busyIn(transaction);
          for (const member of slice) {
            const skipped = member.finished_at === null &&
              busy.has(member.machine_id) && {
                ...{ wave: 0, status: 'skipped', ...inOtherUpgrade, finished_at: member.created_at },
              };
            transaction.put('upgrade_machines', 'upgrade_id, machine_id', { ...member, ...skipped });
          }
          if (!more) {
            transaction.put('upgrades', 'id', { ...upgrade });
            this.#emit('upgrade.started', upgrade, undefined, transaction);
          }
          commit(
            transaction,
            slice.map(({ machine_id }) => machine_id),
            more,
          );
        });
      }
    } catch (error) {
      await this.#removeMachinesOf(upgrade.id).catch(() => {});
      throw error;
    }
  }

  /** Removes the machines of upgrades that were not stored completely because of a crash. */
  async #removeIncomplete(): Promise<void> {
    const rows = await this.history.all(
      // Only old rows are removed: newer ones may belong to an upgrade that another broker is just storing.
      `SELECT DISTINCT upgrade_id FROM upgrade_machines WHERE finished_at IS NULL AND created_at < ?
       AND upgrade_id NOT IN (SELECT id FROM upgrades)`,
      now() - incompleteMs,
    );
    for (const row of rows) await this.#removeMachinesOf(textIn(row, 'upgrade_id'));
  }

  async #removeMachinesOf(id: string): Promise<void> {
    const remove = 'DELETE FROM upgrade_machines WHERE upgrade_id = ?';
    await this.history.write((transaction) => transaction.run(remove, id));
  }

  async get(id: string): Promise<Upgrade> {
    const row = await this.history.get(`SELECT ${upgradeColumns} FROM upgrades WHERE id = ?`, id);
    if (row) return upgradeFromRow(row);
    throw notFound('upgrade', id);
  }

  /**
   * Finds a machine whose upgrade has ended before the machine reported the outcome; undefined if there is none. The
   * machine may still report the outcome.
   */
  async endedWithoutOutcome(id: string, machineId: MachineId): Promise<Member | undefined> {
    const sql = `SELECT ${memberColumns} FROM upgrade_machines
      WHERE upgrade_id = ? AND machine_id = ? AND finished_at IS NOT NULL AND ${withoutOutcome}`;
    const row = await this.history.get(sql, id, machineId);
    return row && memberFromRow(row);
  }

  /** All upgrades that have not ended. */
  async open(): Promise<Upgrade[]> {
    const rows = await this.history.all(
      `SELECT ${upgradeColumns} FROM upgrades WHERE finished_at IS NULL ORDER BY rowid`,
    );
    return rows.map(upgradeFromRow);
  }

  /** Returns the machines of an upgrade; no machines if the upgrade does not exist. */
  async machinesOf(id: string): Promise<MachineId[]> {
    const rows = await this.history.all('SELECT machine_id FROM upgrade_machines WHERE upgrade_id = ?', id);
    return rows.map((row) => textIn(row, 'machine_id') as MachineId);
  }

  /** Returns the machines whose upgrade has not ended. */
  busyMachines(): Promise<Set<string>> {
    return busyIn(this.history);
  }

  /**
   * Returns the machines whose wave has begun and whose upgrade has not ended, either all or those among `machineIds`.
   */
  async started(machineIds?: readonly string[]): Promise<Member[]> {
    const [where, values] = allOf([reachableOnly(machineIds)]);
    const columns = memberColumns.replaceAll(/\w+/g, 'm.$&');
    const rows = await this.history.all(
      `SELECT ${columns} FROM upgrade_machines m JOIN upgrades u ON u.id = m.upgrade_id
       WHERE m.finished_at IS NULL AND m.wave <= u.current_wave AND ${where.replace('machine_id', 'm.machine_id')}`,
      ...values,
    );
    return rows.map(memberFromRow);
  }

  /**
   * Stores the new status of a machine. Stores nothing and returns false if the machine's upgrade has ended, for
   * example because another broker cancelled it. Exception: the outcome that the machine reports is also stored if its
   * upgrade has ended without one.
   */
  step(member: Member, upgrade: Upgrade): Promise<boolean> {
    const { upgrade_id, machine_id, status, reason, message, from_version } = member;
    const { commands, started_at, until, finished_at } = member;
    const isOutcome = status === 'upgraded' || status === 'failed';
    const change = `UPDATE upgrade_machines SET status = ?, reason = ?, message = ?, from_version = ?, commands = ?,
      started_at = ?, until = ?, finished_at = ?
      WHERE upgrade_id = ? AND machine_id = ? AND (finished_at IS NULL${isOutcome ? ` OR ${withoutOutcome}` : ''}) RETURNING machine_id`;
    const values = [status, reason, message, from_version, commands, started_at, until, finished_at];
    return this.history.write(async (transaction) => {
      transaction.about(machine_id);
      const before = await transaction.get(
        'SELECT status FROM upgrade_machines WHERE upgrade_id = ? AND machine_id = ?',
        ...[upgrade_id, machine_id],
      );
      const row = await transaction.get(change, ...values, upgrade_id, machine_id);
      if (!row) return false;
      const failures = Number(status === 'failed') - Number(before?.status === 'failed');
      if (failures !== 0)
        transaction.run('UPDATE upgrades SET failures = failures + ? WHERE id = ?', failures, upgrade_id);
      if (status === 'upgraded' || status === 'failed')
        this.#emit(`upgrade.machine_${status}`, upgrade, member, transaction);
      return true;
    });
  }

  /**
   * If the present wave of an upgrade is done, starts the pause or the next wave, or ends the upgrade. Any broker may
   * call this at any time.
   */
  advance(id: UpgradeId): Promise<Upgrade | undefined> {
    return this.history.write(async (transaction) => {
      const row = await transaction.get(`SELECT ${upgradeColumns} FROM upgrades WHERE id = ?`, id);
      const upgrade = row && upgradeFromRow(row);
      if (!upgrade || upgrade.finished_at !== null) return undefined;
      const next = await this.#next(upgrade, transaction);
      const { status, current_wave, next_wave_at, finished_at } = next;
      transaction.run(
        'UPDATE upgrades SET status = ?, current_wave = ?, next_wave_at = ?, finished_at = ? WHERE id = ?',
        ...[status, current_wave, next_wave_at, finished_at, id],
      );
      if (finished_at !== null) this.#emit('upgrade.finished', next, undefined, transaction);
      else if (current_wave > upgrade.current_wave)
        this.#emit('upgrade.wave_started', next, undefined, transaction);
      return next;
    });
  }

  async #next(upgrade: Upgrade, transaction: HistoryTransaction): Promise<Upgrade> {
    const { id, current_wave, waves, pause, failures, max_failures, next_wave_at } = upgrade;
    const isOver = upgrade.status === 'running' && failures > max_failures;
    if (isOver) this.#endWaiting(id, 'max_failures', transaction);
    const status = isOver ? 'failed' : upgrade.status;
    const some = 'SELECT 1 AS n FROM upgrade_machines WHERE upgrade_id = ? AND finished_at IS NULL';
    if (!(await transaction.get(`${some} LIMIT 1`, id))) {
      const end = failures > 0 ? 'failed' : 'completed';
      return {
        ...upgrade,
        status: status === 'running' ? end : status,
        next_wave_at: null,
        finished_at: now(),
      };
    }
    if (status !== 'running' || current_wave === waves) return { ...upgrade, status, next_wave_at: null };
    const inWave = `${some} AND wave = ? AND status IN ('waiting', 'staging', 'busy', 'switching') LIMIT 1`;
    if (current_wave > 0 && (await transaction.get(inWave, id, current_wave))) return upgrade;
    const at = current_wave === 0 ? now() : (next_wave_at ?? now() + pause);
    return at > now()
      ? { ...upgrade, next_wave_at: at }
      : { ...upgrade, current_wave: current_wave + 1, next_wave_at: null };
  }

  /** Cancels the upgrade for the machines that are `waiting` or `offline`. No package is being sent to them. */
  #endWaiting(id: UpgradeId, reason: 'max_failures' | null, transaction: HistoryTransaction): void {
    const message =
      reason === null ? null : 'more machines failed than max_failures allows: see their messages';
    transaction.run(
      `UPDATE upgrade_machines SET status = 'cancelled', reason = ?, message = ?, until = NULL, finished_at = ?
       WHERE upgrade_id = ? AND finished_at IS NULL AND status IN ('waiting', 'offline')`,
      ...[reason, message, now(), id],
    );
  }

  /**
   * Cancels a running upgrade. For machines that are `waiting` or `offline`, the upgrade ends here. For machines that
   * are `staging` or `busy`, the brokers that own them stop it.
   */
  cancel(id: UpgradeId, commit: (transaction: HistoryTransaction) => void): Promise<void> {
    return this.history.write((transaction) => {
      const open = 'id = ? AND finished_at IS NULL';
      transaction.run(
        `UPDATE upgrades SET status = 'cancelled', next_wave_at = NULL WHERE ${open} AND status = 'running'`,
        id,
      );
      this.#endWaiting(id, null, transaction);
      commit(transaction);
    });
  }

  /** Counts the machines of an upgrade by status: all of them, or only those in `machines`. */
  async counts(id: string, machines?: readonly MachineId[]): Promise<Served['counts']> {
    const [where, values] = allOf([['upgrade_id = ?', id], reachableOnly(machines)]);
    const sql = `SELECT status, count(*) AS n FROM upgrade_machines WHERE ${where} GROUP BY status`;
    const [rows = []] = await this.history.read([{ sql, values }]);
    const found = Object.fromEntries(rows.map((row) => [textIn(row, 'status'), Number(row.n)]));
    const none = { waiting: 0, offline: 0, staging: 0, busy: 0, switching: 0 };
    return { ...none, upgraded: 0, failed: 0, skipped: 0, cancelled: 0, ...found };
  }

  /**
   * True if an upgrade has machines that are not in `machines`. If `machines` is undefined, it stands for all machines,
   * so the result is false.
   */
  async hasOthers(id: string, machines: readonly MachineId[] | undefined): Promise<boolean> {
    if (!machines) return false;
    return totalOf(await this.counts(id)) > totalOf(await this.counts(id, machines));
  }

  #emit(
    type: Extract<EventType, `upgrade.${string}`>,
    upgrade: Upgrade,
    member: Member | undefined,
    journal: Journal,
  ): void {
    const { id: upgrade_id, version, status, current_wave: wave, waves } = upgrade;
    const id = member?.machine_id;
    const machine = id && (this.#context.state.machines.get(id) ?? { id, name: '' });
    // The event of one machine includes no waves: a key for only this machine may read the event, and waves would
    // reveal how many other machines there are.
    const of = member
      ? {
          from_version: member.from_version,
          reason: member.reason,
          message: member.message,
        }
      : { wave, waves };
    const data = { upgrade_id, version, status: member?.status ?? status };
    this.#context.events.emit(journal, type, machine, { ...data, ...of });
  }
}

/** SQL condition for machines whose upgrade has ended, and that have not reported its outcome. */
const withoutOutcome = `(status IN ('cancelled', 'skipped') OR reason = 'no_answer')`;

/** The reason why a machine is skipped whose earlier upgrade has not ended. */
export const inOtherUpgrade = {
  reason: 'in_other_upgrade',
  message: 'another upgrade of this machine has not ended: wait for it, or cancel it',
} as const;

async function busyIn(reader: Pick<HistoryTransaction, 'all'>): Promise<Set<string>> {
  const rows = await reader.all('SELECT machine_id FROM upgrade_machines WHERE finished_at IS NULL');
  return new Set(rows.map((row) => textIn(row, 'machine_id')));
}

const totalOf = (counts: Served['counts']): number => Object.values(counts).reduce((sum, n) => sum + n, 0);

/**
 * Converts an upgrade to the JSON of the REST API. If `seesWaves` is false, the fields about waves are null, because
 * waves reveal how many machines the upgrade has.
 */
export function upgradeToJson(
  { failures: _, created_at, finished_at, next_wave_at, current_wave, waves, ...upgrade }: Upgrade,
  counts: Served['counts'],
  seesWaves: boolean,
): Served {
  return {
    ...upgrade,
    current_wave: seesWaves ? current_wave : null,
    waves: seesWaves ? waves : null,
    next_wave_at: seesWaves ? isoOrNull(next_wave_at) : null,
    total: totalOf(counts),
    counts,
    created_at: iso(created_at),
    finished_at: isoOrNull(finished_at),
  };
}
