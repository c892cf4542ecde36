// Maintenance windows, in which alerts are held back: a list, and the form of a new one.
import { useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { durationText, fullTime } from '../format-times-and-sizes.ts';
import { may } from '../login-state.ts';
import { fromLimited, LimitsFields, limitsText, toLimited } from '../machines/machine-restriction.tsx';
import { ConfirmButton, NewButton } from '../parts/action-buttons.tsx';
import { IconButton } from '../parts/button.tsx';
import { SelectField, TextField } from '../parts/form.tsx';
import { FormDialog, useDraft } from '../parts/form-draft-and-dialog.tsx';
import * as icons from '../parts/icons.ts';
import { Empty } from '../parts/loading-failed-or-empty.tsx';
import { WithScopes } from '../parts/missing-scope.tsx';
import { Ago, Choice, State } from '../parts/small-components.tsx';
import { actions, type Column, List, LongList, twoLines } from '../parts/table-and-paged-list.tsx';
import { place, setQuery } from '../router.ts';
import { CronField } from '../schedules/cron-field.tsx';
import { browserTimeZone, timeZoneOptions } from '../schedules/time-zones.ts';
import { clock, hourMs } from '../timers.ts';

export type Window = Awaited<ReturnType<typeof client.maintenanceWindows.get>>;

export function WindowList() {
  // A link on the page of a machine opens the form for this machine.
  const forMachine = place.value.query.get('machine') ?? '';
  const [creating, setCreating] = useState(false);
  const [round, setRound] = useState(0);
  const changed = (): void => setRound((before) => before + 1);
  const close = (): void => {
    setCreating(false);
    if (forMachine) setQuery({ machine: '' });
  };
  const newButton = (
    <NewButton text="New window" allowed={may('webhooks:write')} opens={() => setCreating(true)} />
  );
  return (
    <>
      <LongList
        read={(paging, signal) => client.maintenanceWindows.list({ ...paging }, { signal })}
        version={round}
        button={newButton}
        empty={
          <Empty icon={icons.maintenance} title="No maintenance is planned">
            <p>
              During a maintenance window, alerts about the chosen machines are held back. When the window
              ends, an alert opens if its condition still holds.
            </p>
            {newButton}
          </Empty>
        }
      >
        {(items) => <List label="Maintenance windows" columns={columnsOf(changed)} items={items} />}
      </LongList>
      {(creating || forMachine !== '') && (
        <WithScopes scopes={['webhooks:write']}>
          <NewWindow machine={forMachine} close={close} saved={changed} />
        </WithScopes>
      )}
    </>
  );
}

const columnsOf = (changed: () => void): Column<Window>[] => [
  twoLines('Window', ({ name }) => <span>{name}</span>, timesOf),
  ['Machines', limitsText, 'muted'],
  ['State', (window) => <WindowState window={window} />],
  [
    actions,
    (window) =>
      may('webhooks:write') && (
        <ConfirmButton
          button={(ask) => (
            <IconButton icon={icons.trash} label={`Delete ${window.name}`} title="Delete" press={ask} />
          )}
          title={`Delete ${window.name}?`}
          action="Delete the window"
          run={async () => {
            await client.maintenanceWindows.remove({ window_id: window.id });
            changed();
          }}
        >
          <p>
            If the window is in progress, it ends now. Held-back alerts open if their condition still holds.
          </p>
        </ConfirmButton>
      ),
  ],
];

function timesOf({ starts_at, ends_at, cron, timezone, duration }: Window) {
  if (cron === null) return `${fullTime(starts_at ?? '')} to ${fullTime(ends_at ?? '')}`;
  return (
    <>
      <code>{cron}</code> {timezone}, for {durationText(duration ?? 0)}
    </>
  );
}

function WindowState({ window: { ends_at, active_until, next_start } }: { window: Window }) {
  if (active_until !== null && Date.parse(active_until) > clock.value)
    return (
      <>
        <State of="running" text="now" />{' '}
        <span class="muted">
          ends <Ago at={active_until} />
        </span>
      </>
    );
  const isOver = ends_at !== null && Date.parse(ends_at) <= clock.value;
  return (
    <>
      <State of={isOver ? 'off' : 'queued'} text={isOver ? 'over' : 'planned'} />{' '}
      {next_start !== null && Date.parse(next_start) > clock.value && (
        <span class="muted">
          starts <Ago at={next_start} />
        </span>
      )}
    </>
  );
}

const lengths = [0.5, 1, 2, 4, 8, 24].map((hours) => hours * hourMs);

interface NewWindowProps {
  /** Id of the machine in the URL of the page; empty if the URL names no machine. */
  machine: string;
  close: () => void;
  saved: () => void;
}

type When = 'now' | 'later' | 'cron';
const whens = [
  ['now', 'Now'],
  ['later', 'Once, later'],
  ['cron', 'Again and again'],
] as const;

function NewWindow({ machine, close, saved }: NewWindowProps) {
  const [when, setWhen] = useState<When>('now');
  const { draft, bind } = useDraft({
    name: '',
    limits: fromLimited(machine ? { tags: null, machine_ids: [machine] } : undefined),
    start: '',
    duration: String(hourMs),
    cron: '0 3 * * sun',
    timezone: browserTimeZone,
  });
  const { name, limits, start, duration, cron, timezone } = draft;
  const save = async (): Promise<void> => {
    const { tags, machine_ids } = toLimited(limits);
    await client.maintenanceWindows.create({
      name,
      duration: Number(duration),
      ...(tags && { tags }),
      ...(machine_ids && { machine_ids }),
      ...(when === 'later' && { starts_at: new Date(start).toISOString() }),
      ...(when === 'cron' && { cron, timezone }),
    });
  };
  return (
    <FormDialog
      title="New maintenance window"
      submit="Create"
      close={close}
      run={save}
      done={saved}
      disabled={!name || (when === 'later' && !start)}
    >
      <TextField label="Name" {...bind('name')} placeholder="updates" required autoFocus />
      <LimitsFields {...bind('limits')} />
      <Choice label="When" options={whens} value={when} choose={setWhen} />
      {when === 'later' && <TextField label="Start, in your time zone" {...bind('start')} time required />}
      {when === 'cron' && (
        <>
          <CronField cron={cron} timezone={timezone} change={bind('cron').change} />
          <SelectField label="Time zone" {...bind('timezone')} options={timeZoneOptions(timezone)} />
        </>
      )}
      <SelectField
        label="For"
        {...bind('duration')}
        options={lengths.map((ms) => [String(ms), durationText(ms)] as const)}
      />
    </FormDialog>
  );
}
