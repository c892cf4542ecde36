// The inventories of the fleet: which system each machine has, and which machines have a package.
import { useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { Button } from '../parts/button.tsx';
import * as icons from '../parts/icons.ts';
import { Empty } from '../parts/loading-failed-or-empty.tsx';
import { Page } from '../parts/page.tsx';
import { SearchField } from '../parts/search-field-in-url.tsx';
import { Ago, useClick } from '../parts/small-components.tsx';
import { type Column, List, LongList } from '../parts/table-and-paged-list.tsx';
import { attempt } from '../parts/toasts.tsx';
import { place, to } from '../router.ts';

type Item = Awaited<ReturnType<typeof client.inventory.list>>['items'][number];

export function Inventory() {
  const wanted = place.value.query.get('package') ?? '';
  const below = place.value.query.get('below') ?? '';
  const filter = wanted ? { package: wanted, ...(below && { version_below: below }) } : {};
  const [round, setRound] = useState(0);
  const [unsearched, setUnsearched] = useState(0);
  const { busy, click } = useClick(async () => {
    await attempt(() => client.inventory.list({ ...filter, refresh: true, limit: 1 }));
    setRound(round + 1);
  });
  const collectButton = (
    <Button
      icon={icons.refresh}
      text={busy ? 'Collecting…' : 'Collect now'}
      title="Connected machines collect their inventory now; this takes at most 2 minutes"
      aria-disabled={busy}
      press={click}
    />
  );
  return (
    <Page title="Inventory" actions={collectButton}>
      <div class="filters">
        <SearchField label="Package, by its full name" name="package" />
        {wanted !== '' && <SearchField label="Only versions older than" name="below" />}
      </div>
      {wanted !== '' && unsearched > 0 && <NotSearched count={unsearched} />}
      <LongList
        read={async (paging, signal) => {
          const given = { ...filter, ...paging };
          const { items, without_inventory, ...page } = await client.inventory.list(given, { signal });
          setUnsearched(without_inventory);
          return { ...page, items: items.map((item) => ({ ...item, id: item.machine_id })) };
        }}
        inputs={[wanted, below]}
        version={round}
        empty={wanted ? <NotFound name={wanted} isLimited={below !== ''} /> : <NoMachines />}
      >
        {(items) => <List label="Inventories" columns={columnsOf(wanted)} items={items} />}
      </LongList>
    </Page>
  );
}

const columnsOf = (wanted: string): (Column<Item> | false)[] => [
  [
    'Machine',
    ({ machine_id, machine_name: name }) => <a href={to('/machines', machine_id, 'inventory')}>{name}</a>,
  ],
  [
    wanted ? 'Version' : 'System',
    ({ facts, packages }) => <span>{wanted ? packages.map(versionText).join(', ') : facts?.os_name}</span>,
    'wide two-lines',
  ],
  wanted === '' && ['Kernel', ({ facts }) => facts?.kernel, 'muted'],
  ['Updates', ({ updates }) => updates, 'right number'],
  ['Restart', ({ facts }) => facts?.reboot_required && <span class="warn-text">due</span>],
  ['Collected', ({ collected_at: at }) => (at ? <Ago at={at} /> : 'not yet'), 'muted'],
];

const versionText = ({ version, arch }: Item['packages'][number]): string =>
  arch ? `${version} (${arch})` : version;

function NotSearched({ count }: { count: number }) {
  const machines = count === 1 ? 'One machine has' : `${count} machines have`;
  return <p class="muted">{machines} no inventory. Only machines with an inventory are searched.</p>;
}

function NotFound({ name, isLimited }: { name: string; isLimited: boolean }) {
  return (
    <Empty icon={icons.inventory} title={`No machine has ${isLimited ? 'an older ' : ''}${name}`}>
      <p>
        Only machines whose inventory was collected are searched. Package names are those of the distribution,
        such as libssl3.
      </p>
    </Empty>
  );
}

function NoMachines() {
  return (
    <Empty icon={icons.inventory} title="No machine has joined yet">
      <p>The systems of your machines and their packages will be listed here.</p>
    </Empty>
  );
}
