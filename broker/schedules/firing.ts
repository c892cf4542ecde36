// Fires schedules: one timer for the next time due, each time once, and a decision for every time that passed unseen.
import { after, iso, now } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { History } from '../history.ts';
import type { Presence } from '../presence/index.ts';
import type { Schedule, State } from '../state/index.ts';
import { ClockWatch } from './clock-watch.ts';
import { openDoubts } from './doubts.ts';
import { Due } from './due.ts';
import type { Launcher } from './launch.ts';
import { decide, lateMs } from './policy.ts';
import { type ScheduleRecords, type ScheduleRun, settledRun } from './records.ts';
import { countFrom } from './since.ts';
import { readWhen, type When } from './when.ts';

export interface FiringRooms {
  state: State;
  history: History;
  presence: Presence;
  records: ScheduleRecords;
  launcher: Launcher;
}

export interface Firing {
  /** When a schedule is due next, as often as it is up to `count` times. */
  nextOf(id: string, count: number): number[];
  stop(): void;
}

/** A schedule that is declared. */
interface Entry {
  schedule: Schedule;
  /** Every time up to this is settled. */
  mark: number;
  next: number | undefined;
  /** It is being looked at. */
  busy: boolean;
  /** Its next time waits for what becomes of an open run. */
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
/** An open run that may be over is looked at again after this, one that is not after the other. */
const doubtMs = 1_000;
const waitMs = 60_000;
/** What could not be written is tried again after this. */
const againMs = 5_000;

export function openFiring(rooms: FiringRooms, log: Logger): Firing {
  const { state, history, records, launcher } = rooms;
  const entries = new Map<string, Entry>();
  const doubts = openDoubts(rooms);
  const due = new Due<Entry>();
  /** Those whose next time was long ago: they let the others go first. */
  const behind = new Due<Entry>();
  let known: State['schedules'] = new Map();
  const clock = new ClockWatch();
  /** Rows that missed times may still take. */
  let spare = mostMissedInAll;
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
    if (entry) dequeue(entry);
    entries.delete(id);
  }

  function take(schedule: Schedule, mark = 0): void {
    const entry = entries.get(schedule.id) ?? {
      ...{ schedule, mark, next: undefined },
      ...{ busy: false, waiting: false, missed: 0 },
    };
    entry.schedule = schedule;
    entry.mark = settledUntil(entry, entry.mark);
    entries.set(schedule.id, entry);
    plan(entry);
  }

  function timesOf({ id, cron, timezone }: Schedule): When | undefined {
    try {
      return readWhen(cron, timezone);
    } catch (error) {
      log.error({ err: error, schedule_id: id }, 'a schedule cannot be read, and does not run: change it');
      return undefined;
    }
  }

  /** Times before its own since are none of its. A later one than now is from a clock that was ahead. */
  function settledUntil({ schedule }: Entry, mark: number): number {
    return Math.min(Math.max(mark, Date.parse(schedule.since)), now());
  }

  function plan(entry: Entry): void {
    const { schedule, mark, busy } = entry;
    if (busy || entries.get(schedule.id) !== entry) return;
    entry.waiting = false;
    entry.next = schedule.enabled ? timesOf(schedule)?.next(mark) : undefined;
    if (entry.next === undefined) dequeue(entry);
    else enqueue(entry, entry.next);
  }

  function enqueue(entry: Entry, at: number): void {
    dequeue(entry);
    (at < now() - lateMs ? behind : due).set(entry, at);
  }

  function dequeue(entry: Entry): void {
    due.delete(entry);
    behind.delete(entry);
  }

  function arm(): void {
    cancelTimer();
    if (stopped || working) return;
    const next = behind.next ?? due.next ?? Number.POSITIVE_INFINITY;
    const wait = clock.holds ? longestWaitMs : Math.max(0, next - now());
    cancelTimer = after(Math.min(wait, longestWaitMs), tick);
  }

  function tick(): void {
    if (working) return;
    working = true;
    void work().finally(() => {
      working = false;
      arm();
    });
  }

  async function work(): Promise<void> {
    while (!stopped) {
      followClock();
      if (clock.holds) return;
      const some = due.take(now(), atOnce);
      if (some.length === 0) some.push(...behind.take(now(), behindAtOnce));
      if (some.length === 0) return;
      await Promise.all(some.map(look));
      await new Promise((resolve) => setImmediate(resolve));
    }
  }

  function followClock(): void {
    const { drift, corrected } = clock.look();
    if (drift === 0) return;
    log.warn({ drift_ms: Math.round(drift) }, 'the clock of this machine was set');
    spare = mostMissedInAll;
    if (drift < 0) rewind(corrected);
    for (const entry of entries.values()) {
      const isAhead = entry.mark > corrected;
      if (isAhead) entry.mark = corrected;
      if (isAhead || entry.waiting) plan(entry);
      else if (entry.next !== undefined) enqueue(entry, entry.next);
    }
  }

  /** Removes from disk what a clock that was ahead settled later than `to`; what ran then stays, and does not run again. */
  function rewind(to: number): void {
    const writes = [
      history.write(() => records.rewind(to)),
      countFrom(state, to, ({ since }) => Date.parse(since) > to),
    ];
    Promise.all(writes).catch((error: unknown) =>
      log.warn({ err: error }, 'missed runs and marks of schedules later than now were not removed'),
    );
  }

  /** Settles the next time of a schedule that is due, or some that were missed. Never rejects. */
  async function look(entry: Entry): Promise<void> {
    entry.busy = true;
    entry.waiting = false;
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
    if (failed && entry.next !== undefined) enqueue(entry, now() + againMs);
  }

  async function step(entry: Entry): Promise<void> {
    const { schedule, mark } = entry;
    const when = timesOf(schedule);
    const step =
      when && decide({ schedule, when, mark, at: now(), awake: clock.started, leaps: clock.leaps });
    if (!step) return;
    if ('missed' in step) return miss(entry, when, step.missed);
    const { at, trigger } = step;
    entry.missed = 0;
    // A clock that was set back may come to it again.
    if (!records.ran(schedule.id, at)) {
      const fate = besideOpen(schedule, trigger);
      if (typeof fate === 'number') {
        entry.waiting = true;
        enqueue(entry, now() + fate);
        return;
      }
      if (fate === 'skip') await settle(schedule, 'skipped', trigger, [at], overlapping);
      else await launcher.byClock(schedule, at, trigger);
    }
    entry.mark = at;
  }

  /** Whether a time runs while other runs may be open, is skipped, or waits: so long until the next look. */
  function besideOpen(schedule: Schedule, trigger: 'cron' | 'catch_up'): 'run' | 'skip' | number {
    const open = records.open(schedule.id);
    // On a machine that is away it fails, and says so.
    if (open.length === 0 || launcher.away(schedule.machine_id)) return 'run';
    const all = schedule.catch_up === 'all';
    if (all && trigger === 'catch_up') return waitMs;
    if (schedule.overlap === 'allow') return 'run';
    if (all && open.some((run) => run.trigger === 'catch_up')) return waitMs;
    return doubts.about(open) ? doubtMs : 'skip';
  }

  async function miss(entry: Entry, when: When, until: number): Promise<void> {
    const { schedule, mark } = entry;
    if (entry.missed >= mostMissed || spare <= 0) return missRest(entry, when, until);
    const times: number[] = [];
    for (let at = when.next(mark); times.length < missedAtOnce && at !== undefined; at = when.next(at)) {
      if (at > until) break;
      if (!records.ran(schedule.id, at)) times.push(at);
    }
    spare -= times.length;
    entry.missed += times.length;
    await settle(schedule, 'missed', 'cron', times, unseen);
    entry.mark = times.at(-1) ?? until;
  }

  /** One row, of the last of these times that did not run, stands for all. */
  async function missRest(entry: Entry, when: When, until: number): Promise<void> {
    const { schedule, mark } = entry;
    let last = when.last(mark, until);
    while (last !== undefined && records.ran(schedule.id, last)) last = when.last(mark, last - 1);
    if (last !== undefined) {
      const reason = `${unseen}${sharing(when, mark, last)}`;
      await settle(schedule, 'missed', 'cron', [last], reason);
    }
    entry.mark = until;
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
  rewind(now());
  forget([...marks.keys()].filter((id) => !state.schedules.has(id)));
  marks.clear();
  arm();

  return {
    nextOf(id, count) {
      const entry = entries.get(id);
      const times: number[] = [];
      if (entry?.next === undefined) return times;
      let at: number | undefined = entry.next;
      if (at <= now()) at = timesOf(entry.schedule)?.next(now());
      for (let passed = 0; at !== undefined && times.length < count; ) {
        // A clock that was ahead has been there.
        if (passed < mostRanAhead && records.ran(id, at)) passed += 1;
        else times.push(at);
        if (times.length < count) at = timesOf(entry.schedule)?.next(at);
      }
      return times;
    },
    stop() {
      stopped = true;
      doubts.stop();
      stopWatching();
      cancelTimer();
    },
  };
}

const overlapping = 'the run before was not over';
/** What a row tells of the times that share it. */
function sharing(when: When, mark: number, last: number): string {
  const first = when.next(mark) ?? last;
  if (first === last) return '';
  let count = 1;
  for (let at = first; at < last && count <= mostCounted; count += 1) at = when.next(at) ?? last;
  const times = count > mostCounted ? `more than ${mostCounted} times` : `${count} times`;
  return `; this row stands for ${times} from ${iso(first)} to ${iso(last)}`;
}

const unseen = 'the broker was down or held up at this time, or its clock was set';
