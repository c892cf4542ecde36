// Decides which webhooks get an event. This is checked again before every attempt to send it.
import { names, scopeOfType } from '../../shared/api/events.ts';
import type { KeyId, Scope } from '../../shared/api/route.ts';
import type { Declared, State, Webhook } from '../state/in-memory-state.ts';
import type { DeliveryStore, EventKind } from './delivery-store.ts';
import type { SecretVault } from './secret-vault.ts';
import { type Signer, signerOf } from './signature.ts';

/** The rights of a key at this moment. */
export interface KeyRights {
  may(scope: Scope): boolean;
  reaches(machine: string): boolean;
  /** True if another key may use all machines that this key may use. */
  within(other: KeyId): boolean;
}

/**
 * Returns the rights of a key by `declared`, or by the committed documents if that is undefined. Returns
 * undefined if the key is revoked or expired.
 */
export type RightsOf = (id: KeyId, declared?: Declared) => KeyRights | undefined;

export class Subscriptions {
  readonly #state: State;
  readonly #store: DeliveryStore;
  readonly #vault: SecretVault;
  readonly #rightsOf: RightsOf;
  readonly #signers = new WeakMap<Webhook, Signer>();

  constructor(state: State, store: DeliveryStore, vault: SecretVault, rightsOf: RightsOf) {
    this.#state = state;
    this.#store = store;
    this.#vault = vault;
    this.#rightsOf = rightsOf;
  }

  /** Returns the webhooks that get an event. */
  for(event: EventKind): Webhook[] {
    return [...this.#state.webhooks.values()].filter(
      (webhook) => !this.obstacle(webhook, event) && this.isEnabled(webhook),
    );
  }

  /**
   * Returns the reason why a webhook that its user has enabled is disabled all the same; null if it is not
   * disabled.
   */
  disabledReason(webhook: Webhook): 'attempts_failed' | 'key_revoked' | 'secret_unreadable' | null {
    if (!this.#rightsOf(webhook.key_id)) return 'key_revoked';
    if (webhook.secret !== null && !this.signerOf(webhook)) return 'secret_unreadable';
    return this.#store.hasFailed(webhook.id, webhook.armed) ? 'attempts_failed' : null;
  }

  isEnabled(webhook: Webhook): boolean {
    return webhook.enabled && this.disabledReason(webhook) === null;
  }

  /**
   * Returns the reason why a webhook must not send an event: it is not subscribed, or its key may not read
   * the event.
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
    const secret = this.#vault.decrypt(webhook.id, webhook.secret);
    if (secret === undefined) return undefined;
    const signer = signerOf(secret);
    this.#signers.set(webhook, signer);
    return signer;
  }
}
