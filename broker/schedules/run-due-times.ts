// Runs each due time of a schedule once, and records the times that were skipped or missed.
import { after, iso, nextTurn, now } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Schedule, State } from '../state/state.ts';
import { decide, lateMs } from './catch-up.ts';
import { ClockWatch } from './clock-watch.ts';
import type { Launcher, ScheduleContext } from './launch-run.ts';
import { mostRan, newRun, type RanTimes, type ScheduleRun, settledRun } from './run-records.ts';
import { Timetable } from './timetable.ts';

/** A declared schedule and its progress. */
interface Tracked {
  schedule: Schedule;
  /** Every time up to this one has run or is recorded as skipped or missed. */
  settledUntil: number;
  /** The first time after `settledUntil`; undefined if there is none. */
  next: number | undefined;
  /** When the schedule is checked next: at its next time, or later. */
  lookAt: number;
  /** True while the schedule is being checked. */
  busy: boolean;
  /** True while the next time waits for an open run to end, or for another try after a failed write. */
  waiting: boolean;
  /** Number of missed times recorded in a row. */
  missed: number;
}

/** Longest wait between checks of the clock, because the clock can be set. */
const longestWaitMs = 1_000;
/** Most schedules that are checked together, in one transaction. */
const atOnce = 32;
/** Most schedules far behind that are checked together; each of them may write many rows. */
const behindAtOnce = 8;
const missedAtOnce = 100;
/** Most rows for missed times in a row of one schedule. All further times share one more row. */
const mostMissed = 1000;
/** Most rows for missed times of all schedules, for one start of the broker or one change of the clock. */
const mostMissedInAll = 20_000;
/** Times that share a row are counted up to this number. */
const mostCounted = 200;
/**
 * Waits before a waiting time is checked again:
 * `unsureMs` if the open run may have ended, `openMs` if it has not.
 */
const unsureMs = 1_000;
const openMs = 60_000;
/** Wait after a failed write. */
const againMs = 5_000;

export class Firing {
  readonly #context: ScheduleContext;
  readonly #launcher: Launcher;
  readonly #log: Logger;
  readonly #tracked = new Map<string, Tracked>();
  readonly #clock = new ClockWatch();
  readonly #stopWatching: () => void;
  #declared: State['schedules'] | undefined;
  /** How many more rows may be written for missed times. */
  #spare = mostMissedInAll;
  #working = false;
  #stopped = false;
  #cancelTimer = (): void => {};

  /** `marks`: the time up to which each schedule is settled. */
  constructor(context: ScheduleContext, launcher: Launcher, marks: ReadonlyMap<string, number>, log: Logger) {
    this.#context = context;
    this.#launcher = launcher;
    this.#log = log;
    context.records.onEnd = (id) => {
      const tracked = this.#tracked.get(id);
      if (!tracked?.waiting) return;
      this.#plan(tracked);
      this.#arm();
    };
    this.#sync(marks);
    this.#stopWatching = context.state.watch(() => this.#sync());
    this.#rewind(now());
  }

  /** The first due time of a schedule after an instant; undefined if there is none or the schedule is disabled. */
  nextAfter(id: string, after: number): number | undefined {
    const tracked = this.#tracked.get(id);
    if (tracked?.next === undefined || tracked.next > after) return tracked?.next;
    return this.#timetableOf(tracked.schedule)?.next(after);
  }

  /**
   * The next due times of a schedule, at most `count`. Those in `ran` are skipped: they already ran, while the clock
   * was ahead.
   */
  nextOf(id: string, count: number, ran: RanTimes): number[] {
    const tracked = this.#tracked.get(id);
    const times: number[] = [];
    if (tracked?.next === undefined) return times;
    const { schedule, next } = tracked;
    let at: number | undefined = next > now() ? next : this.#timetableOf(schedule)?.next(now());
    for (let passed = 0; at !== undefined && times.length < count; ) {
      if (passed < mostRan && ran.get(id)?.has(at)) passed += 1;
      else times.push(at);
      if (times.length < count) at = this.#timetableOf(schedule)?.next(at);
    }
    return times;
  }

  stop(): void {
    this.#stopped = true;
    this.#stopWatching();
    this.#cancelTimer();
  }

  /** Adopts the schedules as they are declared now. */
  #sync(marks: ReadonlyMap<string, number> = new Map()): void {
    const { schedules } = this.#context.state;
    if (schedules === this.#declared) return;
    this.#declared = schedules;
    for (const id of this.#tracked.keys()) if (!schedules.has(id)) this.#tracked.delete(id);
    for (const schedule of schedules.values()) {
      if (this.#tracked.get(schedule.id)?.schedule !== schedule) this.#take(schedule, marks.get(schedule.id));
    }
    this.#arm();
  }

  #take(schedule: Schedule, settledUntil = 0): void {
    const tracked = this.#tracked.get(schedule.id) ?? {
      ...{ schedule, settledUntil, next: undefined, lookAt: Number.POSITIVE_INFINITY },
      ...{ busy: false, waiting: false, missed: 0 },
    };
    tracked.schedule = schedule;
    // Times before `since` do not count. A mark later than now was written while the clock was ahead.
    tracked.settledUntil = Math.min(Math.max(tracked.settledUntil, Date.parse(schedule.since)), now());
    this.#tracked.set(schedule.id, tracked);
    this.#plan(tracked);
  }

  #timetableOf({ id, cron, timezone }: Schedule): Timetable | undefined {
    try {
      return new Timetable(cron, timezone);
    } catch (error) {
      const problem =
        'the cron or timezone of a schedule is invalid, so it does not run: change the schedule';
      this.#log.error({ err: error, schedule_id: id }, problem);
      return undefined;
    }
  }

  #plan(tracked: Tracked): void {
    const { schedule, settledUntil, busy } = tracked;
    if (busy) return;
    tracked.waiting = false;
    tracked.next = schedule.enabled ? this.#timetableOf(schedule)?.next(settledUntil) : undefined;
    tracked.lookAt = tracked.next ?? Number.POSITIVE_INFINITY;
  }

  #arm(): void {
    this.#cancelTimer();
    if (this.#stopped || this.#working) return;
    let next = Number.POSITIVE_INFINITY;
    if (!this.#clock.isUncertain)
      for (const { lookAt } of this.#tracked.values()) next = Math.min(next, lookAt);
    const wait = Math.min(Math.max(0, next - now()), longestWaitMs);
    this.#cancelTimer = after(wait, () => {
      this.#working = true;
      void this.#work().finally(() => {
        this.#working = false;
        this.#arm();
      });
    });
  }

  async #work(): Promise<void> {
    while (!this.#stopped) {
      this.#followClock();
      if (this.#clock.isUncertain) return;
      const some = this.#due();
      if (some.length === 0) return;
      await Promise.all(some.map((tracked) => this.#look(tracked)));
      await nextTurn();
    }
  }

  /** Due schedules, oldest first. Those far behind wait until no others are due. */
  #due(): Tracked[] {
    const at = now();
    const due = [...this.#tracked.values()].filter(({ lookAt }) => lookAt <= at);
    due.sort((a, b) => a.lookAt - b.lookAt);
    const fresh = due.filter(({ lookAt }) => lookAt >= at - lateMs);
    return fresh.length > 0 ? fresh.slice(0, atOnce) : due.slice(0, behindAtOnce);
  }

  #followClock(): void {
    const { drift, corrected } = this.#clock.look();
    if (drift === 0) return;
    this.#log.warn(
      { drift_ms: Math.round(drift) },
      'the wall clock was set; no schedule runs for a minute if it was set forward',
    );
    this.#spare = mostMissedInAll;
    if (drift < 0) this.#rewind(corrected);
    for (const tracked of this.#tracked.values()) {
      const isAhead = tracked.settledUntil > corrected;
      if (isAhead) tracked.settledUntil = corrected;
      if (isAhead || tracked.waiting) this.#plan(tracked);
      else tracked.lookAt = tracked.next ?? Number.POSITIVE_INFINITY;
    }
  }

  /**
   * Removes rows and marks later than `to`, written while the clock was ahead.
   * Runs that took place stay and are not repeated.
   */
  #rewind(to: number): void {
    const { state, history, records } = this.#context;
    const writes = [
      history.write((transaction) => records.rewind(to, transaction)),
      countTimesFrom(state, to, ({ since }) => Date.parse(since) > to),
    ];
    Promise.all(writes).catch((error: unknown) =>
      this.#log.warn(
        { err: error },
        'the clock was set back, but the history rows of runs that are now in the future could not be removed',
      ),
    );
  }

  /** Handles the next due time of a schedule, or several missed times. Never rejects. */
  async #look(tracked: Tracked): Promise<void> {
    tracked.busy = true;
    const wait = await this.#step(tracked).catch((error: unknown) => {
      const { id } = tracked.schedule;
      this.#log.error({ err: error, schedule_id: id }, 'a schedule could not be run; trying again in 5 s');
      return againMs;
    });
    tracked.busy = false;
    this.#plan(tracked);
    if (wait === undefined || tracked.next === undefined) return;
    tracked.waiting = true;
    tracked.lookAt = now() + wait;
  }

  /** Runs one step. Resolves with the milliseconds until the next check if the step had to wait. */
  async #step(tracked: Tracked): Promise<number | undefined> {
    const { schedule, settledUntil } = tracked;
    const timetable = this.#timetableOf(schedule);
    if (!timetable) return;
    const { started, jump } = this.#clock;
    const step = decide({ schedule, timetable, settledUntil, now: now(), started, jump });
    if (!step) return;
    if ('missed' in step) {
      await this.#miss(tracked, timetable, step.missed);
      return;
    }
    const { at, trigger } = step;
    tracked.missed = 0;
    // A time that already ran can come again after the clock was set back.
    // Nothing else records times of this schedule meanwhile: `busy` lets only one step of it run.
    if (!(await this.#ran(schedule, at))) {
      const fate = await this.#decideOverlap(schedule, trigger);
      if (typeof fate === 'number') return fate;
      if (fate === 'skip') await this.#settle(schedule, 'skipped', trigger, [at], overlapping);
      else await this.#launcher.byClock(schedule, at, trigger);
    }
    tracked.settledUntil = at;
  }

  /**
   * Decides whether a time runs beside open runs or is skipped. A number means: wait this many milliseconds.
   */
  async #decideOverlap(schedule: Schedule, trigger: 'cron' | 'catch_up'): Promise<'run' | 'skip' | number> {
    // A run by hand that begins meanwhile counts as one that begins after this time: nothing forbids it.
    const open = await this.#context.records.open(schedule.id);
    // The command fails on an offline machine, which leaves a row with the reason.
    if (open.length === 0 || this.#launcher.isAway(schedule.machine_id)) return 'run';
    const all = schedule.catch_up === 'all';
    if (all && trigger === 'catch_up') return openMs;
    if (schedule.overlap === 'allow') return 'run';
    if (all && open.some((run) => run.trigger === 'catch_up')) return openMs;
    return this.#launcher.mayHaveEnded(open) ? unsureMs : 'skip';
  }

  async #miss(tracked: Tracked, timetable: Timetable, until: number): Promise<void> {
    const { schedule, settledUntil } = tracked;
    const most = Math.min(missedAtOnce, mostMissed - tracked.missed, this.#spare);
    if (most <= 0) return this.#missRest(tracked, timetable, until);
    const passed = timetable.times(settledUntil, most, until);
    // Subtracted before the wait, because other schedules use up the same number.
    this.#spare -= passed.length;
    const ran = await this.#context.records.ran([schedule.id], settledUntil, passed.at(-1));
    const times = passed.filter((at) => !ran.get(schedule.id)?.has(at));
    this.#spare += passed.length - times.length;
    tracked.missed += times.length;
    await this.#settle(schedule, 'missed', 'cron', times, unseen);
    tracked.settledUntil = passed.at(-1) ?? until;
  }

  /** Stores one row for all these times, with the last of them that did not run. */
  async #missRest(tracked: Tracked, timetable: Timetable, until: number): Promise<void> {
    const { schedule, settledUntil } = tracked;
    let last = timetable.last(settledUntil, until);
    while (last !== undefined && (await this.#ran(schedule, last))) {
      last = timetable.last(settledUntil, last - 1);
    }
    if (last !== undefined) {
      const reason = `${unseen}${sharing(timetable, settledUntil, last)}`;
      await this.#settle(schedule, 'missed', 'cron', [last], reason);
    }
    tracked.settledUntil = until;
  }

  async #ran({ id }: Schedule, at: number): Promise<boolean> {
    return (await this.#context.records.ran([id], at, at)).has(id);
  }

  #settle(
    schedule: Schedule,
    status: 'missed' | 'skipped',
    trigger: ScheduleRun['trigger'],
    times: readonly number[],
    reason: string,
  ): Promise<void> {
    const runs = times.map((at) => settledRun(newRun(schedule, trigger, at), status, reason));
    return this.#context.history.write((transaction) => this.#context.records.settle(runs, transaction));
  }
}

const overlapping = 'the previous run had not ended';
const unseen = 'the broker was not running or was overloaded at this time, or its clock was set';

/** The part of the reason that says how many times share the row. */
function sharing(timetable: Timetable, settledUntil: number, last: number): string {
  const times = timetable.times(settledUntil, mostCounted + 1, last);
  if (times.length < 2) return '';
  const count = times.length > mostCounted ? `more than ${mostCounted}` : times.length;
  return `; this row stands for ${count} times from ${iso(times[0])} to ${iso(last)}`;
}

/**
 * Sets `since` of these schedules, so that times before `at` are neither run
 * nor recorded as missed. Resolves once on disk.
 */
export async function countTimesFrom(
  state: State,
  at: number,
  which: (schedule: Schedule) => boolean,
): Promise<void> {
  await state.change((transaction) => {
    for (const schedule of transaction.all('schedules').filter(which)) {
      transaction.put('schedules', { ...schedule, since: iso(at) });
    }
  });
}
