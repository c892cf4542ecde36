// What becomes of times that are due: one fires at most, those that passed unseen are caught up or missed.
import type { Schedule } from '../state/index.ts';
import type { When } from './when.ts';

export interface Situation {
  schedule: Pick<Schedule, 'catch_up' | 'catch_up_window'>;
  when: When;
  /** Every time up to this is settled. */
  mark: number;
  /** Now. */
  at: number;
  /** Times before this passed while nobody watched. */
  awake: number;
  /** What the clock was set over. */
  leaps: readonly Leap[];
}

/** Times after `from` and up to `to` were not lived through. */
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
  const { when, mark, at, awake } = situation;
  const first = when.next(mark);
  const last = when.last(mark, at);
  if (first === undefined || last === undefined) return undefined;
  const fresh = last > awake && at - last <= lateMs;
  const chosen = choose(situation, last, fresh);
  if (chosen === undefined) return { missed: last };
  if (first < chosen) return { missed: chosen - 1 };
  return { at: chosen, trigger: fresh && chosen === last ? 'cron' : 'catch_up' };
}

/** The one that runs next; all before it are missed. */
function choose(
  { schedule, when, mark, at, leaps }: Situation,
  last: number,
  fresh: boolean,
): number | undefined {
  const oldest = at - schedule.catch_up_window;
  if (schedule.catch_up === 'all') {
    const next = when.next(Math.max(mark, oldest - 1));
    if (next === undefined || next > at) return undefined;
    // Nothing was down: to run what a clock was set over one after another would be a burst.
    const leap = leaps.find(({ from, to }) => next > from && next <= to);
    return leap ? when.last(next - 1, Math.min(leap.to, at)) : next;
  }
  return fresh || (schedule.catch_up === 'last' && last >= oldest) ? last : undefined;
}
