// The form of a schedule: what runs, where and when. A cron expression is described in words while it is typed.
import { useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import {
  isChosen,
  useSavedCommands,
  valuesOf,
  type WhatToRun,
  WhatToRunFields,
} from '../commands/what-to-run-fields.tsx';
import { me } from '../login-session.ts';
import { tagsOf } from '../machines/limits-fields.tsx';
import { MachineField } from '../machines/machine-picker.tsx';
import { TargetFields, type TargetsBy } from '../machines/target-fields.tsx';
import { CheckField, Form, SelectField, TextField } from '../parts/form.tsx';
import { say } from '../parts/toasts.tsx';
import { go, place, to } from '../router.ts';
import { CronField } from './cron-field.tsx';
import { browserTimeZone, timeZoneOptions } from './time-zones.ts';

type Detail = Awaited<ReturnType<typeof client.schedules.get>>;

/** Where a schedule runs, and what. With tags, the key that changes this gives the schedule its rights. */
interface Subject {
  by: TargetsBy;
  machine: string;
  tags: string;
  what: WhatToRun;
}

interface Rules extends Pick<Detail, 'cron' | 'timezone' | 'overlap' | 'catch_up'> {
  onFailure: boolean;
}

function subjectOf(schedule: Detail | undefined): Subject {
  const { query } = place.value;
  const saved = schedule?.saved_command_id ?? query.get('saved') ?? '';
  const values = Object.entries(schedule?.parameters ?? {}).map(([name, value]) => [name, String(value)]);
  return {
    by: schedule?.tags ? 'tags' : 'machines',
    machine: schedule?.machine_id ?? query.get('machine') ?? '',
    tags: schedule?.tags?.join(', ') ?? '',
    what: {
      by: saved ? 'saved' : 'line',
      line: schedule?.command ?? '',
      saved,
      values: Object.fromEntries(values),
    },
  };
}

const rulesOf = (schedule: Detail | undefined): Rules => ({
  cron: schedule?.cron ?? '30 2 * * *',
  timezone: schedule?.timezone ?? browserTimeZone,
  overlap: schedule?.overlap ?? 'skip',
  catch_up: schedule?.catch_up ?? 'none',
  onFailure: schedule?.notify?.on_failure ?? true,
});

interface ScheduleFormProps {
  /** The schedule to change. If it is undefined, a schedule is created. */
  schedule?: Detail;
  reload?: () => void;
}

export function ScheduleForm({ schedule, reload }: ScheduleFormProps) {
  const [name, setName] = useState(schedule?.name ?? '');
  const [before] = useState(() => subjectOf(schedule));
  const [subject, setSubject] = useState(before);
  const [rules, setRules] = useState(() => rulesOf(schedule));
  const [isTakenOver, setTakenOver] = useState(false);
  const { by, machine, tags, what } = subject;
  const set = (changes: Partial<Subject>): void => setSubject((now) => ({ ...now, ...changes }));
  const all = useSavedCommands(what.by === 'saved');
  const isForeign = Boolean(schedule?.tags) && schedule?.requested_by !== me.value?.id;
  const save = async (): Promise<void> => {
    const { onFailure, ...times } = rules;
    const notify = { on_success: schedule?.notify?.on_success ?? false, on_failure: onFailure };
    const others = { name, ...times, notify };
    const whereAndWhat = {
      ...(by === 'tags' ? { tags: tagsOf(tags) } : { machine_id: machine }),
      ...(what.by === 'saved'
        ? { saved_command_id: what.saved, parameters: valuesOf(what, all) }
        : { command: what.line }),
    };
    if (!schedule) {
      const { id } = await client.schedules.create({ ...whereAndWhat, ...others });
      return go(to('/schedules', id));
    }
    const isSame = isForeign && !isTakenOver && JSON.stringify(subject) === JSON.stringify(before);
    await client.schedules.update({ schedule_id: schedule.id, ...(!isSame && whereAndWhat), ...others });
    say('The schedule is saved');
    reload?.();
  };
  const isReady = name && isChosen(what) && (by === 'tags' ? tagsOf(tags).length > 0 : machine);
  return (
    <div class="narrow">
      <Form submit={schedule ? 'Save' : 'Create'} run={save} disabled={!isReady || !rules.cron}>
        <section class="card card-body">
          <TextField label="Name" value={name} change={setName} required autoFocus={!schedule} />
        </section>
        <TargetFields
          by={by}
          setBy={(chosen) => set({ by: chosen })}
          tags={tags}
          setTags={(text) => set({ tags: text })}
          hint="Every machine that has all of these tags at the time of the run"
        >
          <MachineField before="Runs on" machine={machine} choose={(id) => set({ machine: id })} />
        </TargetFields>
        <WhatToRunFields
          what={what}
          set={(changes) => setSubject((now) => ({ ...now, what: { ...now.what, ...changes } }))}
          all={all}
        />
        <WhenFields rules={rules} set={(changes) => setRules((now) => ({ ...now, ...changes }))} />
        {isForeign && (
          <CheckField
            label="Run it with the rights of my key. A change of where or what it runs does that, too"
            value={isTakenOver}
            change={setTakenOver}
          />
        )}
      </Form>
    </div>
  );
}

function WhenFields({ rules, set }: { rules: Rules; set: (changes: Partial<Rules>) => void }) {
  const { cron, timezone, overlap, catch_up, onFailure } = rules;
  return (
    <section class="card">
      <h2>When</h2>
      <div class="card-body">
        <CronField cron={cron} timezone={timezone} change={(text) => set({ cron: text })} />
        <div class="fields">
          <SelectField
            label="Time zone"
            value={timezone}
            change={(zone) => set({ timezone: zone })}
            options={timeZoneOptions(timezone)}
          />
          <SelectField
            label="If the previous run has not ended"
            value={overlap}
            change={(value) => set({ overlap: value === 'allow' ? 'allow' : 'skip' })}
            options={[
              ['skip', 'skip the run'],
              ['allow', 'run beside it'],
            ]}
          />
          <SelectField
            label="Missed while the broker was down"
            value={catch_up}
            change={(value) => set({ catch_up: value === 'last' || value === 'all' ? value : 'none' })}
            options={[
              ['none', 'leave them out'],
              ['last', 'run the last'],
              ['all', 'run all'],
            ]}
          />
        </div>
        <CheckField
          label="A failed run emits an event for webhooks"
          value={onFailure}
          change={(on) => set({ onFailure: on })}
        />
      </div>
    </section>
  );
}
