// The page of one schedule: what it runs, when and where, the history of its runs, and its settings.
import { client } from '../api-client.ts';
import { quoted } from '../commands/argv-text.ts';
import { outcome } from '../commands/command-list.tsx';
import { lastLine } from '../commands/output-text.tsx';
import { durationText } from '../format-times-and-sizes.ts';
import { may } from '../login-state.ts';
import { MachineLink } from '../machines/names.tsx';
import { DeleteButton } from '../parts/action-buttons.tsx';
import { Button } from '../parts/button.tsx';
import * as icons from '../parts/icons.ts';
import { Empty, Show } from '../parts/loading-failed-or-empty.tsx';
import { WithScopes } from '../parts/missing-scope.tsx';
import { Page } from '../parts/page.tsx';
import { Ago, OnOff, State, Tabs, Tags } from '../parts/small-components.tsx';
import { type Column, List, LongList } from '../parts/table-and-paged-list.tsx';
import { attempt, say } from '../parts/toasts.tsx';
import { useData } from '../parts/use-data.ts';
import { go, type Params, to } from '../router.ts';
import { type Detail, rulesOf, subjectOf } from '../schedules/schedule-draft.ts';
import { ScheduleForm } from '../schedules/schedule-form.tsx';
import { mayWrite, useRunNow, When, writeScopes } from '../schedules/schedule-list.tsx';

type Run = Awaited<ReturnType<typeof client.schedules.history>>['items'][number];

export function Schedule({ params: { schedule = '', tab = 'history' } }: { params: Params }) {
  if (schedule === 'new') {
    return (
      <Page title="New schedule" above={[{ text: 'Schedules', href: to('/schedules') }]}>
        <WithScopes scopes={writeScopes}>
          <ScheduleForm />
        </WithScopes>
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
  const mayChange = mayWrite();
  const tabs = [
    { name: 'history', text: 'History', href: to('/schedules', schedule) },
    ...(mayChange
      ? [{ name: 'settings', text: 'Settings', href: to('/schedules', schedule, 'settings') }]
      : []),
  ];
  return (
    <Page
      title={data?.name ?? 'Schedule'}
      above={[{ text: 'Schedules', href: to('/schedules') }]}
      beside={data && <OnOff enabled={data.enabled} />}
      actions={data && mayChange && <Actions schedule={data} reload={reload} />}
    >
      <Tabs label="Schedule" tabs={tabs} current={tab} />
      <Show of={loaded}>
        {(detail) =>
          tab === 'settings' ? (
            <WithScopes scopes={writeScopes}>
              <ScheduleForm key={formKey(detail)} schedule={detail} reload={reload} />
            </WithScopes>
          ) : (
            <>
              <Coming schedule={detail} />
              <History schedule={schedule} withMachine={detail.machine_id === null} />
            </>
          )
        }
      </Show>
    </Page>
  );
}

/**
 * Returns the `key` of the form. When the key changes, Preact draws a new form, without the text that the user has
 * typed. Turning the schedule on or off does not change the key.
 */
const formKey = (detail: Detail): string => JSON.stringify([detail.name, subjectOf(detail), rulesOf(detail)]);

function Actions({ schedule, reload }: { schedule: Detail; reload: () => void }) {
  const { id, name, enabled } = schedule;
  const run = useRunNow(schedule, reload);
  return (
    <>
      <Button
        text={enabled ? 'Turn off' : 'Turn on'}
        press={() =>
          void attempt(() => client.schedules.update({ schedule_id: id, enabled: !enabled })).then(reload)
        }
      />
      <Button icon={icons.play} text="Run now" class="primary" aria-disabled={run.busy} press={run.click} />
      <DeleteButton
        title={`Delete ${name}?`}
        action="Delete the schedule"
        run={async () => {
          await client.schedules.remove({ schedule_id: id });
          say(`${name} is deleted`);
          go(to('/schedules'));
        }}
      >
        <p>A run in progress goes on, and the history of commands stays.</p>
      </DeleteButton>
    </>
  );
}

function Coming({ schedule }: { schedule: Detail }) {
  const { timezone, next_runs, command, saved_command_id, machine_id, tags, enabled } = schedule;
  const zone = new Intl.DateTimeFormat(undefined, {
    dateStyle: 'medium',
    timeStyle: 'short',
    hour12: false,
    timeZone: timezone,
  });
  return (
    <section class="card command-card">
      <pre class="command-line">
        {saved_command_id === null ? (
          command
        ) : (
          <SavedLine id={saved_command_id} values={schedule.parameters} />
        )}
      </pre>
      <span>
        on{' '}
        {machine_id ? (
          <MachineLink id={machine_id} />
        ) : (
          <>
            every machine with <Tags of={tags ?? []} />
          </>
        )}
      </span>
      <p class="fact-row muted">
        <span>
          <When schedule={schedule} />
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

/** A saved command by its name, with the values of its parameters. */
function SavedLine({ id, values }: { id: string; values: Detail['parameters'] }) {
  const { data } = useData(
    async (signal) =>
      may('commands:read') ? await client.savedCommands.get({ saved_command_id: id }, { signal }) : undefined,
    [id],
  );
  const words = Object.entries(values ?? {}).map(([name, value]) => ` ${name}=${quoted(String(value))}`);
  return (
    <>
      {data ? <a href={to('/saved-commands', id)}>{data.name}</a> : 'saved command'}
      {words.join('')}
    </>
  );
}

function History({ schedule, withMachine }: { schedule: string; withMachine: boolean }) {
  return (
    <LongList
      read={(paging, signal) => client.schedules.history({ schedule_id: schedule, ...paging }, { signal })}
      inputs={[schedule]}
      when={({ data }) => data.schedule_id === schedule}
      empty={
        <Empty icon={icons.schedules} title="This schedule has not run yet">
          <p>Each run appears here with its result and its output. “Run now” starts a run at once.</p>
        </Empty>
      }
    >
      {(items) => <List label="Runs" columns={columnsOf(withMachine)} items={items} />}
    </LongList>
  );
}

const columnsOf = (withMachine: boolean): (Column<Run> | false)[] => [
  [
    'Started',
    ({ command_id, started_at }) => {
      const started = <Ago at={started_at} />;
      return command_id === null ? started : <a href={to('/commands', command_id)}>{started}</a>;
    },
  ],
  withMachine && ['Machine', ({ machine_id }) => <MachineLink id={machine_id} />],
  ['Status', ({ status }) => <State of={status} />],
  ['Result', ({ exit_code }) => outcome({ exit_code, signal: null }), 'muted'],
  [
    'Why',
    ({ trigger, batch_id }) => (
      <>
        {trigger.replace('_', ' ')}
        {batch_id !== null && (
          <>
            , <a href={to('/batches', batch_id)}>batch</a>
          </>
        )}
      </>
    ),
    'muted',
  ],
  ['Duration', ({ duration }) => duration !== null && durationText(duration), 'right number'],
  ['Last line of output', (run) => <span class="mono">{lastLine(run)}</span>, 'wide'],
];
