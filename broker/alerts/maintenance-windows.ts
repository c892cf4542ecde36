// Maintenance windows, during which alerts of some machines are held back. This file contains the REST handlers of
// windows, and finds the window of a machine.
import { maintenanceWindows as routes } from '../../shared/api/maintenance-windows.ts';
import type { Api, Caller, Handlers, Input } from '../../shared/api/route-table.ts';
import type { WindowId } from '../../shared/api/shared-schemas.ts';
import { iso, now } from '../../shared/clock.ts';
import { AppError, fieldError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import { found, tooMany } from '../find-or-not-found.ts';
import { reaches } from '../keys/rights.ts';
import { pageOf } from '../list-pages-and-filters.ts';
import { checkedTimetable, Timetable } from '../schedules/cron-due-times.ts';
import { findTimeZone } from '../schedules/time-zone.ts';
import type { Declared, MaintenanceWindow, State } from '../state/index.ts';
import type { Subject } from './alert-records.ts';
import { mayManage } from './rule-handlers.ts';

const maxWindows = 1_000;

interface ActiveWindow {
  id: WindowId;
  /** End of the window, in milliseconds since 1970. */
  until: number;
}

export class Windows {
  readonly #state: State;
  /**
   * The timetables of all windows that have a cron expression. A window object never changes, so its timetable stays
   * valid.
   */
  readonly #timetables = new WeakMap<MaintenanceWindow, Timetable>();

  constructor(state: State) {
    this.#state = state;
  }

  /** Returns the maintenance window that now holds back alerts about this subject; undefined if there is none. */
  holding({ machineId }: Subject): ActiveWindow | undefined {
    if (machineId === null) return undefined;
    for (const window of this.#state.maintenance_windows.values()) {
      if (!reaches(window, machineId, this.#state)) continue;
      const until = this.#activeUntil(window, now());
      if (until !== undefined) return { id: window.id, until };
    }
    return undefined;
  }

  readonly handlers: Handlers['maintenanceWindows'] = {
    list: (input, caller) => {
      const visible = [...this.#state.maintenance_windows.values()].filter((one) =>
        mayManage(caller, one, this.#state),
      );
      return pageOf(
        routes.list,
        visible.map((one) => this.#serialize(one)),
        input,
      );
    },
    create: async (input, caller) => {
      const made = windowOf(input);
      await this.#state.change((transaction) => {
        assertMayManage(caller, made, transaction.before);
        if (transaction.before.maintenance_windows.size >= maxWindows)
          throw tooMany('maintenance windows', maxWindows);
        transaction.put('maintenance_windows', made);
        caller.commit(transaction, { window_id: made.id });
      });
      return this.#serialize(made);
    },
    get: ({ window_id }, caller) => this.#serialize(find(window_id, caller, this.#state)),
    remove: async ({ window_id }, caller) => {
      await this.#state.change((transaction) => {
        transaction.remove('maintenance_windows', find(window_id, caller, transaction.before).id);
        caller.commit(transaction);
      });
      return { deleted: true };
    },
  };

  #serialize(window: MaintenanceWindow) {
    const at = now();
    const [until, next] = [this.#activeUntil(window, at), this.#nextStart(window, at)];
    return {
      ...window,
      active_until: until === undefined ? null : iso(until),
      next_start: next === undefined ? null : iso(next),
    };
  }

  #nextStart(window: MaintenanceWindow, at: number): number | undefined {
    if (window.cron !== null) return this.#timetableOf(window, window.cron).next(at);
    const start = Date.parse(window.starts_at ?? '');
    return start > at ? start : undefined;
  }

  #timetableOf(window: MaintenanceWindow, cron: string): Timetable {
    const timetable = this.#timetables.get(window) ?? new Timetable(cron, window.timezone);
    this.#timetables.set(window, timetable);
    return timetable;
  }

  #activeUntil(window: MaintenanceWindow, at: number): number | undefined {
    const { cron, duration, starts_at, ends_at } = window;
    if (cron === null || duration === null) {
      const end = Date.parse(ends_at ?? '');
      return Date.parse(starts_at ?? '') <= at && at < end ? end : undefined;
    }
    const begun = this.#timetableOf(window, cron).last(at - duration, at);
    return begun === undefined ? undefined : begun + duration;
  }
}

/**
 * Makes a window that takes place once, or at the times of a cron expression. Throws validation_failed if the fields
 * of the request fit neither.
 */
function windowOf(input: Input<Api['maintenanceWindows']['create']>): MaintenanceWindow {
  const {
    starts_at,
    ends_at,
    machine_ids = null,
    tags = null,
    cron = null,
    duration = null,
    ...rest
  } = input;
  const id = newId('window') as WindowId;
  const made = { id, ...rest, machine_ids, tags, created_at: iso() };
  if (!findTimeZone(rest.timezone))
    throw fieldError('body', 'timezone', 'must be the name of a time zone, such as Europe/Berlin');
  if (cron !== null) {
    if (starts_at)
      throw fieldError('body', 'starts_at', 'cannot be set for a window with cron: leave it out');
    if (ends_at)
      throw fieldError('body', 'ends_at', 'cannot be set for a window with cron: set duration instead');
    if (duration === null) throw fieldError('body', 'duration', 'is missing: a window with cron needs it');
    checkedTimetable(cron, rest.timezone);
    return { ...made, cron, duration, starts_at: null, ends_at: null };
  }
  if ((ends_at === undefined) === (duration === null))
    throw fieldError('body', 'ends_at', 'set either ends_at or duration, but not both');
  const start = starts_at?.getTime() ?? now();
  const end = ends_at?.getTime() ?? start + (duration ?? 0);
  if (end <= start) throw fieldError('body', 'ends_at', 'must be later than starts_at');
  return { ...made, cron: null, duration: null, starts_at: iso(start), ends_at: iso(end) };
}

function assertMayManage(caller: Caller, window: MaintenanceWindow, declared: Declared): void {
  if (mayManage(caller, window, declared)) return;
  const text =
    'this key is not allowed to use every machine of this maintenance window: use another key, or create a window with machine_ids or tags';
  throw new AppError('forbidden', text, { window_id: window.id });
}

/** Finds a window that the caller may see and remove. Throws window_not_found or forbidden. */
function find(window_id: string, caller: Caller, declared: Declared): MaintenanceWindow {
  const window = found(declared.maintenance_windows, 'window', window_id);
  assertMayManage(caller, window, declared);
  return window;
}
