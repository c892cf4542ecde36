// Fires schedules: one timer for the next time due, each time once, and a decision for every time that passed unseen.
import { after, iso, nextTurn, now } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Schedule, State } from '../state/index.ts';
import { decide, lateMs } from './catch-up.ts';
import { ClockWatch } from './clock-watch.ts';
import type { Launcher, ScheduleRooms } from './launch.ts';
import { newRun, type ScheduleRun, settledRun } from './records.ts';
import { Timetable } from './timetable.ts';

/** A schedule that is declared. */
interface Tracked {
  schedule: Schedule;
  /** Every time up to this is settled. */
  mark: number;
  /** The first time after that. */
  next: number | undefined;
  /** When it is looked at: at that time, or later. */
  lookAt: number;
  /** It is being looked at. */
  busy: boolean;
  /** It is looked at again later: its next time waits for an open run to end, or could not be written. */
  waiting: boolean;
  /** Times recorded as missed one after another. */
  missed: number;
}

/** The clock is looked at that often, for it can be set. */
const longestWaitMs = 1_000;
/** Schedules that are looked at in one go, in one transaction. */
const atOnce = 32;
/** Of those that are behind; each may write many rows. */
const behindAtOnce = 8;
const missedAtOnce = 100;
/** Rows for times of one schedule that were missed in a row; the others share the last one. */
const mostMissed = 1000;
/** Such rows of all schedules, for one start of the broker or one leap of its clock. */
const mostMissedInAll = 20_000;
/** Times that share a row are counted so far. */
const mostCounted = 200;
/** Times that ran already that are passed over to find the next one. */
const mostRanAhead = 1000;
/** An open run that may have ended is looked at again after this, one that has not after the other. */
const unsureMs = 1_000;
const openMs = 60_000;
/** What could not be written is tried again after this. */
const againMs = 5_000;

export class Firing {
  readonly #rooms: ScheduleRooms;
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

  constructor(rooms: ScheduleRooms, launcher: Launcher, log: Logger) {
    this.#rooms = rooms;
    this.#launcher = launcher;
    this.#log = log;
    rooms.records.onEnd = (id) => {
      const tracked = this.#tracked.get(id);
      if (!tracked?.waiting) return;
      this.#plan(tracked);
      this.#arm();
    };
    this.#sync(rooms.records.marks([...rooms.state.schedules.keys()]));
    this.#stopWatching = rooms.state.watch(() => this.#sync());
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
      // A clock that was ahead has been there.
      if (passed < mostRanAhead && this.#rooms.records.ran(id, at)) passed += 1;
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

  /** Takes over what is declared now. */
  #sync(marks: ReadonlyMap<string, number> = new Map()): void {
    const { schedules } = this.#rooms.state;
    if (schedules === this.#declared) return;
    this.#declared = schedules;
    for (const id of this.#tracked.keys()) if (!schedules.has(id)) this.#tracked.delete(id);
    for (const schedule of schedules.values()) {
      if (this.#tracked.get(schedule.id)?.schedule !== schedule) this.#take(schedule, marks.get(schedule.id));
    }
    this.#arm();
  }

  #take(schedule: Schedule, mark = 0): void {
    const tracked = this.#tracked.get(schedule.id) ?? {
      ...{ schedule, mark, next: undefined, lookAt: Number.POSITIVE_INFINITY },
      ...{ busy: false, waiting: false, missed: 0 },
    };
    tracked.schedule = schedule;
    // Times before its own since are none of its. A later one than now is from a clock that was ahead.
    tracked.mark = Math.min(Math.max(tracked.mark, Date.parse(schedule.since)), now());
    this.#tracked.set(schedule.id, tracked);
    this.#plan(tracked);
  }

  #timetableOf({ id, cron, timezone }: Schedule): Timetable | undefined {
    try {
      return new Timetable(cron, timezone);
    } catch (error) {
      this.#log.error(
        { err: error, schedule_id: id },
        'a schedule cannot be read, and does not run: change it',
      );
      return undefined;
    }
  }

  #plan(tracked: Tracked): void {
    const { schedule, mark, busy } = tracked;
    if (busy) return;
    tracked.waiting = false;
    tracked.next = schedule.enabled ? this.#timetableOf(schedule)?.next(mark) : undefined;
    tracked.lookAt = tracked.next ?? Number.POSITIVE_INFINITY;
  }

  #arm(): void {
    this.#cancelTimer();
    if (this.#stopped || this.#working) return;
    let wait = longestWaitMs;
    if (!this.#clock.holds) {
      for (const { lookAt } of this.#tracked.values()) wait = Math.min(wait, lookAt - now());
    }
    this.#cancelTimer = after(Math.max(0, wait), () => {
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
      if (this.#clock.holds) return;
      const some = this.#due();
      if (some.length === 0) return;
      await Promise.all(some.map((tracked) => this.#look(tracked)));
      await nextTurn();
    }
  }

  /** Some that are due, the oldest first; those that are far behind let the others go first. */
  #due(): Tracked[] {
    const due = [...this.#tracked.values()].filter(({ lookAt }) => lookAt <= now());
    due.sort((a, b) => a.lookAt - b.lookAt);
    const fresh = due.filter(({ lookAt }) => lookAt >= now() - lateMs);
    return fresh.length > 0 ? fresh.slice(0, atOnce) : due.slice(0, behindAtOnce);
  }

  #followClock(): void {
    const { drift, corrected } = this.#clock.look();
    if (drift === 0) return;
    this.#log.warn({ drift_ms: Math.round(drift) }, 'the clock of this machine was set');
    this.#spare = mostMissedInAll;
    if (drift < 0) this.#rewind(corrected);
    for (const tracked of this.#tracked.values()) {
      const isAhead = tracked.mark > corrected;
      if (isAhead) tracked.mark = corrected;
      if (isAhead || tracked.waiting) this.#plan(tracked);
      else tracked.lookAt = tracked.next ?? Number.POSITIVE_INFINITY;
    }
  }

  /** Removes from disk what a clock that was ahead settled later than `to`; what ran then stays, and does not run again. */
  #rewind(to: number): void {
    const { state, history, records } = this.#rooms;
    const writes = [
      history.write(() => records.rewind(to)),
      countFrom(state, to, ({ since }) => Date.parse(since) > to),
    ];
    Promise.all(writes).catch((error: unknown) =>
      this.#log.warn({ err: error }, 'missed runs and marks of schedules later than now were not removed'),
    );
  }

  /** Settles the next time of a schedule that is due, or some that were missed. Never rejects. */
  async #look(tracked: Tracked): Promise<void> {
    tracked.busy = true;
    const wait = await this.#step(tracked).catch((error: unknown) => {
      const { id } = tracked.schedule;
      this.#log.error({ err: error, schedule_id: id }, 'a schedule could not be run; trying again');
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
    const { schedule, mark } = tracked;
    const timetable = this.#timetableOf(schedule);
    if (!timetable) return;
    const { started, leap } = this.#clock;
    const step = decide({ schedule, timetable, mark, now: now(), started, leap });
    if (!step) return;
    if ('missed' in step) {
      await this.#miss(tracked, timetable, step.missed);
      return;
    }
    const { at, trigger } = step;
    tracked.missed = 0;
    // A clock that was set back may come to it again.
    if (!this.#rooms.records.ran(schedule.id, at)) {
      const fate = this.#besideOpen(schedule, trigger);
      if (typeof fate === 'number') return fate;
      if (fate === 'skip') await this.#settle(schedule, 'skipped', trigger, [at], overlapping);
      else await this.#launcher.byClock(schedule, at, trigger);
    }
    tracked.mark = at;
  }

  /** Whether a time runs while other runs may be open, is skipped, or waits: so long until the next look. */
  #besideOpen(schedule: Schedule, trigger: 'cron' | 'catch_up'): 'run' | 'skip' | number {
    const open = this.#rooms.records.open(schedule.id);
    // On a machine that is away it fails, and says so.
    if (open.length === 0 || this.#launcher.isAway(schedule.machine_id)) return 'run';
    const all = schedule.catch_up === 'all';
    if (all && trigger === 'catch_up') return openMs;
    if (schedule.overlap === 'allow') return 'run';
    if (all && open.some((run) => run.trigger === 'catch_up')) return openMs;
    return this.#launcher.mayHaveEnded(open) ? unsureMs : 'skip';
  }

  async #miss(tracked: Tracked, timetable: Timetable, until: number): Promise<void> {
    const { schedule, mark } = tracked;
    const most = Math.min(missedAtOnce, mostMissed - tracked.missed, this.#spare);
    if (most <= 0) return this.#missRest(tracked, timetable, until);
    const passed = timetable.times(mark, most, until);
    const times = passed.filter((at) => !this.#rooms.records.ran(schedule.id, at));
    this.#spare -= times.length;
    tracked.missed += times.length;
    await this.#settle(schedule, 'missed', 'cron', times, unseen);
    tracked.mark = passed.at(-1) ?? until;
  }

  /** One row, of the last of these times that did not run, stands for all. */
  async #missRest(tracked: Tracked, timetable: Timetable, until: number): Promise<void> {
    const { schedule, mark } = tracked;
    let last = timetable.last(mark, until);
    while (last !== undefined && this.#rooms.records.ran(schedule.id, last)) {
      last = timetable.last(mark, last - 1);
    }
    if (last !== undefined) {
      await this.#settle(schedule, 'missed', 'cron', [last], `${unseen}${sharing(timetable, mark, last)}`);
    }
    tracked.mark = until;
  }

  #settle(
    schedule: Schedule,
    status: 'missed' | 'skipped',
    trigger: ScheduleRun['trigger'],
    times: readonly number[],
    reason: string,
  ): Promise<void> {
    const runs = times.map((at) => settledRun(newRun(schedule, trigger, at), status, reason));
    return this.#rooms.history.write((transaction) => this.#rooms.records.settle(runs, transaction));
  }
}

const overlapping = 'the run before was not over';
const unseen = 'the broker was down or held up at this time, or its clock was set';

/** What a row says of the times that share it. */
function sharing(timetable: Timetable, mark: number, last: number): string {
  const times = timetable.times(mark, mostCounted + 1, last);
  if (times.length < 2) return '';
  const count = times.length > mostCounted ? `more than ${mostCounted}` : times.length;
  return `; this row stands for ${count} times from ${iso(times[0])} to ${iso(last)}`;
}

/**
 * These schedules, of those declared, count from `at` on: what was due before is neither caught up nor missed.
 * Resolves once that is on disk.
 */
export async function countFrom(
  state: State,
  at: number,
  which: (schedule: Schedule) => boolean,
): Promise<void> {
  await state.change((draft) => {
    for (const schedule of draft.all('schedules').filter(which)) {
      draft.put('schedules', { ...schedule, since: iso(at) });
    }
  });
}
