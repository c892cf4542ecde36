// Lists the runs of many schedules that are due in a period, in the order of their times.
import { nextTurn } from '../../shared/clock.ts';
import type { Schedule } from '../state/index.ts';

export interface DueRun {
  schedule: Schedule;
  at: number;
}

/** Number of schedules whose first due time is computed in one turn of the event loop. */
const sliceSize = 100;

/**
 * Returns the first `limit` runs that are due at `from` or later, and before `until`. `more` is true if further runs
 * are due in this period.
 */
export async function dueRuns(
  schedules: readonly Schedule[],
  nextAfter: (schedule: Schedule, after: number) => number | undefined,
  { from, until, limit }: { from: number; until: number; limit: number },
): Promise<{ runs: DueRun[]; more: boolean }> {
  const waiting: DueRun[] = [];
  for (const [n, schedule] of schedules.entries()) {
    const at = nextAfter(schedule, from - 1);
    if (at !== undefined && at < until) waiting.push({ schedule, at });
    if (n % sliceSize === sliceSize - 1) await nextTurn();
  }
  // The list is sorted in descending order, so that pop() returns the earliest run.
  waiting.sort((a, b) => b.at - a.at);
  const runs: DueRun[] = [];
  while (runs.length < limit) {
    const run = waiting.pop();
    if (!run) break;
    runs.push(run);
    const at = nextAfter(run.schedule, run.at);
    if (at === undefined || at >= until) continue;
    const later = waiting.findLastIndex((one) => one.at > at);
    waiting.splice(later + 1, 0, { schedule: run.schedule, at });
  }
  return { runs, more: waiting.length > 0 };
}
