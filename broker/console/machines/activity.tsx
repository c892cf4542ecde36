// The tabs of a machine that list what happened on it: commands and events.
import { client } from '../client.ts';
import { CommandList } from '../commands/command-list.tsx';
import { EventList } from '../parts/event-list.tsx';
import { Icon } from '../parts/icon.tsx';
import * as icons from '../parts/icons.ts';
import { LongList } from '../parts/lists.tsx';
import { Empty } from '../parts/page.tsx';
import { to } from '../routes.ts';
import { may } from '../session.ts';

export function MachineCommands({ machine }: { machine: string }) {
  return (
    <LongList
      read={(paging, signal) => client.commands.ofMachine({ machine_id: machine, ...paging }, { signal })}
      inputs={[machine]}
      when={({ type, data }) => type.startsWith('command.') && data.machine_id === machine}
      empty={
        <Empty icon={icons.command} title="No command has run here">
          <p>
            Commands that you, a script or a schedule run on this machine are listed here with their output.
          </p>
          {may('commands:execute') && (
            <a class="button primary" href={`${to('/run')}?machine=${encodeURIComponent(machine)}`}>
              <Icon of={icons.play} />
              Run a command
            </a>
          )}
        </Empty>
      }
    >
      {(items) => <CommandList items={items} />}
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
        <Empty icon={icons.events} title="Nothing happened in the last 72 hours">
          <p>Connections, commands, terminals and changes of files will appear here.</p>
        </Empty>
      }
    >
      {(items) => <EventList items={items} />}
    </LongList>
  );
}
