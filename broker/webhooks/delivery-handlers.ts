// REST handlers of deliveries: their list, a test delivery, and requests to deliver again.
import type { Caller, Handlers } from '../../shared/api/index.ts';
import type { KeyId, WebhookId } from '../../shared/api/route.ts';
import { webhooks as routes } from '../../shared/api/webhooks.ts';
import { iso } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';
import { readableOnly } from '../events.ts';
import type { History } from '../history.ts';
import { sequenceBefore } from '../ordered-table.ts';
import { filtersOf, pageOfRows } from '../paging.ts';
import type { Webhook } from '../state/index.ts';
import type { DeliveryQueue } from './delivery-queue.ts';
import type { DeliveryStore } from './delivery-store.ts';
import type { Sender } from './sender.ts';
import type { Message } from './signature.ts';
import type { Subscriptions } from './subscriptions.ts';
import { readerOf, type WebhookAccess } from './webhook-access.ts';

interface HandlerParts {
  history: History;
  store: DeliveryStore;
  subscriptions: Subscriptions;
  sender: Sender;
  queue: DeliveryQueue;
  access: WebhookAccess;
}

type DeliveryHandlers = Pick<Handlers['webhooks'], 'test' | 'deliveries' | 'redeliver' | 'redeliverSince'>;

/** Tests at once, of one key and in all: each may hold a connection as long as an attempt. */
const [maxTestsOfKey, maxTests] = [4, 32];
/** Events looked at in one transaction. */
const eventStep = 500;

export function deliveryHandlers(parts: HandlerParts): DeliveryHandlers {
  const { history, store, subscriptions, sender, access } = parts;
  const testing: KeyId[] = [];
  return {
    async test({ webhook_id }, caller) {
      const webhook = access.find(webhook_id, caller);
      if (subscriptions.disabledReason(webhook) === 'secret_unreadable') {
        throw new AppError('conflict', 'the secret of this webhook cannot be read: set it again', {
          webhook_id,
        });
      }
      const { key_id, signal } = caller;
      const own = testing.filter((one) => one === key_id).length;
      if (own >= maxTestsOfKey || testing.length >= maxTests) {
        throw new AppError('unavailable', 'too many webhook tests are running: try again later', {
          of_this_key: own,
        });
      }
      testing.push(key_id);
      const outcome = await sender
        .send(webhook.url, testMessage(), subscriptions.signerOf(webhook), signal)
        .finally(() => testing.splice(testing.indexOf(key_id), 1));
      const { delivered, status_code, duration, error } = outcome;
      return { delivered, status_code, duration, ...(error !== null && { error }) };
    },
    deliveries(input, caller) {
      access.find(input.webhook_id, caller);
      const { items, total } = pageOfRows(
        history,
        { table: 'webhook_deliveries', columns: '*' },
        [...readableOnly(caller), ...filtersOf(routes.deliveries, input)],
        input,
      );
      const withAnswers = caller.may('webhooks:write');
      return { items: items.map((row) => store.serialize(row, withAnswers)), total };
    },
    async redeliver({ webhook_id, delivery_id }, caller) {
      const webhook = findEnabled(parts, webhook_id, caller);
      const row = await history.write(() => {
        requestOne(parts, webhook, delivery_id, caller);
        return store.find(delivery_id)?.row ?? {};
      });
      parts.queue.wake(webhook_id);
      return store.serialize(row, caller.may('webhooks:write'));
    },
    async redeliverSince({ webhook_id, since }, caller) {
      const webhook = findEnabled(parts, webhook_id, caller);
      return { redelivered: await requestSince(parts, webhook, since, caller) };
    },
  };
}

/** Throws conflict for a webhook that is disabled: it gets nothing. */
function findEnabled(
  { access, subscriptions }: HandlerParts,
  webhook_id: WebhookId,
  caller: Caller,
): Webhook {
  const webhook = access.find(webhook_id, caller);
  if (subscriptions.isEnabled(webhook)) return webhook;
  throw new AppError('conflict', 'this webhook is disabled: enable it first', { webhook_id });
}

/** Requests a delivery again, in whatever state it is. Inside a transaction. */
function requestOne(
  { store, subscriptions }: HandlerParts,
  webhook: Webhook,
  delivery_id: string,
  caller: Caller,
): void {
  const { row, event } = store.find(delivery_id) ?? {};
  if (!event || row?.webhook_id !== webhook.id || !readerOf(caller)(event)) {
    throw new AppError('delivery_not_found', 'this webhook has no such delivery', { delivery_id });
  }
  const obstacle = subscriptions.obstacle(webhook, event);
  if (obstacle === 'not_permitted') {
    throw new AppError('forbidden', 'the key of this webhook may not read that event', { delivery_id });
  }
  if (obstacle) {
    throw new AppError('conflict', 'this webhook no longer names such events: add them to its events first', {
      delivery_id,
    });
  }
  store.request(webhook.id, event, true);
}

/** Requests each event since then that the webhook was to get and did not; returns how many. */
async function requestSince(
  { history, store, subscriptions, queue }: HandlerParts,
  webhook: Webhook,
  wanted: Date,
  caller: Caller,
): Promise<number> {
  // Earlier events were never for this webhook.
  const since = new Date(Math.max(wanted.getTime(), Date.parse(webhook.created_at)));
  let requested = 0;
  for (let after: number | undefined = sequenceBefore(since); after !== undefined; ) {
    const from: number = after;
    after = await history.write(() => {
      const mayRead = readerOf(caller);
      const { events, next } = store.eventsSince(since, from, eventStep);
      for (const event of events) {
        if (!mayRead(event) || subscriptions.obstacle(webhook, event)) continue;
        if (store.request(webhook.id, event)) requested += 1;
      }
      return next;
    });
    queue.wake(webhook.id);
  }
  return requested;
}

/** Spec 6.3. */
function testMessage(): Message {
  const [id, type] = ['evt_test', 'test'];
  const data = { message: 'This is a test delivery of your webhook.' };
  const event = { id, type, timestamp: iso(), data };
  return { id, type, deliveryId: newId('delivery'), body: Buffer.from(JSON.stringify(event)) };
}
