// The REST handlers of webhooks and of their deliveries.

import { scopeOfType, typesOf } from '../../shared/api/events.ts';
import type { Api, Caller, Handlers, Input, Reply, Rights } from '../../shared/api/route-table.ts';
import type { KeyId, MachineId, WebhookId } from '../../shared/api/shared-schemas.ts';
import { webhooks as routes } from '../../shared/api/webhooks.ts';
import { iso } from '../../shared/clock.ts';
import { definedFields, setsNothing } from '../../shared/defined-fields.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import { assertUrl } from '../deliveries/address-guard.ts';
import type { DeliveryQueue } from '../deliveries/delivery-queue.ts';
import { deliveryRows, type EventKind } from '../deliveries/delivery-store.ts';
import type { Deliveries } from '../deliveries/index.ts';
import type { RightsOf } from '../deliveries/key-rights-types.ts';
import { testMessage } from '../deliveries/signed-headers.ts';
import { readableOnly } from '../event-log.ts';
import { found, notFound, tooMany } from '../find-or-not-found.ts';
import type { History } from '../history/history-database.ts';
import { filtersOf, pageOf, pageOfRows } from '../list-pages-and-filters.ts';
import type { Declared, State, StateTransaction, Webhook } from '../state/index.ts';
import type { Subscriptions } from './webhook-subscriptions.ts';

interface HandlerParts extends Deliveries {
  state: State;
  history: History;
  rightsOf: RightsOf;
  subscriptions: Subscriptions;
  queue: DeliveryQueue<Webhook>;
}

type Routes = Handlers['webhooks'];
type Serialized = Reply<Api['webhooks']['get']>;
/** A key that reads or changes webhooks, with its rights at the time of the request or the transaction. */
type Editor = Rights & Pick<Caller, 'key_id'>;

/** Maximum number of webhooks. Each event is compared with every webhook. */
const maxWebhooks = 1_000;
/**
 * Maximum number of test deliveries at the same time: first for one key, then for all keys together. A test can occupy
 * a connection until its deadline.
 */
const [maxTestsOfKey, maxTests] = [4, 32];
/** Maximum number of events that are redelivered in one transaction. */
const eventStep = 500;

export class WebhookHandlers implements Routes {
  readonly #parts: HandlerParts;
  readonly #testing: KeyId[] = [];

  constructor(parts: HandlerParts) {
    this.#parts = parts;
  }

  readonly list: Routes['list'] = async (input, caller) => {
    const webhooks = [...this.#parts.state.webhooks.values()];
    const visible = webhooks.filter((webhook) => this.#covers(caller, webhook));
    const { items, total } = pageOf(
      routes.list,
      visible.map((webhook) => this.#withStatus(webhook)),
      input,
    );
    return { items: await Promise.all(items.map((webhook) => this.#serialize(webhook, caller))), total };
  };

  readonly get: Routes['get'] = (input, caller) => {
    return this.#serialize(this.#withStatus(this.#find(input.webhook_id, caller)), caller);
  };

  readonly create: Routes['create'] = async ({ secret, machine_ids = null, ...params }, caller) => {
    const { guard, state, vault } = this.#parts;
    await assertUrl(guard, params.url);
    assertScopes(caller, params.events);
    // The cast is safe: newId('webhook') has the form of a webhook's id.
    const id = newId('webhook') as WebhookId;
    const encrypted = secret === undefined ? null : vault.encrypt(id, secret);
    const at = { created_at: iso(), updated_at: iso() };
    const { key_id } = caller;
    const webhook: Webhook = { ...params, id, secret: encrypted, armed: 0, machine_ids, key_id, ...at };
    await state.change((transaction) => {
      assertScopes(caller.during(transaction), params.events);
      if (transaction.before.webhooks.size >= maxWebhooks) throw tooMany('webhooks', maxWebhooks);
      transaction.put('webhooks', webhook);
      caller.commit(transaction, { webhook_id: id });
    });
    return this.#serialize(this.#withStatus(webhook), caller);
  };

  readonly update: Routes['update'] = async (input, caller) => {
    const { guard, queue, state } = this.#parts;
    this.#find(input.webhook_id, caller);
    if (input.url !== undefined) await assertUrl(guard, input.url);
    const webhook = await state.change((transaction) => this.#change(input, caller, transaction));
    await queue.follow(webhook.id, input.enabled === true);
    return this.#serialize(this.#withStatus(webhook), caller);
  };

  readonly remove: Routes['remove'] = async ({ webhook_id }, caller) => {
    await this.#parts.state.change((transaction) => {
      this.#find(webhook_id, { key_id: caller.key_id, ...caller.during(transaction) }, transaction.before);
      transaction.remove('webhooks', webhook_id);
      caller.commit(transaction);
    });
    return { deleted: true };
  };

  readonly test: Routes['test'] = async ({ webhook_id }, caller) => {
    const { subscriptions } = this.#parts;
    const webhook = this.#find(webhook_id, caller);
    if (subscriptions.disabledReason(webhook) === 'secret_unreadable') {
      const message = `the secret of webhook ${webhook_id} cannot be decrypted; set it again`;
      throw new AppError('conflict', message, { webhook_id });
    }
    const { key_id, signal } = caller;
    const of_this_key = this.#testing.filter((one) => one === key_id).length;
    if (of_this_key >= maxTestsOfKey || this.#testing.length >= maxTests) {
      const message = 'too many webhook tests are running; try again later';
      throw new AppError('unavailable', message, { of_this_key });
    }
    this.#testing.push(key_id);
    const message = testMessage('This is a test delivery of your webhook.');
    const outcome = await subscriptions.send(webhook, message, signal);
    this.#testing.splice(this.#testing.indexOf(key_id), 1);
    const { delivered, status_code, duration, error } = outcome;
    return { delivered, status_code, duration, ...(error !== null && { error }) };
  };

  readonly deliveries: Routes['deliveries'] = async (input, caller) => {
    const { history, store } = this.#parts;
    this.#find(input.webhook_id, caller);
    const conditions = [...readableOnly(caller), ...filtersOf(routes.deliveries, input)];
    const { items, total } = await pageOfRows(history, deliveryRows, conditions, input);
    const withAnswers = caller.may('webhooks:write');
    return { items: items.map((row) => store.serialize(row, withAnswers)), total };
  };

  readonly redeliver: Routes['redeliver'] = async ({ webhook_id, delivery_id }, caller) => {
    const { history, queue, store, subscriptions } = this.#parts;
    const webhook = this.#findEnabled(webhook_id, caller);
    const row = await history.write(async (transaction) => {
      const { row, event } = (await store.find(delivery_id, transaction)) ?? {};
      if (!event || row?.webhook_id !== webhook_id || !mayRead(caller, event))
        throw notFound('delivery', delivery_id);
      const obstacle = subscriptions.obstacle(webhook, event);
      if (obstacle === 'not_permitted') {
        throw new AppError('forbidden', 'the key of this webhook is not allowed to read this event', {
          delivery_id,
        });
      }
      if (obstacle) {
        const message = 'this webhook no longer subscribes to this event; change its events or machine_ids';
        throw new AppError('conflict', message, { delivery_id });
      }
      await store.request(webhook_id, event, transaction, true);
      return (await store.find(delivery_id, transaction))?.row ?? row;
    });
    queue.reread(webhook_id);
    return store.serialize(row, caller.may('webhooks:write'));
  };

  readonly redeliverSince: Routes['redeliverSince'] = async ({ webhook_id, since: wanted }, caller) => {
    const { history, queue, store, subscriptions } = this.#parts;
    const webhook = this.#findEnabled(webhook_id, caller);
    // A webhook gets no events from before its creation.
    const since = new Date(Math.max(wanted.getTime(), Date.parse(webhook.created_at)));
    let redelivered = 0;
    for (let after: number | undefined, more = true; more; more = after !== undefined) {
      const from = after;
      const step = await history.write(async (transaction) => {
        const { events, next } = await store.eventsSince(since, eventStep, from, transaction);
        const sendable = events.filter(
          (event) => mayRead(caller, event) && !subscriptions.obstacle(webhook, event),
        );
        const requested = sendable.map((event) => store.request(webhook_id, event, transaction));
        return { next, count: (await Promise.all(requested)).filter(Boolean).length };
      });
      redelivered += step.count;
      after = step.next;
      queue.reread(webhook_id);
    }
    return { redelivered };
  };

  /**
   * True if the caller may read every event that the webhook sends. Other callers must not change the webhook, because
   * they could redirect its events to their own URL.
   */
  #covers(caller: Editor, webhook: Webhook, declared?: Declared): boolean {
    if (webhook.key_id === caller.key_id) return true;
    const owner = this.#parts.rightsOf(webhook.key_id, declared);
    const reaches = owner ? owner.within(caller.key_id) : caller.reachable() === undefined;
    return reaches && missingScope(caller, webhook.events) === undefined;
  }

  /** Finds a webhook that the caller may read and change. Throws webhook_not_found or forbidden. */
  #find(webhook_id: WebhookId, caller: Editor, declared: Declared = this.#parts.state): Webhook {
    const webhook = found(declared.webhooks, 'webhook', webhook_id);
    if (this.#covers(caller, webhook, declared)) return webhook;
    const message = `webhook ${webhook_id} sends events that this key is not allowed to read`;
    throw new AppError('forbidden', message, { webhook_id });
  }

  /** Finds an enabled webhook. Throws conflict for a disabled one, because it gets no deliveries. */
  #findEnabled(webhook_id: WebhookId, caller: Caller): Webhook {
    const webhook = this.#find(webhook_id, caller);
    if (this.#parts.subscriptions.isEnabled(webhook)) return webhook;
    throw new AppError('conflict', `webhook ${webhook_id} is disabled; enable it first`, { webhook_id });
  }

  #change(input: Input<Api['webhooks']['update']>, caller: Caller, transaction: StateTransaction): Webhook {
    const { webhook_id: id, ...changes } = input;
    const { secret, ...params } = changes;
    const { rightsOf, vault } = this.#parts;
    const editor = { key_id: caller.key_id, ...caller.during(transaction) };
    const before = this.#find(id, editor, transaction.before);
    if (setsNothing(changes)) return before;
    const webhook: Webhook = {
      ...before,
      ...definedFields(params),
      armed: params.enabled ? before.armed + 1 : before.armed,
      updated_at: iso(),
    };
    if (secret !== undefined) webhook.secret = secret === null ? null : vault.encrypt(id, secret);
    // A webhook belongs to the key that sets its URL. If that key is revoked or expired, the key that enables the
    // webhook again becomes its owner.
    const changesOwner =
      webhook.url !== before.url || (params.enabled && !rightsOf(before.key_id, transaction.before));
    if (changesOwner) webhook.key_id = caller.key_id;
    // Both the caller's key and the key that owns the webhook must be allowed to read the events.
    for (const reader of [editor, rightsOf(webhook.key_id, transaction.before) ?? editor]) {
      assertScopes(reader, webhook.events);
      assertReaches(reader, params.machine_ids ?? []);
    }
    transaction.put('webhooks', webhook);
    caller.commit(transaction);
    return webhook;
  }

  #withStatus(webhook: Webhook): Omit<Serialized, 'last_delivery'> {
    const { subscriptions } = this.#parts;
    const disabled_reason = webhook.enabled ? subscriptions.disabledReason(webhook) : null;
    const enabled = webhook.enabled && disabled_reason === null;
    const { secret: _, armed: _armed, key_id: _key, ...rest } = webhook;
    return { ...rest, enabled, disabled_reason };
  }

  async #serialize(webhook: Omit<Serialized, 'last_delivery'>, caller: Caller): Promise<Serialized> {
    const { store } = this.#parts;
    const last = await store.last(webhook.id);
    // The last delivery may be of an event to which the webhook no longer subscribes. The right to read the webhook
    // does not cover such an event. So the caller sees this delivery only if the caller's key may read the event.
    const delivery = last ? await store.find(last.delivery_id) : undefined;
    const machineId = delivery?.event.machineId ?? null;
    const readable = last && mayRead(caller, { type: last.type, machineId });
    return { ...webhook, last_delivery: readable ? last : null };
  }
}

/** Returns the first scope that these events need and that the reader does not have. */
function missingScope({ may }: Pick<Rights, 'may'>, events: readonly string[]) {
  const scopes = typesOf(events).map((type) => scopeOfType.get(type));
  return scopes.find((scope) => scope && !may(scope));
}

function assertScopes(reader: Pick<Rights, 'may'>, events: readonly string[]): void {
  const required_scope = missingScope(reader, events);
  if (!required_scope) return;
  const message = `a webhook sends only events that its key is allowed to read: the key needs the scope ${required_scope}`;
  throw new AppError('forbidden', message, { required_scope });
}

function assertReaches({ reaches }: Pick<Rights, 'reaches'>, machines: readonly MachineId[]): void {
  const machine_id = machines.find((machine) => !reaches(machine));
  if (machine_id === undefined) return;
  const message = `this key or the key that owns the webhook is not allowed to use machine ${machine_id}: leave the machine out of machine_ids`;
  throw new AppError('forbidden', message, { machine_id });
}

/** True if the caller may currently read an event. */
function mayRead({ may, reaches }: Caller, { type, machineId }: EventKind): boolean {
  const scope = scopeOfType.get(type);
  // For an event about no machine, reaches('') is true only for a key without limits.
  return scope !== undefined && may(scope) && reaches((machineId ?? '') as MachineId);
}
