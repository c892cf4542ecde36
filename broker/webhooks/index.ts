// Webhooks: connects the parts that record, queue and send deliveries. Deliveries are sent at least once, and only to
// allowed addresses.
import type { Logger } from '../../shared/logger.ts';
import { DeliveryQueue, type QueueParts, type RetrySettings } from '../deliveries/delivery-queue.ts';
import type { Deliveries } from '../deliveries/index.ts';
import type { RightsOf } from '../deliveries/key-rights-types.ts';
import type { Events } from '../event-log.ts';
import type { History } from '../history/history-database.ts';
import type { State, Webhook } from '../state/index.ts';
import { WebhookHandlers } from './webhook-handlers.ts';
import { Subscriptions } from './webhook-subscriptions.ts';

export type Webhooks = ReturnType<typeof createWebhooks>;

/** Creates all parts of webhooks. Once this returns, every new event is stored with its deliveries. */
export function createWebhooks(
  given: {
    state: State;
    history: History;
    events: Events;
    rightsOf: RightsOf;
    claims: QueueParts<Webhook>['claims'];
  },
  deliveries: Deliveries,
  retry: RetrySettings,
  log: Logger,
) {
  const { state, history, events, claims } = given;
  const { store } = deliveries;
  const subscriptions = new Subscriptions(given, deliveries, log);
  const queue = new DeliveryQueue({ state, history, store, receivers: subscriptions, claims }, retry, log);

  events.within(({ id, type, timestamp }, machineId) => {
    const event = { id, type, machineId, at: Date.parse(timestamp) };
    const subscribed = subscriptions.for(event);
    if (subscribed.length === 0) return undefined;
    return (transaction) => {
      const requested = subscribed.map((webhook) => {
        transaction.committed(() => queue.wake(webhook.id));
        return store.request(webhook.id, event, transaction);
      });
      return Promise.all(requested);
    };
  });

  return {
    queue,
    handlers: new WebhookHandlers({ ...given, ...deliveries, subscriptions, queue }),
    async start(): Promise<void> {
      for (const webhook of state.webhooks.values()) {
        if (subscriptions.disabledReason(webhook) !== 'secret_unreadable') continue;
        log.error(
          { webhook_id: webhook.id },
          'a webhook is disabled, because the key in webhooks.key cannot decrypt its secret; set the secret again',
        );
      }
      await queue.start();
    },
  };
}
