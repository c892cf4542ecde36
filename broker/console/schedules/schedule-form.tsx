// The form of a schedule: what runs, where, and at which times or after which changes. A cron expression is described
// in words while it is typed.
import { useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { isChosen, useSavedCommands, WhatToRunFields } from '../commands/what-to-run-fields.tsx';
import { me } from '../login-state.ts';
import { MachineField } from '../machines/machine-picker.tsx';
import { TargetFields } from '../machines/target-fields.tsx';
import { CheckField, Form, SelectField, TextField } from '../parts/form.tsx';
import { type Editing, useDraft } from '../parts/form-draft-and-dialog.tsx';
import { Choice } from '../parts/small-components.tsx';
import { say } from '../parts/toasts.tsx';
import { go, to } from '../router.ts';
import { CronField } from './cron-field.tsx';
import {
  type Detail,
  isComplete,
  type Rules,
  rulesInput,
  rulesOf,
  subjectInput,
  subjectOf,
  watchInput,
} from './schedule-draft.ts';
import { timeZoneOptions } from './time-zones.ts';

interface ScheduleFormProps {
  /** The schedule to change. If it is undefined, a schedule is created. */
  schedule?: Detail;
  reload?: () => void;
}

export function ScheduleForm({ schedule, reload }: ScheduleFormProps) {
  const [name, setName] = useState(schedule?.name ?? '');
  const [before] = useState(() => subjectOf(schedule));
  const { draft: subject, set } = useDraft(before);
  const when = useDraft(() => rulesOf(schedule));
  const rules = when.draft;
  const [isTakenOver, setTakenOver] = useState(false);
  const { machine, what } = subject;
  const all = useSavedCommands(what.by === 'saved');
  const isForeign = Boolean(schedule?.tags) && schedule?.requested_by !== me.value?.id;
  const save = async (): Promise<void> => {
    const [whereAndWhat, path] = [subjectInput(subject, all), watchInput(rules)];
    const others = { name, ...rulesInput(rules, schedule) };
    if (!schedule)
      return go(
        to('/schedules', (await client.schedules.create({ ...whereAndWhat, ...path, ...others })).id),
      );
    // A schedule with tags may have the rights of another key. Sending these fields would give it the rights of this
    // key, so fields that did not change are left out.
    const stays = isForeign && !isTakenOver;
    const isSame = stays && JSON.stringify(subject) === JSON.stringify(before);
    const isSamePath = stays && JSON.stringify(path) === JSON.stringify(watchInput(rulesOf(schedule)));
    const changed = { ...(!isSame && whereAndWhat), ...(!isSamePath && path) };
    await client.schedules.update({ schedule_id: schedule.id, ...changed, ...others });
    say('The schedule is saved');
    reload?.();
  };
  const isReady = name !== '' && isChosen(what) && isComplete(subject, rules);
  return (
    <div class="narrow">
      <Form submit={schedule ? 'Save' : 'Create'} run={save} disabled={!isReady}>
        <section class="card card-body">
          <TextField label="Name" value={name} change={setName} required autoFocus={!schedule} />
        </section>
        <TargetFields
          draft={subject}
          set={set}
          hint="Every machine that has all of these tags at the time of the run"
        >
          <MachineField before="Runs on" machine={machine} choose={(id) => set({ machine: id })} />
        </TargetFields>
        <WhatToRunFields what={what} set={(changes) => set({ what: { ...what, ...changes } })} all={all} />
        <WhenFields {...when} />
        {isForeign && (
          <CheckField
            label="Give the schedule the rights of my key (this also happens if you change its machines, what it runs or the path)"
            value={isTakenOver}
            change={setTakenOver}
          />
        )}
      </Form>
    </div>
  );
}

const triggers = [
  ['cron', 'At set times'],
  ['change', 'When a path changes'],
] as const;

function WhenFields(form: Editing<Rules>) {
  const { set, bind } = form;
  const { trigger } = form.draft;
  return (
    <section class="card">
      <div class="card-head spread">
        <h2>When</h2>
        <Choice
          label="When"
          options={triggers}
          value={trigger}
          choose={(chosen) => set({ trigger: chosen, catch_up: chosen === 'change' ? 'last' : 'none' })}
        />
      </div>
      <div class="card-body">
        {trigger === 'cron' ? <TimeFields {...form} /> : <ChangeFields {...form} />}
        <SelectField
          label="If the previous run has not ended"
          {...bind('overlap')}
          options={[
            ['skip', trigger === 'cron' ? 'skip the run' : 'run once after it has ended'],
            ['allow', 'run at the same time'],
          ]}
        />
        <CheckField label="A failed run emits an event for webhooks" {...bind('onFailure')} />
      </div>
    </section>
  );
}

function TimeFields({ draft: { cron, timezone }, bind }: Editing<Rules>) {
  return (
    <>
      <CronField cron={cron} timezone={timezone} change={bind('cron').change} />
      <div class="fields">
        <SelectField label="Time zone" {...bind('timezone')} options={timeZoneOptions(timezone)} />
        <SelectField
          label="Runs missed while the broker was down"
          {...bind('catch_up')}
          options={[
            ['none', 'leave them out'],
            ['last', 'run only the last'],
            ['all', 'run all'],
          ]}
        />
      </div>
    </>
  );
}

function ChangeFields({ draft: { catch_up }, set, bind }: Editing<Rules>) {
  return (
    <>
      <TextField
        label="Path on the machine"
        {...bind('path')}
        placeholder="/etc/nginx"
        hint="A file or a folder. It need not exist yet. The command gets the changed paths in FARHAND_CHANGED_PATHS"
        required
        mono
      />
      <CheckField
        label="Watch everything below the folder, not only its own entries"
        {...bind('recursive')}
      />
      <div class="fields">
        <TextField
          label="Run after this many seconds without a change"
          {...bind('settle')}
          hint="If the changes do not stop, the command runs after ten times this number of seconds"
          numeric
          required
        />
        <SelectField
          label="If the path changed while the machine was offline"
          value={catch_up === 'none' ? 'none' : 'last'}
          change={(value) => set({ catch_up: value })}
          options={[
            ['last', 'run once when it is back'],
            ['none', 'do not run'],
          ]}
        />
      </div>
    </>
  );
}
