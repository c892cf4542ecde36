// Creates schedules from requests, applies changes to them, and checks whether the request's key may decide what a
// schedule does.
import { isDeepStrictEqual } from 'node:util';
import type { Api, Caller, Input, Rights } from '../../shared/api/route-table.ts';
import type { ScheduleId } from '../../shared/api/shared-schemas.ts';
import { iso } from '../../shared/clock.ts';
import { definedFields } from '../../shared/defined-fields.ts';
import { AppError, fieldError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import type { Schedule } from '../state/index.ts';

type Params = Input<Api['schedules']['create']>;
export type Changes = Omit<Input<Api['schedules']['update']>, 'schedule_id'>;

const overlap = 'skip' as const;
const defaults = {
  ...{ description: null, timezone: 'UTC', enabled: true, timeout: null, overlap },
  ...{ catch_up_window: 86_400_000, user: null, cwd: null, env: null },
};

const defaultCatchUp = (watchesPath: boolean): 'last' | 'none' => (watchesPath ? 'last' : 'none');

/** Throws forbidden for a key that may not run commands, because such a key must not decide what a schedule runs. */
export function assertMayExecute({ may }: Rights): void {
  if (may('commands:execute')) return;
  const required_scope = 'commands:execute';
  const message = `creating, changing or running a schedule needs a key that also has the scope ${required_scope}`;
  throw new AppError('forbidden', message, { required_scope });
}

/** Throws forbidden for a key that may not read files, because a schedule with on_change reports their changes. */
export function assertMayRead({ may }: Pick<Rights, 'may'>): void {
  if (may('files:read')) return;
  const required_scope = 'files:read';
  const message = `a schedule with on_change needs a key that also has the scope ${required_scope}`;
  throw new AppError('forbidden', message, { required_scope });
}

/**
 * Fields with which a request could make a schedule print its stored environment, for example `command`. If the key of
 * the request may not read this environment, a request with such a field must also send a new `env`.
 */
const exposing = ['command', 'saved_command_id', 'parameters', 'user', 'cwd', 'machine_id', 'tags'] as const;

/** True if a request changes where or what a schedule runs. */
export const decidesRun = (changes: Changes): boolean =>
  ([...exposing, 'on_change', 'env'] as const).some((field) => changes[field] !== undefined);

/**
 * True if a request changes nothing. A request with a field that decidesRun() names always counts as a change, even if
 * the value is the same, because the schedule then gets the rights of the request's key.
 */
export const changesNothing = (before: Schedule, after: Schedule, changes: Changes): boolean =>
  !decidesRun(changes) &&
  // The cast is safe: the fields of a request are fields of a schedule.
  (Object.keys(changes) as (keyof Changes)[]).every((field) =>
    isDeepStrictEqual(before[field], after[field]),
  );

export function assertMayExpose({ may }: Rights, changes: Changes): void {
  const exposed = exposing.filter((field) => changes[field] !== undefined);
  if (exposed.length === 0 || changes.env !== undefined || may('schedules:read')) return;
  const message = `must be sent too, because the change of ${exposed.join(', ')} could make the schedule print its stored environment. This key may not read it without the scope schedules:read. Send a new environment, or null for none`;
  throw fieldError('body', 'env', message);
}

export function scheduleOf(params: Params, { key_id }: Caller): Schedule {
  const at = iso();
  const { name, machine_id = null, tags = null, cron = null, on_change = null } = params;
  const { command = null, saved_command_id = null, parameters = null } = params;
  return {
    ...{ name, ...defaults, catch_up: defaultCatchUp(on_change !== null), ...definedFields(params) },
    ...{ machine_id, tags, cron, on_change },
    ...{ command, saved_command_id, parameters: saved_command_id && (parameters ?? {}) },
    id: newId('schedule') as ScheduleId,
    notify: notifyOf(params.notify, null),
    ...{ requested_by: key_id, created_at: at, updated_at: at, since: at },
  };
}

/**
 * Returns the schedule with the changes of a request. Some changes, such as a new cron expression, set `since` to now.
 * Due times and file changes before `since` start no runs.
 */
export function changedBy(before: Schedule, changes: Changes, { key_id }: Caller): Schedule {
  const at = iso();
  const isOther = before.on_change ? changes.cron !== undefined : changes.on_change !== undefined;
  const isOtherSaved = (changes.saved_command_id ?? before.saved_command_id) !== before.saved_command_id;
  const hasDefault = before.catch_up === defaultCatchUp(before.on_change !== null);
  const after: Schedule = {
    ...before,
    // A request may replace the cron expression by a path, or the reverse. The default of `catch_up` differs for the
    // two. A schedule that has the old default gets the new one.
    ...(isOther && hasDefault && { catch_up: defaultCatchUp(before.on_change === null) }),
    ...definedFields(changes),
    ...(changes.machine_id !== undefined && { tags: null }),
    ...(changes.tags !== undefined && { machine_id: null }),
    ...(changes.cron !== undefined && { on_change: null }),
    ...(changes.on_change !== undefined && { cron: null }),
    ...(changes.command !== undefined && { saved_command_id: null, parameters: null }),
    ...(changes.saved_command_id !== undefined && { command: null }),
    // A request that names the same saved command again keeps the values of its parameters.
    ...(isOtherSaved && { parameters: changes.parameters ?? {} }),
    notify: changes.notify === undefined ? before.notify : notifyOf(changes.notify, before.notify),
    // A schedule with tags runs on the machines that its key may use. A request that sets no field of decidesRun(), for
    // example one that only changes the cron expression, does not replace the key. So the machines stay the same.
    ...(before.tags === null || decidesRun(changes) ? { requested_by: key_id, key_limits: undefined } : {}),
    updated_at: at,
  };
  const same = (['cron', 'timezone', 'enabled'] as const).every((field) => before[field] === after[field]);
  const sameKind = (before.tags === null) === (after.tags === null);
  const samePath =
    isDeepStrictEqual(before.on_change, after.on_change) &&
    (after.on_change === null || before.machine_id === after.machine_id);
  return same && sameKind && samePath ? after : { ...after, since: at };
}

/** True if a request may change the due times of a schedule. */
export const changesTimes = ({ cron, timezone, enabled, on_change }: Changes): boolean =>
  [cron, timezone, enabled, on_change].some((field) => field !== undefined);

function notifyOf(given: Params['notify'], before: Schedule['notify']): Schedule['notify'] {
  if (!given) return null;
  return {
    on_success: given.on_success ?? before?.on_success ?? false,
    on_failure: given.on_failure ?? before?.on_failure ?? false,
  };
}
