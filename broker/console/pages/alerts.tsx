// The page of alerts, with the rules that open them, the channels that send them, and maintenance windows.
import { AlertList } from '../alerts/alert-list.tsx';
import { ChannelList } from '../alerts/channel-list.tsx';
import { WindowList } from '../alerts/maintenance-windows.tsx';
import { RuleList } from '../alerts/rule-list.tsx';
import { client } from '../api-client.ts';
import { may } from '../login-state.ts';
import { ButtonLink } from '../parts/button.tsx';
import * as icons from '../parts/icons.ts';
import { Empty } from '../parts/loading-failed-or-empty.tsx';
import { WithScopes } from '../parts/missing-scope.tsx';
import { Page } from '../parts/page.tsx';
import { Choice, Tabs } from '../parts/small-components.tsx';
import { LongList } from '../parts/table-and-paged-list.tsx';
import { choiceIn, type Params, to } from '../router.ts';

export function Alerts({ params: { tab = '' } }: { params: Params }) {
  const tabs = [
    { name: '', text: 'Alerts', href: to('/alerts'), icon: icons.alerts },
    { name: 'rules', text: 'Rules', href: to('/alerts', 'rules'), icon: icons.check },
    ...(may('webhooks:read')
      ? [{ name: 'channels', text: 'Channels', href: to('/alerts', 'channels'), icon: icons.webhooks }]
      : []),
    { name: 'windows', text: 'Maintenance', href: to('/alerts', 'windows'), icon: icons.maintenance },
  ];
  return (
    <Page title="Alerts">
      <Tabs label="Alerts" tabs={tabs} current={tab} />
      {tab === 'rules' && <RuleList />}
      {tab === 'channels' && (
        <WithScopes scopes={['webhooks:read']}>
          <ChannelList />
        </WithScopes>
      )}
      {tab === 'windows' && <WindowList />}
      {tab === '' && <AllAlerts />}
    </Page>
  );
}

const views = [
  ['open', 'Open'],
  ['acknowledged', 'Acknowledged'],
  ['held', 'Held back'],
  ['all', 'All'],
] as const;

function AllAlerts() {
  const choice = choiceIn('status', views);
  const status = choice.value;
  return (
    <>
      <div class="filters">
        <Choice label="Status" {...choice} />
      </div>
      <LongList
        read={(paging, signal) =>
          client.alerts.list({ ...paging, ...(status !== 'all' && { status }) }, { signal })
        }
        inputs={[status]}
        when={({ type }) => type.startsWith('alert.')}
        empty={<NoAlerts status={status} />}
      >
        {(items, reload) => <AlertList items={items} reload={reload} />}
      </LongList>
    </>
  );
}

function NoAlerts({ status }: { status: (typeof views)[number][0] }) {
  if (status === 'acknowledged' || status === 'held') {
    return (
      <Empty icon={icons.alerts} title={`No alert is ${status === 'held' ? 'held back' : status}`}>
        <p>
          {status === 'held'
            ? 'A maintenance window holds back alerts about its machines until the window ends.'
            : 'Acknowledge an open alert to say that somebody works on it. Acknowledged alerts are not repeated.'}
        </p>
      </Empty>
    );
  }
  return (
    <Empty icon={icons.alerts} title={status === 'open' ? 'No alert is open' : 'There was no alert yet'}>
      <p>Rules watch machines, schedules and expiry dates. The alerts that they open appear here at once.</p>
      <ButtonLink text="Look at the rules" href={to('/alerts', 'rules')} />
    </Empty>
  );
}
