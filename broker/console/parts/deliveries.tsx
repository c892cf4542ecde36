// The deliveries to a webhook or a channel: every attempt with its answer, and a button that sends a delivery again.
import type { ComponentChildren } from 'preact';
import { useEffect, useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { durationText, fullTime } from '../format-times-and-sizes.ts';
import { may } from '../login-state.ts';
import { after } from '../timers.ts';
import { Button } from './button.tsx';
import * as icons from './icons.ts';
import { Show } from './loading-failed-or-empty.tsx';
import { Ago, State } from './small-components.tsx';
import { LongList, type Read } from './table-and-paged-list.tsx';
import { attempt, say, sayError } from './toasts.tsx';
import { useData } from './use-data.ts';

type Delivery = Omit<Awaited<ReturnType<typeof client.webhooks.deliveries>>['items'][number], 'webhook_id'>;

/** Milliseconds until the list is loaded again while a delivery is pending, because no event reports its attempts. */
const pendingMs = 2_000;

interface DeliveriesProps {
  read: Read<Delivery>;
  redeliver: (id: string) => Promise<unknown>;
  /** The webhook or channel. When it changes, the list is loaded again. */
  version: unknown;
  changed: () => void;
  /** The text of an empty list. */
  empty: ComponentChildren;
}

export function Deliveries({ read, version, empty, ...actions }: DeliveriesProps) {
  return (
    <LongList read={read} version={version} when={() => true} empty={empty}>
      {(items, reload) => <DeliveryRows items={items} reload={reload} {...actions} />}
    </LongList>
  );
}

interface DeliveryRowsProps extends Pick<DeliveriesProps, 'redeliver' | 'changed'> {
  items: readonly Delivery[];
  reload: () => void;
}

function DeliveryRows({ items, reload, redeliver, changed }: DeliveryRowsProps) {
  useEffect(
    () => (items.some(({ status }) => status === 'pending') ? after(pendingMs, reload) : undefined),
    [items],
  );
  return (
    <ul class="deliveries card" aria-label="Deliveries">
      {items.map((delivery) => (
        <DeliveryRow
          key={delivery.id}
          delivery={delivery}
          again={async () => {
            if (await attempt(() => redeliver(delivery.id), 'The delivery is being sent again')) changed();
          }}
        />
      ))}
    </ul>
  );
}

/** Displays whether a test delivery succeeded. `receiver` names the receiver in the message, such as `Slack`. */
export function sayTested(
  receiver: string,
  { delivered, status_code, duration, error }: Awaited<ReturnType<typeof client.webhooks.test>>,
): void {
  if (delivered) say(`${receiver} accepted the test in ${durationText(duration)}`);
  else sayError(new Error(`The test was not delivered: ${error ?? `${receiver} answered ${status_code}`}`));
}

/** Displays the time of the last delivery, and whether the delivery succeeded. */
export function LastDelivery({ of }: { of: { delivered: boolean; at: string } | null }) {
  if (!of) return <>none</>;
  return (
    <>
      <State of={of.delivered ? 'delivered' : 'failed'} /> <Ago at={of.at} />
    </>
  );
}

function DeliveryRow({ delivery, again }: { delivery: Delivery; again: () => Promise<void> }) {
  const { event_id, type, status, reason, attempts, created_at, next_attempt_at } = delivery;
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
            <Button icon={icons.refresh} text="Send again" press={() => void again()} />
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
