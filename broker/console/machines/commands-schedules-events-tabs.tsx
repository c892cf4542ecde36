// The tabs of a machine with its commands, schedules and events.
import { client } from '../api-client.ts';
import { CommandList, statusChoice } from '../commands/command-list.tsx';
import type { Happened } from '../live-updates.ts';
import { NewButton } from '../parts/action-buttons.tsx';
import { EventList } from '../parts/event-list.tsx';
import * as icons from '../parts/icons.ts';
import { Empty } from '../parts/loading-failed-or-empty.tsx';
import { Select } from '../parts/small-components.tsx';
import { LongList } from '../parts/table-and-paged-list.tsx';
import { to } from '../router.ts';
import { mayWrite, ScheduleList } from '../schedules/schedule-list.tsx';

export function MachineCommands({ machine }: { machine: string }) {
  const choice = statusChoice();
  return (
    <>
      <div class="filters">
        <Select label="Status" {...choice} />
      </div>
      <CommandList status={choice.value} machine={machine} />
    </>
  );
}

export function MachineSchedules({ machine }: { machine: string }) {
  const isNews = ({ type, data }: Happened): boolean =>
    data.machine_id === machine && (type.startsWith('schedule.') || typeof data.schedule_id === 'string');
  const newButton = (
    <NewButton
      text="New schedule"
      allowed={mayWrite()}
      opens={`${to('/schedules', 'new')}?machine=${encodeURIComponent(machine)}`}
    />
  );
  return (
    <LongList
      read={(paging, signal) =>
        client.schedules.list({ machine_id: machine, sort: 'name', ...paging }, { signal })
      }
      inputs={[machine]}
      when={isNews}
      button={newButton}
      empty={
        <Empty icon={icons.schedules} title="Nothing is scheduled on this machine">
          <p>
            A schedule runs a command at set times or when a path changes, and stores the result of each run.
          </p>
          {newButton}
        </Empty>
      }
    >
      {(items, reload) => <ScheduleList items={items} reload={reload} />}
    </LongList>
  );
}

export function MachineActivity({ machine }: { machine: string }) {
  return (
    <LongList
      read={(paging, signal) =>
        client.events.list({ machine_id: machine, sort: '-created_at', ...paging }, { signal })
      }
      inputs={[machine]}
      when={({ data }) => data.machine_id === machine}
      empty={
        <Empty icon={icons.events} title="No events are stored for this machine">
          <p>Connections, commands, terminals and changes of files will appear here.</p>
        </Empty>
      }
    >
      {(items) => <EventList items={items} />}
    </LongList>
  );
}
