// The page of one webhook: lists its deliveries, and has buttons to send a test, replace the secret and repeat a
// delivery.
import { useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { may } from '../login-state.ts';
import { ConfirmButton, DeleteButton } from '../parts/action-buttons.tsx';
import { Button } from '../parts/button.tsx';
import { Deliveries, sayTested } from '../parts/deliveries.tsx';
import * as icons from '../parts/icons.ts';
import { Empty, Show } from '../parts/loading-failed-or-empty.tsx';
import { Page } from '../parts/page.tsx';
import { Secret } from '../parts/secret-dialog.tsx';
import { Notice, OnOff, Tags } from '../parts/small-components.tsx';
import { attempt } from '../parts/toasts.tsx';
import { useData } from '../parts/use-data.ts';
import { go, type Params, to } from '../router.ts';
import { SendMissed } from '../webhooks/send-missed.tsx';
import { WebhookForm } from '../webhooks/webhook-form.tsx';

type WebhookDetail = Awaited<ReturnType<typeof client.webhooks.get>>;

export function Webhook({ params: { webhook = '' } }: { params: Params }) {
  const loaded = useData(
    (signal) => client.webhooks.get({ webhook_id: webhook }, { signal }),
    [webhook],
    ({ data }) => data.webhook_id === webhook,
  );
  const { data, reload } = loaded;
  return (
    <Page
      title="Webhook"
      above={[{ text: 'Webhooks', href: to('/webhooks') }]}
      beside={data && <OnOff {...data} />}
      actions={data && may('webhooks:write') && <Actions webhook={data} changed={reload} />}
    >
      <Show of={loaded}>
        {({ url, events, enabled, disabled_reason }) => (
          <>
            <section class="card command-card">
              <pre class="command-line">{url}</pre>
              <Tags of={events} />
            </section>
            {!enabled && disabled_reason && (
              <Notice>
                The broker turned this webhook off: {disabled_reason.replaceAll('_', ' ')}. Turn it on to send
                again.
              </Notice>
            )}
            <Deliveries
              read={(paging, signal) =>
                client.webhooks.deliveries({ webhook_id: webhook, ...paging }, { signal })
              }
              redeliver={(delivery_id) => client.webhooks.redeliver({ webhook_id: webhook, delivery_id })}
              version={data}
              changed={reload}
              empty={
                <Empty icon={icons.webhooks} title="Nothing was sent yet">
                  <p>
                    Each event appears here with every attempt. Send a test to see whether the receiver
                    answers.
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

function Actions({ webhook, changed }: { webhook: WebhookDetail; changed: () => void }) {
  const [open, setOpen] = useState<'edit' | 'missed' | undefined>(undefined);
  const { id, url, enabled } = webhook;
  const close = (): void => setOpen(undefined);
  const test = async (): Promise<void> => {
    sayTested('The receiver', await client.webhooks.test({ webhook_id: id }));
    changed();
  };
  return (
    <>
      <Button text="Send a test" press={() => void attempt(test)} />
      <Button
        text={enabled ? 'Turn off' : 'Turn on'}
        press={() =>
          void attempt(() => client.webhooks.update({ webhook_id: id, enabled: !enabled })).then(changed)
        }
      />
      <Button text="Send missed" press={() => setOpen('missed')} />
      <SecretButton webhook={id} changed={changed} />
      <Button icon={icons.edit} text="Edit" press={() => setOpen('edit')} />
      <DeleteButton
        title="Delete this webhook?"
        action="Delete the webhook"
        run={async () => {
          await client.webhooks.remove({ webhook_id: id });
          go(to('/webhooks'));
        }}
      >
        <p>The broker stops sending to {url}, and deletes the stored deliveries.</p>
      </DeleteButton>
      {open === 'missed' && <SendMissed webhook={id} close={close} changed={changed} />}
      {open === 'edit' && <WebhookForm webhook={webhook} close={close} saved={changed} />}
    </>
  );
}

/** A button that asks for confirmation, then replaces the secret of a webhook and displays the new secret. */
function SecretButton({ webhook, changed }: { webhook: string; changed: () => void }) {
  const [secret, setSecret] = useState<string | undefined>(undefined);
  const rotate = async (): Promise<void> => {
    const fresh = newSecret();
    await client.webhooks.update({ webhook_id: webhook, secret: fresh });
    setSecret(fresh);
    changed();
  };
  return (
    <>
      <ConfirmButton
        button={(ask) => <Button icon={icons.key} text="New secret" press={ask} />}
        title="Replace the secret?"
        action="Replace the secret"
        run={rotate}
      >
        <p>The new secret signs all deliveries from now on. Set it at the receiver at once.</p>
      </ConfirmButton>
      {secret !== undefined && (
        <Secret title="The new secret" secret={secret} close={() => setSecret(undefined)} />
      )}
    </>
  );
}

/** Makes a secret of 256 random bits in the form of Standard Webhooks. */
const newSecret = (): string =>
  `whsec_${btoa(String.fromCharCode(...crypto.getRandomValues(new Uint8Array(32))))}`;
