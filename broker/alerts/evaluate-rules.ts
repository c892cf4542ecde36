// Opens and resolves alerts by the alert rules. A rule is evaluated when a machine reports or links, when a schedule
// runs, and when settings change. Rules about expiry dates are also evaluated every hour.
import type { MachineId } from '../../shared/api/shared-schemas.ts';
import { after, every, monotonic } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { ScheduleRun } from '../schedules/run-records.ts';
import type { AlertRule, Declared, State } from '../state/index.ts';
import type { Alert, AlertRecords, Reason, Subject } from './alert-records.ts';
import type { Windows } from './maintenance-windows.ts';
import { brokerRules, type ConditionServices, Conditions } from './rule-conditions.ts';
import { isAboutBroker, isMeasured } from './rule-handlers.ts';
import { type Tracked, TrackedAlerts } from './tracked-alerts.ts';

type Followed = Pick<Declared, 'alert_rules' | 'machines' | 'schedules' | 'keys' | 'maintenance_windows'>;

/** Milliseconds between two checks of the expiry dates. */
const expiryMs = 3_600_000;
/** Milliseconds to wait after a failed read of the history. */
const retryMs = 5_000;

export class Monitor {
  readonly #services: ConditionServices;
  readonly #state: State;
  readonly #records: AlertRecords;
  readonly #conditions: Conditions;
  readonly #log: Logger;
  readonly #tracked: TrackedAlerts;
  /**
   * The rules, machines, schedules, keys and windows that #look() read last. It compares them with the current ones to
   * find changes.
   */
  #seen: Followed;
  /** The kinds whose rules could not be evaluated. All rules of such a kind are evaluated again after 5 s. */
  readonly #failing = new Set<AlertRule['kind']>();
  #stops: (() => void)[] = [];
  #stopped = false;
  #isStarted = false;

  constructor(services: ConditionServices, records: AlertRecords, windows: Windows, log: Logger) {
    this.#services = services;
    this.#state = services.state;
    this.#records = records;
    this.#conditions = new Conditions(services);
    this.#tracked = new TrackedAlerts(records, windows, this.#conditions, log);
    this.#log = log;
    this.#seen = followedIn(services.state);
  }

  /** Resumes the alerts that an earlier broker process left unresolved, and evaluates all rules. */
  async start(): Promise<void> {
    await this.#resume(await this.#records.unresolved());
    this.#isStarted = true;
    // All rules count as new, so #look() evaluates each of them.
    this.#seen = { ...followedIn(this.#state), alert_rules: new Map() };
    const { presence, machineFacts, scheduleRuns } = this.#services;
    this.#stops = [
      this.#state.watch(() => this.#look()),
      machineFacts.watch((id) => this.#evaluateMachine(id, (rule) => isMeasured(rule.kind))),
      presence.watch((id) => this.#evaluateMachine(id, (rule) => rule.kind !== 'schedule')),
      scheduleRuns.watch((run) => {
        this.#conditions.ran(run);
        this.#evaluateSchedule(run);
      }),
      every(expiryMs, () => this.#checkExpiries()),
    ];
    this.#look();
  }

  /** Takes over the alerts about machines that this broker owns from now on. */
  async adopt(machineIds: readonly string[]): Promise<void> {
    await this.#conditions.adopt(machineIds);
    if (!this.#isStarted) return;
    await this.#resume(await this.#records.unresolved(machineIds));
    for (const id of machineIds) this.#evaluateMachine(id, () => true);
  }

  /** Leaves the alerts about a machine to the broker that owns it now. */
  drop(machineId: string): void {
    this.#conditions.drop(machineId);
    for (const tracked of this.#tracked.all())
      if (tracked.subject.machineId === machineId) this.#tracked.leave(tracked);
  }

  /**
   * Takes over the alerts about keys, certificates and removed machines. Does nothing unless this broker has claimed
   * the task `brokerRules`.
   */
  async claimed(): Promise<void> {
    const hasClaim = this.#services.cluster?.claims.has(brokerRules);
    if (!hasClaim || !this.#isStarted || this.#stopped) return;
    const isOwned = (machineId: MachineId | null): boolean =>
      machineId !== null && this.#state.machines.has(machineId);
    try {
      const alerts = await this.#records.unresolved();
      for (const tracked of this.#tracked.all())
        if (!isOwned(tracked.subject.machineId)) this.#tracked.leave(tracked);
      await this.#resume(alerts.filter(({ machine_id }) => !isOwned(machine_id)));
    } catch (err) {
      this.#log.error(
        { err },
        'alerts about keys, certificates and removed machines could not be read; trying again in 5 s',
      );
      after(retryMs, () => void this.claimed());
      return;
    }
    this.#checkExpiries();
  }

  async #resume(alerts: readonly Alert[]): Promise<void> {
    for (const alert of alerts) {
      const subject = { id: alert.subject, machineId: alert.machine_id };
      if (this.#conditions.isElsewhere(subject)) continue;
      const rule = this.#state.alert_rules.get(alert.rule_id);
      if (!rule) {
        await this.#records.resolve(alert, 'rule_removed');
        continue;
      }
      this.#refresh(this.#tracked.resume(rule, alert), false);
    }
  }

  stop(): void {
    this.#stopped = true;
    for (const stop of this.#stops) stop();
    this.#tracked.stop();
  }

  /** Records that an alert was acknowledged. An acknowledged alert is not repeated any more. */
  acknowledged(alert: Alert): void {
    this.#tracked.acknowledged(alert);
  }

  // ---- Triggers of an evaluation

  /**
   * Finds the alert rules, machines, schedules, keys and windows that have changed since the last call. Evaluates the
   * changed rules, and the rules about changed machines and keys.
   */
  #look(): void {
    const before = this.#seen;
    this.#seen = followedIn(this.#state);
    const { alert_rules, machines, keys, maintenance_windows } = this.#seen;
    const isSame = (Object.keys(before) as (keyof Followed)[]).every(
      (name) => before[name] === this.#seen[name],
    );
    if (isSame) return;
    const otherWindows = before.maintenance_windows !== maintenance_windows || before.machines !== machines;
    for (const tracked of this.#tracked.all()) this.#refresh(tracked, otherWindows);
    const changed = [...alert_rules.values()].filter((rule) => before.alert_rules.get(rule.id) !== rule);
    const isShared = this.#services.cluster !== undefined;
    if (isShared && [...before.machines.keys()].some((id) => !machines.has(id))) void this.claimed();
    for (const rule of changed) void this.#evaluate(rule);
    if (before.machines !== machines)
      for (const [id, machine] of machines)
        if (before.machines.get(id) !== machine) this.#evaluateMachine(id, () => true);
    if (before.keys !== keys) this.#evaluateKind('key');
  }

  #checkExpiries(): void {
    this.#evaluateKind('key');
    this.#evaluateKind('certificate');
  }

  // ---- Evaluation

  async #evaluate({ id, kind }: AlertRule): Promise<void> {
    try {
      await this.#conditions.load(kind);
    } catch (error) {
      if (this.#stopped || this.#failing.has(kind)) return;
      this.#failing.add(kind);
      this.#log.error({ err: error, kind }, 'alert rules could not be evaluated; trying again in 5 s');
      after(retryMs, () => {
        this.#failing.delete(kind);
        this.#evaluateKind(kind);
      });
      return;
    }
    const rule = this.#state.alert_rules.get(id);
    if (!rule?.enabled || this.#stopped) return;
    const subjects = this.#conditions.subjects(rule);
    const observed = new Set(subjects.map((subject) => this.#tracked.get(id, subject)));
    for (const tracked of this.#tracked.all())
      if (tracked.rule.id === id && !observed.has(tracked)) this.#tracked.end(tracked, 'subject_removed');
    for (const subject of subjects) this.#observe(rule, subject);
  }

  #evaluateKind(kind: AlertRule['kind']): void {
    for (const rule of this.#state.alert_rules.values()) if (rule.kind === kind) void this.#evaluate(rule);
  }

  #evaluateMachine(id: string, isWanted: (rule: AlertRule) => boolean): void {
    if (this.#stopped) return;
    const machine = this.#state.machines.get(id);
    if (!machine) return;
    for (const rule of this.#state.alert_rules.values()) {
      if (!rule.enabled || isAboutBroker(rule.kind) || !isWanted(rule)) continue;
      if (rule.kind === 'schedule') {
        for (const one of this.#state.schedules.keys())
          this.#observe(rule, { id: one, machineId: machine.id });
      } else this.#observe(rule, { id: machine.id, machineId: machine.id });
    }
  }

  #evaluateSchedule({ schedule_id: id, machine_id: machineId }: ScheduleRun): void {
    if (this.#stopped) return;
    for (const rule of this.#state.alert_rules.values())
      if (rule.enabled && rule.kind === 'schedule') this.#observe(rule, { id, machineId });
  }

  /** Checks whether the condition of a rule holds for a subject, and changes the alert if needed. */
  #observe(rule: AlertRule, subject: Subject): void {
    const known = this.#tracked.get(rule.id, subject);
    if (!this.#conditions.covers(rule, subject)) return;
    const { holds, since = 0, value, message } = this.#conditions.observe(rule, subject);
    if (holds === true) {
      if (known?.target === 'open') return;
      const began = known?.target === 'pending' ? known.since : monotonic() - since;
      this.#check(this.#tracked.add(rule, subject, { message, value, since: began }));
    } else if (known && (holds === false || known.target === 'pending'))
      this.#tracked.end(known, 'recovered');
  }

  /** Opens the alert if its condition has lasted for the minimum time that the rule sets (`for`). */
  #check(tracked: Tracked): void {
    const { rule, subject } = tracked;
    const left = tracked.since + rule.for - monotonic();
    if (left <= 0) this.#tracked.open(tracked);
    else if (!isMeasured(rule.kind)) {
      // Checks the condition again when the minimum time has passed. Rules about measured values need no timer, because
      // each report of the machine checks them again.
      tracked.cancelCheck();
      tracked.cancelCheck = after(left, () => this.#observe(tracked.rule, subject));
    }
  }

  /**
   * Stores a changed rule with the alert. Resolves the alert if the rule no longer covers its subject. Otherwise sets
   * the timer of the alert again if the rule or the maintenance windows have changed.
   */
  #refresh(tracked: Tracked, otherWindows: boolean): void {
    const rule = this.#state.alert_rules.get(tracked.rule.id);
    const isOther = tracked.rule !== rule;
    if (rule) tracked.rule = rule;
    const reason = this.#reasonToEnd(tracked, rule);
    if (reason) this.#tracked.end(tracked, reason);
    else if (tracked.alert && (isOther || otherWindows)) this.#tracked.armNext(tracked, tracked.alert);
  }

  #reasonToEnd({ subject }: Tracked, rule: AlertRule | undefined): Reason | undefined {
    if (!rule) return 'rule_removed';
    if (!this.#conditions.exists(rule.kind, subject)) return 'subject_removed';
    return rule.enabled && this.#conditions.covers(rule, subject) ? undefined : 'rule_changed';
  }
}

function followedIn({ alert_rules, machines, schedules, keys, maintenance_windows }: Declared): Followed {
  return { alert_rules, machines, schedules, keys, maintenance_windows };
}
