// The deliveries of a webhook: the event, every attempt with its answer, and a button to send it again.
import { useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { may } from '../login-session.ts';
import { Icon } from '../parts/icon.tsx';
import * as icons from '../parts/icons.ts';
import { Empty, Show } from '../parts/page.tsx';
import { LongList } from '../parts/paged-list.tsx';
import { Ago, State } from '../parts/small-components.tsx';
import { attempt } from '../parts/toasts.tsx';
import { useData } from '../parts/use-data.ts';
import { durationText, fullTime } from '../time.ts';

type Delivery = Awaited<ReturnType<typeof client.webhooks.deliveries>>['items'][number];

export function Deliveries({
  webhook,
  round,
  changed,
}: {
  webhook: string;
  round: number;
  changed: () => void;
}) {
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
  const { id, webhook_id, event_id, type, status, reason, attempts, created_at, next_attempt_at } = delivery;
  const again = (): Promise<unknown> => client.webhooks.redeliver({ webhook_id, delivery_id: id });
  const [open, setOpen] = useState(false);
  return (
    <li>
      <details onToggle={({ currentTarget }) => setOpen(currentTarget.open)}>
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
          {open && may('machines:read') && <Body event={event_id} />}
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

/** The event in a delivery's body. It can be displayed as long as the event is stored. */
function Body({ event }: { event: string }) {
  const loaded = useData((signal) => client.events.list({ id: event }, { signal }), [event]);
  return (
    <Show of={loaded}>
      {({ items: [body] }) =>
        body ? (
          <details class="body">
            <summary>What is sent</summary>
            <pre class="answer">{JSON.stringify(body, null, 2)}</pre>
          </details>
        ) : (
          <p class="muted">The event is no longer stored, or it was a test.</p>
        )
      }
    </Show>
  );
}
