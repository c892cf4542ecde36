// REST handlers that list, create, change and remove webhooks.
import type { Api, Caller, Handlers, Input, Reply } from '../../shared/api/index.ts';
import type { WebhookId } from '../../shared/api/route.ts';
import { webhooks as routes } from '../../shared/api/webhooks.ts';
import { iso } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';
import { pageOf } from '../paging.ts';
import type { Draft, State, Webhook } from '../state/index.ts';
import { type AddressGuard, NotAllowed } from './address-guard.ts';
import type { DeliveryQueue } from './delivery-queue.ts';
import type { DeliveryStore } from './delivery-store.ts';
import type { SecretVault } from './secret-vault.ts';
import type { RightsOf, Subscriptions } from './subscriptions.ts';
import { assertReaches, assertScopes, readerOf, type WebhookAccess } from './webhook-access.ts';

interface HandlerParts {
  state: State;
  store: DeliveryStore;
  subscriptions: Subscriptions;
  queue: DeliveryQueue;
  guard: AddressGuard;
  vault: SecretVault;
  access: WebhookAccess;
  rightsOf: RightsOf;
}

type WebhookHandlers = Pick<Handlers['webhooks'], 'list' | 'get' | 'create' | 'update' | 'remove'>;

/** Each event is matched against every webhook. */
const maxWebhooks = 1_000;

export function webhookHandlers(parts: HandlerParts): WebhookHandlers {
  const { state, vault, queue, guard, access } = parts;
  return {
    list(input, caller) {
      const visible = [...state.webhooks.values()].filter((webhook) => access.covers(caller, webhook));
      const page = pageOf(routes.list, visible, input, (webhook, field) =>
        Reflect.get(withStatus(parts, webhook), field),
      );
      return { items: page.items.map((webhook) => serialize(parts, webhook, caller)), total: page.total };
    },
    get: (input, caller) => serialize(parts, access.find(input.webhook_id, caller), caller),
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
      access.find(input.webhook_id, caller);
      if (input.url !== undefined) await assertUrl(guard, input.url);
      const { before, webhook } = await state.change((draft) => change(parts, input, caller, draft));
      await queue.follow(before, webhook);
      return serialize(parts, webhook, caller);
    },
    async remove(input, caller) {
      await state.change((draft) => {
        access.find(input.webhook_id, { key_id: caller.key_id, ...caller.during(draft) }, draft.before);
        draft.remove('webhooks', input.webhook_id);
        caller.commit(draft);
      });
      return { deleted: true };
    },
  };
}

function change(
  { access, vault, rightsOf }: HandlerParts,
  { webhook_id: id, secret, ...params }: Input<Api['webhooks']['update']>,
  caller: Caller,
  draft: Draft,
): { before: Webhook; webhook: Webhook } {
  const editor = { key_id: caller.key_id, ...caller.during(draft) };
  const before = access.find(id, editor, draft.before);
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
