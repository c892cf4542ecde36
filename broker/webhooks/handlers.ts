// REST handlers of webhooks and of their deliveries.
import type { Api, Caller, Handlers, Input, Reply, Rights } from '../../shared/api/index.ts';
import type { KeyId, MachineId, WebhookId } from '../../shared/api/route.ts';
import { webhooks as routes, scopeOfType, typesOf } from '../../shared/api/webhooks.ts';
import { iso } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';
import { readableOnly } from '../events.ts';
import { filtersOf, pageOf, pageOfRows } from '../paging.ts';
import type { Declared, Draft, Webhook } from '../state/index.ts';
import { type AddressGuard, NotAllowed } from './address-guard.ts';
import type { DeliveryQueue, QueueParts } from './delivery-queue.ts';
import type { EventKind } from './delivery-store.ts';
import type { SecretVault } from './secret-vault.ts';
import type { Message } from './signature.ts';
import type { RightsOf } from './subscriptions.ts';

interface HandlerParts extends QueueParts {
  queue: DeliveryQueue;
  guard: AddressGuard;
  vault: SecretVault;
  rightsOf: RightsOf;
}

/** A caller, with the rights of that moment. */
type Editor = Rights & Pick<Caller, 'key_id'>;

/** Each event is matched against every webhook. */
const maxWebhooks = 1_000;
/** Tests at once, of one key and in all: each may hold a connection as long as an attempt. */
const [maxTestsOfKey, maxTests] = [4, 32];
/** Events looked at in one transaction. */
const eventStep = 500;

export function webhookHandlers(parts: HandlerParts): Handlers['webhooks'] {
  return { ...resourceHandlers(parts), ...deliveryHandlers(parts) };
}

function resourceHandlers(
  parts: HandlerParts,
): Pick<Handlers['webhooks'], 'list' | 'get' | 'create' | 'update' | 'remove'> {
  const { state, vault, queue, guard } = parts;
  return {
    list(input, caller) {
      const visible = [...state.webhooks.values()].filter((webhook) => covers(parts, caller, webhook));
      const page = pageOf(routes.list, visible, input, (webhook, field) =>
        Reflect.get(withStatus(parts, webhook), field),
      );
      return { items: page.items.map((webhook) => serialize(parts, webhook, caller)), total: page.total };
    },
    get: (input, caller) => serialize(parts, find(parts, input.webhook_id, caller), caller),
    async create({ secret, machine_ids = null, ...params }, caller) {
      await assertUrl(guard, params.url);
      assertScopes(caller, params.events);
      // The kind decides the form of the id.
      const id = newId('webhook') as WebhookId;
      const webhook: Webhook = {
        ...params,
        id,
        secret: secret === undefined ? null : vault.encrypt(id, secret),
        armed: 0,
        machine_ids,
        key_id: caller.key_id,
        created_at: iso(),
        updated_at: iso(),
      };
      await state.change((draft) => {
        assertScopes(caller.during(draft), params.events);
        if (draft.all('webhooks').length >= maxWebhooks) {
          throw new AppError(
            'unavailable',
            `there are ${maxWebhooks} webhooks, the most allowed: remove one`,
          );
        }
        draft.put('webhooks', webhook);
        caller.commit(draft, { webhook_id: id });
      });
      return serialize(parts, webhook, caller);
    },
    async update(input, caller) {
      find(parts, input.webhook_id, caller);
      if (input.url !== undefined) await assertUrl(guard, input.url);
      const { before, webhook } = await state.change((draft) => change(parts, input, caller, draft));
      await queue.follow(before, webhook);
      return serialize(parts, webhook, caller);
    },
    async remove(input, caller) {
      await state.change((draft) => {
        find(parts, input.webhook_id, { key_id: caller.key_id, ...caller.during(draft) }, draft.before);
        draft.remove('webhooks', input.webhook_id);
        caller.commit(draft);
      });
      return { deleted: true };
    },
  };
}

function change(
  parts: HandlerParts,
  { webhook_id: id, secret, ...params }: Input<Api['webhooks']['update']>,
  caller: Caller,
  draft: Draft,
): { before: Webhook; webhook: Webhook } {
  const editor = { key_id: caller.key_id, ...caller.during(draft) };
  const { vault, rightsOf } = parts;
  const before = find(parts, id, editor, draft.before);
  const webhook: Webhook = {
    ...before,
    url: params.url ?? before.url,
    events: params.events ?? before.events,
    enabled: params.enabled ?? before.enabled,
    secret: typeof secret === 'string' ? vault.encrypt(id, secret) : (secret ?? before.secret),
    machine_ids: params.machine_ids === undefined ? before.machine_ids : params.machine_ids,
    armed: params.enabled ? before.armed + 1 : before.armed,
    updated_at: iso(),
  };
  if (secret === null) webhook.secret = null;
  // A webhook belongs to the key that sets its URL, or enables it after its own key has gone.
  const taken = webhook.url !== before.url || (params.enabled && !rightsOf(before.key_id, draft.before));
  if (taken) webhook.key_id = caller.key_id;
  // Both keys must be able to read it: the editor could have more sent to itself.
  for (const reader of [editor, rightsOf(webhook.key_id, draft.before) ?? editor]) {
    assertScopes(reader, webhook.events);
    assertReaches(reader, params.machine_ids ?? []);
  }
  draft.put('webhooks', webhook);
  caller.commit(draft);
  return { before, webhook };
}

function withStatus({ subscriptions }: HandlerParts, webhook: Webhook) {
  const disabled_reason = webhook.enabled ? subscriptions.disabledReason(webhook) : null;
  return { ...webhook, enabled: subscriptions.isEnabled(webhook), disabled_reason };
}

function serialize(parts: HandlerParts, webhook: Webhook, caller: Caller): Reply<Api['webhooks']['get']> {
  const { secret: _, armed: _armed, key_id: _key, ...rest } = withStatus(parts, webhook);
  const last = parts.store.last(webhook.id);
  // The last delivery may be of an event that the webhook no longer names.
  const machineId = (last && parts.store.find(last.delivery_id)?.event.machineId) ?? null;
  const readable = last && readerOf(caller)({ type: last.type, machineId });
  return { ...rest, last_delivery: readable ? last : null };
}

async function assertUrl(guard: AddressGuard, url: string): Promise<void> {
  try {
    await guard.assertUrl(new URL(url));
  } catch (error) {
    if (!(error instanceof NotAllowed)) throw error;
    const issues = [{ path: 'url', message: error.message }];
    throw new AppError('validation_failed', `body: url: ${error.message}`, { issues });
  }
}

function deliveryHandlers(
  parts: HandlerParts,
): Pick<Handlers['webhooks'], 'test' | 'deliveries' | 'redeliver' | 'redeliverSince'> {
  const { history, store, subscriptions, sender } = parts;
  const testing: KeyId[] = [];
  return {
    async test({ webhook_id }, caller) {
      const webhook = find(parts, webhook_id, caller);
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
      find(parts, input.webhook_id, caller);
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
      parts.queue.reread(webhook_id);
      return store.serialize(row, caller.may('webhooks:write'));
    },
    async redeliverSince({ webhook_id, since }, caller) {
      const webhook = findEnabled(parts, webhook_id, caller);
      return { redelivered: await requestSince(parts, webhook, since, caller) };
    },
  };
}

/** Throws conflict for a webhook that is disabled: it gets nothing. */
function findEnabled(parts: HandlerParts, webhook_id: WebhookId, caller: Caller): Webhook {
  const webhook = find(parts, webhook_id, caller);
  if (parts.subscriptions.isEnabled(webhook)) return webhook;
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
  for (let after: number | undefined, more = true; more; more = after !== undefined) {
    after = await history.write(() => {
      const mayRead = readerOf(caller);
      const { events, next } = store.eventsSince(since, eventStep, after);
      for (const event of events) {
        if (!mayRead(event) || subscriptions.obstacle(webhook, event)) continue;
        if (store.request(webhook.id, event)) requested += 1;
      }
      return next;
    });
    queue.reread(webhook.id);
  }
  return requested;
}

/** Spec 6.3. */
function testMessage(): Message {
  const [eventId, type] = ['evt_test', 'test'];
  const data = { message: 'This is a test delivery of your webhook.' };
  const body = Buffer.from(JSON.stringify({ id: eventId, type, timestamp: iso(), data }));
  return { id: newId('delivery'), eventId, type, body };
}

/** Whether the caller may read every event that a webhook sends; else it could read them through the webhook. */
function covers(
  { state, rightsOf }: HandlerParts,
  caller: Editor,
  webhook: Webhook,
  declared: Declared = state,
): boolean {
  if (webhook.key_id === caller.key_id) return true;
  const owner = rightsOf(webhook.key_id, declared);
  const reaches = owner ? owner.within(caller.key_id) : caller.reachable() === undefined;
  return reaches && missingScope(caller, webhook.events) === undefined;
}

/** A webhook that the caller may see and change. Throws webhook_not_found, forbidden. */
function find(
  parts: HandlerParts,
  webhook_id: WebhookId,
  caller: Editor,
  declared: Declared = parts.state,
): Webhook {
  const webhook = declared.webhooks.get(webhook_id);
  if (!webhook) throw new AppError('webhook_not_found', 'no such webhook', { webhook_id });
  if (covers(parts, caller, webhook, declared)) return webhook;
  throw new AppError('forbidden', 'this webhook sends events that this key may not read', { webhook_id });
}

type Reader = Pick<Rights, 'may'>;

/** The first scope that reading these events needs and the reader lacks. */
function missingScope({ may }: Reader, events: readonly string[]) {
  return typesOf(events)
    .map((type) => scopeOfType.get(type))
    .find((scope) => scope && !may(scope));
}

function assertScopes(reader: Reader, events: readonly string[]): void {
  const required_scope = missingScope(reader, events);
  if (!required_scope) return;
  const message = `a webhook sends only what its key may read: ${required_scope} is missing`;
  throw new AppError('forbidden', message, { required_scope });
}

function assertReaches({ reaches }: Pick<Rights, 'reaches'>, machines: readonly MachineId[]): void {
  const outside = machines.find((machine) => !reaches(machine));
  if (outside === undefined) return;
  throw new AppError('forbidden', 'the key of this webhook does not reach that machine', {
    machine_id: outside,
  });
}

/** Whether a caller may read an event itself, at this moment. */
function readerOf(caller: Caller): (event: EventKind) => boolean {
  const machines = caller.reachable();
  return ({ type, machineId }) => {
    const scope = scopeOfType.get(type);
    if (!scope || !caller.may(scope)) return false;
    return machines === undefined || machines.some((id) => id === machineId);
  };
}
