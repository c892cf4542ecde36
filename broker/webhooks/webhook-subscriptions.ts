// Decides which webhooks get an event. The decision is checked again before every attempt to send the event.
import { names, scopeOfType } from '../../shared/api/events.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Outcome } from '../deliveries/attempt-delivery.ts';
import type { Receivers } from '../deliveries/delivery-queue.ts';
import type { Delivery, EventKind } from '../deliveries/delivery-store.ts';
import type { Deliveries } from '../deliveries/index.ts';
import type { RightsOf } from '../deliveries/key-rights-types.ts';
import { headersOf, type Message, type Signer, signerOf } from '../deliveries/signed-headers.ts';
import type { Events } from '../event-log.ts';
import type { HistoryTransaction } from '../history/history-database.ts';
import type { State, Webhook } from '../state/index.ts';

interface SubscriptionContext {
  state: State;
  events: Events;
  rightsOf: RightsOf;
}

export class Subscriptions implements Receivers<Webhook> {
  readonly #state: State;
  readonly #events: Events;
  readonly #deliveries: Deliveries;
  readonly #rightsOf: RightsOf;
  readonly #log: Logger;
  readonly #signers = new WeakMap<Webhook, Signer>();

  constructor({ state, events, rightsOf }: SubscriptionContext, deliveries: Deliveries, log: Logger) {
    this.#state = state;
    this.#events = events;
    this.#deliveries = deliveries;
    this.#rightsOf = rightsOf;
    this.#log = log;
  }

  get byId(): ReadonlyMap<string, Webhook> {
    return this.#state.webhooks;
  }

  send(webhook: Webhook, message: Message, signal: AbortSignal): Promise<Outcome> {
    const signer = this.signerOf(webhook);
    const made = (at: number) => ({ headers: headersOf(message, signer, at), body: message.body });
    return this.#deliveries.sender.send(webhook.url, made, signal);
  }

  /** Disables a webhook after all attempts of a delivery failed. */
  gaveUp(webhook: Webhook, delivery: Delivery, transaction: HistoryTransaction): void {
    if (this.disabledReason(webhook) !== null) return;
    this.#deliveries.store.saveFailed(webhook.id, webhook.armed, transaction);
    const what = { webhook_id: webhook.id, delivery_id: delivery.id };
    this.#events.emit(transaction, 'webhook.disabled', undefined, { ...what, reason: 'attempts_failed' });
    transaction.committed(() => this.#log.warn(what, 'webhook disabled: all attempts of a delivery failed'));
  }

  /** Returns the webhooks to which an event is sent. */
  for(event: EventKind): Webhook[] {
    return [...this.#state.webhooks.values()].filter(
      (webhook) => !this.obstacle(webhook, event) && this.isEnabled(webhook),
    );
  }

  /** Returns why a webhook gets no deliveries although its user has enabled it; null if it gets deliveries. */
  disabledReason(webhook: Webhook): 'attempts_failed' | 'key_revoked' | 'secret_unreadable' | null {
    if (!this.#rightsOf(webhook.key_id)) return 'key_revoked';
    if (webhook.secret !== null && !this.signerOf(webhook)) return 'secret_unreadable';
    return this.#deliveries.store.hasFailed(webhook.id, webhook.armed) ? 'attempts_failed' : null;
  }

  isEnabled(webhook: Webhook): boolean {
    return webhook.enabled && this.disabledReason(webhook) === null;
  }

  /**
   * Returns the reason why a webhook must not send an event: the webhook does not subscribe to the event, or the key
   * of the webhook is not allowed to read the event.
   */
  obstacle(webhook: Webhook, { type, machineId }: EventKind): 'not_subscribed' | 'not_permitted' | undefined {
    const { key_id, events, machine_ids } = webhook;
    const scope = scopeOfType.get(type);
    if (!scope || !names(events, type)) return 'not_subscribed';
    if (machine_ids && !machine_ids.some((id) => id === machineId)) return 'not_subscribed';
    const rights = this.#rightsOf(key_id);
    return rights?.may(scope) && rights.reaches(machineId ?? '') ? undefined : 'not_permitted';
  }

  /** Returns the signer of a webhook; undefined if it has no secret or the secret cannot be decrypted. */
  signerOf(webhook: Webhook): Signer | undefined {
    const ready = this.#signers.get(webhook);
    if (ready || webhook.secret === null) return ready;
    const secret = this.#deliveries.vault.decrypt(webhook.id, webhook.secret);
    if (secret === undefined) return undefined;
    const signer = signerOf(secret);
    this.#signers.set(webhook, signer);
    return signer;
  }
}
