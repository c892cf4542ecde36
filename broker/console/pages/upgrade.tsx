// The page of one upgrade of agents: its waves and the progress of each machine. If the id is `new`, the page
// displays the form that begins an upgrade instead.
import { client } from '../api-client.ts';
import { durationText } from '../format-times-and-sizes.ts';
import { may } from '../login-state.ts';
import { CancelButton } from '../parts/action-buttons.tsx';
import { Empty, Show } from '../parts/loading-failed-or-empty.tsx';
import { WithScopes } from '../parts/missing-scope.tsx';
import { Page } from '../parts/page.tsx';
import { Ago, Choice, State } from '../parts/small-components.tsx';
import { StatusCounts } from '../parts/status-counts-bar.tsx';
import { type Column, List, LongList, twoLines } from '../parts/table-and-paged-list.tsx';
import { useData } from '../parts/use-data.ts';
import { choiceIn, type Params, to } from '../router.ts';
import { UpgradeForm } from '../upgrades/upgrade-form.tsx';
import { type Upgrade, UpgradeState } from '../upgrades/upgrade-state.tsx';

type Machine = Awaited<ReturnType<typeof client.upgrades.machines>>['items'][number];

const above = [{ text: 'Upgrades', href: to('/upgrades') }];

export function UpgradePage({ params: { upgrade = '' } }: { params: Params }) {
  if (upgrade === 'new') {
    return (
      <Page title="Upgrade agents" above={above}>
        <WithScopes scopes={['machines:write']}>
          <UpgradeForm />
        </WithScopes>
      </Page>
    );
  }
  return <Existing id={upgrade} />;
}

function Existing({ id }: { id: string }) {
  const loaded = useData(
    (signal) => client.upgrades.get({ upgrade_id: id }, { signal }),
    [id],
    ({ data }) => data.upgrade_id === id,
  );
  const { data, reload } = loaded;
  const isRunning = data?.status === 'running';
  return (
    <Page
      title={data ? `Upgrade to ${data.version}` : 'Upgrade'}
      above={above}
      beside={data && <UpgradeState of={data} />}
      actions={
        isRunning &&
        may('machines:write') && (
          <CancelButton
            what="upgrade"
            text="The upgrade continues only on machines that are already starting the new version."
            run={async () => {
              await client.upgrades.cancel({ upgrade_id: id });
              reload();
            }}
          />
        )
      }
    >
      <Show of={loaded}>
        {(detail) => (
          <>
            <Plan upgrade={detail} />
            <Machines id={id} />
          </>
        )}
      </Show>
    </Page>
  );
}

function Plan({ upgrade }: { upgrade: Upgrade }) {
  const { wave, waves, current_wave, pause, max_failures, next_wave_at, created_at, finished_at } = upgrade;
  const { counts, total } = upgrade;
  return (
    <section class="card command-card">
      <span>
        {waves === null
          ? 'This page contains only the machines that your key may use'
          : waves === 0
            ? 'No machine could be upgraded'
            : `Wave ${current_wave} of ${waves}`}
        {next_wave_at !== null && (
          <span class="muted">
            , the next <Ago at={next_wave_at} />
          </span>
        )}
      </span>
      <StatusCounts counts={counts} done={counts.upgraded} total={total} />
      <p class="fact-row muted">
        <span>
          {wave} {wave.endsWith('%') ? 'of the machines' : 'machines'} a wave, {durationText(pause)} between
          waves
        </span>
        <span>
          {max_failures === 0
            ? 'stops at the first failure'
            : `stops after more than ${max_failures} failures`}
        </span>
        <span>
          begun <Ago at={created_at} />
          {finished_at !== null && (
            <>
              , finished <Ago at={finished_at} />
            </>
          )}
        </span>
      </p>
    </section>
  );
}

const views = [
  ['', 'All'],
  ['upgraded', 'Upgraded'],
  ['failed', 'Failed'],
  ['skipped', 'Skipped'],
  ['waiting', 'Waiting'],
] as const;

function Machines({ id }: { id: string }) {
  const choice = choiceIn('status', views);
  const status = choice.value;
  return (
    <>
      <div class="filters">
        <Choice label="Status" {...choice} />
      </div>
      <LongList
        read={async (paging, signal) => {
          const input = { upgrade_id: id, sort: 'wave' as const, ...paging, ...(status && { status }) };
          const { items, ...page } = await client.upgrades.machines(input, { signal });
          return { ...page, items: items.map((item) => ({ ...item, id: item.machine_id })) };
        }}
        inputs={[id, status]}
        when={({ data }) => data.upgrade_id === id}
        empty={
          <Empty title="No machine of this upgrade has this status">
            <p>Choose another status above.</p>
          </Empty>
        }
      >
        {(items) => <List label="Machines of the upgrade" columns={columns} items={items} />}
      </LongList>
    </>
  );
}

const columns: Column<Machine>[] = [
  twoLines('Machine', nameOf, reasonOf),
  ['Status', ({ status }) => <State of={status} />],
  ['Wave', ({ wave }) => wave !== null && wave > 0 && wave, 'right number'],
  ['From', ({ from_version }) => from_version, 'muted'],
];

function nameOf({ machine_id, machine_name }: Machine) {
  if (machine_name === '') return <span class="muted">removed</span>;
  return <a href={to('/machines', machine_id)}>{machine_name}</a>;
}

function reasonOf({ status, message, commands, reason }: Machine): string | undefined {
  if (status === 'busy' && commands !== null) return `waits for ${commands} commands and terminals`;
  return message ?? reason?.replaceAll('_', ' ');
}
