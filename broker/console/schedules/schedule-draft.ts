// Converts a schedule to the content of its form, and that content to a request.
import type { client } from '../api-client.ts';
import type { SavedCommand } from '../commands/saved-command-model.ts';
import { runnableOf, type WhatToRun } from '../commands/what-to-run-fields.tsx';
import { tagsOf } from '../machines/machine-restriction.tsx';
import type { Targets } from '../machines/target-fields.tsx';
import { place } from '../router.ts';
import { secondMs } from '../timers.ts';
import { browserTimeZone } from './time-zones.ts';

export type Detail = Awaited<ReturnType<typeof client.schedules.get>>;

/**
 * Where a schedule runs, and what it runs. If a request sends one of these fields for a schedule with tags, the
 * schedule gets the rights of the API key of this request. The same is true for the path to watch, and for the
 * environment, user and folder of the command.
 */
export interface Subject extends Targets {
  machine: string;
  what: WhatToRun;
}

/**
 * The form's fields that decide when a schedule runs: at the times of a cron expression, or after changes of a path.
 * Also the fields about overlapping runs, missed runs and failures.
 */
export type Rules = ReturnType<typeof rulesOf>;

export function subjectOf(schedule: Detail | undefined): Subject {
  const { query } = place.value;
  const saved = schedule?.saved_command_id ?? query.get('saved') ?? '';
  const values: Record<string, string> = {};
  for (const [name, value] of Object.entries(schedule?.parameters ?? {})) values[name] = String(value);
  return {
    by: schedule?.tags ? 'tags' : 'machines',
    machine: schedule?.machine_id ?? query.get('machine') ?? '',
    tags: schedule?.tags?.join(', ') ?? '',
    what: { by: saved ? 'saved' : 'line', line: schedule?.command ?? '', saved, values },
  };
}

export const rulesOf = (schedule: Detail | undefined) => ({
  trigger: schedule?.on_change ? ('change' as const) : ('cron' as const),
  cron: schedule?.cron ?? '30 2 * * *',
  path: schedule?.on_change?.path ?? '',
  recursive: schedule?.on_change?.recursive ?? false,
  /** A run starts after this many seconds without a change. */
  settle: String((schedule?.on_change?.settle ?? 2 * secondMs) / secondMs),
  timezone: schedule?.timezone ?? browserTimeZone,
  overlap: schedule?.overlap ?? 'skip',
  catch_up: schedule?.catch_up ?? 'none',
  onFailure: schedule?.notify?.on_failure ?? true,
});

export const isComplete = ({ by, machine, tags }: Subject, { trigger, cron, path, settle }: Rules): boolean =>
  (by === 'tags' ? tagsOf(tags).length > 0 : machine !== '') &&
  (trigger === 'cron' ? cron !== '' : path !== '' && Number(settle) > 0);

export function subjectInput(
  { by, machine, tags, what }: Subject,
  saved: readonly SavedCommand[] | undefined,
) {
  return {
    ...(by === 'tags' ? { tags: tagsOf(tags) } : { machine_id: machine }),
    ...runnableOf(what, saved),
  };
}

/** Returns the request field with the path to watch; no field for a schedule that runs at set times. */
export const watchInput = ({ trigger, path, recursive, settle }: Rules) =>
  trigger === 'change' ? { on_change: { path, recursive, settle: Number(settle) * secondMs } } : {};

/**
 * Converts the rules, except the path to watch, into fields of an API request. `schedule` is the schedule to change, if
 * any.
 */
export function rulesInput(rules: Rules, schedule: Detail | undefined) {
  const { trigger, cron, timezone, overlap, catch_up, onFailure } = rules;
  return {
    ...(trigger === 'cron' && { cron, timezone }),
    ...{ overlap, catch_up },
    notify: { on_success: schedule?.notify?.on_success ?? false, on_failure: onFailure },
  };
}
