// The page of one channel of alerts: what was sent through it, a test, and its settings.
import { useState } from 'preact/hooks';
import { type Channel, ChannelForm, services } from '../alerts/channel-form.tsx';
import { client } from '../api-client.ts';
import { may } from '../login-state.ts';
import { DeleteButton } from '../parts/action-buttons.tsx';
import { Button } from '../parts/button.tsx';
import { Deliveries, sayTested } from '../parts/deliveries.tsx';
import * as icons from '../parts/icons.ts';
import { Empty, Show } from '../parts/loading-failed-or-empty.tsx';
import { Page } from '../parts/page.tsx';
import { Notice, OnOff, useClick } from '../parts/small-components.tsx';
import { attempt } from '../parts/toasts.tsx';
import { useData } from '../parts/use-data.ts';
import { go, type Params, to } from '../router.ts';

export function AlertChannel({ params: { channel = '' } }: { params: Params }) {
  const loaded = useData(
    (signal) => client.alertChannels.get({ channel_id: channel }, { signal }),
    [channel],
  );
  const { data, reload } = loaded;
  return (
    <Page
      title={data?.name ?? 'Channel'}
      above={[
        { text: 'Alerts', href: to('/alerts') },
        { text: 'Channels', href: to('/alerts/channels') },
      ]}
      beside={data && <OnOff {...data} />}
      actions={data && may('webhooks:write') && <Actions channel={data} changed={reload} />}
    >
      <Show of={loaded}>
        {(detail) => (
          <>
            <Settings channel={detail} />
            <Deliveries
              read={(paging, signal) =>
                client.alertChannels.deliveries({ channel_id: channel, ...paging }, { signal })
              }
              redeliver={(delivery_id) =>
                client.alertChannels.redeliver({ channel_id: channel, delivery_id })
              }
              version={data}
              changed={reload}
              empty={
                <Empty icon={icons.alerts} title="Nothing was sent yet">
                  <p>
                    Alerts sent to this channel appear here, with every attempt. Send a test to see whether
                    the channel works.
                  </p>
                </Empty>
              }
            />
          </>
        )}
      </Show>
    </Page>
  );
}

function Settings({ channel: { type, url, to: recipients, disabled_reason } }: { channel: Channel }) {
  return (
    <>
      <section class="card command-card">
        <pre class="command-line">{url}</pre>
        <span class="tag">{services[type].text}</span>
        {recipients && <p class="fact-row muted">To {recipients.join(', ')}</p>}
      </section>
      {disabled_reason && (
        <Notice>
          The broker turned this channel off: {disabled_reason.replaceAll('_', ' ')}.{' '}
          {disabled_reason === 'key_revoked'
            ? 'Turn it on again. It then sends alerts with the rights of your key.'
            : 'Edit it, and set its address and secret again.'}
        </Notice>
      )}
    </>
  );
}

function Actions({ channel, changed }: { channel: Channel; changed: () => void }) {
  const [editing, setEditing] = useState(false);
  const { id, name, type, enabled } = channel;
  const test = useClick(async () => {
    await attempt(async () =>
      sayTested(services[type].text, await client.alertChannels.test({ channel_id: id })),
    );
    changed();
  });
  const turn = (): Promise<unknown> => client.alertChannels.update({ channel_id: id, enabled: !enabled });
  return (
    <>
      <Button text="Send a test" aria-disabled={test.busy} press={test.click} />
      <Button text={enabled ? 'Turn off' : 'Turn on'} press={() => void attempt(turn).then(changed)} />
      <Button icon={icons.edit} text="Edit" press={() => setEditing(true)} />
      <DeleteButton
        title={`Delete ${name}?`}
        action="Delete the channel"
        run={async () => {
          await client.alertChannels.remove({ channel_id: id });
          go(to('/alerts/channels'));
        }}
      >
        <p>
          The broker stops sending alerts to this channel. If rules name the channel, change or delete these
          rules first.
        </p>
      </DeleteButton>
      {editing && <ChannelForm channel={channel} close={() => setEditing(false)} saved={changed} />}
    </>
  );
}
