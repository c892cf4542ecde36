// Tracks alerts that are not resolved yet. Also tracks conditions that hold but have not lasted long enough to open an
// alert. Writes the changes of each alert (open, repeat, resolve) one after another.
import { after, monotonic, now } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { AlertRule } from '../state/index.ts';
import type { Alert, AlertRecords, Reason, Subject } from './alert-records.ts';
import type { Windows } from './maintenance-windows.ts';
import { type Conditions, returnMs } from './rule-conditions.ts';

/**
 * A rule and one of its subjects. The pair is tracked while the condition of the rule holds for the subject, or while
 * their alert is not resolved.
 */
export interface Tracked {
  rule: AlertRule;
  subject: Subject;
  /** Time at which the condition began to hold, in milliseconds of the monotonic clock. */
  since: number;
  message: string;
  value: number | null;
  alert: Alert | undefined;
  /** The state that the alert should get. A Reason means that the alert should be resolved for this reason. */
  target: 'pending' | 'open' | Reason;
  /** True while a change of the alert is being written. Changes of one alert are written one after another. */
  busy: boolean;
  /**
   * Monotonic time until which a held alert is not opened. It is set for an alert of an earlier process or of another
   * broker, because the machine needs time to link again.
   */
  heldUntil: number;
  cancelCheck(): void;
  cancelNext(): void;
}

/** Milliseconds to wait after a failed write of the history. */
const retryMs = 5_000;

const nothing = (): void => {};

export class TrackedAlerts {
  readonly #records: AlertRecords;
  readonly #windows: Windows;
  readonly #conditions: Pick<Conditions, 'isElsewhere'>;
  readonly #log: Logger;
  readonly #tracked = new Map<string, Tracked>();
  #stopped = false;

  constructor(
    records: AlertRecords,
    windows: Windows,
    conditions: Pick<Conditions, 'isElsewhere'>,
    log: Logger,
  ) {
    this.#records = records;
    this.#windows = windows;
    this.#conditions = conditions;
    this.#log = log;
  }

  get(ruleId: string, subject: Subject): Tracked | undefined {
    return this.#tracked.get(keyOf(ruleId, subject));
  }

  all(): Iterable<Tracked> {
    return this.#tracked.values();
  }

  /** Records that the condition of a rule holds for a subject. */
  add(rule: AlertRule, subject: Subject, began: Pick<Tracked, 'message' | 'value' | 'since'>): Tracked {
    const tracked: Tracked = this.get(rule.id, subject) ?? {
      ...{ rule, subject, alert: undefined, busy: false, target: 'pending', heldUntil: 0 },
      ...{ cancelCheck: nothing, cancelNext: nothing },
      ...began,
    };
    Object.assign(tracked, began, { rule, target: 'pending' });
    this.#tracked.set(keyOf(rule.id, subject), tracked);
    return tracked;
  }

  /** Continues an alert that an earlier process or another broker opened. */
  resume(rule: AlertRule, alert: Alert): Tracked {
    const { message, value, subject: id, machine_id: machineId } = alert;
    const tracked = this.add(rule, { id, machineId }, { message, value, since: monotonic() });
    Object.assign(tracked, { alert, target: 'open', heldUntil: monotonic() + returnMs });
    this.armNext(tracked, alert);
    return tracked;
  }

  /** Stops tracking an alert that is resolved, or that another broker tracks from now on. */
  leave(tracked: Tracked): void {
    cancelTimers(tracked);
    if (this.#has(tracked)) this.#tracked.delete(keyOf(tracked.rule.id, tracked.subject));
  }

  /** Opens an alert. Call this when its condition has lasted for the minimum time that the rule sets (`for`). */
  open(tracked: Tracked): void {
    tracked.target = 'open';
    // If there is an alert, its condition has ended and its timer was cancelled, but the end could not be stored. So the
    // alert continues.
    if (tracked.alert) this.armNext(tracked, tracked.alert);
    void this.#settle(tracked);
  }

  end(tracked: Tracked, reason: Reason): void {
    tracked.target = reason;
    cancelTimers(tracked);
    void this.#settle(tracked);
  }

  /** Records that an alert was acknowledged. An acknowledged alert is not repeated any more. */
  acknowledged(alert: Alert): void {
    const tracked = this.get(alert.rule_id, { id: alert.subject, machineId: alert.machine_id });
    if (tracked?.alert?.id !== alert.id) return;
    tracked.alert = alert;
    tracked.cancelNext();
  }

  stop(): void {
    this.#stopped = true;
    for (const tracked of this.#tracked.values()) cancelTimers(tracked);
  }

  #has(tracked: Tracked): boolean {
    return this.get(tracked.rule.id, tracked.subject) === tracked;
  }

  /** Writes the changes of an alert (created, resolved) one after another, until the alert has its target state. */
  async #settle(tracked: Tracked): Promise<void> {
    if (tracked.busy) return;
    tracked.busy = true;
    try {
      for (let more = true; more && !this.#stopped; ) more = await this.#step(tracked);
    } catch (error) {
      if (!this.#has(tracked)) return;
      this.#log.error(
        { err: error, rule_id: tracked.rule.id },
        'a change of an alert could not be stored; trying again in 5 s',
      );
      tracked.cancelCheck = after(retryMs, () => void this.#settle(tracked));
      return;
    } finally {
      tracked.busy = false;
    }
    if (!tracked.alert && tracked.target !== 'open' && tracked.target !== 'pending') this.leave(tracked);
  }

  /** Writes the next change of the alert to the database. Returns false if the alert has its target state. */
  async #step(tracked: Tracked): Promise<boolean> {
    const { rule, subject, alert, target, message, value } = tracked;
    if (target === 'pending') return false;
    if (target === 'open') {
      if (alert) return false;
      const window_id = this.#windows.holding(subject)?.id ?? null;
      tracked.alert = await this.#records.create(rule, subject, { message, value, window_id });
      if (this.#has(tracked)) this.armNext(tracked, tracked.alert);
      return true;
    }
    if (!alert) return false;
    await this.#records.resolve(alert, target, rule);
    tracked.alert = undefined;
    return true;
  }

  /** Starts the timer that opens a held-back alert or repeats an open alert. */
  armNext(tracked: Tracked, alert: Alert): void {
    tracked.cancelNext();
    tracked.cancelNext = nothing;
    const { repeat_every } = tracked.rule;
    const isHeld = alert.status === 'held';
    if (!isHeld && (repeat_every === null || alert.status !== 'open')) return;
    const last = alert.repeated_at ?? alert.opened_at ?? alert.created_at;
    // If the clock was ahead at the last step, the step's time may be far in the future.
    const repeat = Math.min(last, now()) + (repeat_every ?? 0);
    const due = Math.max(isHeld ? 0 : repeat, this.#windows.holding(tracked.subject)?.until ?? 0);
    const back = isHeld ? tracked.heldUntil - monotonic() : 0;
    tracked.cancelNext = after(Math.max(0, back, due - now()), () => void this.#next(tracked, alert));
  }

  async #next(tracked: Tracked, alert: Alert): Promise<void> {
    const { id, status } = alert;
    const isCurrent = (): boolean =>
      this.#has(tracked) && tracked.alert?.id === id && tracked.target === 'open';
    if (this.#stopped || !isCurrent()) return;
    if (this.#conditions.isElsewhere(tracked.subject)) return this.leave(tracked);
    // If a maintenance window has begun since the timer was set, the alert waits for the end of that window too.
    if (this.#windows.holding(tracked.subject)) {
      this.armNext(tracked, alert);
      return;
    }
    const { rule } = tracked;
    try {
      const changed = await (status === 'held'
        ? this.#records.release(alert, rule)
        : this.#records.repeat(alert, rule));
      if (!changed || !isCurrent()) return;
      tracked.alert = changed;
      this.armNext(tracked, changed);
    } catch (error) {
      this.#log.error(
        { err: error, alert_id: id },
        'a change of an alert could not be stored; trying again in 5 s',
      );
      tracked.cancelNext = after(retryMs, () => void this.#next(tracked, alert));
    }
  }
}

function cancelTimers(tracked: Tracked): void {
  tracked.cancelCheck();
  tracked.cancelNext();
}

const keyOf = (ruleId: string, { id, machineId }: Subject): string => `${ruleId} ${id} ${machineId ?? ''}`;
