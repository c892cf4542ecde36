// Tracks the declared schedules on each of their machines: the last due time that was handled, and the next one.
import type { MachineId } from '../../shared/api/shared-schemas.ts';
import { after, now } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Schedule } from '../state/index.ts';
import { Timetable } from './cron-due-times.ts';
import type { ScheduleContext } from './launch-run.ts';
import { mostRan, type RanTimes } from './run-records.ts';
import type { Mark } from './run-tables.ts';

/** A schedule on one machine. A schedule with tags has one entry for each machine with these tags. */
export interface Tracked {
  schedule: Schedule;
  machine_id: MachineId;
  /** Every due time up to this one has run, or is recorded as skipped or missed. */
  settledUntil: number;
  /** The first due time after `settledUntil`; undefined if there is none. */
  next: number | undefined;
  /** Time of the next check: a due time, the time `until` of a replaced cron expression, or the end of a wait. */
  checkAt: number;
  /**
   * False while the progress mark of the schedule must be read again, because another broker may have run the schedule.
   */
  loaded: boolean;
  /** True while the schedule is being checked. */
  busy: boolean;
  /** True while the next due time waits, because an earlier run has not ended or a failed write will be tried again. */
  waiting: boolean;
  /** Number of successive missed due times that were recorded. */
  missed: number;
}

/** How far the due times of a schedule on a machine are handled. */
interface Progress {
  schedule: Pick<Schedule, 'since' | 'replaced'>;
  settledUntil: number;
}

/** A cron expression that a change of the schedule has replaced. */
export type Replaced = NonNullable<Schedule['replaced']>[number];

/** Maximum number of replaced cron expressions that a schedule keeps. */
const mostReplaced = 100;

/** Milliseconds after which marks that could not be read are read again. */
const retryMs = 5_000;

export class TrackedSchedules {
  readonly #context: ScheduleContext;
  readonly #log: Logger;
  readonly #watchers = new Set<() => void>();
  readonly #bySchedule = new Map<string, Map<string, Tracked>>();
  readonly #timetables = new WeakMap<Schedule, Timetable | null>();
  readonly #stopWatching: () => void;
  #cancelRetry = (): void => {};
  #isStopped = false;
  #seen: Pick<ScheduleContext['state'], 'schedules' | 'machines' | 'keys'> | undefined;

  constructor(context: ScheduleContext, marks: readonly Mark[], log: Logger) {
    this.#context = context;
    this.#log = log;
    this.#sync(marks);
    this.#stopWatching = context.state.watch(() => {
      if (this.#sync()) this.#changed();
    });
  }

  stop(): void {
    this.#isStopped = true;
    this.#stopWatching();
    this.#cancelRetry();
  }

  /**
   * Calls `watcher` after a change of the schedules, machines or keys, and after this broker has taken over machines.
   * Call the returned function to stop.
   */
  watch(watcher: () => void): () => void {
    this.#watchers.add(watcher);
    return () => void this.#watchers.delete(watcher);
  }

  #changed(): void {
    for (const watcher of this.#watchers) watcher();
  }

  /** Yields all schedules on all of their machines. */
  *all(): Generator<Tracked> {
    for (const some of this.#bySchedule.values()) yield* some.values();
  }

  *on(machineId: string): Generator<Tracked> {
    for (const some of this.#bySchedule.values()) {
      const tracked = some.get(machineId);
      if (tracked) yield tracked;
    }
  }

  /**
   * Finds the entry of the schedule that a run belongs to. For a schedule with tags, this is the entry for the machine
   * of the run. A schedule without tags has only one entry, even if it has moved to another machine since the run.
   */
  of({ schedule_id, machine_id }: { schedule_id: string; machine_id: string }): Tracked | undefined {
    const some = this.#bySchedule.get(schedule_id);
    const [only] = some?.values() ?? [];
    return only?.schedule.tags ? some?.get(machine_id) : only;
  }

  /** True if this broker runs the schedule on this machine. */
  isOwn({ machine_id, loaded }: Tracked): boolean {
    return loaded && this.#context.history.owns(machine_id);
  }

  /** Returns the first due time after an instant; undefined if there is none or the schedule is disabled. */
  nextAfter(schedule: Schedule, after: number): number | undefined {
    if (!schedule.enabled) return undefined;
    const tracked = schedule.tags ? undefined : this.of({ schedule_id: schedule.id, machine_id: '' });
    if (tracked && (tracked.next === undefined || tracked.next > after)) return tracked.next;
    return this.timetableOf(schedule)?.next(after);
  }

  /**
   * Returns the next due times of a schedule, at most `count`. Leaves out the times in `ran`, for which the schedule
   * already ran while the clock was ahead.
   */
  nextOf(schedule: Schedule, count: number, ran: RanTimes): number[] {
    const times: number[] = [];
    let at = this.nextAfter(schedule, now());
    for (let passed = 0; at !== undefined && times.length < count; ) {
      if (passed < mostRan && ran.get(schedule.id)?.has(at)) passed += 1;
      else times.push(at);
      if (times.length < count) at = this.timetableOf(schedule)?.next(at);
    }
    return times;
  }

  /**
   * Returns the timetable of a schedule; undefined if it runs when a path changes, or if its cron expression or time
   * zone is invalid.
   */
  timetableOf(schedule: Schedule): Timetable | undefined {
    // A timetable needs some KiB of memory. It is cached only for a schedule with tags, because many machines use it.
    if (!schedule.tags) return this.#createTimetable(schedule);
    const made = this.#timetables.get(schedule);
    if (made !== undefined) return made ?? undefined;
    const timetable = this.#createTimetable(schedule);
    this.#timetables.set(schedule, timetable ?? null);
    return timetable;
  }

  #createTimetable({ id, cron, timezone }: Schedule): Timetable | undefined {
    if (cron === null) return undefined;
    try {
      return new Timetable(cron, timezone);
    } catch (error) {
      const problem =
        'the cron or timezone of a schedule is invalid, so it does not run: change the schedule';
      this.#log.error({ err: error, schedule_id: id }, problem);
      return undefined;
    }
  }

  /**
   * Finds the next due time of a schedule. Skips a `busy` schedule, which is planned once its present due time has been
   * handled.
   */
  plan(tracked: Tracked): void {
    const { schedule, settledUntil, busy } = tracked;
    if (busy) return;
    tracked.waiting = false;
    const from = schedule.replaced ? Math.max(settledUntil, Date.parse(schedule.since)) : settledUntil;
    tracked.next = schedule.enabled ? this.timetableOf(schedule)?.next(from) : undefined;
    const ends = pendingOf(tracked).map(({ until }) => Math.max(Date.parse(until), now()));
    tracked.checkAt = Math.min(tracked.next ?? Number.POSITIVE_INFINITY, ...ends);
  }

  /**
   * Starts to run the schedules of these machines, which this broker owns from now on, once `ready` has resolved. Call
   * it in the turn in which this broker becomes the owner: until then the schedules count as loaded.
   */
  async adopt(machineIds: readonly string[], ready: Promise<void>): Promise<void> {
    const owned = new Set(machineIds);
    await this.#load(
      [...this.all()].filter(({ machine_id }) => owned.has(machine_id)),
      ready,
    );
  }

  /** Reads, for each schedule, the last due time that another broker has handled. */
  async #load(some: readonly Tracked[], ready?: Promise<void>): Promise<void> {
    for (const tracked of some) tracked.loaded = false;
    await ready;
    const marks = latestOf(
      await this.#context.records.marksOf([...new Set(some.map(({ schedule }) => schedule.id))]),
    );
    for (const tracked of some) {
      this.#settleFrom(tracked, marks);
      tracked.loaded = true;
      this.plan(tracked);
    }
    this.#changed();
  }

  /** Updates the tracked schedules to the declared ones. Returns false if nothing has changed. */
  #sync(stored?: readonly Mark[]): boolean {
    const { schedules, machines, keys } = this.#context.state;
    const seen = this.#seen;
    const sameMachines = seen?.machines === machines && seen.keys === keys;
    if (sameMachines && seen.schedules === schedules) return false;
    this.#seen = { schedules, machines, keys };
    const marks = stored && latestOf(stored);
    for (const id of this.#bySchedule.keys()) if (!schedules.has(id)) this.#bySchedule.delete(id);
    const [tagged, moved]: [Tracked[], Tracked[]] = [[], []];
    for (const schedule of schedules.values()) {
      if (seen?.schedules.get(schedule.id) === schedule && (schedule.tags === null || sameMachines)) continue;
      if (schedule.tags) tagged.push(...this.#trackTagged(schedule, marks));
      else moved.push(...this.#trackOnly(schedule, marks));
    }
    this.#mark(tagged);
    if (this.#context.cluster && moved.length > 0) this.#loadMoved(moved);
    return true;
  }

  /** Reads the marks of schedules that have moved to another machine. Tries again until the marks can be read. */
  #loadMoved(moved: readonly Tracked[]): void {
    this.#load(moved).catch((err: unknown) => {
      if (this.#isStopped) return;
      const problem =
        'schedules moved to another machine, but the times of their last runs could not be read: this broker tries again in 5 s, and does not run these schedules before it has read the times';
      this.#log.error({ err }, problem);
      this.#cancelRetry();
      const retry = (): void => this.#loadMoved([...this.all()].filter(({ loaded }) => !loaded));
      this.#cancelRetry = after(retryMs, retry);
    });
  }

  /**
   * Tracks a schedule that has one machine. If the schedule has moved to another machine, returns a list with its
   * entry, otherwise an empty list.
   */
  #trackOnly(schedule: Schedule, marks: LatestMarks | undefined): Tracked[] {
    const [machine_id] = this.#context.machinesOf(schedule);
    if (machine_id === undefined) return [];
    const [before] = this.#bySchedule.get(schedule.id)?.values() ?? [];
    const known = before?.schedule.tags ? undefined : before;
    const hasMoved = known !== undefined && known.machine_id !== machine_id;
    const tracked = known ?? newlyTracked(schedule, machine_id);
    this.#bySchedule.set(schedule.id, new Map([[machine_id, tracked]]));
    Object.assign(tracked, { schedule, machine_id });
    this.#settleFrom(tracked, marks);
    this.plan(tracked);
    // With several brokers, the caller reads the mark of a moved schedule again. The broker of the previous machine may
    // have run the schedule since the last read.
    return hasMoved ? [tracked] : [];
  }

  /** Tracks a schedule on every machine with its tags. Returns the entries of the machines that have no mark yet. */
  #trackTagged(schedule: Schedule, marks: LatestMarks | undefined): Tracked[] {
    const before = this.#bySchedule.get(schedule.id);
    const after = new Map<string, Tracked>();
    const unmarked: Tracked[] = [];
    for (const machine_id of this.#context.machinesOf(schedule)) {
      const known = before?.get(machine_id);
      const tracked = known ?? newlyTracked(schedule, machine_id);
      after.set(machine_id, tracked);
      if (known?.schedule === schedule) continue;
      tracked.schedule = schedule;
      const mark = this.#settleFrom(tracked, marks);
      if (!known && mark === undefined) unmarked.push(tracked);
      this.plan(tracked);
    }
    this.#bySchedule.set(schedule.id, after);
    const gone = [...(before?.keys() ?? [])].filter((machine) => !after.has(machine));
    if (gone.length > 0) this.#forget(schedule.id, gone);
    return unmarked;
  }

  /**
   * Returns the field `replaced` of a schedule after a change. It lists the former cron expressions that have due times
   * after the marks, because these due times may have no row yet. `marks` can be undefined if the request does not
   * change the due times.
   */
  replacedBy(after: Schedule, before: Schedule, marks: readonly Mark[] | undefined): Schedule['replaced'] {
    // A change from one machine to tags, or back, changes the machines. Due times on former machines get no rows.
    if ((before.tags === null) !== (after.tags === null)) return undefined;
    if (!marks) return before.replaced;
    const { cron, timezone, since, enabled, replaced = [] } = before;
    const isReplaced = enabled && cron !== null && since !== after.since;
    const times = marks.map(({ at }) => at);
    const settled = before.tags ? Math.min(Date.parse(after.since), ...times) : Math.max(0, ...times);
    const left = [...replaced, ...(isReplaced ? [{ cron, timezone, since, until: after.since }] : [])].filter(
      (one) => {
        const from = Math.max(settled, Date.parse(one.since));
        return this.timetableOf({ ...before, ...one })?.times(from, 1, Date.parse(one.until)).length;
      },
    );
    return left.length > 0 ? left.slice(-mostReplaced) : undefined;
  }

  /**
   * Sets `settledUntil` from the mark and from `since`: the later one counts. Returns the mark; undefined if there is
   * none.
   */
  #settleFrom(tracked: Tracked, marks: LatestMarks | undefined): number | undefined {
    const { schedule, machine_id, settledUntil } = tracked;
    const mark = marks?.get(schedule.tags ? `${schedule.id} ${machine_id}` : schedule.id);
    // A machine that has just got the tags of the schedule has no mark. Its due times count from now on.
    const from = mark ?? (schedule.tags && settledUntil === 0 ? now() : settledUntil);
    setSettledUntil(tracked, from);
    return mark;
  }

  /**
   * Stores marks for machines that have just got the tags of a schedule. Due times may pass on these machines while the
   * broker is down. Without the marks, the broker would overlook these due times after its next start.
   */
  #mark(added: readonly Tracked[]): void {
    const { history, records } = this.#context;
    const own = added.filter(({ machine_id }) => history.owns(machine_id));
    if (own.length === 0) return;
    const marks = own.map(({ schedule: { id: schedule_id }, machine_id, settledUntil: at }) => ({
      ...{ schedule_id, machine_id, at },
    }));
    records
      .mark(marks)
      .catch((err: unknown) =>
        this.#log.warn(
          { err },
          'new machines match the tags of schedules, but this could not be stored; if the broker restarts soon, it may miss a run that is due on these machines',
        ),
      );
  }

  /** Removes the marks of machines that no longer have the tags. */
  #forget(schedule_id: string, machineIds: readonly string[]): void {
    this.#context.records
      .forget(schedule_id, machineIds)
      .catch((err: unknown) =>
        this.#log.warn(
          { err, schedule_id },
          'a schedule’s tags no longer select some machines, but the stored times of its last runs on them could not be removed',
        ),
      );
  }
}

function newlyTracked(schedule: Schedule, machine_id: MachineId): Tracked {
  return {
    ...{ schedule, machine_id, settledUntil: 0, next: undefined, checkAt: Number.POSITIVE_INFINITY },
    ...{ loaded: true, busy: false, waiting: false, missed: 0 },
  };
}

/** Returns the replaced cron expressions whose due times must still be recorded, the oldest first. */
const pendingOf = ({ schedule, settledUntil }: Progress): Replaced[] =>
  (schedule.replaced ?? []).filter(({ until }) => Date.parse(until) > settledUntil);

/**
 * Returns the replaced cron expression whose due times must be recorded next; undefined if there is none. An expression
 * whose `until` is in the future must wait. This happens if another broker's clock is ahead or the clock was set back.
 */
export const replacedOf = (tracked: Progress): Replaced | undefined =>
  pendingOf(tracked).find(({ until }) => Date.parse(until) <= now());

/**
 * Sets `settledUntil` to `at`, or to `since` of the oldest cron expression with due times to handle, if that is later.
 */
export function setSettledUntil(tracked: Progress, at: number): void {
  tracked.settledUntil = at;
  const { since } = pendingOf(tracked)[0] ?? tracked.schedule;
  // A mark or `since` from a time when the clock was ahead is in the future, so it is limited to the present time.
  tracked.settledUntil = Math.min(Math.max(at, Date.parse(since)), now());
}

/**
 * Returns the machine on which earlier runs of the schedule are looked up; undefined for all machines. A schedule
 * without tags may have moved, so its earlier runs may be on other machines.
 */
export function machineIn({ schedule, machine_id }: Tracked): MachineId | undefined {
  return schedule.tags ? machine_id : undefined;
}

type LatestMarks = ReadonlyMap<string, number>;

/**
 * Returns a map with two kinds of keys. `SCHEDULE_ID MACHINE_ID` gives the mark of the schedule on this machine.
 * `SCHEDULE_ID` alone gives the latest mark of the schedule on any machine.
 */
function latestOf(marks: readonly Mark[]): LatestMarks {
  const latest = new Map<string, number>();
  for (const { schedule_id, machine_id, at } of marks) {
    latest.set(`${schedule_id} ${machine_id}`, at);
    latest.set(schedule_id, Math.max(at, latest.get(schedule_id) ?? 0));
  }
  return latest;
}
