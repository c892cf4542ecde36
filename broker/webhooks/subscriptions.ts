// Which webhooks are to be told of an event, and whether they may: judged when it happens and at every attempt.
import type { KeyId, Scope, WebhookId } from '../../shared/api/route.ts';
import { names, scopeOfType, typesOf } from '../../shared/api/webhooks.ts';
import type { Declared, State, Webhook } from '../state/index.ts';
import { type Signer, signerOf } from './sign.ts';
import type { Vault } from './vault.ts';

/** What a key may at this moment. */
export interface Rights {
  may(scope: Scope): boolean;
  reaches(machine: string): boolean;
  /** Whether another key reaches all that this one does. */
  within(other: KeyId): boolean;
}

/** Of a key that is neither revoked nor expired: as it is committed, or as a change under way finds it. */
export type RightsOf = (id: KeyId, declared?: Declared) => Rights | undefined;

export type DisabledReason = 'attempts_failed' | 'key_revoked' | 'secret_unreadable';

export type Obstacle = 'not_subscribed' | 'not_permitted';

export interface Subscriptions {
  /** Those that are to be told of an event. */
  wanting(type: string, machineId: string | null): Webhook[];
  /** Why a webhook is disabled though it was declared enabled. */
  disabledReason(webhook: Webhook): DisabledReason | null;
  isEnabled(webhook: Webhook): boolean;
  /** Why it must not tell such an event: it does not name it, or its key may not read it. */
  obstacle(webhook: Webhook, type: string, machineId: string | null): Obstacle | undefined;
  mayTell(webhook: Webhook, type: string, machineId: string | null): boolean;
  /** Undefined for one without a secret, or whose secret cannot be read. */
  signerOf(webhook: Webhook): Signer | undefined;
  tripped(id: WebhookId, armed: number): void;
}

/** `trips`: how often each webhook was armed when it failed too often. */
export function openSubscriptions(
  state: State,
  vault: Vault,
  rightsOf: RightsOf,
  trips: Map<string, number>,
): Subscriptions {
  const byType = typeIndex(state);
  const signers = new WeakMap<Webhook, { signer: Signer | undefined }>();

  function readySigner(webhook: Webhook): Signer | undefined {
    const known = signers.get(webhook);
    if (known) return known.signer;
    const secret = webhook.secret === null ? undefined : vault.open(webhook.id, webhook.secret);
    const signer = secret === undefined ? undefined : signerOf(secret);
    signers.set(webhook, { signer });
    return signer;
  }

  const subscriptions: Subscriptions = {
    wanting: (type, machineId) =>
      (byType().get(type) ?? []).filter(
        (webhook) => subscriptions.isEnabled(webhook) && subscriptions.mayTell(webhook, type, machineId),
      ),
    disabledReason(webhook) {
      if (!rightsOf(webhook.key_id)) return 'key_revoked';
      if (webhook.secret !== null && !readySigner(webhook)) return 'secret_unreadable';
      return trips.get(webhook.id) === webhook.armed ? 'attempts_failed' : null;
    },
    isEnabled: (webhook) => webhook.enabled && subscriptions.disabledReason(webhook) === null,
    obstacle({ key_id, events, machine_ids }, type, machineId) {
      const scope = scopeOfType.get(type);
      if (!scope || !names(events, type)) return 'not_subscribed';
      if (machine_ids && !machine_ids.some((id) => id === machineId)) return 'not_subscribed';
      const rights = rightsOf(key_id);
      return rights?.may(scope) && rights.reaches(machineId ?? '') ? undefined : 'not_permitted';
    },
    mayTell: (webhook, type, machineId) => subscriptions.obstacle(webhook, type, machineId) === undefined,
    signerOf: readySigner,
    tripped: (id, armed) => void trips.set(id, armed),
  };
  return subscriptions;
}

/** Webhooks by the types they name, made anew only when the committed ones changed. */
function typeIndex(state: State): () => Map<string, Webhook[]> {
  let from: State['webhooks'] | undefined;
  let index = new Map<string, Webhook[]>();
  return () => {
    if (from === state.webhooks) return index;
    from = state.webhooks;
    index = new Map();
    for (const webhook of from.values()) {
      for (const type of typesOf(webhook.events)) index.set(type, [...(index.get(type) ?? []), webhook]);
    }
    return index;
  };
}
