// One webhook: its deliveries with every attempt, a test, and sending again.
import { useState } from 'preact/hooks';
import { client } from '../client.ts';
import { Ago, Confirm, Dialog, State, Tags } from '../parts/basics.tsx';
import { Icon } from '../parts/icon.tsx';
import * as icons from '../parts/icons.ts';
import { LongList } from '../parts/lists.tsx';
import { Empty, Page, Show } from '../parts/page.tsx';
import { attempt, say, sayError } from '../parts/toasts.tsx';
import { useData } from '../parts/use-data.ts';
import { go, type Params, to } from '../routes.ts';
import { may } from '../session.ts';
import { durationText, fullTime } from '../time.ts';
import { WebhookForm } from '../webhooks/webhook-form.tsx';

type WebhookDetail = Awaited<ReturnType<typeof client.webhooks.get>>;
type Delivery = Awaited<ReturnType<typeof client.webhooks.deliveries>>['items'][number];

export function Webhook({ params: { webhook = '' } }: { params: Params }) {
  const loaded = useData((signal) => client.webhooks.get({ webhook_id: webhook }, { signal }), [webhook]);
  const [round, setRound] = useState(0);
  const { data, reload } = loaded;
  const changed = (): void => {
    reload();
    setRound(round + 1);
  };
  return (
    <Page
      title="Webhook"
      above={[{ text: 'Webhooks', href: to('/webhooks') }]}
      beside={data && <State of={data.enabled ? 'online' : 'failed'} text={data.enabled ? 'on' : 'off'} />}
      actions={data && may('webhooks:write') && <Actions webhook={data} changed={changed} />}
    >
      <Show of={loaded}>
        {({ url, events, enabled, disabled_reason }) => (
          <>
            <section class="card command-card">
              <pre class="command-line">{url}</pre>
              <Tags of={events} />
            </section>
            {!enabled && disabled_reason && (
              <p class="notice warn">
                <Icon of={icons.warning} />
                <span>
                  The broker turned it off: {disabled_reason.replaceAll('_', ' ')}. Turn it on to send again.
                </span>
              </p>
            )}
            <Deliveries webhook={webhook} round={round} changed={changed} />
          </>
        )}
      </Show>
    </Page>
  );
}

function Actions({ webhook, changed }: { webhook: WebhookDetail; changed: () => void }) {
  const [open, setOpen] = useState<'edit' | 'remove' | undefined>(undefined);
  const { id, enabled, url } = webhook;
  const test = async (): Promise<void> => {
    const { delivered, status_code, duration, error } = await client.webhooks.test({ webhook_id: id });
    if (delivered) say(`The receiver answered ${status_code} in ${durationText(duration)}`);
    else
      sayError(new Error(`The test was not delivered: ${error ?? `the receiver answered ${status_code}`}`));
    changed();
  };
  return (
    <>
      <button type="button" onClick={() => void attempt(test)}>
        Send a test
      </button>
      <button
        type="button"
        onClick={() =>
          void attempt(() => client.webhooks.update({ webhook_id: id, enabled: !enabled })).then(changed)
        }
      >
        {enabled ? 'Turn off' : 'Turn on'}
      </button>
      <button type="button" onClick={() => setOpen('edit')}>
        <Icon of={icons.edit} />
        Edit
      </button>
      <button type="button" class="danger icon-only" aria-label="Delete" onClick={() => setOpen('remove')}>
        <Icon of={icons.trash} />
      </button>
      {open === 'edit' && (
        <Dialog title="Edit the webhook" onClose={() => setOpen(undefined)}>
          <WebhookForm
            webhook={webhook}
            cancel={() => setOpen(undefined)}
            saved={() => {
              setOpen(undefined);
              changed();
            }}
          />
        </Dialog>
      )}
      {open === 'remove' && (
        <Confirm
          title="Delete this webhook?"
          action="Delete the webhook"
          onClose={() => setOpen(undefined)}
          run={async () => {
            await client.webhooks.remove({ webhook_id: id });
            go(to('/webhooks'));
          }}
        >
          <p>Nothing is sent to {url} any more, and its deliveries are deleted.</p>
        </Confirm>
      )}
    </>
  );
}

function Deliveries({ webhook, round, changed }: { webhook: string; round: number; changed: () => void }) {
  return (
    <LongList
      read={(paging, signal) => client.webhooks.deliveries({ webhook_id: webhook, ...paging }, { signal })}
      inputs={[webhook, round]}
      when={() => true}
      empty={
        <Empty icon={icons.webhooks} title="Nothing was sent yet">
          <p>Each event appears here with every attempt. Send a test to see whether the receiver answers.</p>
        </Empty>
      }
    >
      {(items) => (
        <ul class="deliveries card" aria-label="Deliveries">
          {items.map((delivery) => (
            <DeliveryRow key={delivery.id} delivery={delivery} changed={changed} />
          ))}
        </ul>
      )}
    </LongList>
  );
}

function DeliveryRow({ delivery, changed }: { delivery: Delivery; changed: () => void }) {
  const { id, webhook_id, type, status, reason, attempts, created_at, next_attempt_at } = delivery;
  const again = (): Promise<unknown> => client.webhooks.redeliver({ webhook_id, delivery_id: id });
  return (
    <li>
      <details>
        <summary>
          <State of={status} />
          <span class="cut">{type}</span>
          <span class="muted">
            {attempts.length === 1 ? '1 attempt' : `${attempts.length} attempts`}, <Ago at={created_at} />
          </span>
        </summary>
        <div class="attempts">
          {reason && <p class="bad-text">{reason.replaceAll('_', ' ')}</p>}
          <ol>
            {attempts.map(({ at, status_code, duration, error, answer }) => (
              <li key={at}>
                {fullTime(at)}: {status_code === null ? (error ?? 'no answer') : `answer ${status_code}`} in{' '}
                {durationText(duration)}
                {answer && <pre class="answer">{answer}</pre>}
              </li>
            ))}
          </ol>
          {next_attempt_at && (
            <p class="muted">
              Next attempt <Ago at={next_attempt_at} />
            </p>
          )}
          {may('webhooks:write') && (
            <button type="button" onClick={() => void attempt(again, 'It is sent again').then(changed)}>
              <Icon of={icons.refresh} />
              Send again
            </button>
          )}
        </div>
      </details>
    </li>
  );
}
