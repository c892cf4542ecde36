// Fires schedules: one timer for the next time due, each time once, and a decision for every time that passed unseen.
import { after, monotonic, now } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { History } from '../history.ts';
import type { Schedule, State } from '../state/index.ts';
import { Due } from './due.ts';
import type { Launcher } from './launch.ts';
import { decide } from './policy.ts';
import { type ScheduleRecords, type ScheduleRun, settledRun } from './records.ts';
import { openWhen, type When } from './when.ts';

export interface FiringRooms {
  state: State;
  history: History;
  records: ScheduleRecords;
  launcher: Launcher;
}

export interface Firing {
  /** The times of a schedule; undefined for one that this version cannot read. */
  whenOf(id: string): When | undefined;
  /** When a schedule is due next; undefined when it never is. */
  nextOf(id: string): number | undefined;
  stop(): void;
}

/** A schedule that is declared. */
interface Entry {
  schedule: Schedule;
  when: When | undefined;
  /** Every time up to this is settled. */
  mark: number;
  next: number | undefined;
  /** It is being looked at. */
  busy: boolean;
  /** Its next time has to wait for the end of a run. */
  waiting: boolean;
  /** Times recorded as missed one after another. */
  missed: number;
}

/** The clock is looked at that often, for it can be set. */
const longestWaitMs = 60_000;
/** What wall time and the machine's own time may differ by between two looks. */
const jumpMs = 10_000;
/** A mark further ahead than crontab takes for a changed clock is from a clock that was wrong. */
const mostAheadMs = 3 * 3_600_000;
/** Schedules that are looked at in one go, in one transaction. */
const atOnce = 32;
const missedAtOnce = 100;
/** Rows for times of one schedule that were missed in a row; the others share the last one. */
const mostMissed = 1000;
/** What could not be written is tried again after this. */
const againMs = 5_000;

export function openFiring(rooms: FiringRooms, log: Logger): Firing {
  const { state, history, records, launcher } = rooms;
  const entries = new Map<string, Entry>();
  const due = new Due<Entry>();
  let known: State['schedules'] = new Map();
  /** Times before this passed while nobody watched. */
  let awake = now();
  let skew = now() - monotonic();
  let working = false;
  let stopped = false;
  let cancelTimer = (): void => {};

  /** Takes over what is declared now. */
  function sync(marks: ReadonlyMap<string, number>): void {
    if (state.schedules === known) return;
    const gone = [...known.keys()].filter((id) => !state.schedules.has(id));
    known = state.schedules;
    for (const id of gone) drop(id);
    forget(gone);
    for (const schedule of known.values()) {
      if (entries.get(schedule.id)?.schedule !== schedule) take(schedule, marks.get(schedule.id));
    }
    arm();
  }

  function forget(ids: readonly string[]): void {
    if (ids.length === 0) return;
    history
      .write(() => records.forget(ids))
      .catch((error: unknown) => log.warn({ err: error }, 'marks of removed schedules were not forgotten'));
  }

  function drop(id: string): void {
    const entry = entries.get(id);
    if (entry) due.delete(entry);
    entries.delete(id);
  }

  function take(schedule: Schedule, mark = 0): void {
    const entry = entries.get(schedule.id) ?? {
      ...{ schedule, when: undefined, mark, next: undefined },
      ...{ busy: false, waiting: false, missed: 0 },
    };
    const before = entry.schedule;
    const same = before.cron === schedule.cron && before.timezone === schedule.timezone;
    entry.schedule = schedule;
    if (!entry.when || !same) entry.when = readWhen(schedule);
    entry.mark = settledUntil(entry, entry.mark);
    entries.set(schedule.id, entry);
    plan(entry);
  }

  function readWhen({ id, cron, timezone }: Schedule): When | undefined {
    try {
      return openWhen(cron, timezone);
    } catch (error) {
      log.error({ err: error, schedule_id: id }, 'a schedule cannot be read, and does not run: change it');
      return undefined;
    }
  }

  /** Times before its own since are none of its. */
  function settledUntil({ schedule }: Entry, mark: number): number {
    const until = Math.max(mark, Date.parse(schedule.since));
    return until > now() + mostAheadMs ? now() : until;
  }

  function plan(entry: Entry): void {
    const { schedule, when, mark, busy } = entry;
    if (busy || entries.get(schedule.id) !== entry) return;
    entry.waiting = false;
    entry.next = schedule.enabled ? when?.next(mark) : undefined;
    if (entry.next === undefined) due.delete(entry);
    else due.set(entry, entry.next);
  }

  function arm(): void {
    cancelTimer();
    if (stopped || working) return;
    const wait = Math.min(Math.max(0, (due.next ?? Number.POSITIVE_INFINITY) - now()), longestWaitMs);
    cancelTimer = after(wait, tick);
  }

  function tick(): void {
    noticeJump();
    if (working) return;
    working = true;
    void work().finally(() => {
      working = false;
      arm();
    });
  }

  async function work(): Promise<void> {
    for (;;) {
      const some = stopped ? [] : due.take(now(), atOnce);
      if (some.length === 0) return;
      await Promise.all(some.map(look));
    }
  }

  /** A clock that was set forward has passed times unseen; one that was set far back makes marks of the future void. */
  function noticeJump(): void {
    const drift = now() - monotonic() - skew;
    skew += drift;
    if (Math.abs(drift) < jumpMs) return;
    log.warn({ drift_ms: Math.round(drift) }, 'the clock of this machine was set');
    awake += drift;
    for (const entry of entries.values()) {
      const mark = settledUntil(entry, entry.mark);
      if (mark === entry.mark) continue;
      entry.mark = mark;
      plan(entry);
    }
  }

  /** Settles the next time of a schedule that is due, or some that were missed. Never rejects. */
  async function look(entry: Entry): Promise<void> {
    entry.busy = true;
    let failed = false;
    try {
      await step(entry);
    } catch (error) {
      failed = true;
      log.error({ err: error, schedule_id: entry.schedule.id }, 'a schedule could not be run; trying again');
    }
    entry.busy = false;
    if (entry.waiting) return;
    plan(entry);
    if (failed && entry.next !== undefined) due.set(entry, now() + againMs);
  }

  async function step(entry: Entry): Promise<void> {
    const { schedule, when, mark } = entry;
    const step = when && decide({ schedule, when, mark, at: now(), awake });
    if (!step) return;
    if ('missed' in step) return miss(entry, when, step.missed);
    const { at, trigger } = step;
    entry.missed = 0;
    const open = records.isOpen(schedule.id);
    if (open && trigger === 'catch_up' && schedule.catch_up === 'all') {
      entry.waiting = true;
      return;
    }
    // A clock that was set back may come to it again.
    if (!records.has(schedule.id, at)) {
      if (open && schedule.overlap === 'skip') await settle(schedule, 'skipped', trigger, [at], overlapping);
      else await launcher.byClock(schedule, at, trigger);
    }
    entry.mark = settledUntil(entry, at);
  }

  async function miss(entry: Entry, when: When, until: number): Promise<void> {
    const { schedule, mark } = entry;
    const times: number[] = [];
    const rest = entry.missed >= mostMissed ? when.last(mark, until) : undefined;
    if (rest !== undefined) times.push(rest);
    for (let at = when.next(mark); times.length < missedAtOnce && at !== undefined; at = when.next(at)) {
      if (rest !== undefined || at > until) break;
      if (!records.has(schedule.id, at)) times.push(at);
    }
    const reason =
      rest === undefined ? unseen : `${unseen}; nor at the times since ${new Date(mark).toISOString()}`;
    await settle(schedule, 'missed', 'cron', times, reason);
    entry.missed += times.length;
    entry.mark = settledUntil(entry, times.at(-1) ?? until);
  }

  function settle(
    schedule: Schedule,
    status: 'missed' | 'skipped',
    trigger: ScheduleRun['trigger'],
    times: readonly number[],
    reason: string,
  ): Promise<void> {
    const runs = times.map((at) => settledRun(schedule, { status, trigger, scheduled_for: at, reason }));
    return history.write((transaction) => records.settle(runs, transaction));
  }

  records.onEnd((id) => {
    const entry = entries.get(id);
    if (!entry?.waiting) return;
    plan(entry);
    arm();
  });
  const marks = records.marks();
  const stopWatching = state.watch(() => sync(marks));
  sync(marks);
  forget([...marks.keys()].filter((id) => !state.schedules.has(id)));
  marks.clear();
  arm();

  return {
    whenOf: (id) => entries.get(id)?.when,
    nextOf(id) {
      const entry = entries.get(id);
      const passed = entry?.next !== undefined && entry.next <= now();
      return passed ? entry.when?.next(now()) : entry?.next;
    },
    stop() {
      stopped = true;
      stopWatching();
      cancelTimer();
    },
  };
}

const overlapping = 'the run before was not over';
const unseen = 'the broker was down or held up at this time, or its clock was set';
