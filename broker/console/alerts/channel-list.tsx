// The channels through which alerts are sent: a list with the last delivery of each.
import { useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { may } from '../login-state.ts';
import { NewButton } from '../parts/action-buttons.tsx';
import { LastDelivery } from '../parts/deliveries.tsx';
import * as icons from '../parts/icons.ts';
import { Empty } from '../parts/loading-failed-or-empty.tsx';
import { OnOff } from '../parts/small-components.tsx';
import { type Column, List, LongList } from '../parts/table-and-paged-list.tsx';
import { go, to } from '../router.ts';
import { type Channel, ChannelForm, services } from './channel-form.tsx';

export function ChannelList() {
  const [creating, setCreating] = useState(false);
  const newButton = (
    <NewButton text="New channel" allowed={may('webhooks:write')} opens={() => setCreating(true)} />
  );
  return (
    <>
      <LongList
        read={(paging, signal) => client.alertChannels.list({ sort: 'name', ...paging }, { signal })}
        when={({ type }) => type.startsWith('alert.')}
        button={newButton}
        empty={
          <Empty icon={icons.webhooks} title="No channel sends alerts yet">
            <p>A channel sends alerts to Slack, Discord, ntfy, e-mail or a webhook of yours.</p>
            {newButton}
          </Empty>
        }
      >
        {(items) => <List label="Channels" columns={columns} items={items} />}
      </LongList>
      {creating && (
        <ChannelForm close={() => setCreating(false)} saved={(id) => go(to('/alerts/channels', id))} />
      )}
    </>
  );
}

const columns: Column<Channel>[] = [
  ['Name', ({ id, name }) => <a href={to('/alerts/channels', id)}>{name}</a>],
  [
    'Address',
    ({ type, url, to: recipients }) => (
      <span>
        {services[type].text}: {recipients ? recipients.join(', ') : url}
      </span>
    ),
    'wide',
  ],
  ['State', (channel) => <OnOff {...channel} />],
  ['Last delivery', ({ last_delivery }) => <LastDelivery of={last_delivery} />, 'muted'],
];
