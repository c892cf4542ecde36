// The schedules: when each runs next, how it ended last, and a button to run it now.
import { client } from '../client.ts';
import { nameOf } from '../machines/names.ts';
import { NewButton } from '../parts/actions.tsx';
import { Ago, State } from '../parts/basics.tsx';
import { Icon } from '../parts/icon.tsx';
import * as icons from '../parts/icons.ts';
import { List, LongList } from '../parts/lists.tsx';
import { Empty, Page } from '../parts/page.tsx';
import { attempt } from '../parts/toasts.tsx';
import { to } from '../routes.ts';
import { Timeline } from '../schedules/timeline.tsx';
import { may } from '../session.ts';

type Schedule = Awaited<ReturnType<typeof client.schedules.list>>['items'][number];

const mayWrite = (): boolean => may('schedules:write') && may('commands:execute');

const newButton = () => (
  <NewButton text="New schedule" allowed={mayWrite()} opens={to('/schedules', 'new')} />
);

export function Schedules() {
  return (
    <Page title="Schedules" actions={newButton()}>
      <Timeline />
      <LongList
        read={(paging, signal) => client.schedules.list({ sort: 'name', ...paging }, { signal })}
        inputs={[]}
        when={({ type, data }) => type.startsWith('schedule.') || typeof data.schedule_id === 'string'}
        empty={
          <Empty icon={icons.schedules} title="Nothing is scheduled">
            <p>
              A schedule runs a command on a machine by a cron expression, and keeps the result of each run.
            </p>
            {newButton()}
          </Empty>
        }
      >
        {(items, reload) => (
          <List
            label="Schedules"
            head={
              <>
                <th class="wide">Name</th>
                <th>Machine</th>
                <th>When</th>
                <th>Next run</th>
                <th>Last run</th>
                <th>
                  <span class="only-read">Actions</span>
                </th>
              </>
            }
          >
            {items.map((schedule) => (
              <ScheduleRow key={schedule.id} schedule={schedule} reload={reload} />
            ))}
          </List>
        )}
      </LongList>
    </Page>
  );
}

function ScheduleRow({ schedule, reload }: { schedule: Schedule; reload: () => void }) {
  const { id, name, machine_id, cron, timezone, enabled, next_run, last_run } = schedule;
  return (
    <tr>
      <td class="wide">
        <a href={to('/schedules', id)}>{name}</a>
      </td>
      <td>
        <a href={to('/machines', machine_id)}>{nameOf(machine_id)}</a>
      </td>
      <td>
        <code>{cron}</code> <span class="muted small">{timezone}</span>
      </td>
      <td class="muted">{enabled ? <Ago at={next_run} /> : 'off'}</td>
      <td>{last_run ? <State of={last_run.status} /> : <span class="muted">never</span>}</td>
      <td>
        {mayWrite() && (
          <button
            type="button"
            class="quiet icon-only"
            aria-label={`Run ${name} now`}
            title="Run now"
            onClick={() =>
              void attempt(() => client.schedules.run({ schedule_id: id }), `${name} is started`).then(reload)
            }
          >
            <Icon of={icons.play} />
          </button>
        )}
      </td>
    </tr>
  );
}
