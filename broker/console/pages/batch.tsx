// The page of one batch: a live card or row for each machine, with the last part of its output. A button opens the form
// that runs the command again on the machines where it failed.
import { useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { BatchCards, type Result } from '../commands/batch-machine-cards.tsx';
import { commandLine, outcome, runAgain } from '../commands/command-list.tsx';
import { lastLine } from '../commands/output-text.tsx';
import { durationText } from '../format-times-and-sizes.ts';
import { may } from '../login-state.ts';
import { nameOf } from '../machines/names.tsx';
import { selectOnly } from '../machines/selected-machines.ts';
import { CancelButton } from '../parts/action-buttons.tsx';
import { Button } from '../parts/button.tsx';
import * as icons from '../parts/icons.ts';
import { Show } from '../parts/loading-failed-or-empty.tsx';
import { Page } from '../parts/page.tsx';
import { Choice, More, State } from '../parts/small-components.tsx';
import { StatusCounts } from '../parts/status-counts-bar.tsx';
import { type Column, List } from '../parts/table-and-paged-list.tsx';
import { useData } from '../parts/use-data.ts';
import { choiceIn, go, type Params, to } from '../router.ts';

type BatchRecord = Awaited<ReturnType<typeof client.batches.get>>;

const bad = ['failed', 'timeout', 'lost', 'expired', 'cancelled'];
/** A batch with at most this many machines is drawn as cards by default, a larger one as a table. */
const mostAsCards = 60;
const views = [
  ['cards', 'Cards'],
  ['table', 'Table'],
] as const;
const filters = [
  ['all', 'All'],
  ['open', 'Open'],
  ['bad', 'Failed'],
  ['completed', 'Completed'],
] as const;
type Filter = (typeof filters)[number][0];

function matches({ status }: Result, filter: Filter): boolean {
  if (filter === 'all') return true;
  if (filter === 'bad') return bad.includes(status);
  return filter === 'completed' ? status === 'completed' : status === 'queued' || status === 'running';
}

export function Batch({ params: { batch = '' } }: { params: Params }) {
  const [filter, setFilter] = useState<Filter>('all');
  const loaded = useData(
    (signal) => client.batches.get({ batch_id: batch }, { signal }),
    [batch],
    undefined,
    `batches:${batch}`,
  );
  const { data, reload } = loaded;
  return (
    <Page
      title="Batch"
      above={[{ text: 'Batches', href: to('/batches') }]}
      beside={data && <State of={data.status} />}
      actions={data && <Actions batch={data} reload={reload} />}
    >
      <Show of={loaded}>
        {(record) => (
          <>
            <section class="card command-card">
              <pre class="command-line">{commandLine(record)}</pre>
              <StatusCounts counts={record.counts} done={record.counts.completed} total={record.total} />
            </section>
            <div class="filters">
              <Choice label="Machines" options={filters} value={filter} choose={setFilter} />
              <Choice label="View" {...viewOf(record)} />
            </div>
            {viewOf(record).value === 'cards' ? (
              <BatchCards
                batch={record.id}
                results={record.results.filter((result) => matches(result, filter))}
              />
            ) : (
              <Results results={record.results.filter((result) => matches(result, filter))} />
            )}
          </>
        )}
      </Show>
    </Page>
  );
}

const viewOf = ({ total }: BatchRecord) => choiceIn('view', views, total <= mostAsCards ? 'cards' : 'table');

/** Maximum number of rows that are drawn at first. A batch may have 10,000 machines. */
const mostRows = 200;

const columns: Column<Result>[] = [
  ['Machine', ({ id, machine_id }) => <a href={to('/commands', id)}>{nameOf(machine_id)}</a>],
  ['Status', ({ status }) => <State of={status} />],
  ['Result', outcome, 'muted'],
  ['Duration', ({ duration }) => duration !== null && durationText(duration), 'right number'],
  ['Last line of output', (result) => <span class="mono">{lastLine(result)}</span>, 'wide'],
];

function Results({ results }: { results: readonly Result[] }) {
  const [most, setMost] = useState(mostRows);
  if (results.length === 0) return <p class="muted">No machine is in this state.</p>;
  return (
    <>
      <List label="Machines" columns={columns} items={results.slice(0, most)} />
      <More count={most} of={results.length} more={() => setMost(most * 5)} />
    </>
  );
}

function Actions({ batch, reload }: { batch: BatchRecord; reload: () => void }) {
  if (!may('commands:execute')) return null;
  const failed = batch.results.filter(({ status }) => bad.includes(status));
  const again = (): void => {
    selectOnly(failed.map(({ machine_id }) => machine_id));
    go(runAgain(batch));
  };
  return (
    <>
      {failed.length > 0 && batch.status !== 'running' && (
        <Button icon={icons.refresh} text={`Run again on the ${failed.length} failed`} press={again} />
      )}
      {batch.status === 'running' && (
        <CancelButton
          what="batch"
          text="Waiting commands are not run; running commands are killed with all their processes."
          run={() => client.batches.cancel({ batch_id: batch.id }).then(reload)}
        />
      )}
    </>
  );
}
