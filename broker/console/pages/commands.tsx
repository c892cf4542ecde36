// The page of all commands, newest first, with a filter by status.
import { client } from '../api-client.ts';
import { CommandList } from '../commands/command-list.tsx';
import * as icons from '../parts/icons.ts';
import { RunButton } from '../parts/new-and-cancel-buttons.tsx';
import { Empty, Page } from '../parts/page.tsx';
import { LongList } from '../parts/paged-list.tsx';
import { Choice } from '../parts/small-components.tsx';
import { choiceIn } from '../router.ts';

const filters = [
  ['', 'All'],
  ['running', 'Running'],
  ['queued', 'Queued'],
  ['failed', 'Failed'],
] as const;

export function Commands() {
  const choice = choiceIn('status', filters);
  const status = choice.value;
  return (
    <Page title="Commands" actions={<RunButton />}>
      <div class="filters">
        <Choice label="Status" {...choice} />
      </div>
      <LongList
        read={(paging, signal) => client.commands.list({ ...(status && { status }), ...paging }, { signal })}
        inputs={[status]}
        topic="commands"
        empty={
          <Empty icon={icons.command} title={status ? `No command is ${status}` : 'No command has run yet'}>
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
