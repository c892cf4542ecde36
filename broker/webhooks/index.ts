// Webhooks: whoever subscribed is told what happened, at least once, and nowhere that webhooks must not go.
import type { Handlers } from '../../shared/api/index.ts';
import { StartError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Events } from '../events.ts';
import type { History } from '../history.ts';
import type { State } from '../state/index.ts';
import { openGuard, type Range, rangeOf } from './guard.ts';
import { webhookHandlers } from './handlers.ts';
import { openQueue, type Patience } from './queue.ts';
import { openRecords } from './records.ts';
import { openResolver, type Resolve } from './resolve.ts';
import { openSender } from './send.ts';
import { openSubscriptions, type RightsOf } from './subscriptions.ts';
import { openVault } from './vault.ts';

export interface WebhookRooms {
  state: State;
  history: History;
  events: Events;
  rightsOf: RightsOf;
}

export interface WebhookSettings extends Patience {
  /** Where the key file of secrets lies. */
  directory: string;
  /** Networks besides the public internet. */
  allow: readonly string[];
  keepMs: number;
  /** Instead of the system's name servers (tests). */
  resolve: Resolve | undefined;
}

export interface Webhooks {
  handlers: Handlers['webhooks'];
  hasDelivery(id: string): boolean;
  /** Begins to deliver; never to the broker's own ports. */
  start(ownPorts: readonly number[]): void;
  close(): Promise<void>;
}

/** Opens the room: from now on events are recorded with their deliveries. Throws StartError. */
export function openWebhooks(rooms: WebhookRooms, settings: WebhookSettings, log: Logger): Webhooks {
  const { state, history, events, rightsOf } = rooms;
  const vault = openVault(settings.directory);
  const records = openRecords(history, settings.keepMs);
  const subscriptions = openSubscriptions(state, vault, rightsOf, records.trips());
  const guard = openGuard(settings.allow.map(demandRange));
  const resolver = openResolver();
  const resolve = settings.resolve ?? resolver.resolve;
  const sender = openSender(guard, resolve);
  const queue = openQueue({ ...rooms, records, subscriptions, sender }, settings, log);

  events.within((event, machineId, transaction) => {
    const told = { id: event.id, type: event.type, machineId, at: Date.parse(event.timestamp) };
    for (const { id } of subscriptions.wanting(event.type, machineId)) {
      records.insert(id, told);
      transaction.committed(() => queue.wake(id));
    }
  });

  return {
    handlers: webhookHandlers({
      state,
      history,
      records,
      subscriptions,
      guard,
      resolve,
      vault,
      sender,
      queue,
      rightsOf,
    }),
    hasDelivery: records.exists,
    start(ownPorts) {
      guard.protect(ownPorts);
      for (const webhook of state.webhooks.values()) {
        if (subscriptions.disabledReason(webhook) !== 'secret_unreadable') continue;
        log.error(
          { webhook_id: webhook.id },
          'webhooks.key is missing or another: give this webhook its secret again',
        );
      }
      queue.start();
    },
    async close() {
      await queue.close();
      await sender.close();
      resolver.close();
    },
  };
}

function demandRange(text: string): Range {
  const range = rangeOf(text);
  if (range) return range;
  throw new StartError(
    `--webhook-allow ${text}: must be an address or a network in full, such as 10.0.0.0/8 or fd00::/8`,
  );
}
