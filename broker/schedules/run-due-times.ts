// Runs each due time of a schedule once, and records the times that were skipped or missed.
import { after, iso, nextTurn, now } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Schedule, State } from '../state/in-memory-state.ts';
import { decide, lateMs } from './catch-up.ts';
import { ClockWatch } from './clock-watch.ts';
import { Timetable } from './due-times.ts';
import type { Launcher, ScheduleContext } from './launch-run.ts';
import { mostRan, newRun, type RanTimes, type ScheduleRun, settledRun } from './run-records.ts';

/** A declared schedule and its progress. */
interface Tracked {
  schedule: Schedule;
  /** Every time up to this one has run, or is recorded as skipped or missed. */
  settledUntil: number;
  /** The first time after `settledUntil`; undefined if there is none. */
  next: number | undefined;
  /** When the schedule is checked next: at its next time or later. */
  checkAt: number;
  /** False if the mark must be read first, because another broker may have run the schedule. */
  loaded: boolean;
  /** True while the schedule is being checked. */
  busy: boolean;
  /** True while the next time waits: for the end of an open run, or for a retry after a failed write. */
  waiting: boolean;
  /** Number of missed times recorded in a row. */
  missed: number;
}

/** Longest wait between two checks of the clock. It is short because the clock can be set at any time. */
const longestWaitMs = 1_000;
/** Maximum number of schedules that are checked together, in one transaction. */
const atOnce = 32;
/** Maximum number of schedules far behind that are checked together. Each of them may write many rows. */
const behindAtOnce = 8;
const missedAtOnce = 100;
/** Maximum number of rows in succession for missed times of one schedule. All further times share one more row. */
const mostMissed = 1000;
/**
 * Maximum number of rows for missed times of all schedules, for one start of the broker or one change of the
 * clock.
 */
const mostMissedInAll = 20_000;
/** The times that share a row are counted only up to this number. */
const mostCounted = 200;
/**
 * Milliseconds until a due time that waits for an open run is checked again: `unsureMs` if the run may have
 * ended, `openMs` if it has not.
 */
const unsureMs = 1_000;
const openMs = 60_000;
/** Milliseconds to wait after a failed write. */
const retryMs = 5_000;

export class DueTimes {
  readonly #context: ScheduleContext;
  readonly #launcher: Launcher;
  readonly #log: Logger;
  readonly #tracked = new Map<string, Tracked>();
  readonly #clock = new ClockWatch();
  readonly #stopWatching: () => void;
  #declared: State['schedules'] | undefined;
  /** Number of rows that may still be written for missed times. */
  #missedRowsLeft = mostMissedInAll;
  #working = false;
  #stopped = false;
  #cancelTimer = (): void => {};

  /** `marks` has the time up to which each schedule is settled. */
  constructor(context: ScheduleContext, launcher: Launcher, marks: ReadonlyMap<string, number>, log: Logger) {
    this.#context = context;
    this.#launcher = launcher;
    this.#log = log;
    context.records.onEnd = (id) => {
      const tracked = this.#tracked.get(id);
      if (!tracked?.waiting) return;
      this.#plan(tracked);
      this.#setTimer();
    };
    this.#sync(marks);
    this.#stopWatching = context.state.watch(() => this.#sync());
    this.#rewind(now());
  }

  /**
   * Returns the first due time of a schedule after an instant; undefined if there is none or the schedule is
   * disabled.
   */
  nextAfter(id: string, after: number): number | undefined {
    const tracked = this.#tracked.get(id);
    if (tracked?.next === undefined || tracked.next > after) return tracked?.next;
    return this.#timetableOf(tracked.schedule)?.next(after);
  }

  /**
   * Returns at most `count` next due times of a schedule. The times in `ran` are left out, because they ran
   * while the clock was ahead.
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

  /** Goes on with the schedules of these machines, which this broker owns from now on. */
  async adopt(machineIds: readonly string[]): Promise<void> {
    const owned = new Set(machineIds);
    await this.#load([...this.#tracked.values()].filter(({ schedule }) => owned.has(schedule.machine_id)));
  }

  /** Reads the times up to which other brokers have settled these schedules. */
  async #load(some: readonly Tracked[]): Promise<void> {
    for (const tracked of some) tracked.loaded = false;
    const marks = await this.#context.records.marksOf(some.map(({ schedule }) => schedule.id));
    for (const tracked of some) {
      const { id, since } = tracked.schedule;
      tracked.settledUntil = Math.min(Math.max(marks.get(id) ?? 0, Date.parse(since)), now());
      tracked.loaded = true;
      this.#plan(tracked);
    }
    this.#setTimer();
  }

  /** True if this broker runs the schedule. */
  #isOwn({ schedule, loaded }: Tracked): boolean {
    return loaded && this.#context.history.owns(schedule.machine_id);
  }

  stop(): void {
    this.#stopped = true;
    this.#stopWatching();
    this.#cancelTimer();
  }

  /** Makes the tracked schedules equal to those that are declared now. */
  #sync(marks: ReadonlyMap<string, number> = new Map()): void {
    const { schedules } = this.#context.state;
    if (schedules === this.#declared) return;
    this.#declared = schedules;
    for (const id of this.#tracked.keys()) if (!schedules.has(id)) this.#tracked.delete(id);
    const moved: Tracked[] = [];
    for (const schedule of schedules.values()) {
      const before = this.#tracked.get(schedule.id);
      if (before?.schedule === schedule) continue;
      // If the machine of a schedule changes, another broker may have owned the new machine.
      if (before && before.schedule.machine_id !== schedule.machine_id) moved.push(before);
      this.#track(schedule, marks.get(schedule.id));
    }
    if (this.#context.cluster && moved.length > 0)
      this.#load(moved).catch((err: unknown) =>
        this.#log.error({ err }, 'marks of schedules could not be read'),
      );
    this.#setTimer();
  }

  #track(schedule: Schedule, settledUntil = 0): void {
    const tracked = this.#tracked.get(schedule.id) ?? {
      ...{ schedule, settledUntil, next: undefined, checkAt: Number.POSITIVE_INFINITY },
      ...{ loaded: true, busy: false, waiting: false, missed: 0 },
    };
    tracked.schedule = schedule;
    // Due times before `since` do not count. A mark later than now was written while the clock was ahead.
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
    tracked.checkAt = tracked.next ?? Number.POSITIVE_INFINITY;
  }

  #setTimer(): void {
    this.#cancelTimer();
    if (this.#stopped || this.#working) return;
    let next = Number.POSITIVE_INFINITY;
    if (!this.#clock.isUncertain)
      for (const tracked of this.#tracked.values())
        if (this.#isOwn(tracked)) next = Math.min(next, tracked.checkAt);
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

  /** Returns due schedules, oldest first. Schedules that are far behind wait until no others are due. */
  #due(): Tracked[] {
    const at = now();
    const due = [...this.#tracked.values()].filter((one) => one.checkAt <= at && this.#isOwn(one));
    due.sort((a, b) => a.checkAt - b.checkAt);
    const fresh = due.filter(({ checkAt: lookAt }) => lookAt >= at - lateMs);
    return fresh.length > 0 ? fresh.slice(0, atOnce) : due.slice(0, behindAtOnce);
  }

  #followClock(): void {
    const { drift, corrected } = this.#clock.compare();
    if (drift === 0) return;
    this.#log.warn(
      { drift_ms: Math.round(drift) },
      'the wall clock was set; no schedule runs for a minute if it was set forward',
    );
    this.#missedRowsLeft = mostMissedInAll;
    if (drift < 0) this.#rewind(corrected);
    for (const tracked of this.#tracked.values()) {
      const isAhead = tracked.settledUntil > corrected;
      if (isAhead) tracked.settledUntil = corrected;
      if (isAhead || tracked.waiting) this.#plan(tracked);
      else tracked.checkAt = tracked.next ?? Number.POSITIVE_INFINITY;
    }
  }

  /**
   * Removes rows and marks later than `to`, which were written while the clock was ahead. Rows of runs that
   * took place are not removed, and these runs are not repeated.
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
  async #check(tracked: Tracked): Promise<void> {
    tracked.busy = true;
    const wait = await this.#step(tracked).catch((error: unknown) => {
      const { id } = tracked.schedule;
      this.#log.error({ err: error, schedule_id: id }, 'a schedule could not be run; trying again in 5 s');
      return retryMs;
    });
    tracked.busy = false;
    this.#plan(tracked);
    if (wait === undefined || tracked.next === undefined) return;
    tracked.waiting = true;
    tracked.checkAt = now() + wait;
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
      await this.#recordMissed(tracked, timetable, step.missed);
      return;
    }
    const { at, trigger } = step;
    tracked.missed = 0;
    // After the clock was set back, a due time that has run can come again. `busy` ensures that no other step
    // records this time meanwhile, because only one step of a schedule runs at a time.
    if (!(await this.#ran(schedule, at))) {
      const decision = await this.#decideOverlap(schedule, trigger);
      if (typeof decision === 'number') return decision;
      if (decision === 'skip') await this.#settle(schedule, 'skipped', trigger, [at], overlapping);
      else await this.#launcher.byClock(schedule, at, trigger);
    }
    tracked.settledUntil = at;
  }

  /**
   * Decides whether a due time runs or is skipped while earlier runs have not ended. A returned number means:
   * wait this many milliseconds, then decide again.
   */
  async #decideOverlap(schedule: Schedule, trigger: 'cron' | 'catch_up'): Promise<'run' | 'skip' | number> {
    // A manual run that starts during this read is treated like one that starts right after the due time.
    const open = await this.#context.records.open(schedule.id);
    // If the machine is offline, the command fails, and its row then has the reason.
    if (open.length === 0 || this.#launcher.isAway(schedule.machine_id)) return 'run';
    const all = schedule.catch_up === 'all';
    if (all && trigger === 'catch_up') return openMs;
    if (schedule.overlap === 'allow') return 'run';
    if (all && open.some((run) => run.trigger === 'catch_up')) return openMs;
    return this.#launcher.mayHaveEnded(open) ? unsureMs : 'skip';
  }

  async #recordMissed(tracked: Tracked, timetable: Timetable, until: number): Promise<void> {
    const { schedule, settledUntil } = tracked;
    const most = Math.min(missedAtOnce, mostMissed - tracked.missed, this.#missedRowsLeft);
    if (most <= 0) return this.#recordRest(tracked, timetable, until);
    const passed = timetable.times(settledUntil, most, until);
    // The number is subtracted before the wait, because other schedules use the same number.
    this.#missedRowsLeft -= passed.length;
    const ran = await this.#context.records.ran([schedule.id], settledUntil, passed.at(-1));
    const times = passed.filter((at) => !ran.get(schedule.id)?.has(at));
    this.#missedRowsLeft += passed.length - times.length;
    tracked.missed += times.length;
    await this.#settle(schedule, 'missed', 'cron', times, notRunning);
    tracked.settledUntil = passed.at(-1) ?? until;
  }

  /** Stores one row for all these due times. Its time is the last of them that did not run. */
  async #recordRest(tracked: Tracked, timetable: Timetable, until: number): Promise<void> {
    const { schedule, settledUntil } = tracked;
    let last = timetable.last(settledUntil, until);
    while (last !== undefined && (await this.#ran(schedule, last))) {
      last = timetable.last(settledUntil, last - 1);
    }
    if (last !== undefined) {
      const reason = `${notRunning}${sharing(timetable, settledUntil, last)}`;
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
const notRunning = 'the broker was not running or was overloaded at this time, or its clock was set';

/** Returns the part of the reason that says how many due times the row stands for. */
function sharing(timetable: Timetable, settledUntil: number, last: number): string {
  const times = timetable.times(settledUntil, mostCounted + 1, last);
  if (times.length < 2) return '';
  const count = times.length > mostCounted ? `more than ${mostCounted}` : times.length;
  return `; this row stands for ${count} times from ${iso(times[0])} to ${iso(last)}`;
}

/**
 * Sets `since` of these schedules, so that times before `at` are neither run nor recorded as missed. Resolves
 * when that is on disk.
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
