// The page of all schedules: the next run and the last result of each, and a button to run it now.
import { client } from '../api-client.ts';
import { NewButton } from '../parts/action-buttons.tsx';
import * as icons from '../parts/icons.ts';
import { Empty } from '../parts/loading-failed-or-empty.tsx';
import { Page } from '../parts/page.tsx';
import { LongList } from '../parts/table-and-paged-list.tsx';
import { to } from '../router.ts';
import { mayWrite, ScheduleList } from '../schedules/schedule-list.tsx';
import { Timeline } from '../schedules/upcoming-runs-timeline.tsx';

const newButton = () => (
  <NewButton text="New schedule" allowed={mayWrite()} opens={to('/schedules', 'new')} />
);

export function Schedules() {
  return (
    <Page title="Schedules" actions={newButton()}>
      <Timeline />
      <LongList
        read={(paging, signal) => client.schedules.list({ sort: 'name', ...paging }, { signal })}
        when={({ type, data }) => type.startsWith('schedule.') || typeof data.schedule_id === 'string'}
        empty={
          <Empty icon={icons.schedules} title="Nothing is scheduled">
            <p>
              A schedule runs a command at set times or when a path changes. It runs on one machine or on all
              machines with certain tags, and stores the result of each run.
            </p>
            {newButton()}
          </Empty>
        }
      >
        {(items, reload) => <ScheduleList items={items} reload={reload} withMachine />}
      </LongList>
    </Page>
  );
}
