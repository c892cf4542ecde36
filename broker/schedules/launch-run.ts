// Starts runs of schedules. A run has a row in the history and a command, which are stored in one transaction. If the
// command is refused, the row contains the reason.

import type { Caller, Rights } from '../../shared/api/route-table.ts';
import type { KeyId, MachineId } from '../../shared/api/shared-schemas.ts';
import { monotonic } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import type { Cluster } from '../cluster/index.ts';
import type { AcceptedCommand, Commands, ScheduledParams } from '../commands/command-handlers.ts';
import type { CommandParams } from '../commands/command-record.ts';
import { commandWith } from '../commands/saved-command-parameters.ts';
import { found } from '../find-or-not-found.ts';
import type { History, HistoryTransaction } from '../history/history-database.ts';
import type { Presence } from '../presence/index.ts';
import type { Declared, SavedCommand, Schedule, State } from '../state/index.ts';
import type { Changes } from './collect-changed-paths.ts';
import { newRun, type OnMachine, type ScheduleRecords, type ScheduleRun, settledRun } from './run-records.ts';

export interface ScheduleContext {
  /** The other brokers on the same database; undefined with a single broker. */
  cluster?: Pick<Cluster, 'join'> | undefined;
  state: State;
  history: History;
  presence: Presence;
  commands: Commands;
  records: ScheduleRecords;
  mayRun(who: { requested_by: KeyId; machine_id: MachineId }): boolean;
  /** True if the key may run commands and read files on the machine. A schedule with on_change needs both. */
  mayWatch(who: { requested_by: KeyId; machine_id: MachineId }): boolean;
  /** The machines that a schedule would run on if it started now. */
  machinesOf(schedule: Schedule): MachineId[];
  /** The rights of a key; undefined if it is revoked or expired. */
  rightsOf(id: KeyId, declared: Declared): Pick<Rights, 'may'> | undefined;
}

/** Adds writes to the transaction that stores a run. */
type Also = (transaction: HistoryTransaction) => void;

/** Optional parts of a run, in addition to those from its schedule. */
interface More {
  /** Adds writes to the transaction that stores the run. */
  also?: Also;
  /** Environment variables of the command, added to those of the schedule. */
  env?: Record<string, string>;
}

/** Maximum time in milliseconds that a scheduled command waits for a busy machine. */
const busyMs = 60_000;
/** Milliseconds that a machine gets to connect after the broker has started or has taken the machine over. */
const returnMs = 60_000;
/** A machine that has linked again reports within this many milliseconds which of its commands have ended meanwhile. */
const reportMs = 5_000;

export class Launcher {
  readonly #context: ScheduleContext;
  readonly #started = monotonic();
  /** Ids of the runs that had not ended when this broker started or took over machines. */
  readonly #leftOpen: Set<string>;
  /** For each machine, the monotonic time at which this broker took it over from another broker. */
  readonly #adoptedAt = new Map<string, number>();
  readonly #linkedAt = new Map<string, number>();

  constructor(context: ScheduleContext, left: readonly string[]) {
    this.#context = context;
    this.#leftOpen = new Set(left);
    context.records.watch(({ id }) => this.#leftOpen.delete(id));
    context.presence.watch((machineId, online) => {
      if (online) this.#linkedAt.set(machineId, monotonic());
      else this.#linkedAt.delete(machineId);
    });
  }

  /**
   * Must be called when this broker has taken over machines. Gives these machines `returnMs` to connect, because their
   * previous broker may have stopped.
   */
  async adopt(machineIds: readonly string[]): Promise<void> {
    for (const id of machineIds) this.#adoptedAt.set(id, monotonic());
    for (const id of await this.#context.records.unfinishedIds(machineIds)) this.#leftOpen.add(id);
  }

  #ownedSince(machineId: string): number {
    return this.#adoptedAt.get(machineId) ?? this.#started;
  }

  /** True if the machine is offline although it has had time to connect. A command for this machine fails at once. */
  isAway(machineId: string): boolean {
    return this.#queueFor(machineId) === undefined;
  }

  /**
   * Leaves out runs on machines that are offline. A schedule may have been moved away from a machine that never comes
   * back. The run there counts as open for a day, and must not stop the schedule on its new machine.
   */
  inProgress(open: readonly ScheduleRun[]): ScheduleRun[] {
    const { presence } = this.#context;
    return open.filter(({ machine_id }) => presence.linkedAnywhere(machine_id) || !this.isAway(machine_id));
  }

  /**
   * True if each of these runs may have ended without the knowledge of this broker. This is possible for a run that
   * was open when this broker started or took over the machine, until the machine has had time to report the run's
   * end.
   */
  mayHaveEnded(open: readonly ScheduleRun[]): boolean {
    const isReported = (machineId: string): boolean =>
      monotonic() - (this.#linkedAt.get(machineId) ?? Number.POSITIVE_INFINITY) >= reportMs;
    const isOver = (machineId: string): boolean => monotonic() - this.#ownedSince(machineId) >= returnMs;
    return open.every(
      ({ id, machine_id }) => this.#leftOpen.has(id) && !isOver(machine_id) && !isReported(machine_id),
    );
  }

  /** Starts a run at its due time. Resolves when the run is on disk, with its command or the reason of its failure. */
  byClock(on: OnMachine, at: number, trigger: 'cron' | 'catch_up'): Promise<void> {
    return this.#byItself(on, newRun(on, trigger, at));
  }

  /**
   * Starts a run after changes of a watched path. Resolves when the run is on disk, with its command or the reason of
   * its failure.
   */
  byChange(on: OnMachine, changes: Changes, also: Also): Promise<void> {
    return this.#byItself(on, newRun(on, changes.trigger, null), { also, env: changes.environment() });
  }

  async #byItself(on: OnMachine, run: ScheduleRun, more: More = {}): Promise<void> {
    const { machine_id } = on;
    const { requested_by } = on.schedule;
    if (!this.#context.mayRun({ requested_by, machine_id })) return this.#refused(run, keyRevoked, more.also);
    const queue_for = this.#queueFor(machine_id);
    try {
      await this.#launch(on, run, { key_id: requested_by, request_id: newId('request'), queue_for }, more);
    } catch (error) {
      if (!(error instanceof AppError)) throw error;
      // If the refusal cannot be stored, for example because the database does not answer, the error is thrown. The
      // caller then tries again.
      await this.#refused(run, error, more.also);
    }
  }

  /**
   * Starts a run for a request. If the run's command is refused, stores the run as failed, and throws the error that
   * POST /commands would give.
   */
  async byHand(on: OnMachine, caller: Caller): Promise<AcceptedCommand> {
    const run = newRun(on, 'manual', null);
    const also: Also = (transaction) => caller.commit(transaction, { run_id: run.id });
    const { key_id, request_id } = caller;
    try {
      return await this.#launch(on, run, { key_id, request_id }, { also });
    } catch (error) {
      if (error instanceof AppError) await this.#refused(run, error);
      throw error;
    }
  }

  /** Starts a run on each of these machines for a request, as one batch. Returns the first command of the batch. */
  async batchByHand(
    schedule: Schedule,
    machines: readonly MachineId[],
    caller: Caller,
  ): Promise<AcceptedCommand> {
    const runs = machines.map((machine_id) => newRun({ schedule, machine_id }, 'manual', null));
    const params = { ...paramsOf(schedule, this.#context.state), schedule_id: schedule.id };
    return await this.#context.commands.startBatch(params, machines, caller, {
      made: { run_id: runs[0]?.id ?? '' },
      complete: (transaction, members) => {
        for (const [n, run] of runs.entries()) {
          const { id = null, batch_id = null } = members[n] ?? {};
          this.#context.records.begin({ ...run, command_id: id, batch_id }, transaction);
        }
      },
    });
  }

  async #launch(
    { schedule, machine_id }: OnMachine,
    run: ScheduleRun,
    requester: Pick<ScheduledParams, 'key_id' | 'request_id' | 'queue_for'>,
    { also, env }: More,
  ): Promise<AcceptedCommand> {
    const params = paramsOf(schedule, this.#context.state);
    const all = {
      ...{ ...params, env: { ...params.env, ...env } },
      ...{ machine_id, schedule_id: schedule.id, ...requester },
    };
    return await this.#context.commands.start(all, (transaction, command_id) => {
      this.#context.records.begin({ ...run, command_id }, transaction);
      also?.(transaction);
    });
  }

  #refused(run: ScheduleRun, { code, message }: AppError, also?: Also): Promise<void> {
    const { history, records } = this.#context;
    const settled = settledRun(run, 'failed', `${code}: ${message}`);
    return history.write((transaction) => {
      records.settle([settled], transaction);
      also?.(transaction);
    });
  }

  /**
   * Returns `queue_for`: how many milliseconds a command may wait for its machine. It is undefined if the machine is
   * offline, and its `returnMs` milliseconds to connect are over. The command then fails at once.
   */
  #queueFor(machineId: string): number | undefined {
    if (this.#context.presence.online(machineId)) return busyMs;
    const left = this.#ownedSince(machineId) + returnMs - monotonic();
    return left > 0 ? Math.ceil(left) : undefined;
  }
}

const filledIn = new WeakMap<Schedule, { saved: SavedCommand; params: CommandParams }>();

/**
 * Fills the parameters of a schedule into its saved command. The result is reused for all machines, because matching
 * patterns takes time. An error is not reused: on a busy computer, a match can time out, and that is temporary.
 */
function fillIn(schedule: Schedule, saved: SavedCommand): CommandParams {
  const known = filledIn.get(schedule);
  if (known?.saved === saved) return known.params;
  const params = commandWith(saved, schedule.parameters ?? {});
  filledIn.set(schedule, { saved, params });
  return params;
}

/**
 * Returns the parameters of the command that a run of a schedule starts. Throws validation_failed if the values of the
 * schedule do not fit its saved command.
 */
export function paramsOf(schedule: Schedule, declared: Pick<Declared, 'saved_commands'>): CommandParams {
  const { command, saved_command_id, user, cwd, env, timeout } = schedule;
  const saved =
    saved_command_id && fillIn(schedule, found(declared.saved_commands, 'saved_command', saved_command_id));
  return {
    ...(saved ?? { command: command ?? '' }),
    ...(user !== null && { user }),
    ...(cwd !== null && { cwd }),
    ...(env !== null && { env }),
    ...(timeout !== null && { timeout }),
  };
}

const keyRevoked = new AppError(
  'forbidden',
  'the key of this schedule may no longer run commands on the machine of this run (key_revoked). To run the schedule with the rights of another key, use that key to change the schedule. If the schedule has tags, that request must contain its tags and its command, even if they stay the same',
);

/** The error for a schedule whose key may no longer watch its path. */
export const mayNotWatch = new AppError(
  'forbidden',
  'the path of this schedule is not watched: the key of the schedule may no longer read files and run commands on the machine (key_revoked). To use the rights of another key, use that key to change the schedule. If the schedule has tags, that request must contain its tags and its command, even if they stay the same',
);
