// The page of one machine: its heading and its tabs.
import { useEffect, useState } from 'preact/hooks';
import type { Scope } from '../../../shared/api/route.ts';
import { MachineNotices } from '../alerts/machine-notices.tsx';
import { client } from '../api-client.ts';
import { listen, useTopic } from '../live-updates.ts';
import { may } from '../login-state.ts';
import {
  MachineActivity,
  MachineCommands,
  MachineSchedules,
} from '../machines/commands-schedules-events-tabs.tsx';
import { MachineInventory } from '../machines/machine-inventory.tsx';
import type { MachineDetail } from '../machines/machine-overview.tsx';
import { tagsOf } from '../machines/machine-restriction.tsx';
import { DeleteButton } from '../parts/action-buttons.tsx';
import { Button, ButtonLink } from '../parts/button.tsx';
import { TextField } from '../parts/form.tsx';
import { FormDialog } from '../parts/form-draft-and-dialog.tsx';
import * as icons from '../parts/icons.ts';
import { later } from '../parts/lazy-component.tsx';
import { Show } from '../parts/loading-failed-or-empty.tsx';
import { WithScopes } from '../parts/missing-scope.tsx';
import { Page } from '../parts/page.tsx';
import { Ago, State, type Tab, Tabs, Tags } from '../parts/small-components.tsx';
import { say } from '../parts/toasts.tsx';
import { useData } from '../parts/use-data.ts';
import { go, type Params, to } from '../router.ts';

const Overview = later(async () => (await import('../machines/machine-overview.tsx')).Overview);
const Terminals = later(async () => (await import('../terminal/terminals.tsx')).Terminals);
const Files = later(async () => (await import('../files/file-browser.tsx')).Files);

/** The scopes that some tabs need besides `machines:read`, which the whole page needs. */
const scopesOf: Readonly<Record<string, readonly Scope[]>> = {
  terminals: ['sessions:read'],
  files: ['files:read'],
  commands: ['commands:read'],
  schedules: ['schedules:read'],
};

function tabsOf(id: string): Tab[] {
  const tab = (name: string, text: string, icon: Tab['icon']): Tab => ({
    name,
    text,
    href: name === 'overview' ? to('/machines', id) : to('/machines', id, name),
    icon,
  });
  return [
    tab('overview', 'Overview', icons.activity),
    tab('terminals', 'Terminals', icons.terminal),
    tab('files', 'Files', icons.folder),
    tab('commands', 'Commands', icons.command),
    tab('schedules', 'Schedules', icons.schedules),
    tab('inventory', 'Inventory', icons.inventory),
    tab('activity', 'Activity', icons.events),
  ].filter(({ name }) => (scopesOf[name] ?? []).every(may));
}

/** Returns a text that changes with what the heading of the page displays. */
const headingOf = ({ name, status, tags }: Pick<MachineDetail, 'name' | 'status' | 'tags'>): string =>
  JSON.stringify([name, status, tags]);

export function Machine({ params }: { params: Params }) {
  const { machine = '', tab = 'overview' } = params;
  const loaded = useData(
    (signal) => client.machines.get({ machine_id: machine }, { signal }),
    [machine],
    ({ data, type }) => data.machine_id === machine && type.startsWith('machine.'),
  );
  const { data, reload } = loaded;
  // Events are not enough: the broker records none for an edited name or tag, or for a short loss of the connection.
  useTopic('machines');
  const heading = data && headingOf(data);
  useEffect(
    () =>
      listen(({ machines }) => {
        const reported = machines?.find(({ id }) => id === machine);
        if (reported && headingOf(reported) !== heading) reload();
      }),
    [machine, heading],
  );
  const isFull = tab === 'terminals' || tab === 'files';
  return (
    <Page
      title={data?.name ?? 'Machine'}
      above={[{ text: 'Machines', href: to('/machines') }]}
      full={isFull}
      beside={data && <Beside machine={data} />}
      actions={data && <Actions machine={data} reload={reload} />}
    >
      <Tabs label="Machine" tabs={tabsOf(machine)} current={tab} />
      {data && !isFull && <MachineNotices machine={data} />}
      <Show of={loaded}>
        {(detail) => (
          <WithScopes scopes={scopesOf[tab] ?? []}>
            <TabBody key={machine} machine={detail} tab={tab} params={params} />
          </WithScopes>
        )}
      </Show>
    </Page>
  );
}

function Beside({ machine: { status, last_seen, tags } }: { machine: MachineDetail }) {
  return (
    <span class="beside">
      <State of={status} />
      {status === 'offline' && (
        <span class="muted">
          last seen <Ago at={last_seen} />
        </span>
      )}
      <Tags of={tags} />
    </span>
  );
}

function TabBody({ machine, tab, params }: { machine: MachineDetail; tab: string; params: Params }) {
  const { id, status } = machine;
  if (tab === 'terminals') return <Terminals machine={id} item={params.item} status={status} />;
  if (tab === 'files') return <Files machine={id} />;
  if (tab === 'commands') return <MachineCommands machine={id} />;
  if (tab === 'schedules') return <MachineSchedules machine={id} />;
  if (tab === 'inventory') return <MachineInventory machine={id} status={status} />;
  if (tab === 'activity') return <MachineActivity machine={id} />;
  return <Overview machine={machine} />;
}

function Actions({ machine, reload }: { machine: MachineDetail; reload: () => void }) {
  const [editing, setEditing] = useState(false);
  const close = (): void => setEditing(false);
  return (
    <>
      {may('commands:execute') && (
        <ButtonLink
          icon={icons.play}
          text="Run"
          href={`${to('/run')}?machine=${encodeURIComponent(machine.id)}`}
        />
      )}
      {may('webhooks:write') && (
        <ButtonLink
          icon={icons.maintenance}
          text="Maintenance"
          href={`${to('/alerts', 'windows')}?machine=${encodeURIComponent(machine.id)}`}
          title="Hold back its alerts for a time"
        />
      )}
      {may('machines:write') && (
        <>
          <Button icon={icons.edit} text="Edit" press={() => setEditing(true)} />
          <DeleteButton
            label="Remove"
            title={`Remove ${machine.name}?`}
            action="Remove the machine"
            run={async () => {
              await client.machines.remove({ machine_id: machine.id });
              say(`${machine.name} is removed`);
              go(to('/machines'));
            }}
          >
            <p>Its agent stops for good and its schedules are deleted. Its history is not deleted.</p>
            <p class="muted">To use the machine again, join it with a new token.</p>
          </DeleteButton>
        </>
      )}
      {editing && <Edit machine={machine} close={close} reload={reload} />}
    </>
  );
}

function Edit({ machine, close, reload }: { machine: MachineDetail; close: () => void; reload: () => void }) {
  const [name, setName] = useState(machine.name);
  const [tags, setTags] = useState(machine.tags.join(', '));
  return (
    <FormDialog
      title="Edit the machine"
      submit="Save"
      close={close}
      run={() => {
        const wanted = tagsOf(tags);
        const isSame = wanted.join() === machine.tags.join();
        return client.machines.update({ machine_id: machine.id, name, ...(!isSame && { tags: wanted }) });
      }}
      done={reload}
    >
      <TextField label="Name" value={name} change={setName} required autoFocus />
      <TextField label="Tags" value={tags} change={setTags} hint="Separated by commas, such as web, eu" />
    </FormDialog>
  );
}
