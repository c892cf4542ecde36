// Decides what becomes of times that are due: at most one runs, those that passed unseen are caught up or missed.
import type { Schedule } from '../state/index.ts';
import type { Timetable } from './timetable.ts';

export interface Situation {
  schedule: Pick<Schedule, 'catch_up' | 'catch_up_window'>;
  timetable: Timetable;
  /** Every time up to this is settled. */
  mark: number;
  now: number;
  /** When the broker started: earlier times passed unseen. */
  started: number;
  /** What the clock was last set forward over. */
  leap: Leap | undefined;
}

/** Times after `from` and up to `to` never came. */
export interface Leap {
  from: number;
  to: number;
}

/** Everything up to `missed` is missed; or the time `at`, the oldest, runs. */
export type Step = { missed: number } | { at: number; trigger: 'cron' | 'catch_up' };

/** A leap of the clock forward counts once it has lasted this long; until then nothing is decided. */
export const believedMs = 60_000;
/** A time seen later than this, and not only because a leap was waited for, passed unseen: the machine slept. */
export const lateMs = believedMs + 60_000;

/** What is to be done first; undefined when nothing is due. */
export function decide(situation: Situation): Step | undefined {
  const { timetable, mark, now, started } = situation;
  const first = timetable.next(mark);
  const last = timetable.last(mark, now);
  if (first === undefined || last === undefined) return undefined;
  const fresh = last > started && now - last <= lateMs;
  const chosen = choose(situation, last, fresh);
  if (chosen === undefined) return { missed: last };
  if (first < chosen) return { missed: chosen - 1 };
  return { at: chosen, trigger: fresh && chosen === last ? 'cron' : 'catch_up' };
}

/** The one that runs next; all before it are missed. */
function choose(
  { schedule, timetable, mark, now, leap }: Situation,
  last: number,
  fresh: boolean,
): number | undefined {
  const oldest = now - schedule.catch_up_window;
  if (schedule.catch_up !== 'all')
    return fresh || (schedule.catch_up === 'last' && last >= oldest) ? last : undefined;
  const [next] = timetable.times(Math.max(mark, oldest - 1), 1, now);
  if (next === undefined || !leap || next <= leap.from || next > leap.to) return next;
  // To run what a clock was set over one after another would be a burst.
  return timetable.last(next - 1, Math.min(leap.to, now));
}
