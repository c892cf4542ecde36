// Runs schedules when they are due, each time once, and records the times that were skipped or missed.
import { after, iso, nextTurn, now } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Schedule, State } from '../state/index.ts';
import { decide, lateMs } from './catch-up.ts';
import { ClockWatch } from './clock-watch.ts';
import type { Launcher, ScheduleContext } from './launch.ts';
import { newRun, type ScheduleRun, settledRun } from './records.ts';
import { Timetable } from './timetable.ts';

/** A declared schedule, and how far it has come. */
interface Tracked {
  schedule: Schedule;
  /** Every time up to this is settled. */
  settledUntil: number;
  /** The first time after that. */
  next: number | undefined;
  /** When it is looked at next: at that time, or later. */
  lookAt: number;
  /** It is being looked at. */
  busy: boolean;
  /** Its next time waits for an open run to end, or for a disk that failed. */
  waiting: boolean;
  /** Times recorded as missed one after another. */
  missed: number;
}

/** The clock is checked this often, as it can be set. */
const longestWaitMs = 1_000;
/** Schedules that are looked at together, in one transaction. */
const atOnce = 32;
/** Of those far behind; each may write many rows. */
const behindAtOnce = 8;
const missedAtOnce = 100;
/** Rows for times of one schedule missed in a row; the others share one more. */
const mostMissed = 1000;
/** Such rows of all schedules, for one start of the broker or one clock that was set. */
const mostMissedInAll = 20_000;
/** Times that share a row are counted up to this. */
const mostCounted = 200;
/** Times that ran already are skipped in next_run, up to this many. */
const mostRanAhead = 1000;
/** A time that waits is looked at again after this: if the open run may have ended, and if it has not. */
const unsureMs = 1_000;
const openMs = 60_000;
/** A failed write is tried again after this. */
const againMs = 5_000;

export class Firing {
  readonly #context: ScheduleContext;
  readonly #launcher: Launcher;
  readonly #log: Logger;
  readonly #tracked = new Map<string, Tracked>();
  readonly #clock = new ClockWatch();
  readonly #stopWatching: () => void;
  #declared: State['schedules'] | undefined;
  /** Rows that missed times may still take. */
  #spare = mostMissedInAll;
  #working = false;
  #stopped = false;
  #cancelTimer = (): void => {};

  constructor(context: ScheduleContext, launcher: Launcher, log: Logger) {
    this.#context = context;
    this.#launcher = launcher;
    this.#log = log;
    context.records.onEnd = (id) => {
      const tracked = this.#tracked.get(id);
      if (!tracked?.waiting) return;
      this.#plan(tracked);
      this.#arm();
    };
    this.#sync(context.records.marks([...context.state.schedules.keys()]));
    this.#stopWatching = context.state.watch(() => this.#sync());
    this.#rewind(now());
  }

  /** When a schedule is due next, as often as it is up to `count` times. */
  nextOf(id: string, count: number): number[] {
    const tracked = this.#tracked.get(id);
    const times: number[] = [];
    if (tracked?.next === undefined) return times;
    const { schedule, next } = tracked;
    let at: number | undefined = next > now() ? next : this.#timetableOf(schedule)?.next(now());
    for (let passed = 0; at !== undefined && times.length < count; ) {
      // It ran when the clock was ahead.
      if (passed < mostRanAhead && this.#context.records.ran(id, at)) passed += 1;
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

  /** Takes over the schedules as they are declared now. */
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
    // Times before its `since` do not count. A mark later than now is from a clock that was ahead.
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

  /** Some that are due, the oldest first; those that are far behind let the others go first. */
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

  /** Removes rows and marks later than `to`, which a clock that was ahead wrote. Runs that ran stay, and are not repeated. */
  #rewind(to: number): void {
    const { state, history, records } = this.#context;
    const writes = [
      history.write(() => records.rewind(to)),
      countTimesFrom(state, to, ({ since }) => Date.parse(since) > to),
    ];
    Promise.all(writes).catch((error: unknown) =>
      this.#log.warn(
        { err: error },
        'history rows of missed runs in the future (the clock was set back) could not be removed',
      ),
    );
  }

  /** Settles the next time of a schedule that is due, or some that were missed. Never rejects. */
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

  /** Resolves with the time to wait until the next look, where one step does not settle anything. */
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
    // A clock that was set back comes to a time again.
    if (!this.#context.records.ran(schedule.id, at)) {
      const fate = this.#decideOverlap(schedule, trigger);
      if (typeof fate === 'number') return fate;
      if (fate === 'skip') await this.#settle(schedule, 'skipped', trigger, [at], overlapping);
      else await this.#launcher.byClock(schedule, at, trigger);
    }
    tracked.settledUntil = at;
  }

  /** Whether a time runs beside open runs, is skipped, or waits: then milliseconds until the next look. */
  #decideOverlap(schedule: Schedule, trigger: 'cron' | 'catch_up'): 'run' | 'skip' | number {
    const open = this.#context.records.open(schedule.id);
    // On a machine that is offline it fails, with a row that says so.
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
    const times = passed.filter((at) => !this.#context.records.ran(schedule.id, at));
    this.#spare -= times.length;
    tracked.missed += times.length;
    await this.#settle(schedule, 'missed', 'cron', times, unseen);
    tracked.settledUntil = passed.at(-1) ?? until;
  }

  /** Stores one row for all of these times, at the last of them that did not run. */
  async #missRest(tracked: Tracked, timetable: Timetable, until: number): Promise<void> {
    const { schedule, settledUntil } = tracked;
    let last = timetable.last(settledUntil, until);
    while (last !== undefined && this.#context.records.ran(schedule.id, last)) {
      last = timetable.last(settledUntil, last - 1);
    }
    if (last !== undefined) {
      const reason = `${unseen}${sharing(timetable, settledUntil, last)}`;
      await this.#settle(schedule, 'missed', 'cron', [last], reason);
    }
    tracked.settledUntil = until;
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

const overlapping = 'the run before was not over';
const unseen = 'the broker was down or held up at this time, or its clock was set';

/** Says in a row how many times share it. */
function sharing(timetable: Timetable, settledUntil: number, last: number): string {
  const times = timetable.times(settledUntil, mostCounted + 1, last);
  if (times.length < 2) return '';
  const count = times.length > mostCounted ? `more than ${mostCounted}` : times.length;
  return `; this row stands for ${count} times from ${iso(times[0])} to ${iso(last)}`;
}

/** Sets `since` of these schedules: times before `at` are neither caught up nor missed. Resolves once on disk. */
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
