// The page of all webhooks: their URLs, and the result of the last delivery of each.
import { useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { may } from '../login-session.ts';
import { LastDelivery } from '../parts/deliveries.tsx';
import * as icons from '../parts/icons.ts';
import { NewButton } from '../parts/new-and-cancel-buttons.tsx';
import { Empty, Page } from '../parts/page.tsx';
import { List, LongList } from '../parts/paged-list.tsx';
import { State } from '../parts/small-components.tsx';
import { go, to } from '../router.ts';
import { WebhookForm } from '../webhooks/webhook-form.tsx';

type Webhook = Awaited<ReturnType<typeof client.webhooks.list>>['items'][number];

export function Webhooks() {
  const [creating, setCreating] = useState(false);
  const newButton = (
    <NewButton text="New webhook" allowed={may('webhooks:write')} opens={() => setCreating(true)} />
  );
  return (
    <Page title="Webhooks" actions={newButton}>
      <LongList
        read={(paging, signal) => client.webhooks.list(paging, { signal })}
        inputs={[]}
        when={({ type }) => type.startsWith('webhook.')}
        empty={
          <Empty icon={icons.webhooks} title="There is no webhook yet">
            <p>A webhook posts events, such as a failed command or a lost machine, to a URL of yours.</p>
            {newButton}
          </Empty>
        }
      >
        {(items) => (
          <List label="Webhooks" columns={[['Address', 'wide'], 'Events', 'State', 'Last delivery']}>
            {items.map((webhook) => (
              <WebhookRow key={webhook.id} webhook={webhook} />
            ))}
          </List>
        )}
      </LongList>
      {creating && <WebhookForm close={() => setCreating(false)} saved={(id) => go(to('/webhooks', id))} />}
    </Page>
  );
}

function WebhookRow({ webhook }: { webhook: Webhook }) {
  const { id, url, events, enabled, disabled_reason, last_delivery } = webhook;
  return (
    <tr>
      <td class="wide">
        <a href={to('/webhooks', id)}>{url}</a>
      </td>
      <td class="muted">{events.length > 2 ? `${events.length} kinds` : events.join(', ')}</td>
      <td>
        <State
          of={enabled ? 'online' : disabled_reason ? 'failed' : 'off'}
          text={enabled ? 'on' : (disabled_reason?.replaceAll('_', ' ') ?? 'off')}
        />
      </td>
      <td class="muted">
        <LastDelivery of={last_delivery} />
      </td>
    </tr>
  );
}
