// Moves the time from which schedules count: what was due before it is neither caught up nor missed.
import { iso } from '../../shared/clock.ts';
import type { Schedule, State } from '../state/index.ts';

/** These schedules, of those declared, count from `at` on. Resolves once that is on disk. */
export async function countFrom(
  state: State,
  at: number,
  which: (schedule: Schedule) => boolean,
): Promise<void> {
  if (![...state.schedules.values()].some(which)) return;
  await state.change((draft) => {
    for (const schedule of draft.all('schedules').filter(which)) {
      draft.put('schedules', { ...schedule, since: iso(at) });
    }
  });
}
