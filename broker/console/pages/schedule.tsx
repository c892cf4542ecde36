// The page of one schedule: its form, which describes the expression in words while it is typed, and the
// history of its runs.
import { useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { outcome } from '../commands/command-list.tsx';
import { may } from '../login-session.ts';
import { MachineField } from '../machines/machine-picker.tsx';
import { nameOf } from '../machines/names.ts';
import { CheckField, Form, SelectField, TextField } from '../parts/form.tsx';
import { Icon } from '../parts/icon.tsx';
import * as icons from '../parts/icons.ts';
import { Empty, Page, Show } from '../parts/page.tsx';
import { List, LongList } from '../parts/paged-list.tsx';
import { Ago, Confirm, State, Tabs } from '../parts/small-components.tsx';
import { attempt, say } from '../parts/toasts.tsx';
import { useData } from '../parts/use-data.ts';
import { go, type Params, place, to } from '../router.ts';
import { CronField } from '../schedules/cron-field.tsx';
import { browserTimeZone, timeZoneOptions } from '../schedules/time-zones.ts';
import { durationText } from '../time.ts';

type Detail = Awaited<ReturnType<typeof client.schedules.get>>;

export function Schedule({ params: { schedule = '', tab = 'history' } }: { params: Params }) {
  if (schedule === 'new') {
    return (
      <Page title="New schedule" above={[{ text: 'Schedules', href: to('/schedules') }]}>
        <ScheduleForm />
      </Page>
    );
  }
  return <Existing schedule={schedule} tab={tab} />;
}

function Existing({ schedule, tab }: { schedule: string; tab: string }) {
  const loaded = useData(
    (signal) => client.schedules.get({ schedule_id: schedule }, { signal }),
    [schedule],
    ({ data }) => data.schedule_id === schedule,
  );
  const { data, reload } = loaded;
  const tabs = [
    { name: 'history', text: 'History', href: to('/schedules', schedule) },
    { name: 'settings', text: 'Settings', href: to('/schedules', schedule, 'settings') },
  ];
  return (
    <Page
      title={data?.name ?? 'Schedule'}
      above={[{ text: 'Schedules', href: to('/schedules') }]}
      beside={data && <State of={data.enabled ? 'online' : 'off'} text={data.enabled ? 'on' : 'off'} />}
      actions={
        data &&
        may('schedules:write') &&
        may('commands:execute') && <Actions schedule={data} reload={reload} />
      }
    >
      <Tabs label="Schedule" tabs={tabs} current={tab} />
      <Show of={loaded}>
        {(detail) =>
          tab === 'settings' ? (
            <ScheduleForm key={detail.updated_at} schedule={detail} reload={reload} />
          ) : (
            <>
              <Coming schedule={detail} />
              <History schedule={schedule} />
            </>
          )
        }
      </Show>
    </Page>
  );
}

function Actions({ schedule, reload }: { schedule: Detail; reload: () => void }) {
  const [asking, setAsking] = useState(false);
  const { id, name, enabled } = schedule;
  return (
    <>
      <button
        type="button"
        onClick={() =>
          void attempt(() => client.schedules.update({ schedule_id: id, enabled: !enabled })).then(reload)
        }
      >
        {enabled ? 'Turn off' : 'Turn on'}
      </button>
      <button
        type="button"
        class="primary"
        onClick={() =>
          void attempt(() => client.schedules.run({ schedule_id: id }), `${name} is started`).then(reload)
        }
      >
        <Icon of={icons.play} />
        Run now
      </button>
      <button type="button" class="danger icon-only" aria-label="Delete" onClick={() => setAsking(true)}>
        <Icon of={icons.trash} />
      </button>
      {asking && (
        <Confirm
          title={`Delete ${name}?`}
          action="Delete the schedule"
          onClose={() => setAsking(false)}
          run={async () => {
            await client.schedules.remove({ schedule_id: id });
            say(`${name} is deleted`);
            go(to('/schedules'));
          }}
        >
          <p>A run in progress goes on, and the history of commands stays.</p>
        </Confirm>
      )}
    </>
  );
}

function Coming({
  schedule: { cron, timezone, next_runs, command, machine_id, tags, enabled },
}: {
  schedule: Detail;
}) {
  const zone = new Intl.DateTimeFormat(undefined, {
    dateStyle: 'medium',
    timeStyle: 'short',
    hour12: false,
    timeZone: timezone,
  });
  return (
    <section class="card command-card">
      <pre class="command-line">{command}</pre>
      <span>
        on{' '}
        {machine_id ? (
          <a href={to('/machines', machine_id)}>{nameOf(machine_id)}</a>
        ) : (
          `every machine with ${tags?.join(', ')}`
        )}
      </span>
      <p class="fact-row muted">
        <span>
          <code>{cron}</code> {timezone}
        </span>
        {enabled && next_runs.length > 0 && (
          <span>
            next:{' '}
            {next_runs
              .slice(0, 3)
              .map((at) => zone.format(new Date(at)))
              .join(' · ')}
          </span>
        )}
      </p>
    </section>
  );
}

function History({ schedule }: { schedule: string }) {
  return (
    <LongList
      read={(paging, signal) => client.schedules.history({ schedule_id: schedule, ...paging }, { signal })}
      inputs={[schedule]}
      when={({ data }) => data.schedule_id === schedule}
      empty={
        <Empty icon={icons.schedules} title="It has not run yet">
          <p>Each run appears here with its result and its output. “Run now” starts it at once.</p>
        </Empty>
      }
    >
      {(items) => (
        <List
          label="Runs"
          head={
            <>
              <th>Started</th>
              <th>Status</th>
              <th>Result</th>
              <th>Why</th>
              <th class="right">Duration</th>
              <th class="wide">End of the output</th>
            </>
          }
        >
          {items.map((run) => (
            <tr key={run.id}>
              <td>
                {run.command_id === null ? (
                  <Ago at={run.started_at} />
                ) : (
                  <a href={to('/commands', run.command_id)}>
                    <Ago at={run.started_at} />
                  </a>
                )}
              </td>
              <td>
                <State of={run.status} />
              </td>
              <td class="muted">{outcome({ exit_code: run.exit_code, signal: null })}</td>
              <td class="muted">{run.trigger.replace('_', ' ')}</td>
              <td class="right number">{run.duration === null ? '' : durationText(run.duration)}</td>
              <td class="wide">
                <span class="mono">
                  {(run.reason ?? (run.stderr || run.stdout)).trim().split('\n').at(-1)}
                </span>
              </td>
            </tr>
          ))}
        </List>
      )}
    </LongList>
  );
}

type Rules = Pick<Detail, 'timezone' | 'overlap' | 'catch_up'>;

function ScheduleForm({ schedule, reload }: { schedule?: Detail; reload?: () => void }) {
  const [name, setName] = useState(schedule?.name ?? '');
  const [machine, setMachine] = useState(schedule?.machine_id ?? place.value.query.get('machine') ?? '');
  const [command, setCommand] = useState(schedule?.command ?? '');
  const [cron, setCron] = useState(schedule?.cron ?? '30 2 * * *');
  const [rules, setRules] = useState<Rules>({
    timezone: schedule?.timezone ?? browserTimeZone,
    overlap: schedule?.overlap ?? 'skip',
    catch_up: schedule?.catch_up ?? 'none',
  });
  const [onFailure, setOnFailure] = useState(schedule?.notify?.on_failure ?? true);
  const save = async (): Promise<void> => {
    const notify = { on_success: schedule?.notify?.on_success ?? false, on_failure: onFailure };
    const input = { name, machine_id: machine, command, cron, ...rules, notify };
    if (schedule) {
      await client.schedules.update({ schedule_id: schedule.id, ...input });
      say('The schedule is saved');
      reload?.();
    } else {
      const { id } = await client.schedules.create(input);
      go(to('/schedules', id));
    }
  };
  return (
    <div class="narrow card card-body">
      <Form
        submit={schedule ? 'Save' : 'Create'}
        run={save}
        disabled={!name || !command || !cron || !machine}
      >
        <TextField label="Name" value={name} change={setName} required autoFocus={!schedule} />
        <MachineField before="Runs on" machine={machine} choose={setMachine} />
        <TextField
          label="Command"
          value={command}
          change={setCommand}
          rows={2}
          mono
          required
          hint="A line for /bin/sh"
        />
        <CronField cron={cron} timezone={rules.timezone} change={setCron} />
        <RuleFields rules={rules} change={(changes) => setRules({ ...rules, ...changes })} />
        <CheckField
          label="A failed run emits an event for webhooks"
          value={onFailure}
          change={setOnFailure}
        />
      </Form>
    </div>
  );
}

function RuleFields({ rules, change }: { rules: Rules; change: (changes: Partial<Rules>) => void }) {
  return (
    <div class="fields">
      <SelectField
        label="Time zone"
        value={rules.timezone}
        change={(timezone) => change({ timezone })}
        options={timeZoneOptions(rules.timezone)}
      />
      <SelectField
        label="If the previous run has not ended"
        value={rules.overlap}
        change={(value) => change({ overlap: value === 'allow' ? 'allow' : 'skip' })}
        options={[
          ['skip', 'skip the run'],
          ['allow', 'run beside it'],
        ]}
      />
      <SelectField
        label="Missed while the broker was down"
        value={rules.catch_up}
        change={(value) => change({ catch_up: value === 'last' || value === 'all' ? value : 'none' })}
        options={[
          ['none', 'leave them out'],
          ['last', 'run the last'],
          ['all', 'run all'],
        ]}
      />
    </div>
  );
}
