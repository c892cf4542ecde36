// Schedules over REST: declared in the state, fired by the clock, every run kept in history.
import type { Api, Caller, Handlers, Input, Reply, Rights } from '../../shared/api/index.ts';
import type { MachineId, ScheduleId } from '../../shared/api/route.ts';
import { schedules as routes } from '../../shared/api/schedules.ts';
import { iso, now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';
import type { Logger } from '../../shared/logger.ts';
import { pageOf } from '../paging.ts';
import type { Declared, Schedule, State } from '../state/index.ts';
import { wordsOf } from './cron.ts';
import { type Firing, openFiring } from './firing.ts';
import { type LaunchRooms, openLauncher } from './launch.ts';
import type { ScheduleRun } from './records.ts';
import { openWhen, type When } from './when.ts';

export interface Schedules {
  handlers: Handlers['schedules'];
  /** The machine of a schedule, also of one that has gone and left runs. */
  machineOf(id: string, declared: Pick<Declared, 'schedules'>): MachineId | undefined;
  /** The machine of a run. */
  machineOfRun(id: string): MachineId | undefined;
  /** Nothing is fired any more. */
  stop(): void;
}

export interface ScheduleRooms extends LaunchRooms {
  state: State;
}

type Wish = Input<Api['schedules']['create']>;
type Changes = Omit<Input<Api['schedules']['update']>, 'schedule_id'>;
type Listed = Reply<Api['schedules']['list']>['items'][number];
type Detailed = Reply<Api['schedules']['get']>;
type ShownRun = Reply<Api['schedules']['getRun']>;

const day = 86_400_000;
const detailedTimes = 5;
/** An agent that is there accepts within this. */
const acceptMs = 10_000;

/** Opens the room and takes up what passed meanwhile. */
export function openSchedules(rooms: ScheduleRooms, log: Logger): Schedules {
  const { state, records } = rooms;
  const launcher = openLauncher(rooms);
  const firing = openFiring({ ...rooms, launcher }, log);
  const show = shower(rooms, firing);
  // The first zone of all takes 15 ms to find: nobody has to wait for it.
  openWhen('@daily', 'Europe/Berlin');

  function find(id: string, { schedules }: Pick<Declared, 'schedules'> = state): Schedule {
    const schedule = schedules.get(id);
    if (schedule) return schedule;
    throw new AppError('schedule_not_found', 'no such schedule', { schedule_id: id });
  }

  return {
    machineOf: (id, declared) => declared.schedules.get(id)?.machine_id ?? records.machineOf(id),
    machineOfRun: (id) => records.find(id)?.machine_id,
    stop: () => firing.stop(),
    handlers: {
      ...declaring(state, find, show.detailed),
      list(input, caller) {
        const seen = [...state.schedules.values()].filter(({ machine_id }) => caller.reaches(machine_id));
        const page = pageOf(routes.list, seen, input, (schedule, field) =>
          field === 'next_run' ? firing.nextOf(schedule.id, 1)[0] : Reflect.get(schedule, field),
        );
        return { items: page.items.map((one) => show.listed(one, caller)), total: page.total };
      },
      preview({ cron, timezone, count, from }) {
        // Nobody plans for before the clocks of computers began.
        const after = Math.max(0, from?.getTime() ?? now());
        const times = timesOf(openWhen(cron, timezone), after, count);
        return { cron, timezone, description: wordsOf(cron), next_runs: times };
      },
      get: (input, caller) => show.detailed(find(input.schedule_id), caller),
      async run({ schedule_id }, caller) {
        demandExecute(caller);
        const begun = await launcher.byHand(find(schedule_id), caller, (journal, run_id) =>
          caller.commit(journal, { run_id }),
        );
        const { started_at, status } = await begun.within(acceptMs, caller.signal);
        return { command_id: begun.id, status: started_at === null ? status : 'running' };
      },
      async history(input, caller) {
        const { items, total } = records.page(input, caller.reachable());
        return { items: await show.runs(items), total };
      },
      async getRun({ run_id }) {
        const run = records.find(run_id);
        const [shown] = run ? await show.runs([run]) : [];
        if (shown) return shown;
        throw new AppError('run_not_found', 'no such run', { run_id });
      },
    },
  };
}

function declaring(
  state: State,
  find: (id: string, declared: Pick<Declared, 'schedules'>) => Schedule,
  shown: (schedule: Schedule, caller: Caller) => Detailed,
): Pick<Handlers['schedules'], 'create' | 'update' | 'remove'> {
  return {
    async create(input, caller) {
      const schedule = scheduleOf(input, caller);
      await state.change((draft) => {
        demandExecute(caller.during(draft));
        openWhen(schedule.cron, schedule.timezone);
        draft.put('schedules', schedule);
        caller.commit(draft, { schedule_id: schedule.id });
      });
      return shown(schedule, caller);
    },
    async update({ schedule_id, ...changes }, caller) {
      const changed = await state.change((draft) => {
        demandExecute(caller.during(draft));
        const before = find(schedule_id, draft.before);
        // Who changes nothing takes nothing over.
        if (Object.values(changes).every((value) => value === undefined)) return before;
        const after = changedBy(before, changes, caller);
        openWhen(after.cron, after.timezone);
        draft.put('schedules', after);
        caller.commit(draft);
        // Last: who does not reach it hears only that.
        refuseUnreadEnvironment(caller.during(draft), changes);
        return after;
      });
      const answer = shown(changed, caller);
      // Who may not look does not look by changing something else.
      const known = caller.may('schedules:read') || changes.env !== undefined;
      return known ? answer : { ...answer, env: null };
    },
    async remove({ schedule_id }, caller) {
      await state.change((draft) => {
        const { id } = find(schedule_id, draft.before);
        draft.remove('schedules', id);
        caller.commit(draft);
      });
      return { deleted: true };
    },
  };
}

/** Whoever decides what runs must be one who may run it. */
function demandExecute({ may }: Rights): void {
  if (may('commands:execute')) return;
  throw new AppError('forbidden', 'this needs a key with the scope commands:execute too', {
    required_scope: 'commands:execute',
  });
}

/** What a schedule runs, or where, decides who sees its environment: it could print it. */
const exposing = ['command', 'user', 'cwd', 'machine_id'] as const;

function refuseUnreadEnvironment({ may }: Rights, changes: Changes): void {
  const exposed = exposing.filter((field) => changes[field] !== undefined);
  if (exposed.length === 0 || changes.env !== undefined || may('schedules:read')) return;
  const message = `send it anew, or null: a key without schedules:read changes ${exposed.join(', ')} only together with it`;
  throw new AppError('validation_failed', `body: env: ${message}`, { issues: [{ path: 'env', message }] });
}

function scheduleOf(wish: Wish, { key_id }: Caller): Schedule {
  const at = iso();
  return {
    id: newId('schedule') as ScheduleId,
    name: wish.name,
    description: wish.description ?? null,
    machine_id: wish.machine_id,
    command: wish.command,
    cron: wish.cron,
    timezone: wish.timezone ?? 'UTC',
    enabled: wish.enabled ?? true,
    timeout: wish.timeout ?? null,
    notify: notifyOf(wish.notify, null),
    overlap: wish.overlap ?? 'skip',
    catch_up: wish.catch_up ?? 'none',
    catch_up_window: wish.catch_up_window ?? day,
    user: wish.user ?? null,
    cwd: wish.cwd ?? null,
    env: wish.env ?? null,
    requested_by: key_id,
    created_at: at,
    updated_at: at,
    since: at,
  };
}

/** Its times count anew when they change: what they were before is nothing to catch up with. */
function changedBy(before: Schedule, changes: Changes, { key_id }: Caller): Schedule {
  const at = iso();
  const given = Object.fromEntries(Object.entries(changes).filter(([, value]) => value !== undefined));
  const after: Schedule = {
    ...before,
    // The fields of the body that are there: each has the name and type of the document's own.
    ...(given as Partial<Schedule>),
    notify: changes.notify === undefined ? before.notify : notifyOf(changes.notify, before.notify),
    requested_by: key_id,
    updated_at: at,
  };
  const same = (['cron', 'timezone', 'enabled'] as const).every((field) => before[field] === after[field]);
  return same ? after : { ...after, since: at };
}

function notifyOf(wish: Wish['notify'], before: Schedule['notify']): Schedule['notify'] {
  if (!wish) return null;
  return {
    on_success: wish.on_success ?? before?.on_success ?? false,
    on_failure: wish.on_failure ?? before?.on_failure ?? false,
  };
}

function timesOf(when: When, from: number, count: number): string[] {
  const times: string[] = [];
  for (let at = when.next(from); at !== undefined && times.length < count; at = when.next(at)) {
    times.push(iso(at));
  }
  return times;
}

/** Schedules and runs as REST shows them. */
function shower({ records, commands }: ScheduleRooms, firing: Firing) {
  function lastRun(id: string, caller: Caller): Listed['last_run'] {
    const run = records.last(id, caller.reachable());
    if (!run) return null;
    const { started_at, exit_code, duration, status } = run;
    return { at: iso(started_at), exit_code: exit_code ?? -1, duration: duration ?? 0, status };
  }

  function listed(schedule: Schedule, caller: Caller) {
    const [next] = firing.nextOf(schedule.id, 1);
    return {
      ...schedule,
      next_run: next === undefined ? null : iso(next),
      last_run: lastRun(schedule.id, caller),
    };
  }

  return {
    listed,
    detailed(schedule: Schedule, caller: Caller): Detailed {
      const next = firing.nextOf(schedule.id, detailedTimes);
      return { ...listed(schedule, caller), next_runs: next.map((at) => iso(at)) };
    },
    async runs(runs: readonly ScheduleRun[]): Promise<ShownRun[]> {
      const ids = runs.map(({ command_id }) => command_id).filter((id) => id !== null);
      const made = await commands.listed(ids);
      return runs.map((run) => {
        const command = run.command_id === null ? undefined : made.get(run.command_id);
        const began = run.finished_at === null ? command?.started_at : undefined;
        // One that never started has nothing but its reason to say.
        const said = run.duration === 0 && !command?.started_at ? run.reason : undefined;
        return {
          ...run,
          scheduled_for: run.scheduled_for === null ? null : iso(run.scheduled_for),
          started_at: began ?? iso(run.started_at),
          finished_at: run.finished_at === null ? null : iso(run.finished_at),
          stdout: command?.stdout ?? '',
          stderr: said ?? command?.stderr ?? '',
        };
      });
    },
  };
}
