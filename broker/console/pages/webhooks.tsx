// The page of all webhooks: their URLs, and the result of the last delivery of each.
import { useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { may } from '../login-state.ts';
import { NewButton } from '../parts/action-buttons.tsx';
import { LastDelivery } from '../parts/deliveries.tsx';
import * as icons from '../parts/icons.ts';
import { Empty } from '../parts/loading-failed-or-empty.tsx';
import { Page } from '../parts/page.tsx';
import { OnOff } from '../parts/small-components.tsx';
import { type Column, List, LongList } from '../parts/table-and-paged-list.tsx';
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
        when={({ type }) => type.startsWith('webhook.')}
        empty={
          <Empty icon={icons.webhooks} title="There is no webhook yet">
            <p>A webhook posts events, such as a failed command or a lost machine, to a URL of yours.</p>
            {newButton}
          </Empty>
        }
      >
        {(items) => <List label="Webhooks" columns={columns} items={items} />}
      </LongList>
      {creating && <WebhookForm close={() => setCreating(false)} saved={(id) => go(to('/webhooks', id))} />}
    </Page>
  );
}

const columns: Column<Webhook>[] = [
  ['Address', ({ id, url }) => <a href={to('/webhooks', id)}>{url}</a>, 'wide'],
  ['Events', ({ events }) => (events.length > 2 ? `${events.length} kinds` : events.join(', ')), 'muted'],
  ['State', (webhook) => <OnOff {...webhook} />],
  ['Last delivery', ({ last_delivery }) => <LastDelivery of={last_delivery} />, 'muted'],
];
