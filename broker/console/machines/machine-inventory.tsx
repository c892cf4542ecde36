// The inventory of one machine: facts, and lists such as packages and ports, as the agent last collected them.
import type { ComponentChildren } from 'preact';
import { useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { Icon } from '../parts/icon.tsx';
import * as icons from '../parts/icons.ts';
import { Show } from '../parts/page.tsx';
import { List } from '../parts/paged-list.tsx';
import { SearchField } from '../parts/search-field.tsx';
import { Ago, Card, Fact, More } from '../parts/small-components.tsx';
import { attempt } from '../parts/toasts.tsx';
import { useData } from '../parts/use-data.ts';
import { type Params, place } from '../router.ts';
import { bytesText } from '../time.ts';

type Inventory = Awaited<ReturnType<typeof client.inventory.get>>;

export function MachineInventory({ params: { machine = '', status } }: { params: Params }) {
  const [busy, setBusy] = useState(false);
  const inventory = useData(
    (signal) => client.inventory.get({ machine_id: machine }, { signal }),
    [machine],
    null,
  );
  const collect = async (): Promise<void> => {
    setBusy(true);
    await attempt(async () => {
      inventory.replace(await client.inventory.get({ machine_id: machine, refresh: true }));
    });
    setBusy(false);
  };
  return (
    <Show of={inventory}>
      {(data) => (
        <>
          <div class="filters spread">
            <span class="muted">
              Collected <Ago at={data.collected_at} />
            </span>
            {status === 'online' && (
              <button type="button" disabled={busy} onClick={() => void collect()}>
                <Icon of={icons.refresh} />
                {busy ? 'Collecting…' : 'Collect now'}
              </button>
            )}
          </div>
          <Incomplete parts={data.incomplete} />
          <div class="overview">
            <div class="stack">
              <FailedUnits units={data.failed_units} />
              <Updates updates={data.updates} />
              <Ports ports={data.ports} />
              <Containers containers={data.containers} />
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
  return (
    <p class="notice warn">
      <Icon of={icons.warning} />
      <span>Not complete: {parts.map(({ part, reason }) => `${part} (${reason})`).join('; ')}</span>
    </p>
  );
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
            {[bytesText(size_bytes), model, rotational ? 'rotates' : ''].filter(Boolean).join(', ')}
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

interface PartProps {
  title: string;
  count: number;
  /** Names of the columns; the first one is the widest. */
  columns: readonly string[];
  /** Text in place of an empty list. */
  none?: string;
  /** Content beside the title, at the right edge. */
  beside?: ComponentChildren;
  children: ComponentChildren[];
}

/** Number of rows of a list that are displayed at first. */
const mostRows = 12;

/** A titled list of the inventory. */
function Part({ title, count, columns: [first, ...others], none, beside, children }: PartProps) {
  const [all, setAll] = useState(false);
  const isCut = !all && children.length > mostRows;
  return (
    <section class="part">
      <div class="filters spread">
        <h2>
          {title} <span class="count">{count.toLocaleString()}</span>
        </h2>
        {beside}
      </div>
      {count === 0 && none !== undefined ? (
        <p class="muted">{none}</p>
      ) : (
        <List label={title} columns={[[first, 'wide'], ...others]}>
          {isCut ? children.slice(0, mostRows) : children}
        </List>
      )}
      {isCut && <More count={mostRows} of={children.length} more={() => setAll(true)} />}
    </section>
  );
}

function FailedUnits({ units }: { units: Inventory['failed_units'] }) {
  if (units.length === 0) return null;
  return (
    <Part title="Failed units" count={units.length} columns={['Unit']}>
      {units.map(({ name, description }) => (
        <tr key={name}>
          <td class="wide">
            <span>
              <span class="bad-text">{name}</span> <span class="muted">{description}</span>
            </span>
          </td>
        </tr>
      ))}
    </Part>
  );
}

function Updates({ updates }: { updates: Inventory['updates'] }) {
  return (
    <Part
      title="Pending updates"
      count={updates.length}
      columns={['Package', 'Installed', 'Available']}
      none="None, according to the package lists that the machine last fetched."
    >
      {updates.map(({ name, installed, available }) => (
        <tr key={name}>
          <td class="wide">
            <span>{name}</span>
          </td>
          <td class="muted">{installed}</td>
          <td>{available}</td>
        </tr>
      ))}
    </Part>
  );
}

function Ports({ ports }: { ports: Inventory['ports'] }) {
  return (
    <Part
      title="Listening ports"
      count={ports.length}
      columns={['Address', 'Port', 'Process']}
      none="No program listens."
    >
      {ports.map(({ protocol, address, port, process, pid }) => (
        <tr key={`${protocol} ${address} ${port} ${pid}`}>
          <td class="wide">
            <span class="muted">{address}</span>
          </td>
          <td class="number">
            {port} {protocol}
          </td>
          <td title={pid > 0 ? `process ${pid}` : 'The agent’s user has no right to see this process'}>
            {process || '–'}
          </td>
        </tr>
      ))}
    </Part>
  );
}

function Containers({ containers }: { containers: Inventory['containers'] }) {
  if (containers.length === 0) return null;
  return (
    <Part title="Containers" count={containers.length} columns={['Name', 'Image', 'State']}>
      {containers.map(({ id, name, image, state }) => (
        <tr key={id}>
          <td class="wide">
            <span>{name}</span>
          </td>
          <td class="muted">{image}</td>
          <td>{state}</td>
        </tr>
      ))}
    </Part>
  );
}

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
        count={packages.length}
        columns={['Package', 'Version']}
        none="No known package manager."
        beside={<SearchField label="Search packages" name="q" />}
      >
        {found.slice(0, mostPackages).map(({ name, version, arch }) => (
          <tr key={`${name} ${version} ${arch}`}>
            <td class="wide">
              <span>{name}</span>
            </td>
            <td class="muted">{version}</td>
          </tr>
        ))}
      </Part>
      {packages.length > 0 && found.length === 0 && <p class="muted">No package has {text} in its name</p>}
      {others > 0 && (
        <p class="muted">
          {others.toLocaleString()} more packages. Search for a part of a name to find them.
        </p>
      )}
    </>
  );
}
