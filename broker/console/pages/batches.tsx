// The page of all batches, each with the number of machines that are done.
import { client } from '../api-client.ts';
import { commandLine } from '../commands/command-list.tsx';
import * as icons from '../parts/icons.ts';
import { Empty, Page } from '../parts/page.tsx';
import { List, LongList } from '../parts/paged-list.tsx';
import { Ago, State } from '../parts/small-components.tsx';
import { StatusCounts } from '../parts/status-counts-bar.tsx';
import { to } from '../router.ts';
import { RunButton } from './commands.tsx';

export function Batches() {
  return (
    <Page title="Batches" actions={<RunButton />}>
      <LongList
        read={(paging, signal) => client.batches.list(paging, { signal })}
        inputs={[]}
        topic="commands"
        empty={
          <Empty icon={icons.batches} title="No command has run on many machines yet">
            <p>Select machines in their list, or name tags, and run one command on all of them.</p>
            <RunButton />
          </Empty>
        }
      >
        {(items) => (
          <List label="Batches" columns={[['Command', 'wide'], 'Status', 'Machines', 'Created']}>
            {items.map((batch) => (
              <tr key={batch.id}>
                <td class="wide">
                  <a class="mono" href={to('/batches', batch.id)}>
                    {commandLine(batch)}
                  </a>
                </td>
                <td>
                  <State of={batch.status} />
                </td>
                <td>
                  <StatusCounts counts={batch.counts} done={batch.counts.completed} total={batch.total} />
                </td>
                <td class="muted">
                  <Ago at={batch.created_at} />
                </td>
              </tr>
            ))}
          </List>
        )}
      </LongList>
    </Page>
  );
}
