// Evaluates alert rules, and opens, repeats and resolves alerts. A rule is evaluated when something changes:
// a report, a link, a run of a schedule, or a declared document. If there are no rules, changes are not
// followed.
import { after, every, monotonic, now } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { ScheduleRun } from '../schedules/run-records.ts';
import type { AlertRule, Declared, State } from '../state/in-memory-state.ts';
import type { Alert, AlertRecords, Reason, Subject } from './alert-records.ts';
import type { Windows } from './maintenance-windows.ts';
import { type ConditionServices, Conditions } from './rule-conditions.ts';
import { isAboutBroker, isMeasured } from './rule-handlers.ts';

/** A pair of a rule and a subject. Either its condition holds, or its alert is not resolved yet. */
interface Tracked {
  rule: AlertRule;
  subject: Subject;
  /** Time at which the condition began to hold, in milliseconds of the monotonic clock. */
  since: number;
  message: string;
  value: number | null;
  alert: Alert | undefined;
  /** The state that the alert should get. A Reason means: resolved for this reason. */
  target: 'pending' | 'open' | Reason;
  /** True while a step is being written. Steps of one alert are written one after another. */
  busy: boolean;
  cancelCheck(): void;
  cancelNext(): void;
}

type Followed = Pick<Declared, 'alert_rules' | 'machines' | 'schedules' | 'keys' | 'maintenance_windows'>;

/** Milliseconds between two checks of the expiry dates. */
const expiryMs = 3_600_000;
/** Milliseconds to wait after a failed read or write of the history. */
const retryMs = 5_000;

const nothing = (): void => {};

export class Monitor {
  readonly #services: ConditionServices;
  readonly #state: State;
  readonly #records: AlertRecords;
  readonly #conditions: Conditions;
  readonly #windows: Windows;
  readonly #log: Logger;
  readonly #tracked = new Map<string, Tracked>();
  /** The documents at the time of the last comparison. */
  #seen: Followed;
  /** Stops following changes. Is undefined if there are no rules, because changes are followed only for rules. */
  #unfollow: (() => void) | undefined;
  #stopExpiries = nothing;
  #stopWatching = nothing;
  #stopped = false;
  #isStarted = false;

  constructor(services: ConditionServices, records: AlertRecords, windows: Windows, log: Logger) {
    this.#services = services;
    this.#state = services.state;
    this.#records = records;
    this.#conditions = new Conditions(services);
    this.#windows = windows;
    this.#log = log;
    const empty = new Map<never, never>();
    this.#seen = {
      ...{ alert_rules: empty, machines: empty, schedules: empty, keys: empty },
      maintenance_windows: empty,
    };
  }

  /** Continues the alerts that an earlier broker process left, and evaluates all rules. */
  async start(): Promise<void> {
    await this.#resume(await this.#records.unresolved());
    this.#isStarted = true;
    this.#seen = { ...this.#seen, machines: this.#state.machines, keys: this.#state.keys };
    this.#stopWatching = this.#state.watch(() => this.#look());
    this.#look();
  }

  /** Continues the alerts about machines that this broker owns from now on. */
  async adopt(machineIds: readonly string[]): Promise<void> {
    for (const id of machineIds) this.#conditions.adopt(id);
    if (!this.#isStarted || this.#state.alert_rules.size === 0) return;
    await this.#resume(await this.#records.unresolved(machineIds));
    for (const id of machineIds) this.#evaluateMachine(id, () => true);
  }

  /** Leaves the alerts about a machine to the broker that owns it now. */
  drop(machineId: string): void {
    this.#conditions.drop(machineId);
    for (const tracked of this.#tracked.values())
      if (tracked.subject.machineId === machineId) this.#leave(tracked);
  }

  /** Continues the alerts about keys and certificates, which another broker has evaluated so far. */
  claimed(): void {
    if (!this.#isStarted || this.#stopped || this.#state.alert_rules.size === 0) return;
    void this.#records
      .unresolved()
      .then((alerts) => this.#resume(alerts.filter(({ machine_id }) => machine_id === null)))
      .catch((err: unknown) =>
        this.#log.error({ err }, 'alerts about keys and certificates could not be read'),
      )
      .finally(() => this.#checkExpiries());
  }

  async #resume(alerts: readonly Alert[]): Promise<void> {
    for (const alert of alerts) {
      const subject = { id: alert.subject, machineId: alert.machine_id };
      if (this.#conditions.isElsewhere(subject)) continue;
      const rule = this.#state.alert_rules.get(alert.rule_id);
      if (!rule) {
        await this.#records.resolve(alert.id, 'rule_removed');
        continue;
      }
      const { message, value } = alert;
      const tracked = this.#track(rule, subject, { message, value, since: monotonic() });
      Object.assign(tracked, { alert, target: 'open' });
      this.#armNext(tracked, alert);
    }
  }

  #leave(tracked: Tracked): void {
    cancelTimers(tracked);
    this.#tracked.delete(keyOf(tracked.rule.id, tracked.subject));
  }

  stop(): void {
    this.#stopped = true;
    this.#stopWatching();
    this.#unfollow?.();
    this.#stopExpiries();
    for (const tracked of this.#tracked.values()) cancelTimers(tracked);
  }

  /** Records that an alert was acknowledged, after which it is not repeated any more. */
  acknowledged(alert: Alert): void {
    const subject = { id: alert.subject, machineId: alert.machine_id };
    const tracked = this.#tracked.get(keyOf(alert.rule_id, subject));
    if (tracked?.alert?.id !== alert.id) return;
    tracked.alert = alert;
    tracked.cancelNext();
  }

  // ---- What is followed

  /** Compares the declared documents with the documents at the last comparison. */
  #look(): void {
    const before = this.#seen;
    const { alert_rules, machines, schedules, keys, maintenance_windows } = this.#state;
    this.#seen = { alert_rules, machines, schedules, keys, maintenance_windows };
    const isSame = (Object.keys(before) as (keyof Followed)[]).every(
      (name) => before[name] === this.#seen[name],
    );
    if (isSame) return;
    const otherWindows = before.maintenance_windows !== maintenance_windows || before.machines !== machines;
    for (const tracked of this.#tracked.values()) this.#refresh(tracked, otherWindows);
    const changed = [...alert_rules.values()].filter((rule) => before.alert_rules.get(rule.id) !== rule);
    this.#follow(alert_rules.size > 0);
    for (const rule of changed) void this.#evaluate(rule);
    if (alert_rules.size === 0) return;
    if (before.machines !== machines)
      for (const [id, machine] of machines)
        if (before.machines.get(id) !== machine) this.#evaluateMachine(id, () => true);
    if (before.keys !== keys) this.#evaluateKind('key');
  }

  #follow(isNeeded: boolean): void {
    const { presence, machineFacts, scheduleRuns } = this.#services;
    const expires = [...this.#state.alert_rules.values()].some(({ kind }) => isAboutBroker(kind));
    this.#stopExpiries();
    this.#stopExpiries = expires ? every(expiryMs, () => this.#checkExpiries()) : nothing;
    if (!isNeeded) {
      this.#unfollow?.();
      this.#unfollow = undefined;
    }
    if (!isNeeded || this.#unfollow) return;
    const stops = [
      machineFacts.watch((id) => this.#evaluateMachine(id, (rule) => isMeasured(rule.kind))),
      presence.watch((id) => this.#evaluateMachine(id, (rule) => rule.kind !== 'schedule')),
      scheduleRuns.watch((run) => {
        this.#conditions.ran(run);
        this.#evaluateSchedule(run);
      }),
    ];
    this.#unfollow = () => {
      for (const stop of stops) stop();
    };
  }

  #checkExpiries(): void {
    this.#evaluateKind('key');
    this.#evaluateKind('certificate');
  }

  // ---- Evaluation

  /** Evaluates a rule for each of its subjects. */
  async #evaluate({ id, kind }: AlertRule): Promise<void> {
    try {
      await this.#conditions.load(kind);
    } catch (error) {
      this.#log.error({ err: error, rule_id: id }, 'an alert rule could not be evaluated; trying again');
      after(retryMs, () => this.#evaluateKind(kind));
      return;
    }
    const rule = this.#state.alert_rules.get(id);
    if (!rule?.enabled || this.#stopped) return;
    const subjects = this.#conditions.subjects(rule);
    const keys = new Set(subjects.map((subject) => keyOf(id, subject)));
    for (const [key, tracked] of this.#tracked)
      if (tracked.rule.id === id && !keys.has(key)) this.#end(tracked, 'subject_removed');
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
    const key = keyOf(rule.id, subject);
    const known = this.#tracked.get(key);
    if (!this.#conditions.covers(rule, subject)) return;
    const { holds, since = 0, value, message } = this.#conditions.observe(rule, subject);
    if (holds === true) {
      if (known?.target === 'open') return;
      const began = known?.target === 'pending' ? known.since : monotonic() - since;
      this.#check(this.#track(rule, subject, { message, value, since: began }));
    } else if (known && (holds === false || known.target === 'pending')) this.#end(known, 'recovered');
  }

  /** Opens the alert once its condition has held as long as the rule demands. */
  #check(tracked: Tracked): void {
    const { rule, subject } = tracked;
    const left = tracked.since + rule.for - monotonic();
    if (left <= 0) {
      tracked.target = 'open';
      void this.#settle(tracked);
    } else if (!isMeasured(rule.kind)) {
      // A measured value is checked again with the next report.
      tracked.cancelCheck();
      tracked.cancelCheck = after(left, () => this.#observe(tracked.rule, subject));
    }
  }

  #track(rule: AlertRule, subject: Subject, began: Pick<Tracked, 'message' | 'value' | 'since'>): Tracked {
    const key = keyOf(rule.id, subject);
    const known = this.#tracked.get(key);
    const tracked: Tracked = known ?? {
      ...{ rule, subject, alert: undefined, busy: false, target: 'pending' },
      ...{ cancelCheck: nothing, cancelNext: nothing },
      ...began,
    };
    Object.assign(tracked, began, { rule, target: 'pending' });
    this.#tracked.set(key, tracked);
    return tracked;
  }

  /**
   * Resolves an alert if its rule no longer covers its subject. Otherwise applies the changed rule to the
   * alert.
   */
  #refresh(tracked: Tracked, otherWindows: boolean): void {
    const rule = this.#state.alert_rules.get(tracked.rule.id);
    const isOther = tracked.rule !== rule;
    if (rule) tracked.rule = rule;
    const reason = this.#reasonToEnd(tracked, rule);
    if (reason) this.#end(tracked, reason);
    else if (tracked.alert && (isOther || otherWindows)) this.#armNext(tracked, tracked.alert);
  }

  #reasonToEnd({ subject }: Tracked, rule: AlertRule | undefined): Reason | undefined {
    if (!rule) return 'rule_removed';
    if (!this.#conditions.exists(rule.kind, subject)) return 'subject_removed';
    return rule.enabled && this.#conditions.covers(rule, subject) ? undefined : 'rule_changed';
  }

  #end(tracked: Tracked, reason: Reason): void {
    tracked.target = reason;
    cancelTimers(tracked);
    void this.#settle(tracked);
  }

  // ---- Steps

  /** Writes steps of the alert until it has its target state. */
  async #settle(tracked: Tracked): Promise<void> {
    if (tracked.busy) return;
    tracked.busy = true;
    try {
      for (let more = true; more && !this.#stopped; ) more = await this.#step(tracked);
    } catch (error) {
      this.#log.error(
        { err: error, rule_id: tracked.rule.id },
        'a step of an alert could not be written; trying again',
      );
      tracked.cancelCheck = after(retryMs, () => void this.#settle(tracked));
      return;
    } finally {
      tracked.busy = false;
    }
    const key = keyOf(tracked.rule.id, tracked.subject);
    const isDone = !tracked.alert && tracked.target !== 'open' && tracked.target !== 'pending';
    if (isDone && this.#tracked.get(key) === tracked) this.#tracked.delete(key);
  }

  /** Writes the next step. Returns false if there is none. */
  async #step(tracked: Tracked): Promise<boolean> {
    const { rule, subject, alert, target, message, value } = tracked;
    if (target === 'pending') return false;
    if (target === 'open') {
      if (alert) return false;
      const window_id = this.#windows.holding(subject)?.id ?? null;
      tracked.alert = await this.#records.create(rule, subject, { message, value, window_id });
      this.#armNext(tracked, tracked.alert);
      return true;
    }
    if (!alert) return false;
    await this.#records.resolve(alert.id, target);
    tracked.alert = undefined;
    return true;
  }

  /** Starts the timer that opens an alert that is held back, or that repeats an open alert. */
  #armNext(tracked: Tracked, alert: Alert): void {
    tracked.cancelNext();
    tracked.cancelNext = nothing;
    const { repeat_every } = tracked.rule;
    const isHeld = alert.status === 'held';
    if (!isHeld && (repeat_every === null || alert.status !== 'open')) return;
    const repeat = (alert.repeated_at ?? alert.opened_at ?? alert.created_at) + (repeat_every ?? 0);
    const due = Math.max(isHeld ? 0 : repeat, this.#windows.holding(tracked.subject)?.until ?? 0);
    tracked.cancelNext = after(Math.max(0, due - now()), () => void this.#next(tracked, alert));
  }

  async #next(tracked: Tracked, alert: Alert): Promise<void> {
    const { id, status } = alert;
    const isCurrent = (): boolean => tracked.alert?.id === id && tracked.target === 'open';
    if (this.#stopped || !isCurrent()) return;
    if (this.#conditions.isElsewhere(tracked.subject)) return this.#leave(tracked);
    // Another maintenance window may have begun meanwhile.
    if (this.#windows.holding(tracked.subject)) {
      this.#armNext(tracked, alert);
      return;
    }
    try {
      const changed = await (status === 'held' ? this.#records.release(id) : this.#records.repeat(alert));
      if (!changed || !isCurrent()) return;
      tracked.alert = changed;
      this.#armNext(tracked, changed);
    } catch (error) {
      this.#log.error({ err: error, alert_id: id }, 'a step of an alert could not be written; trying again');
      tracked.cancelNext = after(retryMs, () => void this.#next(tracked, alert));
    }
  }
}

function cancelTimers(tracked: Tracked): void {
  tracked.cancelCheck();
  tracked.cancelNext();
}

const keyOf = (ruleId: string, { id, machineId }: Subject): string => `${ruleId} ${id} ${machineId ?? ''}`;
