// Webhooks: connects the parts that record, queue and send deliveries. Deliveries are sent at least once, and
// only to allowed addresses.
import { StartError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Events } from '../events.ts';
import type { History } from '../history/history.ts';
import type { State } from '../state/in-memory-state.ts';
import { AddressGuard, type Network, networkOf } from './address-guard.ts';
import { DeliveryQueue, type RetrySettings } from './delivery-queue.ts';
import { DeliveryStore } from './delivery-store.ts';
import { WebhookHandlers } from './handlers.ts';
import { type ResolveName, resolveName } from './resolve-name.ts';
import { SecretVault } from './secret-vault.ts';
import { Sender } from './sender.ts';
import { type RightsOf, Subscriptions } from './subscriptions.ts';

export interface WebhookSettings extends RetrySettings {
  /** Directory of the key file for the secrets. */
  directory: string;
  /** Networks that webhooks may call besides the public internet. */
  allow: readonly string[];
  keepMs: number;
  /** Replaces the hosts file and the name servers in tests. */
  resolve: ResolveName | undefined;
}

export type Webhooks = Awaited<ReturnType<typeof createWebhooks>>;

/**
 * Creates all parts of webhooks. From then on each event is stored with its deliveries. Throws StartError.
 */
export async function createWebhooks(
  given: { state: State; history: History; events: Events; rightsOf: RightsOf },
  settings: WebhookSettings,
  log: Logger,
) {
  const { state, history, events, rightsOf } = given;
  const vault = await SecretVault.open(settings.directory);
  const store = await DeliveryStore.open(history, settings.keepMs);
  const subscriptions = new Subscriptions(state, store, vault, rightsOf);
  const guard = new AddressGuard(settings.allow.map(assertNetwork), settings.resolve ?? resolveName);
  const sender = new Sender(guard);
  const parts = { ...given, vault, store, subscriptions, guard, sender };
  const queue = new DeliveryQueue(parts, settings, log);

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
    handlers: new WebhookHandlers({ ...parts, queue }),
    hasDelivery: async (id: string): Promise<boolean> => (await store.find(id)) !== undefined,
    /** Starts to send deliveries. Webhooks never call `ownPorts`, the ports of this broker. */
    async start(ownPorts: readonly number[]): Promise<void> {
      guard.protect(ownPorts);
      for (const webhook of state.webhooks.values()) {
        if (subscriptions.disabledReason(webhook) !== 'secret_unreadable') continue;
        log.error(
          { webhook_id: webhook.id },
          'a webhook is disabled, because webhooks.key does not decrypt its secret; set the secret again',
        );
      }
      await queue.start();
    },
    async close(): Promise<void> {
      await queue.close();
      await sender.close();
    },
  };
}

function assertNetwork(text: string): Network {
  const network = networkOf(text);
  if (network) return network;
  throw new StartError(
    `--webhook-allow ${text}: must be a complete address or network, such as 10.0.0.0/8 or fd00::/8`,
  );
}
