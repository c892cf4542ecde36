// Watches the path of each schedule with `on_change`, on each machine of the schedule. Starts a run after a change,
// once the path has not changed again for the time `settle`.
import type { FileChange__Output } from '../../proto/types/farhand/agent/v1/FileChange.ts';
import type { CallOptions } from '../../shared/agent-rpcs.ts';
import { after, monotonic, sleep } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import type { Logger } from '../../shared/logger.ts';
import { Semaphore } from '../../shared/semaphore.ts';
import type { Schedule } from '../state/index.ts';
import { Changes } from './collect-changed-paths.ts';
import { type Launcher, mayNotWatch, type ScheduleContext } from './launch-run.ts';
import { fingerprintOf, isMissing } from './path-fingerprint.ts';
import { newRun, settledRun } from './run-records.ts';
import { machineIn, type Tracked, type TrackedSchedules } from './tracked-schedules.ts';

/**
 * Maximum number of paths that schedules watch on one machine. A machine allows 32 watches, so 16 remain for requests
 * that watch files.
 */
export const mostWatches = 16;
export const tooManyWatches = `schedules already watch ${mostWatches} paths of this machine: delete or disable one of these schedules`;
/**
 * Milliseconds until a path is watched again. `soonMs` applies when a watch has ended, or has failed once. `laterMs`
 * applies after further failures, and while the path is missing.
 */
const soonMs = 1_000;
const laterMs = 30_000;
/**
 * Changes can wait for the end of an earlier run. If this end is not reported, the broker checks after this number of
 * milliseconds whether the run has ended.
 */
const openMs = 60_000;

/** The watch of one schedule on one of its machines. */
interface PathWatch {
  tracked: Tracked;
  /** The schedule as it was last declared. */
  schedule: Schedule;
  on_change: NonNullable<Schedule['on_change']>;
  /** Ends the call to the agent; undefined while the machine is offline or the key may not watch the path. */
  link: AbortController | undefined;
  /** True while the agent watches the path, or has been asked to. */
  open: boolean;
  /** Changes for which no run has started yet. */
  changes: Changes | undefined;
  busy: boolean;
  /** True while `changes` must wait until an earlier run of the schedule has ended. */
  waiting: boolean;
  /** Number of failed attempts in a row. */
  failures: number;
  /**
   * True once the path has been compared with its stored state since the machine was linked. Changes after this
   * comparison start a run even if `catch_up` is `none`, because `catch_up` is only about earlier changes.
   */
  wasLinked: boolean;
  /** The last recorded reason why the path is not watched. */
  problem: string | undefined;
  /** Monotonic time at which a directory was last created at the path. */
  renewedAt: number;
  cancelTimer(): void;
}

const nothing = (): void => {};

export class PathWatches {
  readonly #context: ScheduleContext;
  readonly #launcher: Launcher;
  readonly #tracked: TrackedSchedules;
  readonly #log: Logger;
  readonly #watches = new Map<string, PathWatch>();
  /** Limits how many fingerprints are computed at the same time, because thousands of machines may link together. */
  readonly #readings = new Semaphore(16);
  readonly #stops: (() => void)[];
  #stopped = false;

  constructor(context: ScheduleContext, launcher: Launcher, tracked: TrackedSchedules, log: Logger) {
    this.#context = context;
    this.#launcher = launcher;
    this.#tracked = tracked;
    this.#log = log;
    this.#stops = [
      tracked.watch(() => this.#follow()),
      context.presence.watch((machineId) => {
        for (const one of tracked.on(machineId)) if (one.schedule.on_change) this.#update(one);
      }),
      context.records.watch((run) => {
        const one = tracked.of(run);
        const watch = one && this.#watches.get(keyOf(one));
        if (watch?.waiting) this.#settle(watch);
      }),
    ];
    this.#follow();
  }

  stop(): void {
    this.#stopped = true;
    for (const stop of this.#stops) stop();
    for (const watch of this.#watches.values()) end(watch);
  }

  /** Starts and ends watches, so that they match the declared schedules. */
  #follow(): void {
    const gone = new Set(this.#watches.keys());
    for (const tracked of this.#tracked.all()) {
      if (!tracked.schedule.on_change) continue;
      gone.delete(keyOf(tracked));
      this.#update(tracked);
    }
    for (const key of gone) this.#drop(key);
  }

  #drop(key: string): void {
    const watch = this.#watches.get(key);
    if (watch) end(watch);
    this.#watches.delete(key);
  }

  /** Starts or ends the watch of one schedule on one machine. */
  #update(tracked: Tracked): void {
    const { schedule, machine_id } = tracked;
    const { on_change, enabled, since, requested_by } = schedule;
    const key = keyOf(tracked);
    const before = this.#watches.get(key);
    const isWatched = !this.#stopped && on_change && enabled && this.#tracked.isOwn(tracked);
    // When another key edits the schedule, the watch continues. Otherwise changes that wait for a run would be lost.
    if (!isWatched || before?.schedule.since !== since || before.tracked !== tracked) this.#drop(key);
    if (!isWatched) return;
    const watch = this.#watches.get(key) ?? newWatch(tracked, on_change);
    this.#watches.set(key, watch);
    watch.schedule = schedule;
    if (!this.#context.mayWatch({ requested_by, machine_id })) {
      disconnect(watch);
      void this.#report(watch, mayNotWatch);
    } else if (!this.#context.presence.online(machine_id)) disconnect(watch);
    else if (!watch.link) {
      watch.link = new AbortController();
      void this.#watch(watch, watch.link.signal);
    }
  }

  /** Watches a path until the signal fires. Never rejects. */
  async #watch(watch: PathWatch, signal: AbortSignal): Promise<void> {
    while (!signal.aborted) {
      const wait = await this.#watchOnce(watch, signal).catch((error: unknown) =>
        signal.aborted ? 0 : this.#failed(watch, error, signal),
      );
      await sleep(wait, signal);
    }
  }

  /** Follows a path until the watch ends or must be renewed. Resolves with the milliseconds until the next watch. */
  async #watchOnce(watch: PathWatch, signal: AbortSignal): Promise<number> {
    const { path, recursive } = watch.on_change;
    this.#assertFewWatches(watch);
    const { stub } = this.#context.presence.get(watch.tracked.machine_id);
    const request = { path: Buffer.from(path), recursive, may_be_missing: true };
    const options = { ...this.#optionsOf(watch, signal), lane: 'watch', idle_ms: 0 } as const;
    let watched: Buffer | undefined;
    watch.open = true;
    try {
      for await (const { changes, path: absolute } of stub.watchFiles(request, options)) {
        if (watched === undefined) {
          watched = absolute;
          // The first answer means that the agent now watches the path, so it reports all later changes. Earlier
          // changes are found by comparing the path with its stored state.
          await this.#compare(watch, signal);
          succeeded(watch);
        }
        if (changes.length > 0) this.#add(watch, changes);
        // A new directory at the path needs a new watch, which follows the entries of this directory.
        if (changes.some((one) => isNewDirectory(one) && watched?.equals(one.path)))
          return waitBeforeRenewal(watch);
      }
    } finally {
      watch.open = false;
    }
    return soonMs;
  }

  #assertFewWatches({ tracked: { machine_id } }: PathWatch): void {
    const others = [...this.#tracked.on(machine_id)].map((one) => this.#watches.get(keyOf(one)));
    if (others.filter((one) => one?.open).length < mostWatches) return;
    throw new AppError('unavailable', tooManyWatches);
  }

  /** Handles a watch that could not start or has failed. Returns the milliseconds until the next attempt. */
  async #failed(watch: PathWatch, error: unknown, signal: AbortSignal): Promise<number> {
    if (isMissing(error)) {
      // An agent cannot watch a path whose directory is missing, and agents of version 0.1.0 cannot watch a missing
      // path. So the broker compares the path with its stored state every `laterMs`.
      try {
        await this.#compare(watch, signal);
        succeeded(watch);
      } catch (err) {
        if (!signal.aborted) this.#log.warn({ err, schedule_id: watch.schedule.id }, notCompared);
      }
      return laterMs;
    }
    watch.failures += 1;
    // The first failure is not recorded, because a link that is just ending may have caused it.
    if (watch.failures === 1) return soonMs;
    await this.#report(watch, error);
    return laterMs;
  }

  /**
   * Records a failed run with the reason why a path is not watched or a run could not start, unless the reason is
   * recorded already. Never rejects.
   */
  async #report(watch: PathWatch, error: unknown): Promise<void> {
    const { history, records } = this.#context;
    const { schedule, machine_id } = watch.tracked;
    const reason = error instanceof AppError ? `${error.code}: ${error.message}` : 'internal_error';
    if (!(error instanceof AppError))
      this.#log.error(
        { err: error, schedule_id: schedule.id },
        'the path of a schedule could not be watched, or its run could not be started; trying again in 30 s',
      );
    if (watch.problem === reason) return;
    watch.problem = reason;
    try {
      const [last] = await records.lastOutcomes([{ schedule_id: schedule.id, machine_id }]);
      if (last?.status === 'failed' && last.reason === reason) return;
      const run = settledRun(newRun(watch.tracked, 'change', null), 'failed', reason);
      await history.write((transaction) => records.settle([run], transaction));
    } catch (err) {
      watch.problem = undefined;
      this.#log.error({ err, schedule_id: schedule.id }, 'a failed run of a schedule could not be stored');
    }
  }

  // ---- Changes

  /** Finds a change that happened while the path was not watched. */
  async #compare(watch: PathWatch, signal: AbortSignal): Promise<void> {
    const { history, records } = this.#context;
    const { schedule, tracked } = watch;
    const seen = await this.#lookAt(watch, signal);
    const before = await records.seen(tracked);
    if (signal.aborted) return;
    if (watch.changes) {
      // The watch was interrupted, and meanwhile the agent could not report changes. So the list of the paths that were
      // collected before may be incomplete.
      watch.changes.forgetPaths();
      return this.#settle(watch);
    }
    if (before === seen) return;
    // The stored state is missing, or older than `since`. Changes before `since` start no run, so the new state is only
    // stored.
    if (!before?.startsWith(schedule.since))
      return history.write((transaction) => records.see(tracked, seen, transaction));
    if (watch.wasLinked) return this.#begin(watch, 'change');
    if (schedule.catch_up !== 'none') return this.#begin(watch, 'catch_up');
    const run = settledRun(newRun(tracked, 'change', null), 'missed', unwatched);
    await history.write((transaction) => {
      records.settle([run], transaction);
      records.see(tracked, seen, transaction);
    });
  }

  /**
   * Returns the state of the path as a text: the schedule's `since` and a fingerprint. Changes before `since` do not
   * count, so #compare() ignores a stored state with another `since`.
   */
  async #lookAt(watch: PathWatch, signal: AbortSignal): Promise<string> {
    const { stub } = this.#context.presence.get(watch.tracked.machine_id);
    const options = this.#optionsOf(watch, signal);
    const fingerprint = await this.#readings.run(signal, () => fingerprintOf(stub, watch.on_change, options));
    return `${watch.schedule.since} ${fingerprint}`;
  }

  #optionsOf({ schedule: { requested_by } }: PathWatch, signal: AbortSignal): CallOptions {
    const key_name = this.#context.state.keys.get(requested_by)?.name ?? '';
    return { request_id: newId('request'), signal, caller: { key_id: requested_by, key_name } };
  }

  #add(watch: PathWatch, changes: readonly FileChange__Output[]): void {
    watch.changes ??= new Changes('change');
    watch.changes.add(changes);
    if (!watch.waiting) this.#settle(watch);
  }

  /** Starts to collect changes after a comparison. The comparison has found a change, but not which paths changed. */
  #begin(watch: PathWatch, trigger: 'change' | 'catch_up'): void {
    watch.changes = new Changes(trigger);
    watch.changes.forgetPaths();
    this.#settle(watch);
  }

  /** Sets the timer that starts the run once no change has come for the time `settle`. */
  #settle(watch: PathWatch): void {
    if (watch.changes) this.#arm(watch, watch.changes.wait(watch.on_change.settle));
  }

  #arm(watch: PathWatch, ms: number): void {
    watch.cancelTimer();
    watch.cancelTimer = after(ms, () => void this.#fire(watch));
  }

  /** Starts a run for the collected changes, or waits until an earlier run has ended. Never rejects. */
  async #fire(watch: PathWatch): Promise<void> {
    if (watch.busy) return this.#arm(watch, soonMs);
    const { changes, link } = watch;
    // No run starts while the machine is offline. When the machine is linked again, #compare() finds the changes and
    // starts the run.
    if (!changes || !link) return;
    watch.busy = true;
    try {
      if (await this.#mustWait(watch)) return;
      watch.changes = undefined;
      await this.#start(watch, changes, link.signal);
    } catch (error) {
      if (watch.changes) watch.changes.forgetPaths();
      else watch.changes = changes;
      if (link.signal.aborted) return;
      await this.#report(watch, error);
      this.#arm(watch, laterMs);
    } finally {
      watch.busy = false;
    }
  }

  /** True if an earlier run must end first. The collected changes then wait. */
  async #mustWait(watch: PathWatch): Promise<boolean> {
    const { schedule, tracked } = watch;
    watch.waiting = schedule.overlap === 'skip';
    if (!watch.waiting) return false;
    // The timer is set before the read. If the open run ends during the read, #settle() replaces the timer with a
    // shorter one. If the timer were set after the read, it would replace the shorter one.
    this.#arm(watch, openMs);
    const open = this.#launcher.inProgress(await this.#context.records.open(schedule.id, machineIn(tracked)));
    watch.waiting = open.length > 0;
    if (!watch.waiting) watch.cancelTimer();
    return watch.waiting;
  }

  async #start(watch: PathWatch, changes: Changes, signal: AbortSignal): Promise<void> {
    const { schedule, tracked } = watch;
    const { machine_id } = tracked;
    if (!this.#context.mayWatch({ requested_by: schedule.requested_by, machine_id })) {
      disconnect(watch);
      return this.#report(watch, mayNotWatch);
    }
    const seen = await this.#lookAt(watch, signal);
    await this.#launcher.byChange(tracked, changes, (transaction) =>
      this.#context.records.see(tracked, seen, transaction),
    );
  }
}

const keyOf = ({ schedule, machine_id }: Tracked): string => `${schedule.id} ${machine_id}`;

function newWatch(tracked: Tracked, on_change: PathWatch['on_change']): PathWatch {
  return {
    ...{ tracked, schedule: tracked.schedule, on_change, link: undefined, changes: undefined },
    ...{ open: false, busy: false, waiting: false, failures: 0, wasLinked: false, problem: undefined },
    renewedAt: Number.NEGATIVE_INFINITY,
    cancelTimer: nothing,
  };
}

function succeeded(watch: PathWatch): void {
  Object.assign(watch, { failures: 0, wasLinked: true, problem: undefined });
}

/**
 * Returns the milliseconds to wait before the path is watched again. The wait limits the load from an agent that keeps
 * reporting new directories.
 */
function waitBeforeRenewal(watch: PathWatch): number {
  const passed = monotonic() - watch.renewedAt;
  watch.renewedAt = monotonic();
  return passed < soonMs ? soonMs : 0;
}

/**
 * Ends the call to the agent. `watch.changes` still contains the changes that the agent has reported. They start a run
 * when the path is watched again.
 */
function disconnect(watch: PathWatch): void {
  watch.link?.abort();
  watch.link = undefined;
  watch.cancelTimer();
  Object.assign(watch, { failures: 0, waiting: false, wasLinked: false });
}

function end(watch: PathWatch): void {
  disconnect(watch);
  watch.changes = undefined;
}

const isNewDirectory = ({ kind, type }: FileChange__Output): boolean =>
  kind === 'FILE_CHANGE_KIND_ADDED' && type === 'FILE_TYPE_DIRECTORY';

const notCompared =
  'the path of a schedule could not be compared with its earlier state; trying again in 30 s';

const unwatched =
  'the path changed while it was not watched, because its machine was offline or the broker was not running';
