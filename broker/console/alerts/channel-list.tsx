// The channels through which alerts are sent: a list with the last delivery of each.
import { useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { may } from '../login-session.ts';
import { LastDelivery } from '../parts/deliveries.tsx';
import * as icons from '../parts/icons.ts';
import { NewButton } from '../parts/new-and-cancel-buttons.tsx';
import { Empty } from '../parts/page.tsx';
import { List, LongList } from '../parts/paged-list.tsx';
import { State } from '../parts/small-components.tsx';
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
        inputs={[]}
        when={({ type }) => type.startsWith('alert.')}
        empty={
          <Empty icon={icons.webhooks} title="No channel sends alerts yet">
            <p>A channel sends alerts to Slack, Discord, ntfy, e-mail or a webhook of yours.</p>
            {newButton}
          </Empty>
        }
      >
        {(items) => (
          <>
            <div class="filters">{newButton}</div>
            <List label="Channels" columns={['Name', ['Address', 'wide'], 'State', 'Last delivery']}>
              {items.map((channel) => (
                <ChannelRow key={channel.id} channel={channel} />
              ))}
            </List>
          </>
        )}
      </LongList>
      {creating && (
        <ChannelForm close={() => setCreating(false)} saved={(id) => go(to('/alerts/channels', id))} />
      )}
    </>
  );
}

function ChannelRow({ channel }: { channel: Channel }) {
  const { id, name, type, url, to: recipients, last_delivery } = channel;
  return (
    <tr>
      <td>
        <a href={to('/alerts/channels', id)}>{name}</a>
      </td>
      <td class="wide">
        <span>
          {services[type].text}: {recipients ? recipients.join(', ') : url}
        </span>
      </td>
      <td>
        <ChannelState channel={channel} />
      </td>
      <td class="muted">
        <LastDelivery of={last_delivery} />
      </td>
    </tr>
  );
}

export function ChannelState({ channel: { enabled, disabled_reason } }: { channel: Channel }) {
  return (
    <State
      of={enabled ? 'online' : disabled_reason ? 'failed' : 'off'}
      text={enabled ? 'on' : (disabled_reason?.replaceAll('_', ' ') ?? 'off')}
    />
  );
}
