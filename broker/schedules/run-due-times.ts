// Runs each due time of a schedule once, and records the due times that were skipped or missed.
import { after, iso, nextTurn, now } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { State } from '../state/index.ts';
import { ClockWatch } from './clock-watch.ts';
import type { Timetable } from './cron-due-times.ts';
import { decide, lateMs } from './decide-next-run.ts';
import type { Launcher, ScheduleContext } from './launch-run.ts';
import { newRun, type ScheduleRun, settledRun } from './run-records.ts';
import {
  machineIn,
  type Replaced,
  replacedOf,
  setSettledUntil,
  type Tracked,
  type TrackedSchedules,
} from './tracked-schedules.ts';

/**
 * Longest wait between two checks of the clock, in milliseconds. The clock can be set at any time, so this wait is
 * short.
 */
const longestWaitMs = 1_000;
/** Maximum number of schedules that are checked together, in one transaction. */
const atOnce = 32;
/**
 * Maximum number of schedules that are checked together if they are far behind. Each check may then write many rows.
 */
const behindAtOnce = 8;
const missedAtOnce = 100;
/**
 * If a schedule misses many due times one after another, up to this number of them get a row each. One more row stands
 * for all the others.
 */
const mostMissed = 1000;
/**
 * Maximum number of rows for missed due times of all schedules together. The count begins again when the broker starts
 * and when its clock is changed.
 */
const mostMissedInAll = 20_000;
/**
 * A row can stand for many missed due times. Its reason gives their exact number up to this maximum, and otherwise says
 * "more than 200".
 */
const mostCounted = 200;
/** If a due time waits for an earlier run to end, it is checked again after this many milliseconds. */
const openMs = 60_000;
/** Like `openMs`, but for an earlier run that may have ended although its machine has not reported that yet. */
const unsureMs = 1_000;
/** Milliseconds to wait after a failed write. */
const retryMs = 5_000;

export class DueTimes {
  readonly #context: ScheduleContext;
  readonly #launcher: Launcher;
  readonly #log: Logger;
  readonly #tracked: TrackedSchedules;
  readonly #clock = new ClockWatch();
  /** Number of rows that may still be written for missed due times. */
  #missedRowsLeft = mostMissedInAll;
  #working = false;
  #stopped = false;
  #cancelTimer = (): void => {};

  constructor(context: ScheduleContext, launcher: Launcher, tracked: TrackedSchedules, log: Logger) {
    this.#context = context;
    this.#launcher = launcher;
    this.#log = log;
    this.#tracked = tracked;
    tracked.watch(() => this.#setTimer());
    context.records.watch((run) => {
      const waiting = tracked.of(run);
      if (!waiting?.waiting) return;
      tracked.plan(waiting);
      this.#setTimer();
    });
    this.#setTimer();
    this.#rewind(now());
  }

  stop(): void {
    this.#stopped = true;
    this.#tracked.stop();
    this.#cancelTimer();
  }

  #setTimer(): void {
    this.#cancelTimer();
    if (this.#stopped || this.#working) return;
    let next = Number.POSITIVE_INFINITY;
    if (!this.#clock.isUncertain)
      for (const one of this.#tracked.all())
        if (one.checkAt < next && this.#tracked.isOwn(one)) next = one.checkAt;
    const wait = Math.min(Math.max(0, next - now()), longestWaitMs);
    this.#cancelTimer = after(wait, () => {
      this.#working = true;
      void this.#work().finally(() => {
        this.#working = false;
        this.#setTimer();
      });
    });
  }

  async #work(): Promise<void> {
    while (!this.#stopped) {
      this.#followClock();
      if (this.#clock.isUncertain) return;
      const some = this.#due();
      if (some.length === 0) return;
      await Promise.all(some.map((tracked) => this.#check(tracked)));
      await nextTurn();
    }
  }

  /** Returns some due schedules, earliest `checkAt` first. Schedules far behind wait until no others are due. */
  #due(): Tracked[] {
    const at = now();
    const due: Tracked[] = [];
    for (const one of this.#tracked.all()) if (one.checkAt <= at && this.#tracked.isOwn(one)) due.push(one);
    due.sort((a, b) => a.checkAt - b.checkAt);
    const fresh = due.filter(({ checkAt: lookAt }) => lookAt >= at - lateMs);
    return fresh.length > 0 ? fresh.slice(0, atOnce) : due.slice(0, behindAtOnce);
  }

  #followClock(): void {
    const { drift, corrected } = this.#clock.compare();
    if (drift === 0) return;
    this.#log.warn(
      { drift_ms: Math.round(drift) },
      'the wall clock was set; if it was set forward, no schedule runs for the next minute',
    );
    this.#missedRowsLeft = mostMissedInAll;
    if (drift < 0) this.#rewind(corrected);
    for (const tracked of this.#tracked.all()) {
      const isAhead = tracked.settledUntil > corrected;
      if (isAhead) tracked.settledUntil = corrected;
      if (isAhead || tracked.waiting || tracked.schedule.replaced) this.#tracked.plan(tracked);
      else tracked.checkAt = tracked.next ?? Number.POSITIVE_INFINITY;
    }
  }

  /**
   * Undoes what was stored for times after `to` while the clock was ahead. Rows of runs that took place remain, so that
   * these runs are not repeated.
   */
  #rewind(to: number): void {
    const { state, history, records } = this.#context;
    const writes = [history.write((transaction) => records.rewind(to, transaction)), setBack(state, to)];
    Promise.all(writes).catch((error: unknown) =>
      this.#log.warn(
        { err: error },
        'the broker could not correct data about schedule runs that it may have stored while the clock was ahead; it tries again at its next start',
      ),
    );
  }

  /** Handles the next due time of a schedule, or several missed ones. Never rejects. */
  async #check(tracked: Tracked): Promise<void> {
    tracked.busy = true;
    const wait = await this.#step(tracked).catch((error: unknown) => {
      const { id } = tracked.schedule;
      this.#log.error({ err: error, schedule_id: id }, 'a schedule could not be run; trying again in 5 s');
      return retryMs;
    });
    tracked.busy = false;
    this.#tracked.plan(tracked);
    const isDone = tracked.next === undefined && !replacedOf(tracked);
    if (wait === undefined || isDone) return;
    tracked.waiting = true;
    tracked.checkAt = now() + wait;
  }

  /** Runs one step. Resolves with the milliseconds until the next check if the step had to wait. */
  async #step(tracked: Tracked): Promise<number | undefined> {
    const { schedule, settledUntil } = tracked;
    const replaced = replacedOf(tracked);
    if (replaced) {
      await this.#recordReplaced(tracked, replaced);
      return;
    }
    const timetable = this.#tracked.timetableOf(schedule);
    if (!timetable) return;
    const { started, jump } = this.#clock;
    const step = decide({ schedule, timetable, settledUntil, now: now(), started, jump });
    if (!step) return;
    if ('missed' in step) {
      await this.#recordMissed(tracked, timetable, step.missed, notRunning);
      return;
    }
    const { at, trigger } = step;
    tracked.missed = 0;
    // After the clock was set back, a due time can come a second time. It does not run again.
    if (!(await this.#ran(tracked, at))) {
      const decision = await this.#decideOverlap(tracked, trigger);
      if (typeof decision === 'number') return decision;
      if (decision === 'skip') await this.#settle(tracked, overlapping, trigger, [at]);
      else await this.#launcher.byClock(tracked, at, trigger);
    }
    advance(tracked, at);
  }

  /**
   * Decides what happens to a due time while earlier runs have not ended: it runs or is skipped. If the result is a
   * number, the decision must be made again after this number of milliseconds.
   */
  async #decideOverlap(tracked: Tracked, trigger: 'cron' | 'catch_up'): Promise<'run' | 'skip' | number> {
    const { schedule, machine_id } = tracked;
    // A run that a user starts during this read may be missing from its result. Such a run is treated as if it had
    // started just after this due time.
    const open = this.#launcher.inProgress(await this.#context.records.open(schedule.id, machineIn(tracked)));
    // The run does not wait for earlier runs if the machine is offline: its command fails at once, and its row contains
    // the reason.
    if (open.length === 0 || this.#launcher.isAway(machine_id)) return 'run';
    const all = schedule.catch_up === 'all';
    if (all && trigger === 'catch_up') return openMs;
    if (schedule.overlap === 'allow') return 'run';
    if (all && open.some((run) => run.trigger === 'catch_up')) return openMs;
    return this.#launcher.mayHaveEnded(open) ? unsureMs : 'skip';
  }

  /**
   * Records due times that did not run because the schedule was changed. Each call records up to `missedAtOnce` of
   * them. The next step of the schedule records more.
   */
  async #recordReplaced(tracked: Tracked, replaced: Replaced): Promise<void> {
    const timetable = this.#tracked.timetableOf({ ...tracked.schedule, ...replaced });
    const end = Date.parse(replaced.until);
    if (timetable?.times(tracked.settledUntil, 1, end).length)
      return this.#recordMissed(tracked, timetable, end, changed);
    setSettledUntil(tracked, end);
    tracked.missed = 0;
  }

  /** Records the next due times up to `until`, at most `missedAtOnce`, as missed or skipped. */
  async #recordMissed(tracked: Tracked, timetable: Timetable, until: number, why: NoRun): Promise<void> {
    const { schedule, settledUntil } = tracked;
    const most = Math.min(missedAtOnce, mostMissed - tracked.missed, this.#missedRowsLeft);
    if (most <= 0) return this.#recordRest(tracked, timetable, until, why);
    const passed = timetable.times(settledUntil, most, until);
    // The rows are subtracted before the read, because checks of other schedules read `#missedRowsLeft` at the same
    // time.
    this.#missedRowsLeft -= passed.length;
    const ran = await this.#context.records.ran(
      [schedule.id],
      settledUntil,
      passed.at(-1),
      machineIn(tracked),
    );
    const times = passed.filter((at) => !ran.get(schedule.id)?.has(at));
    this.#missedRowsLeft += passed.length - times.length;
    tracked.missed += times.length;
    await this.#settle(tracked, why, 'cron', times);
    advance(tracked, passed.at(-1) ?? until);
  }

  /** Stores one row for all missed due times up to `until`. Its time is the last due time that had no run. */
  async #recordRest(tracked: Tracked, timetable: Timetable, until: number, why: NoRun): Promise<void> {
    const { settledUntil } = tracked;
    let last = timetable.last(settledUntil, until);
    while (last !== undefined && (await this.#ran(tracked, last))) {
      last = timetable.last(settledUntil, last - 1);
    }
    if (last !== undefined) {
      const reason = `${why.reason}${sharing(timetable, settledUntil, last)}`;
      await this.#settle(tracked, { ...why, reason }, 'cron', [last]);
    }
    advance(tracked, until);
  }

  async #ran(tracked: Tracked, at: number): Promise<boolean> {
    const { id } = tracked.schedule;
    return (await this.#context.records.ran([id], at, at, machineIn(tracked))).has(id);
  }

  #settle(
    on: Tracked,
    { status, reason }: NoRun,
    trigger: ScheduleRun['trigger'],
    times: readonly number[],
  ): Promise<void> {
    const runs = times.map((at) => settledRun(newRun(on, trigger, at), status, reason));
    return this.#context.history.write((transaction) => this.#context.records.settle(runs, transaction));
  }
}

/** Status and reason of a due time that does not run. */
interface NoRun {
  status: 'missed' | 'skipped';
  reason: string;
}
const overlapping: NoRun = { status: 'skipped', reason: 'the previous run had not ended' };
const changed: NoRun = {
  status: 'skipped',
  reason: 'the schedule was changed or disabled before this time could run',
};
const notRunning: NoRun = {
  status: 'missed',
  reason: 'the broker was not running or was overloaded at this time, or its clock was set',
};

/**
 * Returns the text that ends the `reason` of a row for several due times: their number, the first one and the last one.
 * Returns '' if the row is for a single due time.
 */
function sharing(timetable: Timetable, settledUntil: number, last: number): string {
  const times = timetable.times(settledUntil, mostCounted + 1, last);
  if (times.length < 2) return '';
  const count = times.length > mostCounted ? `more than ${mostCounted}` : times.length;
  return `; this row stands for ${count} due times, from ${iso(times[0])} to ${iso(last)}`;
}

/** Moves `settledUntil` forward to `at`, unless a change of the schedule during the step has moved it further. */
function advance(tracked: Tracked, at: number): void {
  tracked.settledUntil = Math.max(tracked.settledUntil, at);
}

/**
 * Sets `since` of all schedules to `at`. Their due times before `at` then neither run nor are recorded as missed.
 * Resolves when the change is on disk.
 */
export async function countTimesFrom(state: State, at: number): Promise<void> {
  await state.change((transaction) => {
    for (const schedule of transaction.all('schedules'))
      transaction.put('schedules', { ...schedule, since: iso(at), replaced: undefined });
  });
}

/** Limits `since` and the times in `replaced` to at most `to`, in all schedules. Resolves when this is on disk. */
async function setBack(state: State, to: number): Promise<void> {
  const back = (time: string): string => iso(Math.min(Date.parse(time), to));
  await state.change((transaction) => {
    for (const schedule of transaction.all('schedules')) {
      if (Date.parse(schedule.since) <= to) continue;
      const replaced = schedule.replaced?.map((one) => ({
        ...one,
        since: back(one.since),
        until: back(one.until),
      }));
      transaction.put('schedules', { ...schedule, since: back(schedule.since), replaced });
    }
  });
}
