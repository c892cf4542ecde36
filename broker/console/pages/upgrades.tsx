// The page of all upgrades of agents, each with its waves and the number of machines that are done.
import { client } from '../api-client.ts';
import { may } from '../login-state.ts';
import { NewButton } from '../parts/action-buttons.tsx';
import * as icons from '../parts/icons.ts';
import { Empty } from '../parts/loading-failed-or-empty.tsx';
import { Page } from '../parts/page.tsx';
import { Ago } from '../parts/small-components.tsx';
import { StatusCounts } from '../parts/status-counts-bar.tsx';
import { type Column, List, LongList } from '../parts/table-and-paged-list.tsx';
import { to } from '../router.ts';
import { type Upgrade, UpgradeState } from '../upgrades/upgrade-state.tsx';

const columns: Column<Upgrade>[] = [
  ['Version', ({ id, version }) => <a href={to('/upgrades', id)}>{version}</a>, 'wide'],
  ['Status', (upgrade) => <UpgradeState of={upgrade} />],
  [
    'Wave',
    ({ waves, current_wave }) => waves !== null && waves > 0 && `${current_wave} of ${waves}`,
    'number',
  ],
  ['Machines', (upgrade) => <StatusCounts {...upgrade} done={upgrade.counts.upgraded} />],
  ['Created', ({ created_at }) => <Ago at={created_at} />, 'muted'],
];

const newButton = () => (
  <NewButton text="Upgrade agents" allowed={may('machines:write')} opens={to('/upgrades', 'new')} />
);

export function Upgrades() {
  return (
    <Page title="Upgrades" actions={newButton()}>
      <LongList
        read={(paging, signal) => client.upgrades.list(paging, { signal })}
        when={({ type }) => type.startsWith('upgrade.')}
        empty={
          <Empty icon={icons.upgrades} title="No agent was upgraded from here yet">
            <p>
              An upgrade installs another version of the agent on many machines, a wave at a time, and stops
              when too many fail.
            </p>
            {newButton()}
          </Empty>
        }
      >
        {(items) => <List label="Upgrades" columns={columns} items={items} />}
      </LongList>
    </Page>
  );
}
