// The inventory of one machine: facts, and lists such as packages and ports, as the agent last collected them.
import type { ComponentChildren } from 'preact';
import { useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { bytesText } from '../format-times-and-sizes.ts';
import { Button } from '../parts/button.tsx';
import * as icons from '../parts/icons.ts';
import { Show } from '../parts/loading-failed-or-empty.tsx';
import { SearchField } from '../parts/search-field-in-url.tsx';
import { Ago, Card, Fact, More, Notice, useClick } from '../parts/small-components.tsx';
import { type Column, List } from '../parts/table-and-paged-list.tsx';
import { attempt } from '../parts/toasts.tsx';
import { useData } from '../parts/use-data.ts';
import { place } from '../router.ts';

type Inventory = Awaited<ReturnType<typeof client.inventory.get>>;

export function MachineInventory({ machine, status }: { machine: string; status: string }) {
  const inventory = useData(
    (signal) => client.inventory.get({ machine_id: machine }, { signal }),
    [machine],
    null,
  );
  const { busy, click } = useClick(() =>
    attempt(async () => {
      inventory.replace(await client.inventory.get({ machine_id: machine, refresh: true }));
    }),
  );
  return (
    <Show of={inventory}>
      {(data) => (
        <>
          <div class="filters spread">
            <span class="muted">
              Collected <Ago at={data.collected_at} />
            </span>
            {status === 'online' && (
              <Button
                icon={icons.refresh}
                text={busy ? 'Collecting…' : 'Collect now'}
                aria-disabled={busy}
                press={click}
              />
            )}
          </div>
          <Incomplete parts={data.incomplete} />
          <div class="overview">
            <div class="stack">
              <Part title="Failed units" columns={unitColumns} items={data.failed_units} />
              <Part
                title="Pending updates"
                columns={updateColumns}
                items={data.updates}
                none="None, according to the package lists that the machine last fetched."
              />
              <Part
                title="Listening ports"
                columns={portColumns}
                items={data.ports}
                none="No program listens."
              />
              <Part title="Containers" columns={containerColumns} items={data.containers} />
              <Packages packages={data.packages} />
            </div>
            <div class="side">
              <System inventory={data} />
              <Disks disks={data.disks} />
              <Interfaces interfaces={data.interfaces} />
            </div>
          </div>
        </>
      )}
    </Show>
  );
}

function Incomplete({ parts }: { parts: Inventory['incomplete'] }) {
  if (parts.length === 0) return null;
  return <Notice>Not complete: {parts.map(({ part, reason }) => `${part} (${reason})`).join('; ')}</Notice>;
}

const restartTexts = new Map<boolean | null, string>([
  [true, 'due'],
  [false, 'not due'],
  [null, 'unknown'],
]);

function System({ inventory }: { inventory: Inventory }) {
  const { os_name, kernel, arch, hostname, cpu_model, cpu_cores, memory_bytes, swap_bytes } = inventory;
  const { virtualization, booted_at, reboot_required } = inventory;
  return (
    <Card title="System">
      <dl class="facts">
        <Fact name="System">{os_name}</Fact>
        <Fact name="Kernel">{kernel}</Fact>
        <Fact name="Host name">{hostname}</Fact>
        <Fact name="Processor">
          {cpu_model || arch}, {cpu_cores} {cpu_cores === 1 ? 'core' : 'cores'}
        </Fact>
        <Fact name="Memory">
          {bytesText(memory_bytes)}
          {swap_bytes > 0 && <span class="muted"> and {bytesText(swap_bytes)} of swap</span>}
        </Fact>
        <Fact name="Runs in">{virtualization === 'none' ? 'no virtual machine' : virtualization}</Fact>
        <Fact name="Booted">
          <Ago at={booted_at} />
        </Fact>
        <Fact name="Restart">
          <span class={reboot_required ? 'warn-text' : undefined}>{restartTexts.get(reboot_required)}</span>
        </Fact>
      </dl>
    </Card>
  );
}

function Disks({ disks }: { disks: Inventory['disks'] }) {
  if (disks.length === 0) return null;
  return (
    <Card title="Disks">
      <dl class="facts">
        {disks.map(({ name, size_bytes, model, rotational }) => (
          <Fact key={name} name={name}>
            {[bytesText(size_bytes), model, rotational ? 'rotational' : ''].filter(Boolean).join(', ')}
          </Fact>
        ))}
      </dl>
    </Card>
  );
}

function Interfaces({ interfaces }: { interfaces: Inventory['interfaces'] }) {
  if (interfaces.length === 0) return null;
  return (
    <Card title="Network">
      <dl class="facts">
        {interfaces.map(({ name, mac, addresses, state }) => (
          <Fact key={name} name={name}>
            {addresses.map((address) => (
              <div key={address}>{address}</div>
            ))}
            <div class="muted small">{[mac, state].filter(Boolean).join(', ')}</div>
          </Fact>
        ))}
      </dl>
    </Card>
  );
}

interface PartProps<T> {
  title: string;
  items: readonly T[];
  columns: readonly Column<T>[];
  /** Text to display if the list is empty. Without this text, a part with an empty list is not displayed. */
  none?: string;
  /** The number beside the title; by default the number of items. */
  count?: number;
  /** Content beside the title, at the right edge. */
  beside?: ComponentChildren;
}

/** Number of rows of a list that are displayed at first. */
const mostRows = 12;

/** A titled list of the inventory. */
function Part<T extends object>({ title, items, columns, none, count = items.length, beside }: PartProps<T>) {
  const [all, setAll] = useState(false);
  if (count === 0 && none === undefined) return null;
  const isCut = !all && items.length > mostRows;
  return (
    <section class="part">
      <div class="filters spread">
        <h2>
          {title} <span class="count">{count.toLocaleString()}</span>
        </h2>
        {beside}
      </div>
      {count === 0 ? (
        <p class="muted">{none}</p>
      ) : (
        <List label={title} columns={columns} items={isCut ? items.slice(0, mostRows) : items} />
      )}
      {isCut && <More count={mostRows} of={items.length} more={() => setAll(true)} />}
    </section>
  );
}

const unitColumns: Column<Inventory['failed_units'][number]>[] = [
  [
    'Unit',
    ({ name, description }) => (
      <span>
        <span class="bad-text">{name}</span> <span class="muted">{description}</span>
      </span>
    ),
    'wide',
  ],
];

const updateColumns: Column<Inventory['updates'][number]>[] = [
  ['Package', ({ name }) => <span>{name}</span>, 'wide'],
  ['Installed', ({ installed }) => installed, 'muted'],
  ['Available', ({ available }) => available],
];

const portColumns: Column<Inventory['ports'][number]>[] = [
  ['Address', ({ address }) => <span class="muted">{address}</span>, 'wide'],
  ['Port', ({ port, protocol }) => `${port} ${protocol}`, 'number'],
  [
    'Process',
    ({ process }) => process || '–',
    undefined,
    ({ pid }) => (pid > 0 ? `process ${pid}` : 'The agent’s user has no right to see this process'),
  ],
];

const containerColumns: Column<Inventory['containers'][number]>[] = [
  ['Name', ({ name }) => <span>{name}</span>, 'wide'],
  ['Image', ({ image }) => image, 'muted'],
  ['State', ({ state }) => state],
];

const packageColumns: Column<Inventory['packages'][number]>[] = [
  ['Package', ({ name }) => <span>{name}</span>, 'wide'],
  ['Version', ({ version }) => version, 'muted'],
];

/** Maximum number of packages on the page. A search finds packages that are not on the page. */
const mostPackages = 200;

function Packages({ packages }: { packages: Inventory['packages'] }) {
  const text = (place.value.query.get('q') ?? '').toLowerCase();
  const found = packages.filter(({ name }) => name.toLowerCase().includes(text));
  const others = found.length - mostPackages;
  return (
    <>
      <Part
        title="Packages"
        columns={packageColumns}
        items={found.slice(0, mostPackages)}
        count={packages.length}
        none="No known package manager."
        beside={<SearchField label="Search packages" name="q" />}
      />
      {packages.length > 0 && found.length === 0 && <p class="muted">No package has {text} in its name</p>}
      {others > 0 && (
        <p class="muted">
          {others.toLocaleString()} more packages. Search for a part of a name to find them.
        </p>
      )}
    </>
  );
}
