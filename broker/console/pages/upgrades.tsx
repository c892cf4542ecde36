// The page of all upgrades of agents, each with its waves and the number of machines that are done.
import { client } from '../api-client.ts';
import { may } from '../login-session.ts';
import * as icons from '../parts/icons.ts';
import { NewButton } from '../parts/new-and-cancel-buttons.tsx';
import { Empty, Page } from '../parts/page.tsx';
import { List, LongList } from '../parts/paged-list.tsx';
import { Ago, State } from '../parts/small-components.tsx';
import { StatusCounts } from '../parts/status-counts-bar.tsx';
import { to } from '../router.ts';

type Upgrade = Awaited<ReturnType<typeof client.upgrades.get>>;

/** True if an upgrade is over, but not every machine has the new version. */
const isPartial = ({ status, counts, total }: Upgrade): boolean =>
  status === 'completed' && counts.upgraded < total;

const newButton = () => (
  <NewButton text="Upgrade agents" allowed={may('machines:write')} opens={to('/upgrades', 'new')} />
);

export function Upgrades() {
  return (
    <Page title="Upgrades" actions={newButton()}>
      <LongList
        read={(paging, signal) => client.upgrades.list(paging, { signal })}
        inputs={[]}
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
        {(items) => (
          <List label="Upgrades" columns={[['Version', 'wide'], 'Status', 'Wave', 'Machines', 'Created']}>
            {items.map((upgrade) => (
              <tr key={upgrade.id}>
                <td class="wide">
                  <a href={to('/upgrades', upgrade.id)}>{upgrade.version}</a>
                </td>
                <td>
                  <State of={isPartial(upgrade) ? 'skipped' : upgrade.status} text={upgrade.status} />
                </td>
                <td class="number">
                  {upgrade.waves !== null &&
                    upgrade.waves > 0 &&
                    `${upgrade.current_wave} of ${upgrade.waves}`}
                </td>
                <td>
                  <StatusCounts {...upgrade} done={upgrade.counts.upgraded} />
                </td>
                <td class="muted">
                  <Ago at={upgrade.created_at} />
                </td>
              </tr>
            ))}
          </List>
        )}
      </LongList>
    </Page>
  );
}
