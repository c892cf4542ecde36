// The page of all batches, each with the number of machines that are done.
import { client } from '../api-client.ts';
import { commandLine } from '../commands/command-list.tsx';
import { RunButton } from '../parts/action-buttons.tsx';
import * as icons from '../parts/icons.ts';
import { Empty } from '../parts/loading-failed-or-empty.tsx';
import { Page } from '../parts/page.tsx';
import { Ago, State } from '../parts/small-components.tsx';
import { StatusCounts } from '../parts/status-counts-bar.tsx';
import { type Column, List, LongList } from '../parts/table-and-paged-list.tsx';
import { to } from '../router.ts';

type Batch = Awaited<ReturnType<typeof client.batches.list>>['items'][number];

const columns: Column<Batch>[] = [
  [
    'Command',
    (batch) => (
      <a class="mono" href={to('/batches', batch.id)}>
        {commandLine(batch)}
      </a>
    ),
    'wide',
  ],
  ['Status', ({ status }) => <State of={status} />],
  ['Machines', ({ counts, total }) => <StatusCounts counts={counts} done={counts.completed} total={total} />],
  ['Created', ({ created_at }) => <Ago at={created_at} />, 'muted'],
];

export function Batches() {
  return (
    <Page title="Batches" actions={<RunButton />}>
      <LongList
        read={(paging, signal) => client.batches.list(paging, { signal })}
        topic="commands"
        empty={
          <Empty icon={icons.batches} title="No command has run on many machines yet">
            <p>Select machines in their list, or name tags, and run one command on all of them.</p>
            <RunButton />
          </Empty>
        }
      >
        {(items) => <List label="Batches" columns={columns} items={items} />}
      </LongList>
    </Page>
  );
}
