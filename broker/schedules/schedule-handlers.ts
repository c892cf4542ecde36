// The REST handlers of schedules: create, change and list schedules, run them by hand, and list their runs.
import type { Api, Caller, Handlers, Reply } from '../../shared/api/route-table.ts';
import { schedules as routes } from '../../shared/api/schedules.ts';
import type { MachineId } from '../../shared/api/shared-schemas.ts';
import { iso, isoOrNull, now } from '../../shared/clock.ts';
import { setsNothing } from '../../shared/defined-fields.ts';
import { AppError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import { found, notFound } from '../find-or-not-found.ts';
import { pageOf } from '../list-pages-and-filters.ts';
import type { Declared, Schedule, StateTransaction } from '../state/index.ts';
import { checkedTimetable } from './cron-due-times.ts';
import { refusal, wordsOf } from './cron-expression.ts';
import { Launcher, paramsOf, type ScheduleContext } from './launch-run.ts';
import { DueTimes } from './run-due-times.ts';
import type { RanTimes, ScheduleRun } from './run-records.ts';
import {
  assertMayExecute,
  assertMayExpose,
  assertMayRead,
  type Changes,
  changedBy,
  changesNothing,
  changesTimes,
  decidesRun,
  scheduleOf,
} from './schedule-from-request.ts';
import { findTimeZone } from './time-zone.ts';
import { TrackedSchedules } from './tracked-schedules.ts';
import { type DueRun, dueRuns } from './upcoming.ts';
import { mostWatches, PathWatches, tooManyWatches } from './watch-paths.ts';

const detailedTimes = 5;
/** Milliseconds that `run` waits for a linked agent to accept the command. */
const acceptMs = 10_000;

export class Schedules {
  readonly #context: ScheduleContext;
  readonly #launcher: Launcher;
  readonly #tracked: TrackedSchedules;
  readonly #dueTimes: DueTimes;
  readonly #watches: PathWatches;

  private constructor(context: ScheduleContext, launcher: Launcher, tracked: TrackedSchedules, log: Logger) {
    this.#context = context;
    this.#launcher = launcher;
    this.#tracked = tracked;
    this.#dueTimes = new DueTimes(context, launcher, tracked, log);
    this.#watches = new PathWatches(context, launcher, tracked, log);
  }

  /** Starts to run schedules, and handles the due times that passed while the broker was down. */
  static async open(context: ScheduleContext, log: Logger): Promise<Schedules> {
    const { records, state } = context;
    const launcher = new Launcher(context, await records.unfinishedIds());
    const ids = [...state.schedules.keys()];
    await records.forgetOthers(ids);
    const tracked = new TrackedSchedules(context, await records.marksOf(ids), log);
    context.cluster?.join({
      adopt: (machineIds) => tracked.adopt(machineIds, launcher.adopt(machineIds)),
      drop() {},
    });
    return new Schedules(context, launcher, tracked, log);
  }

  /** No schedule starts a run after this call. */
  stop(): void {
    this.#dueTimes.stop();
    this.#watches.stop();
  }

  readonly handlers: Handlers['schedules'] = {
    create: async (input, caller) => {
      assertUseOfParameters(input);
      const schedule = scheduleOf(input, caller);
      await this.#assertServed(schedule, caller);
      await this.#context.state.change((transaction) => {
        assertMayExecute(caller.during(transaction));
        this.#assertTrigger(schedule, transaction, caller);
        paramsOf(schedule, transaction.before);
        transaction.put('schedules', schedule);
        caller.commit(transaction, { schedule_id: schedule.id });
      });
      return this.#serializeDetail(schedule, caller);
    },
    list: async (input, caller) => {
      const all = [...this.#context.state.schedules.values()];
      const seen = all.filter((one) => this.#isSeen(one, caller) && this.#runsOn(one, input.machine_id));
      const byNextRun = input.sort.endsWith('next_run');
      const ran = await this.#ranAhead(byNextRun ? seen : []);
      const page = pageOf(routes.list, seen, input, (schedule, field) =>
        field === 'next_run' ? this.#tracked.nextOf(schedule, 1, ran)[0] : Reflect.get(schedule, field),
      );
      const ranOfPage = byNextRun ? ran : await this.#ranAhead(page.items);
      const items = await Promise.all(page.items.map((one) => this.#serialize(one, ranOfPage, caller)));
      return { items, total: page.total };
    },
    preview: ({ cron, timezone, count, from }) => {
      // Due times are computed only from 1970 on, so an earlier `from` counts as 1970.
      const after = Math.max(0, from?.getTime() ?? now());
      const times = checkedTimetable(cron, timezone).times(after, count);
      return { cron, timezone, description: wordsOf(cron), next_runs: times.map((at) => iso(at)) };
    },
    upcoming: async ({ from, until, limit, schedule_id, machine_id }, caller) => {
      const start = Math.max(now(), from?.getTime() ?? 0);
      const end = until?.getTime() ?? start + 86_400_000;
      const seen = [...this.#context.state.schedules.values()].filter(
        (one) =>
          this.#isSeen(one, caller) &&
          (schedule_id === undefined || one.id === schedule_id) &&
          this.#runsOn(one, machine_id),
      );
      const next = (one: Schedule, after: number) => this.#tracked.nextAfter(one, after);
      const { runs, more } = await dueRuns(seen, next, { from: start, until: end, limit });
      return { from: iso(start), until: iso(end), runs: runs.map(serializeDue), more };
    },
    get: ({ schedule_id }, caller) => this.#serializeDetail(this.#find(schedule_id), caller),
    update: async ({ schedule_id, ...changes }, caller) => {
      if (changes.on_change)
        await this.#assertServed(changedBy(this.#find(schedule_id), changes, caller), caller);
      const marks = changesTimes(changes) ? await this.#context.records.marksOf([schedule_id]) : undefined;
      const changed = await this.#context.state.change((transaction) => {
        assertMayExecute(caller.during(transaction));
        const before = this.#find(schedule_id, transaction.before);
        if (setsNothing(changes)) return before;
        this.#assertReachesAll(before, transaction, caller);
        const next = changedBy(before, changes, caller);
        const after = { ...next, replaced: this.#tracked.replacedBy(next, before, marks) };
        if (before.tags) this.#assertKeyIsValid(before, changes, transaction);
        // A request without changes returns here, so that the schedule continues to use the rights of its present key.
        // Most changes replace this key with the key of the request.
        if (changesNothing(before, after, changes)) return before;
        this.#assertTrigger(after, transaction, caller);
        assertUseOfParameters(after);
        paramsOf(after, transaction.before);
        transaction.put('schedules', after);
        caller.commit(transaction);
        // commit() throws an error about the machine if the caller may not use it. The environment is checked after
        // commit(), so that the caller gets that error first.
        assertMayExpose(caller.during(transaction), changes);
        return after;
      });
      const detail = await this.#serializeDetail(changed, caller);
      const mayRead = caller.may('schedules:read') || changes.env !== undefined;
      return mayRead ? detail : { ...detail, env: null };
    },
    remove: async ({ schedule_id }, caller) => {
      await this.#context.state.change((transaction) => {
        const schedule = this.#find(schedule_id, transaction.before);
        this.#assertReachesAll(schedule, transaction, caller);
        transaction.remove('schedules', schedule.id);
        caller.commit(transaction);
      });
      return { deleted: true };
    },
    run: async ({ schedule_id }, caller) => {
      assertMayExecute(caller);
      const schedule = this.#find(schedule_id);
      const { machine_id } = schedule;
      const begun =
        machine_id === null
          ? await this.#runOnTagged(schedule, caller)
          : await this.#launcher.byHand({ schedule, machine_id }, caller);
      const { id: command_id, batch_id = null, within } = begun;
      const { started_at, status } = await within(acceptMs, caller.signal);
      return { command_id, status: started_at === null ? status : 'running', batch_id };
    },
    history: async (input, caller) => {
      const { items, total } = await this.#context.records.page(input, caller.reachable());
      return { items: await this.#serializeRuns(items), total };
    },
    getRun: async ({ run_id }) => {
      const run = await this.#context.records.find(run_id);
      const [served] = run ? await this.#serializeRuns([run]) : [];
      if (served) return served;
      throw notFound('run', run_id);
    },
  };

  #find(id: string, { schedules }: Pick<Declared, 'schedules'> = this.#context.state): Schedule {
    return found(schedules, 'schedule', id);
  }

  /** True if the key may use a machine of the schedule. For a schedule with tags, also true if the key owns it. */
  #isSeen(schedule: Schedule, caller: Caller): boolean {
    const { machinesOf } = this.#context;
    // A schedule with tags may have no machines at present; its owner must see the schedule all the same.
    const isOwn = schedule.tags !== null && schedule.requested_by === caller.key_id;
    if (isOwn || !caller.reachable()) return true;
    return machinesOf(schedule).some((machine) => caller.reaches(machine));
  }

  #runsOn(schedule: Schedule, machine: MachineId | undefined): boolean {
    return machine === undefined || this.#context.machinesOf(schedule).includes(machine);
  }

  /** For a schedule with tags: throws forbidden unless the key owns the schedule or may use all its machines. */
  #assertReachesAll(schedule: Schedule, transaction: StateTransaction, caller: Caller): void {
    const { id, tags, requested_by } = schedule;
    const { reachable, reaches } = caller.during(transaction);
    if (!tags || !reachable() || requested_by === caller.key_id) return;
    if (this.#context.machinesOf(schedule).every((machine) => reaches(machine))) return;
    const message = `schedule ${id} runs on machines that this key is not allowed to use: to change or delete it, use a key that may use all of them`;
    throw new AppError('forbidden', message, { schedule_id: id });
  }

  /**
   * A schedule with tags runs with the rights of its key. Throws conflict if this key is revoked or expired.
   * Exceptions: the request sets both the machines and the command; or it sets no field of decidesRun(), and the
   * schedule is disabled after the change.
   */
  #assertKeyIsValid(
    { id, enabled, requested_by }: Schedule,
    changes: Changes,
    transaction: StateTransaction,
  ): void {
    const where = changes.tags ?? changes.machine_id;
    const what = changes.command ?? changes.saved_command_id;
    // If a request changes both the machines and the command, the schedule gets the key of the request.
    if (where !== undefined && what !== undefined) return;
    // A schedule that stays disabled may be changed, except in fields that decide where or what it runs.
    const isDisabled = !(changes.enabled ?? enabled) && !decidesRun(changes);
    if (isDisabled || this.#context.rightsOf(requested_by, transaction.before)) return;
    const message =
      'the key of this schedule is revoked or expired: to run the schedule with the rights of your key, send both its machines (tags or machine_id) and its command (command or saved_command_id)';
    throw new AppError('conflict', message, { schedule_id: id });
  }

  /**
   * Checks the cron expression and the time zone of a schedule. If it watches a path, checks the right to read files
   * and the number of watches on the machine. Throws validation_failed, forbidden or conflict.
   */
  #assertTrigger(schedule: Schedule, transaction: StateTransaction, caller: Caller): void {
    const { id, cron, on_change, timezone, machine_id, enabled, requested_by } = schedule;
    checkedTimetable(cron ?? '@daily', timezone);
    if (!on_change) return;
    assertMayRead(caller.during(transaction));
    const key = this.#context.rightsOf(requested_by, transaction.before);
    if (key && requested_by !== caller.key_id) assertMayRead(key);
    const others = transaction
      .all('schedules')
      .filter((one) => one.id !== id && one.on_change && one.enabled && one.machine_id === machine_id);
    if (!enabled || machine_id === null || others.length < mostWatches) return;
    throw new AppError('conflict', tooManyWatches, { machine_id });
  }

  /**
   * Checks a schedule with on_change. Throws forbidden if the key may not run commands or read files. Throws
   * permission_denied or invalid_path if the machine is online and refuses the path.
   */
  async #assertServed({ machine_id, on_change }: Schedule, caller: Caller): Promise<void> {
    if (!on_change) return;
    assertMayExecute(caller);
    assertMayRead(caller);
    const { presence } = this.#context;
    if (machine_id === null || !caller.reaches(machine_id) || !presence.online(machine_id)) return;
    const { signal, request_id } = caller;
    await presence
      .get(machine_id)
      .stub.statFile(
        { path: Buffer.from(on_change.path), sha256: false },
        { lane: 'single', signal, request_id, caller },
      )
      .catch((error: unknown) => {
        const isRefused =
          error instanceof AppError && ['permission_denied', 'invalid_path'].includes(error.code);
        if (isRefused) throw error;
      });
  }

  #runOnTagged(schedule: Schedule, caller: Caller) {
    const machines = this.#context.machinesOf(schedule).filter((machine) => caller.reaches(machine));
    if (machines.length > 0) return this.#launcher.batchByHand(schedule, machines, caller);
    const message = `no machine that this key may use has all tags of the schedule: ${schedule.tags?.join(', ')}`;
    throw new AppError('conflict', message, { schedule_id: schedule.id });
  }

  /** Returns the future due times for which these schedules have already run, because the clock was ahead. */
  #ranAhead(schedules: readonly Schedule[]): Promise<RanTimes> {
    return this.#context.records.ran(
      schedules.map(({ id }) => id),
      now(),
    );
  }

  async #serialize(schedule: Schedule, ran: RanTimes, caller: Caller) {
    const [next] = this.#tracked.nextOf(schedule, 1, ran);
    const run = await this.#context.records.last(schedule, caller.reachable());
    const last_run = run && {
      ...{ at: iso(run.started_at), exit_code: run.exit_code ?? -1, duration: run.duration ?? 0 },
      status: run.status,
    };
    return { ...schedule, next_run: next === undefined ? null : iso(next), last_run: last_run ?? null };
  }

  async #serializeDetail(schedule: Schedule, caller: Caller): Promise<Reply<Api['schedules']['get']>> {
    const ran = await this.#ranAhead([schedule]);
    const next = this.#tracked.nextOf(schedule, detailedTimes, ran);
    return { ...(await this.#serialize(schedule, ran, caller)), next_runs: next.map((at) => iso(at)) };
  }

  async #serializeRuns(runs: readonly ScheduleRun[]): Promise<Reply<Api['schedules']['getRun']>[]> {
    const ids = runs.map(({ command_id }) => command_id).filter((id) => id !== null);
    const commands = await this.#context.commands.listed(ids);
    return runs.map(({ decided_at: _, ...run }) => {
      const command = run.command_id === null ? undefined : commands.get(run.command_id);
      const began = run.finished_at === null ? command?.started_at : undefined;
      // A run that never started has no output. Its field stderr has the reason instead.
      const reason = run.duration === 0 && !command?.started_at ? run.reason : undefined;
      return {
        ...run,
        scheduled_for: isoOrNull(run.scheduled_for),
        started_at: began ?? iso(run.started_at),
        finished_at: isoOrNull(run.finished_at),
        stdout: command?.stdout ?? '',
        stderr: reason ?? command?.stderr ?? '',
      };
    });
  }
}

/** Throws validation_failed if a schedule has parameters but no saved command, because only saved commands use them. */
function assertUseOfParameters({
  saved_command_id = null,
  parameters = null,
}: {
  saved_command_id?: string | null | undefined;
  parameters?: object | null | undefined;
}): void {
  if (saved_command_id !== null || parameters === null) return;
  throw refusal('parameters', 'need a saved command: send saved_command_id too, or leave parameters out');
}

function serializeDue({ schedule: { id, name, machine_id, timezone }, at }: DueRun) {
  const offset = findTimeZone(timezone)?.offsetAt(at) ?? 0;
  return { schedule_id: id, name, machine_id, at: iso(at), utc_offset: offset / 60_000 };
}
