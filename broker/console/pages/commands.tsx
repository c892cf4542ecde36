// The page of all commands, newest first, with filters by status and machine.
import { client } from '../api-client.ts';
import { CommandList, statusChoice } from '../commands/command-list.tsx';
import { may } from '../login-state.ts';
import { MachineFilter } from '../machines/machine-picker.tsx';
import { RunButton } from '../parts/action-buttons.tsx';
import * as icons from '../parts/icons.ts';
import { Empty } from '../parts/loading-failed-or-empty.tsx';
import { Page } from '../parts/page.tsx';
import { Select } from '../parts/small-components.tsx';
import { LongList } from '../parts/table-and-paged-list.tsx';
import { place } from '../router.ts';

export function Commands() {
  const choice = statusChoice();
  const status = choice.value;
  const machine_id = place.value.query.get('machine') ?? '';
  const isFiltered = status !== '' || machine_id !== '';
  return (
    <Page title="Commands" actions={<RunButton />}>
      <div class="filters">
        <Select label="Status" {...choice} />
        {may('machines:read') && <MachineFilter />}
      </div>
      <LongList
        read={(paging, signal) => {
          const filter = { ...(status && { status }), ...(machine_id && { machine_id }) };
          return client.commands.list({ ...filter, ...paging }, { signal });
        }}
        inputs={[status, machine_id]}
        topic="commands"
        empty={
          <Empty
            icon={icons.command}
            title={isFiltered ? 'No command matches the filters' : 'No command has run yet'}
          >
            <p>A command runs on one machine or on many, and its output is stored here.</p>
            <RunButton />
          </Empty>
        }
      >
        {(items) => <CommandList items={items} withMachine />}
      </LongList>
    </Page>
  );
}
