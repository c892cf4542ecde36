// Upgrades machines a wave at a time. Every step is stored in the history, so that a broker can continue the upgrade
// after a crash.
import type { MachineId, UpgradeId } from '../../shared/api/shared-schemas.ts';
import { after, now } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import { Semaphore } from '../../shared/semaphore.ts';
import { MachineUpgrade, outcomeOf, type UpgradeServices } from './upgrade-one-machine.ts';
import type { UpgradeRecords } from './upgrade-records.ts';
import type { Member, Upgrade } from './upgrade-tables.ts';

/** Maximum number of machines that get a package at the same time. */
const sendAtOnce = 16;
/** Milliseconds until a failed step is tried again. */
const retryMs = 5_000;

/** An upgrade in its present state, and the timer of its next wave. */
interface Plan {
  upgrade: Upgrade;
  cancelTimer: () => void;
}

export class Rollout {
  readonly #services: UpgradeServices;
  readonly #records: UpgradeRecords;
  readonly #log: Logger;
  /** The upgrades that have not ended. */
  readonly #open = new Map<UpgradeId, Plan>();
  /** Machines whose wave has begun, and whose own upgrade has not ended. */
  readonly #members = new Map<MachineId, MachineUpgrade>();
  readonly #slots = new Semaphore(sendAtOnce);
  /**
   * Upgrades whose next step is being stored by #advanceNow(). The value is true if advance() was called again
   * meanwhile. #advanceNow() then takes another step.
   */
  readonly #advancing = new Map<UpgradeId, boolean>();
  /** True if a wave may have begun whose machines are not loaded, for example because they could not be read. */
  #isLoadDue = false;
  #stops: (() => void)[] = [];
  #isStopped = false;

  constructor(services: UpgradeServices, records: UpgradeRecords, log: Logger) {
    this.#services = services;
    this.#records = records;
    this.#log = log;
    services.cluster?.join({
      adopt: (machineIds) => this.#load(machineIds),
      drop: (machineId) => this.#remove(machineId as MachineId),
    });
    services.cluster?.follow(() => this.#follow());
  }

  /** Continues the upgrades that an earlier broker process began. */
  async start(): Promise<void> {
    const { state, presence, machineFacts, events } = this.#services;
    const look = (machineId: string): void => this.#look(machineId as MachineId);
    this.#stops = [
      presence.watch((machineId, online) => {
        if (online) look(machineId);
      }),
      machineFacts.watchUpgrades(look),
      state.watch(() => {
        for (const member of this.#members.values()) member.checkAgain();
      }),
      events.listen(['machine.removed'], ({ data }) =>
        this.#members.get(data.machine_id as MachineId)?.leave('removed'),
      ),
    ];
    for (const upgrade of await this.#records.open()) this.#set(upgrade);
    await this.#load();
    for (const id of this.#open.keys()) this.advance(id);
  }

  stop(): void {
    this.#isStopped = true;
    for (const stop of this.#stops) stop();
    for (const { cancelTimer } of this.#open.values()) cancelTimer();
    for (const id of [...this.#members.keys()]) this.#remove(id);
  }

  /** Starts the work on an upgrade that is stored already. */
  begin(upgrade: Upgrade): void {
    this.#set(upgrade);
    this.advance(upgrade.id);
  }

  /**
   * If the present wave of an upgrade is done, begins the next wave or ends the upgrade. If an earlier call for this
   * upgrade is still running, that call takes one more step instead.
   */
  advance(id: UpgradeId): void {
    if (this.#isStopped) return;
    const isRunning = this.#advancing.has(id);
    this.#advancing.set(id, isRunning);
    if (!isRunning) void this.#advanceNow(id);
  }

  async #advanceNow(id: UpgradeId): Promise<void> {
    try {
      do {
        this.#advancing.set(id, false);
        await this.#step(id);
      } while (this.#advancing.get(id) && !this.#isStopped);
    } catch (err) {
      if (this.#isStopped) return;
      this.#log.error({ err, upgrade_id: id }, 'the next step of an upgrade was not stored; trying again');
      this.#wait(id, now() + retryMs);
    } finally {
      this.#advancing.delete(id);
    }
  }

  async #step(id: UpgradeId): Promise<void> {
    const before = this.#open.get(id)?.upgrade;
    const upgrade = await this.#records.advance(id);
    if (!upgrade || upgrade.finished_at !== null) {
      this.#open.get(id)?.cancelTimer();
      this.#open.delete(id);
      return;
    }
    this.#set(upgrade);
    if (upgrade.status !== 'running') this.#leave(upgrade);
    if (upgrade.next_wave_at !== null) this.#wait(id, upgrade.next_wave_at);
    if (upgrade.current_wave !== before?.current_wave) this.#isLoadDue = true;
    if (!this.#isLoadDue) return;
    await this.#loadDue();
    this.advance(id);
  }

  /** Stops the work on the machines of a stopped upgrade. Machines that have already taken the package continue. */
  #leave({ id, status }: Upgrade): void {
    for (const member of this.#members.values())
      if (member.upgrade.id === id) member.leave(whyStopped(status));
  }

  #set(upgrade: Upgrade): void {
    const known = this.#open.get(upgrade.id);
    if (known) known.upgrade = upgrade;
    else this.#open.set(upgrade.id, { upgrade, cancelTimer: () => {} });
  }

  #wait(id: UpgradeId, until: number): void {
    const open = this.#open.get(id);
    open?.cancelTimer();
    if (open) open.cancelTimer = after(Math.max(0, until - now()), () => this.advance(id));
  }

  /** Reads which upgrades other brokers have started or ended. */
  async #follow(): Promise<void> {
    const open = await this.#records.open();
    const ids = new Set(open.map(({ id }) => id));
    for (const id of this.#open.keys()) if (!ids.has(id)) this.#open.delete(id);
    const news = open.filter(({ id, status, current_wave }) => {
      const known = this.#open.get(id)?.upgrade;
      return !known || known.current_wave !== current_wave || known.status !== status;
    });
    for (const upgrade of open) this.#set(upgrade);
    if (news.length > 0) this.#isLoadDue = true;
    if (this.#isLoadDue) await this.#loadDue();
    for (const { id } of open) this.advance(id);
  }

  /** Loads all machines whose wave has begun. If that fails, the next step of any upgrade tries again. */
  async #loadDue(): Promise<void> {
    this.#isLoadDue = false;
    await this.#load().catch((error: unknown) => {
      this.#isLoadDue = true;
      throw error;
    });
  }

  /** Loads the machines whose wave has begun: all of them, or only those in `machineIds`. */
  async #load(machineIds?: readonly string[]): Promise<void> {
    const members = await this.#records.started(machineIds);
    for (const member of members) {
      const plan = this.#open.get(member.upgrade_id);
      const known = this.#members.get(member.machine_id);
      if (this.#isStopped || known?.upgrade.id === member.upgrade_id) continue;
      if (!plan || !this.#records.history.owns(member.machine_id)) continue;
      // A machine has at most one open upgrade. So the one in memory has been cancelled in the database.
      this.#remove(member.machine_id);
      this.#add(member, plan);
    }
  }

  #add(member: Member, plan: Plan): void {
    const made = new MachineUpgrade(member, plan, {
      ...this.#services,
      records: this.#records,
      slots: this.#slots,
      log: this.#log,
      ended: (ended) => this.#ended(ended),
      left: () => this.advance(member.upgrade_id),
    });
    this.#members.set(member.machine_id, made);
    const { status } = plan.upgrade;
    if (status === 'running') made.look();
    else made.leave(whyStopped(status));
  }

  #ended({ machine_id, upgrade_id }: Member): void {
    this.#members.delete(machine_id);
    // The machine may have reported an outcome while the end of its upgrade was being stored.
    void this.#storeLate(machine_id);
    this.advance(upgrade_id);
  }

  #remove(machineId: MachineId): void {
    this.#members.get(machineId)?.close();
    this.#members.delete(machineId);
  }

  #look(machineId: MachineId): void {
    this.#members.get(machineId)?.look();
    void this.#storeLate(machineId);
  }

  /**
   * Stores the outcome that a machine reports only after the end of its upgrade. For example, the machine may have
   * begun to install the package just before the upgrade was cancelled.
   */
  async #storeLate(machineId: MachineId): Promise<void> {
    const last = this.#services.machineFacts.of(machineId)?.installation?.last_upgrade;
    if (!last || last.outcome === 'running') return;
    try {
      const member = await this.#records.endedWithoutOutcome(last.upgrade_id, machineId);
      if (!member || this.#isStopped) return;
      const upgrade = await this.#records.get(member.upgrade_id);
      await this.#records.step({ ...member, ...outcomeOf(last), finished_at: now() }, upgrade);
      this.advance(upgrade.id);
    } catch (err) {
      if (this.#isStopped) return;
      this.#log.error(
        { err, machine_id: machineId, upgrade_id: last.upgrade_id },
        'a machine reported the outcome of its upgrade late, but the outcome was not stored; it is stored when the machine links again',
      );
    }
  }
}

const whyStopped = (status: Upgrade['status']) => (status === 'cancelled' ? 'cancelled' : 'max_failures');
