// What of deliveries REST shows and does: their list, a test at once, and asking again for what failed.
import type { Caller, Handlers } from '../../shared/api/index.ts';
import type { KeyId, WebhookId } from '../../shared/api/route.ts';
import { webhooks as routes, scopeOfType } from '../../shared/api/webhooks.ts';
import { iso } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';
import { readableOnly } from '../events.ts';
import type { History, Row } from '../history.ts';
import { numberBefore } from '../numbers.ts';
import { filtersOf, pageOfRows } from '../paging.ts';
import type { State, Webhook } from '../state/index.ts';
import type { Queue } from './queue.ts';
import type { Place, Records, Told } from './records.ts';
import type { Sender } from './send.ts';
import type { Obstacle, Subscriptions } from './subscriptions.ts';

export interface DeliveryRooms {
  state: State;
  history: History;
  records: Records;
  subscriptions: Subscriptions;
  sender: Sender;
  queue: Queue;
  /** A webhook that the caller may deal with. Throws webhook_not_found, forbidden. */
  find(id: WebhookId, caller: Caller): Webhook;
}

type DeliveryHandlers = Pick<Handlers['webhooks'], 'test' | 'deliveries' | 'redeliver' | 'redeliverSince'>;

/** Tests at once, of one key and in all: each may hold a connection for as long as an attempt. */
const [mostTestsOfKey, mostTests] = [4, 32];
/** Events looked at in one go. */
const step = 500;

export function deliveryHandlers(rooms: DeliveryRooms): DeliveryHandlers {
  const { history, records, subscriptions, sender, queue, find } = rooms;
  const testing: KeyId[] = [];

  /** Takes a place for a test until the result is called. */
  function beginTest({ key_id }: Caller): () => void {
    const own = testing.filter((one) => one === key_id).length;
    if (own >= mostTestsOfKey || testing.length >= mostTests)
      throw new AppError('unavailable', 'many tests are under way: try again later', { of_this_key: own });
    testing.push(key_id);
    return () => void testing.splice(testing.indexOf(key_id), 1);
  }

  /** Only what is enabled gets anything. */
  function enabled(id: WebhookId, caller: Caller): Webhook {
    const webhook = find(id, caller);
    if (subscriptions.isEnabled(webhook)) return webhook;
    throw new AppError('conflict', 'this webhook is disabled: enable it first', { webhook_id: id });
  }

  /** Asks again for what of these this webhook was to get and did not; tells for how many. */
  async function againAmong(
    webhook: Webhook,
    place: Place,
    caller: Caller,
  ): Promise<{ asked: number; next: Place | undefined }> {
    const mayRead = readerOf(caller);
    return history.write(() => {
      const { events, next } = records.eventsFrom(place, step);
      const asked = events.filter(
        (told) =>
          mayRead(told) &&
          subscriptions.mayTell(webhook, told.type, told.machineId) &&
          records.again(webhook.id, told),
      );
      return { asked: asked.length, next };
    });
  }

  return {
    async test(input, caller) {
      const webhook = find(input.webhook_id, caller);
      if (subscriptions.disabledReason(webhook) === 'secret_unreadable') {
        throw new AppError('conflict', 'the secret of this webhook cannot be read: give it a new one', {
          webhook_id: webhook.id,
        });
      }
      const end = beginTest(caller);
      try {
        const signer = subscriptions.signerOf(webhook);
        const outcome = await sender.send(webhook.url, testMessage(), signer, caller.signal);
        const { delivered, status_code, duration, error } = outcome;
        return { delivered, status_code, duration, ...(error !== null && { error }) };
      } finally {
        end();
      }
    },
    deliveries(input, caller) {
      find(input.webhook_id, caller);
      const page = pageOfRows(
        history,
        { table: 'webhook_deliveries', columns: '*' },
        [...readableOnly(caller), ...filtersOf(routes.deliveries, input)],
        input,
      );
      const answers = caller.may('webhooks:write');
      return { items: page.items.map((row) => records.shown(row, answers)), total: page.total };
    },
    async redeliver(input, caller) {
      const webhook = enabled(input.webhook_id, caller);
      const row = await history.write(() => {
        const found = records.find(input.delivery_id);
        if (found?.row.webhook_id !== webhook.id || !readerOf(caller)(found.told)) {
          throw new AppError('delivery_not_found', 'no such delivery of this webhook', {
            delivery_id: input.delivery_id,
          });
        }
        refuseObstacle(subscriptions.obstacle(webhook, found.told.type, found.told.machineId), found.row);
        records.redo(input.delivery_id);
        return records.find(input.delivery_id)?.row ?? found.row;
      });
      queue.wake(webhook.id);
      return records.shown(row, caller.may('webhooks:write'));
    },
    async redeliverSince(input, caller) {
      const webhook = enabled(input.webhook_id, caller);
      let redelivered = 0;
      // What happened before there was a webhook was never for it.
      const since = new Date(Math.max(input.since.getTime(), Date.parse(webhook.created_at)));
      for (let place: Place | undefined = { since, after: numberBefore(since) }; place; ) {
        const { asked, next }: Awaited<ReturnType<typeof againAmong>> = await againAmong(
          webhook,
          place,
          caller,
        );
        redelivered += asked;
        place = next;
        queue.wake(webhook.id);
      }
      return { redelivered };
    },
  };
}

function refuseObstacle(obstacle: Obstacle | undefined, { id }: Row): void {
  if (obstacle === 'not_permitted') {
    throw new AppError('forbidden', 'the key of this webhook may not read that event', { delivery_id: id });
  }
  if (obstacle) {
    throw new AppError('conflict', 'this webhook no longer tells such events', { delivery_id: id });
  }
}

/** Whether a caller may read an event itself, at this moment. */
export function readerOf(caller: Caller): (told: Pick<Told, 'type' | 'machineId'>) => boolean {
  const machines = caller.reachable();
  return ({ type, machineId }) => {
    const scope = scopeOfType.get(type);
    if (!scope || !caller.may(scope)) return false;
    return machines === undefined || machines.some((id) => id === machineId);
  };
}

/** Spec 6.3. */
function testMessage() {
  const type = 'test';
  const event = {
    id: 'evt_test',
    type,
    timestamp: iso(),
    data: { message: 'This is a test: deliveries of this webhook look so.' },
  };
  return { id: event.id, type, deliveryId: newId('delivery'), body: Buffer.from(JSON.stringify(event)) };
}
