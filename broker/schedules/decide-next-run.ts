// Decides which due time of a schedule runs next, and which due times were missed because the broker was down or its
// clock was changed.
import type { Schedule } from '../state/index.ts';
import type { Timetable } from './cron-due-times.ts';

/** The data for a decision. All times are in milliseconds since 1970. */
export interface Situation {
  schedule: Pick<Schedule, 'catch_up' | 'catch_up_window'>;
  timetable: Timetable;
  /** Every due time up to this one has run, or is recorded as skipped or missed. */
  settledUntil: number;
  now: number;
  /** Time when the broker started. It was down before that. */
  started: number;
  jump: ClockJump | undefined;
}

/** A forward jump of the clock, which skipped the times after `from` and up to `to`. */
export interface ClockJump {
  from: number;
  to: number;
}

/** The next step for a schedule: either record all due times up to `missed` as missed, or run the due time `at`. */
export type Step = { missed: number } | { at: number; trigger: 'cron' | 'catch_up' };

/** No schedule runs for this many milliseconds after a forward jump, because the clock may be set back. */
export const lastingMs = 60_000;
/**
 * Maximum delay of a regular run, in milliseconds. After a longer delay, the due time runs only if `catch_up` allows
 * it. The maximum includes `lastingMs`, because no schedule runs so soon after a forward jump of the clock.
 */
export const lateMs = lastingMs + 60_000;

/** Returns the next step; undefined if nothing is due. */
export function decide(situation: Situation): Step | undefined {
  const { timetable, settledUntil, now, started } = situation;
  const first = timetable.next(settledUntil);
  const last = timetable.last(settledUntil, now);
  if (first === undefined || last === undefined) return undefined;
  const fresh = last > started && now - last <= lateMs;
  const chosen = choose(situation, last, fresh);
  if (chosen === undefined) return { missed: last };
  if (first < chosen) return { missed: chosen - 1 };
  return { at: chosen, trigger: fresh && chosen === last ? 'cron' : 'catch_up' };
}

/** Returns the due time that runs next; undefined if none runs. All due times before the returned one are missed. */
function choose(
  { schedule, timetable, settledUntil, now, jump }: Situation,
  last: number,
  fresh: boolean,
): number | undefined {
  const oldest = now - schedule.catch_up_window;
  if (schedule.catch_up !== 'all')
    return fresh || (schedule.catch_up === 'last' && last >= oldest) ? last : undefined;
  const [next] = timetable.times(Math.max(settledUntil, oldest - 1), 1, now);
  if (next === undefined || !jump || next <= jump.from || next > jump.to) return next;
  // Of the due times that a jump of the clock has skipped, only the last one runs. Running all of them would be a
  // burst.
  return timetable.last(next - 1, Math.min(jump.to, now));
}
