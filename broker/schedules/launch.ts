// Starts runs: a command with its row and mark in one transaction, or a row that says why there is none.
import type { Journal } from '../../shared/api/index.ts';
import type { KeyId, MachineId, RunId } from '../../shared/api/route.ts';
import { monotonic, now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';
import type { Begun, Commands } from '../commands/index.ts';
import type { History } from '../history.ts';
import type { Presence } from '../presence/index.ts';
import type { Schedule } from '../state/index.ts';
import { newRun, type ScheduleRecords, type ScheduleRun, settledRun } from './records.ts';

export interface LaunchRooms {
  history: History;
  presence: Presence;
  commands: Commands;
  records: ScheduleRecords;
  mayRun(who: { requested_by: KeyId; machine_id: MachineId }): boolean;
}

export interface Launcher {
  /** Whether a command for this machine would fail: it is not linked, nor on its way back. */
  away(machineId: string): boolean;
  /** Resolves once its run, or why there is none, is on disk. */
  byClock(schedule: Schedule, at: number, trigger: 'cron' | 'catch_up'): Promise<void>;
  /** Throws what POST /commands would answer, once that is on disk too. */
  byHand(
    schedule: Schedule,
    who: { key_id: KeyId; request_id: string },
    also: (journal: Journal, id: RunId) => void,
  ): Promise<Begun>;
}

/** So long a scheduled command may wait for a place on a busy machine. */
const placeMs = 60_000;
/** So long after the broker's start, machines are still on their way back. */
export const returnMs = 60_000;

export function openLauncher({ history, presence, commands, records, mayRun }: LaunchRooms): Launcher {
  const opened = monotonic();

  async function launch(
    schedule: Schedule,
    run: ScheduleRun,
    order: { key_id: KeyId; request_id: string; queue_for?: number },
    also: (journal: Journal) => void = () => {},
  ): Promise<Begun> {
    const { machine_id, command, user, cwd, env, timeout } = schedule;
    const wish = {
      ...{ machine_id, command, schedule_id: schedule.id },
      ...(user !== null && { user }),
      ...(cwd !== null && { cwd }),
      ...(env !== null && { env }),
      ...(timeout !== null && { timeout }),
    };
    try {
      return await commands.start({ ...wish, ...order }, (journal, command_id) => {
        records.begin({ ...run, command_id });
        also(journal);
      });
    } catch (error) {
      if (error instanceof AppError) await refused(schedule, run, error);
      throw error;
    }
  }

  function refused(schedule: Schedule, run: ScheduleRun, { code, message }: AppError): Promise<void> {
    const { id, trigger, scheduled_for } = run;
    const reason = `${code}: ${message}`;
    const settled = settledRun(schedule, { status: 'failed', trigger, scheduled_for, reason });
    return history.write((transaction) => records.settle([{ ...settled, id }], transaction));
  }

  /** How long it may wait for its machine, if at all. */
  function patience(machineId: string): { queue_for?: number } {
    if (presence.online(machineId)) return { queue_for: placeMs };
    const left = opened + returnMs - monotonic();
    return left > 0 ? { queue_for: Math.ceil(left) } : {};
  }

  return {
    away: (machineId) => patience(machineId).queue_for === undefined,
    async byClock(schedule, at, trigger) {
      const run = newRun(schedule, trigger, at, now());
      if (!mayRun(schedule)) return refused(schedule, run, keyRevoked);
      const order = { key_id: schedule.requested_by, request_id: newId('request') };
      await launch(schedule, run, { ...order, ...patience(schedule.machine_id) }).catch((error: unknown) => {
        // That is on disk by now.
        if (!(error instanceof AppError)) throw error;
      });
    },
    byHand(schedule, who, also) {
      const run = newRun(schedule, 'manual', null, now());
      return launch(schedule, run, who, (journal) => also(journal, run.id));
    },
  };
}

const keyRevoked = new AppError(
  'forbidden',
  'the key that last changed this schedule may not run commands on this machine any more (key_revoked): change the schedule with another one',
);
