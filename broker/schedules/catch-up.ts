// Decides which time of a schedule runs next, and which times are missed, after downtime or a clock that was set.
import type { Schedule } from '../state/index.ts';
import type { Timetable } from './timetable.ts';

export interface Situation {
  schedule: Pick<Schedule, 'catch_up' | 'catch_up_window'>;
  timetable: Timetable;
  /** Every time up to this is settled. */
  settledUntil: number;
  now: number;
  /** When the broker started: earlier times passed unseen. */
  started: number;
  jump: ClockJump | undefined;
}

/** The clock was set forward: times after `from` and up to `to` never came. */
export interface ClockJump {
  from: number;
  to: number;
}

/** Every time up to `missed` is missed; or `at`, the first one, runs. */
export type Step = { missed: number } | { at: number; trigger: 'cron' | 'catch_up' };

/** A jump forward counts once it has lasted this long; until then nothing is decided. */
export const believedMs = 60_000;
/** A time seen later than this counts as passed unseen, as when the machine slept. A jump forward delays the look, too. */
export const lateMs = believedMs + 60_000;

/** The next step; undefined when nothing is due. */
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

/** The time that runs next; all before it are missed. */
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
  // Of the times in a jump only the last runs: all of them would be a burst.
  return timetable.last(next - 1, Math.min(jump.to, now));
}
