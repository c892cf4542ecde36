// A list of schedules, used on the page of schedules and on the page of a machine.
import { client } from '../api-client.ts';
import { may } from '../login-state.ts';
import { MachineLink } from '../machines/names.tsx';
import { IconButton } from '../parts/button.tsx';
import * as icons from '../parts/icons.ts';
import { Ago, State, Tags, useClick } from '../parts/small-components.tsx';
import { actions, type Column, List } from '../parts/table-and-paged-list.tsx';
import { attempt } from '../parts/toasts.tsx';
import { to } from '../router.ts';

type Schedule = Awaited<ReturnType<typeof client.schedules.list>>['items'][number];

/** The scopes that a key needs to create, change and run schedules. */
export const writeScopes = ['schedules:write', 'commands:execute'] as const;
export const mayWrite = (): boolean => writeScopes.every(may);

/** Milliseconds in which a second click, such as that of a double-click, does not run a schedule again. */
const doubleClickMs = 600;

/** Returns the click handler of a button that runs a schedule now. */
export function useRunNow({ id, name }: Pick<Schedule, 'id' | 'name'>, reload: () => void) {
  const start = () => client.schedules.run({ schedule_id: id });
  return useClick(() => attempt(start, `${name} is started`).then(reload), doubleClickMs);
}

interface ScheduleListProps {
  items: readonly Schedule[];
  reload: () => void;
  /** True if each row contains the name of the machine. */
  withMachine?: boolean;
}

export function ScheduleList({ items, reload, withMachine = false }: ScheduleListProps) {
  return <List label="Schedules" columns={columnsOf(withMachine, reload)} items={items} />;
}

/** Displays what starts a schedule: its cron expression, or the path whose changes start it. */
export function When({
  schedule: { cron, timezone, on_change },
}: {
  schedule: Pick<Schedule, 'cron' | 'timezone' | 'on_change'>;
}) {
  if (on_change === null)
    return (
      <>
        <code>{cron}</code> <span class="muted small">{timezone}</span>
      </>
    );
  return (
    <>
      <span class="muted small">change {on_change.recursive ? 'below' : 'of'}</span>{' '}
      <code>{on_change.path}</code>
    </>
  );
}

const columnsOf = (withMachine: boolean, reload: () => void): (Column<Schedule> | false)[] => [
  ['Name', ({ id, name }) => <a href={to('/schedules', id)}>{name}</a>, 'wide'],
  withMachine && [
    'Where',
    ({ machine_id, tags }) => (machine_id ? <MachineLink id={machine_id} /> : <Tags of={tags ?? []} />),
  ],
  ['When', (schedule) => <When schedule={schedule} />],
  [
    'Next run',
    ({ enabled, on_change, next_run }) =>
      !enabled ? 'off' : on_change ? 'at a change' : <Ago at={next_run} />,
    'muted',
  ],
  [
    'Last run',
    ({ last_run }) => (last_run ? <State of={last_run.status} /> : <span class="muted">never</span>),
  ],
  [actions, (schedule) => mayWrite() && <RunNow schedule={schedule} reload={reload} />],
];

function RunNow({ schedule, reload }: { schedule: Schedule; reload: () => void }) {
  const run = useRunNow(schedule, reload);
  return (
    <IconButton
      icon={icons.play}
      label={`Run ${schedule.name} now`}
      title="Run now"
      aria-disabled={run.busy}
      press={run.click}
    />
  );
}
