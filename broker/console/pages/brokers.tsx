// The page of the brokers that share a database: whether their leases are valid, how many machines each owns, and how
// many of these are linked. A broker stays the owner of a machine that loses its link, until another broker takes over.
import { useEffect } from 'preact/hooks';
import { client } from '../api-client.ts';
import * as icons from '../parts/icons.ts';
import { Empty, Show } from '../parts/loading-failed-or-empty.tsx';
import { Page } from '../parts/page.tsx';
import { Ago, State } from '../parts/small-components.tsx';
import { type Column, List } from '../parts/table-and-paged-list.tsx';
import { useData } from '../parts/use-data.ts';
import { every } from '../timers.ts';

const refreshMs = 5_000;
type Broker = Awaited<ReturnType<typeof client.brokers.list>>['items'][number];

const columns: Column<Broker>[] = [
  [
    'URL for other brokers',
    ({ url, self }) => (
      <span class="entry">
        {url}
        {self && <span class="tag">this broker</span>}
      </span>
    ),
    'wide',
  ],
  ['State', ({ status }) => <State of={status} />],
  ['Machines', ({ machines }) => machines.toLocaleString(), 'right number'],
  ['Linked', ({ linked }) => linked.toLocaleString(), 'right number'],
  ['Lease', (broker) => (broker.status === 'online' ? 'valid' : <Ended at={broker.lease_until} />), 'muted'],
];

export function Brokers() {
  const loaded = useData((signal) => client.brokers.list({ limit: 100 }, { signal }), []);
  useEffect(() => every(refreshMs, () => !document.hidden && loaded.reload()), [loaded.reload]);
  return (
    <Page title="Brokers">
      <Show of={loaded}>
        {({ items }) =>
          items.length === 0 ? (
            <Empty icon={icons.brokers} title="This broker works alone">
              <p>Brokers that share one PostgreSQL database are listed here.</p>
            </Empty>
          ) : (
            <List label="Brokers" columns={columns} items={items} />
          )
        }
      </Show>
    </Page>
  );
}

function Ended({ at }: { at: string }) {
  return (
    <>
      ended <Ago at={at} />
    </>
  );
}
