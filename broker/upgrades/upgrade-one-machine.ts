// Upgrades one machine. The work begins with the machine's wave, and ends when the final status is stored.
import type { UpgradeReason } from '../../shared/api/upgrades.ts';
import { after, now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Semaphore } from '../../shared/semaphore.ts';
import { heldOrPinned, packageFor, type Refusal } from '../agent-packages/can-machine-upgrade.ts';
import type { AgentPackage, Packages } from '../agent-packages/index.ts';
import type { Cluster } from '../cluster/index.ts';
import type { RightsOf } from '../deliveries/key-rights-types.ts';
import type { Events } from '../event-log.ts';
import type { History } from '../history/history-database.ts';
import type { Presence } from '../presence/index.ts';
import type { LastUpgrade } from '../presence/installation-report.ts';
import type { MachineFacts } from '../presence/stored-facts-and-metrics.ts';
import type { Machine, State } from '../state/index.ts';
import { stagingRequests } from './staging-messages.ts';
import type { UpgradeRecords } from './upgrade-records.ts';
import type { Member, Upgrade } from './upgrade-tables.ts';

/** The parts of the broker that upgrades use. */
export interface UpgradeServices {
  state: State;
  history: History;
  events: Events;
  presence: Presence;
  machineFacts: MachineFacts;
  packages: Pick<Packages, 'catalog'>;
  rightsOf: RightsOf;
  /** The other brokers on the same database; undefined with a single broker. */
  cluster: Pick<Cluster, 'join' | 'follow' | 'ownerElsewhere'> | undefined;
}

interface Context extends UpgradeServices {
  records: UpgradeRecords;
  /** Limits how many machines get a package at the same time. */
  slots: Semaphore;
  log: Logger;
  /** Called after the end of the machine's upgrade has been stored. */
  ended(member: Member): void;
  /** Called when the wave no longer waits for the machine. */
  left(): void;
}

/**
 * A machine must report the outcome of its upgrade within twice the upgrade's `probe_timeout`, plus this number of
 * milliseconds.
 */
const outcomeMs = 180_000;
/** After a restart of the broker, each machine has at least this number of milliseconds to link again. */
const returnMs = 60_000;
/**
 * A call to a machine ends after `wait_for` plus this number of milliseconds. The number leaves enough time to transfer
 * the package over a slow link.
 */
const sendMs = 1_800_000;
/** Milliseconds until the broker repeats a failed write, or a call for which the machine was not ready. */
const retryMs = 5_000;
/** Maximum number of attempts to send the package to a machine. A failure that may pass leads to the next attempt. */
const mostAttempts = 5;

interface Skip {
  reason: UpgradeReason;
  message: string;
}
type Why = 'cancelled' | 'max_failures' | 'removed' | Skip;
type End = Pick<Member, 'status'> & Partial<Pick<Member, 'reason' | 'message'>>;

export class MachineUpgrade {
  #member: Member;
  readonly #plan: { readonly upgrade: Upgrade };
  readonly #context: Context;
  /** Aborts the running call of StageUpgrade. */
  #call: AbortController | undefined;
  /** The reason to stop the upgrade of this machine. It has no effect once the machine has taken the package. */
  #leaving: Why | undefined;
  #attempts = 0;
  #cancelTimer = (): void => {};
  #isClosed = false;
  #isActing = false;
  #looksAgain = false;

  /** `plan.upgrade` must be read again at each use, because each change of the upgrade puts a new object there. */
  constructor(member: Member, plan: { readonly upgrade: Upgrade }, context: Context) {
    // The machine's deadline may have passed while the broker was down. The machine gets some more time to link.
    const until = member.until === null ? null : Math.max(member.until, now() + returnMs);
    this.#member = { ...member, until };
    this.#plan = plan;
    this.#context = context;
  }

  get upgrade(): Upgrade {
    return this.#plan.upgrade;
  }

  /** Ends the work without a write, because this broker stops or another broker now owns the machine. */
  close(): void {
    this.#isClosed = true;
    this.#cancelTimer();
    this.#call?.abort(new AppError('unavailable', 'the broker stops'));
  }

  /** Stops the upgrade of this machine, unless the machine has already taken the package. */
  leave(why: Why): void {
    this.#leaving ??= why;
    this.#call?.abort(new AppError('unavailable', 'the upgrade of this machine was cancelled'));
    this.look();
  }

  /** Stops the upgrade of this machine if a hold, a pin or the rights of the upgrade's key now forbid it. */
  checkAgain(): void {
    const { status, machine_id } = this.#member;
    const machine = this.#context.state.machines.get(machine_id);
    // While the transfer has not begun, no check is needed here: #check() runs right before it.
    if (!machine || !(this.#call || status === 'staging' || status === 'busy')) return;
    const forbidden = this.#forbidden(machine);
    if (forbidden) this.leave(forbidden);
  }

  /**
   * Takes the next step that is possible now. Called when the machine links, when it reports an outcome, and when a
   * wait is over.
   */
  look(): void {
    this.#looksAgain = true;
    if (!this.#isActing && !this.#isClosed) void this.#actAll();
  }

  async #actAll(): Promise<void> {
    this.#isActing = true;
    while (this.#looksAgain && !this.#isClosed) {
      this.#looksAgain = false;
      try {
        await this.#act();
      } catch (err) {
        if (this.#isClosed) break;
        const { machine_id } = this.#member;
        this.#context.log.error({ err, machine_id }, 'a step of an upgrade was not stored; trying again');
        this.#lookIn(retryMs);
      }
    }
    this.#isActing = false;
  }

  #lookIn(ms: number): void {
    this.#cancelTimer();
    this.#cancelTimer = after(Math.max(0, ms), () => this.look());
  }

  async #act(): Promise<void> {
    const { machineFacts, presence, state } = this.#context;
    const { machine_id, status } = this.#member;
    if (!state.machines.has(machine_id)) return this.#endLeft('removed');
    const last = machineFacts.of(machine_id)?.installation?.last_upgrade;
    const isTaken = last?.upgrade_id === this.upgrade.id;
    if (isTaken && last.outcome !== 'running') return this.#end(outcomeOf(last));
    if (isTaken || status === 'switching') return this.#awaitOutcome();
    if (this.#leaving) return this.#endLeft(this.#leaving);
    if (presence.online(machine_id)) return this.#stage();
    return status === 'staging' || status === 'busy' ? this.#awaitReturn() : this.#awaitLink();
  }

  /** Waits for a machine that is offline. The wave continues without it. */
  async #awaitLink(): Promise<void> {
    const { status, until } = this.#member;
    if (status !== 'offline' || until === null) {
      await this.#step({ status: 'offline', commands: null, until: now() + this.upgrade.queue_for });
      this.#context.left();
    } else if (until <= now())
      return this.#end({
        status: 'skipped',
        reason: 'offline',
        message:
          'the machine was offline for the whole waiting time (queue_for): start its agent, then upgrade it again',
      });
    this.#lookAtEnd();
  }

  /**
   * Waits for a machine whose link was lost while it got the package. The wave waits too, because the machine may be
   * upgrading.
   */
  async #awaitReturn(): Promise<void> {
    const { until } = this.#member;
    if (until === null) await this.#step({ until: this.#outcomeUntil() });
    else if (until <= now()) {
      await this.#step({ status: 'offline', commands: null, until: now() + this.upgrade.queue_for });
      this.#context.left();
    }
    this.#lookAtEnd();
  }

  /** Waits until the machine, which has taken the package, reports the outcome of the upgrade. */
  async #awaitOutcome(): Promise<void> {
    const { status, until } = this.#member;
    if (status !== 'switching')
      await this.#step({ status: 'switching', commands: null, until: this.#outcomeUntil() });
    else if (until !== null && until <= now()) {
      const message =
        'the machine has not reported the outcome of the upgrade: see journalctl -u farhand-agent -u farhand-agent-upgrade there';
      return this.#end({ status: 'failed', reason: 'no_answer', message });
    }
    this.#lookAtEnd();
  }

  #outcomeUntil(): number {
    // The new agent gets `probe_timeout` to connect. If it does not connect, the machine returns to the old agent,
    // which gets the same time to connect. So `probe_timeout` counts twice.
    return now() + this.upgrade.probe_timeout * 2 + outcomeMs;
  }

  #lookAtEnd(): void {
    if (!this.#isClosed) this.#lookIn((this.#member.until ?? now()) - now());
  }

  async #stage(): Promise<void> {
    this.#cancelTimer();
    const call = new AbortController();
    this.#call = call;
    let release = (): void => {};
    // The slot is freed right after the transfer of the package. The machine may then wait for hours until its running
    // commands have ended.
    const free = (): void => {
      release();
      release = () => {};
    };
    try {
      const acquired = await Promise.resolve(this.#context.slots.acquire(call.signal)).catch(() => undefined);
      if (!acquired) return this.look();
      release = acquired;
      const found = this.#check();
      if (!found) return this.look();
      if ('reason' in found) return await this.#end({ status: 'skipped', ...found });
      const from_version = this.#context.machineFacts.of(this.#member.machine_id)?.agent_version ?? '';
      const started_at = this.#member.started_at ?? now();
      const isStored = await this.#step({ status: 'staging', started_at, from_version, until: null });
      if (isStored) await this.#send(found, call.signal, free);
    } finally {
      free();
      this.#call = undefined;
    }
  }

  /**
   * Returns the package to send, or the reason why the machine cannot be upgraded. Returns undefined if the machine was
   * removed or is offline.
   */
  #check(): AgentPackage | Skip | undefined {
    const { state, presence, machineFacts, packages } = this.#context;
    const { machine_id } = this.#member;
    const machine = state.machines.get(machine_id);
    if (!machine || !presence.online(machine_id)) return undefined;
    const facts = machineFacts.of(machine_id);
    return this.#forbidden(machine) ?? packageFor(machine, facts, this.upgrade.version, packages.catalog());
  }

  /**
   * Returns what forbids the upgrade of the machine: its hold or pin, or the rights of the upgrade's key. Returns
   * undefined if nothing forbids it.
   */
  #forbidden(machine: Machine): Skip | undefined {
    const rights = this.#context.rightsOf(this.upgrade.requested_by);
    if (rights?.may('machines:write') && rights.reaches(machine.id))
      return heldOrPinned(machine, this.upgrade.version);
    const message =
      'the key that started the upgrade may no longer upgrade this machine: upgrade it with another key';
    return { reason: 'not_permitted', message };
  }

  async #send(found: AgentPackage, signal: AbortSignal, free: () => void): Promise<void> {
    const { stub } = this.#context.presence.get(this.#member.machine_id);
    this.#attempts += 1;
    const deadline_ms = this.upgrade.wait_for + sendMs;
    const options = { request_id: newId('request'), signal, deadline_ms, lane: 'bulk' } as const;
    const requests = stagingRequests(this.upgrade, found);
    const answers = stub.stageUpgrade(requests, options)[Symbol.asyncIterator]();
    try {
      for (;;) {
        // Errors of the call go to #failed(). After an error of #step(), #actAll() tries the step again.
        const next = await answers.next().catch((error: unknown) => ({ error }));
        free();
        if ('error' in next) return await this.#failed(next.error);
        if (next.done)
          return this.#member.status === 'switching' ? undefined : await this.#failed(noAnswer());
        const { part, waiting } = next.value;
        // The call stays open, because the machine may still report that root did not take or install the package.
        if (part === 'switching') await this.#awaitOutcome();
        if (this.#member.status === 'switching') continue;
        // The machine has the package, and waits until its running commands and terminals have ended.
        const commands = part === 'waiting' ? (waiting?.processes ?? 0) : this.#member.commands;
        if (commands !== this.#member.commands) await this.#step({ status: 'busy', commands });
      }
    } finally {
      await answers.return?.();
    }
  }

  async #failed(error: unknown): Promise<void> {
    if (this.#isClosed) return;
    const { machine_id } = this.#member;
    const known = error instanceof AppError ? error : new AppError('internal_error', 'see the broker’s log');
    if (known !== error) this.#context.log.error({ err: error, machine_id }, 'a package could not be sent');
    const { reason } = known.details;
    // An earlier call has delivered the package, but its answer was lost.
    if (reason === 'already_taken') return this.#awaitOutcome();
    const isPassing = passing.includes(known.code) || reason === 'in_progress';
    if (this.#leaving || (isPassing && this.#member.status === 'switching')) return this.look();
    if (!isPassing || this.#attempts >= mostAttempts) return this.#end(endOf(known));
    // The link was lost, so only the machine knows whether it has taken the package. It reports that when it links
    // again. look() waits for this report.
    if (known.code === 'machine_offline') this.look();
    else this.#lookIn(retryMs);
  }

  #endLeft(why: Why): Promise<void> {
    if (typeof why === 'object') return this.#end({ status: 'skipped', ...why });
    if (why === 'removed')
      return this.#end({ status: 'skipped', reason: why, message: 'the machine was removed' });
    return this.#end({ status: 'cancelled', ...(why === 'max_failures' && { reason: why }) });
  }

  async #end({ status, reason, message }: End): Promise<void> {
    const end = { status, reason: reason ?? null, message: message ?? null };
    if (await this.#step({ ...end, commands: null, until: null, finished_at: now() })) this.#finish();
  }

  #finish(): void {
    if (this.#isClosed) return;
    this.#isClosed = true;
    this.#cancelTimer();
    this.#context.ended(this.#member);
  }

  /**
   * Stores a step. Returns false if records.step() wrote nothing, for example because another broker cancelled the
   * upgrade of this machine.
   */
  async #step(change: Partial<Member>): Promise<boolean> {
    const next = { ...this.#member, ...change };
    const isStored = await this.#context.records.step(next, this.upgrade);
    this.#member = next;
    if (!isStored) this.#finish();
    return isStored;
  }
}

/** Returns the final status of a machine that has reported the outcome of its upgrade. */
export function outcomeOf({ outcome, reason }: LastUpgrade): Pick<Member, 'status' | 'reason' | 'message'> {
  if (outcome === 'succeeded') return { status: 'upgraded', reason: null, message: null };
  const isBack = outcome === 'rolled_back';
  const what = isBack
    ? 'the new version did not work, and the old version runs again'
    : 'the upgrade failed on the machine';
  const message = reason === '' ? what : `${what}: ${reason}`;
  return { status: 'failed', reason: isBack ? 'rolled_back' : 'refused', message };
}

const noAnswer = (): AppError =>
  new AppError(
    'machine_error',
    'the agent ended the upgrade without an answer: see journalctl -u farhand-agent on the machine',
  );

/** Returns the final status of a machine after a failed attempt to send the package. */
function endOf({ code, message, details }: AppError): End {
  const skipped = skipReasons[String(details.reason)] ?? skipReasons[code];
  if (skipped) return { status: 'skipped', reason: skipped, message };
  return { status: 'failed', reason: passing.includes(code) ? 'no_answer' : 'refused', message };
}

/**
 * Error codes after which the package is sent again. `machine_timeout` often means that the machine has vanished, which
 * ends its link only after 45 s of silence.
 */
const passing: readonly string[] = ['machine_offline', 'machine_timeout', 'unavailable'];

/**
 * Reasons and error codes with which an agent refuses an upgrade although nothing is wrong on its machine. Such a
 * machine is skipped, not failed.
 */
const skipReasons: Readonly<Record<string, Refusal['reason'] | 'busy' | 'in_other_upgrade'>> = {
  processes_running: 'busy',
  unavailable: 'busy',
  same_version: 'current',
  held: 'held',
  in_progress: 'in_other_upgrade',
  no_trusted_key: 'no_key',
  permission_denied: 'not_allowed',
  not_supported: 'not_supported',
};
