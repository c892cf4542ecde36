// Starts runs: a command with its row and mark in one transaction, or a row that says why there is none.
import type { Journal } from '../../shared/api/index.ts';
import type { KeyId, MachineId, RunId } from '../../shared/api/route.ts';
import { monotonic } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';
import type { Begun, Commands } from '../commands/index.ts';
import type { History } from '../history.ts';
import type { Presence } from '../presence/index.ts';
import type { Schedule, State } from '../state/index.ts';
import { newRun, type ScheduleRecords, type ScheduleRun, settledRun } from './records.ts';

export interface ScheduleRooms {
  state: State;
  history: History;
  presence: Presence;
  commands: Commands;
  records: ScheduleRecords;
  mayRun(who: { requested_by: KeyId; machine_id: MachineId }): boolean;
}

/** Who asks for a run. */
interface Requester {
  key_id: KeyId;
  request_id: string;
}

/** So long a scheduled command may wait for a busy machine. */
const busyMs = 60_000;
/** So long after the broker's start, machines are still on their way back. */
const returnMs = 60_000;
/** What ended while it was away a machine reports within this after it has linked. */
const reportMs = 5_000;

export class Launcher {
  readonly #rooms: ScheduleRooms;
  readonly #started = monotonic();
  /** Runs that an earlier broker left open. */
  readonly #left: ReadonlySet<string>;
  readonly #linkedAt = new Map<string, number>();

  constructor(rooms: ScheduleRooms) {
    this.#rooms = rooms;
    this.#left = new Set(rooms.records.openIds());
    rooms.presence.watch((machineId, online) => {
      if (online) this.#linkedAt.set(machineId, monotonic());
      else this.#linkedAt.delete(machineId);
    });
  }

  /** Whether a command for this machine would fail: it is not linked, nor on its way back. */
  isAway(machineId: string): boolean {
    return this.#queueFor(machineId).queue_for === undefined;
  }

  /** Whether all of these may have ended while the broker was down, and their machines have yet to report it. */
  mayHaveEnded(open: readonly ScheduleRun[]): boolean {
    const isReported = (machineId: string): boolean =>
      monotonic() - (this.#linkedAt.get(machineId) ?? Number.POSITIVE_INFINITY) >= reportMs;
    if (monotonic() - this.#started >= returnMs) return false;
    return open.every(({ id, machine_id }) => this.#left.has(id) && !isReported(machine_id));
  }

  /** Resolves once the run, or why there is none, is on disk. */
  async byClock(schedule: Schedule, at: number, trigger: 'cron' | 'catch_up'): Promise<void> {
    const run = newRun(schedule, trigger, at);
    if (!this.#rooms.mayRun(schedule)) return this.#refused(run, keyRevoked);
    const requester = { key_id: schedule.requested_by, request_id: newId('request') };
    const waiting = this.#queueFor(schedule.machine_id);
    await this.#launch(schedule, run, { ...requester, ...waiting }).catch((error: unknown) => {
      // That is on disk by now.
      if (!(error instanceof AppError)) throw error;
    });
  }

  /** Throws what POST /commands would answer, once that is on disk too. */
  byHand(
    schedule: Schedule,
    requester: Requester,
    also: (journal: Journal, id: RunId) => void,
  ): Promise<Begun> {
    const run = newRun(schedule, 'manual', null);
    return this.#launch(schedule, run, requester, (journal) => also(journal, run.id));
  }

  async #launch(
    schedule: Schedule,
    run: ScheduleRun,
    requester: Requester & { queue_for?: number },
    also: (journal: Journal) => void = () => {},
  ): Promise<Begun> {
    const { machine_id, command, user, cwd, env, timeout } = schedule;
    const params = {
      ...{ machine_id, command, schedule_id: schedule.id, ...requester },
      ...(user !== null && { user }),
      ...(cwd !== null && { cwd }),
      ...(env !== null && { env }),
      ...(timeout !== null && { timeout }),
    };
    try {
      return await this.#rooms.commands.start(params, (journal, command_id) => {
        this.#rooms.records.begin({ ...run, command_id });
        also(journal);
      });
    } catch (error) {
      if (error instanceof AppError) await this.#refused(run, error);
      throw error;
    }
  }

  #refused(run: ScheduleRun, { code, message }: AppError): Promise<void> {
    const { history, records } = this.#rooms;
    const settled = settledRun(run, 'failed', `${code}: ${message}`);
    return history.write((transaction) => records.settle([settled], transaction));
  }

  /** How long a command may wait for its machine, if at all. */
  #queueFor(machineId: string): { queue_for?: number } {
    if (this.#rooms.presence.online(machineId)) return { queue_for: busyMs };
    const left = this.#started + returnMs - monotonic();
    return left > 0 ? { queue_for: Math.ceil(left) } : {};
  }
}

const keyRevoked = new AppError(
  'forbidden',
  'the key that last changed this schedule may not run commands on this machine any more (key_revoked): change the schedule with another one',
);
