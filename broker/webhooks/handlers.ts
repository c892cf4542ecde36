// Webhooks over REST: made for what their key may read, changed by who may read as much, before and after.
import type { Api, Caller, Handlers, Reply, Rights } from '../../shared/api/index.ts';
import type { MachineId, WebhookId } from '../../shared/api/route.ts';
import { webhooks as routes, scopeOfType, typesOf } from '../../shared/api/webhooks.ts';
import { iso } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';
import { pageOf } from '../paging.ts';
import type { Declared, Webhook } from '../state/index.ts';
import { type DeliveryRooms, deliveryHandlers, readerOf } from './deliveries.ts';
import { type Guard, NotAllowed } from './guard.ts';
import type { Resolve } from './resolve.ts';
import type { RightsOf } from './subscriptions.ts';
import type { Vault } from './vault.ts';

export interface HandlerRooms extends Omit<DeliveryRooms, 'find'> {
  guard: Guard;
  resolve: Resolve;
  vault: Vault;
  rightsOf: RightsOf;
}

type Shown = Reply<Api['webhooks']['get']>;

/** In all: each costs a look at every event. */
const mostWebhooks = 1_000;

export function webhookHandlers(rooms: HandlerRooms): Handlers['webhooks'] {
  const { state, records, subscriptions, vault, queue, rightsOf } = rooms;

  /** Whether a key may read all that a webhook tells: else it could have that sent to itself. */
  function mayDeal(caller: Dealer, webhook: Webhook, declared: Declared = state): boolean {
    if (webhook.key_id === caller.key_id) return true;
    const owner = rightsOf(webhook.key_id, declared);
    const reaches = owner ? owner.within(caller.key_id) : caller.reachable() === undefined;
    return reaches && missingScope(caller, webhook.events) === undefined;
  }

  function find(id: WebhookId, caller: Dealer, declared: Declared = state): Webhook {
    const webhook = declared.webhooks.get(id);
    if (!webhook) throw new AppError('webhook_not_found', 'no such webhook', { webhook_id: id });
    if (mayDeal(caller, webhook, declared)) return webhook;
    throw new AppError('forbidden', 'this webhook tells more than this key may read', { webhook_id: id });
  }

  /** The last delivery may be of an event that the webhook no longer names. */
  function lastFor(caller: Caller, webhook: Webhook): Shown['last_delivery'] {
    const last = records.lastOf(webhook.id);
    if (!last) return null;
    const machineId = records.find(last.delivery_id)?.told.machineId ?? null;
    return readerOf(caller)({ type: last.type, machineId }) ? last : null;
  }

  function shown(webhook: Webhook, caller: Caller): Shown {
    const { secret: _, armed: _armed, key_id: _key, ...rest } = withStatus(webhook);
    return { ...rest, last_delivery: lastFor(caller, webhook) };
  }

  function withStatus(webhook: Webhook) {
    const enabled = subscriptions.isEnabled(webhook);
    const disabled_reason = webhook.enabled ? subscriptions.disabledReason(webhook) : null;
    return { ...webhook, enabled, disabled_reason };
  }

  return {
    list(input, caller) {
      const seen = [...state.webhooks.values()].filter((webhook) => mayDeal(caller, webhook));
      const page = pageOf(routes.list, seen, input, (webhook, field) =>
        Reflect.get(withStatus(webhook), field),
      );
      return { items: page.items.map((webhook) => shown(webhook, caller)), total: page.total };
    },
    get: (input, caller) => shown(find(input.webhook_id, caller), caller),
    async create(input, caller) {
      await refuseUrl(rooms, input.url);
      demandScopes(caller, input.events);
      // The kind decides the form of the id.
      const id = newId('webhook') as WebhookId;
      const webhook: Webhook = {
        id,
        url: input.url,
        events: input.events,
        secret: input.secret === undefined ? null : await vault.seal(id, input.secret),
        enabled: input.enabled,
        armed: 0,
        machine_ids: input.machine_ids ?? null,
        key_id: caller.key_id,
        created_at: iso(),
        updated_at: iso(),
      };
      await state.change((draft) => {
        demandScopes(caller.during(draft), input.events);
        if (draft.all('webhooks').length >= mostWebhooks) {
          throw new AppError('unavailable', `${mostWebhooks} webhooks exist already: remove some`);
        }
        draft.put('webhooks', webhook);
        caller.commit(draft, { webhook_id: id });
      });
      return shown(webhook, caller);
    },
    async update(input, caller) {
      const { webhook_id: id, secret, ...wish } = input;
      find(id, caller);
      if (wish.url !== undefined) await refuseUrl(rooms, wish.url);
      const sealed = typeof secret === 'string' ? await vault.seal(id, secret) : secret;
      const { before, webhook } = await state.change((draft) => {
        const dealer = { key_id: caller.key_id, ...caller.during(draft) };
        const before = find(id, dealer, draft.before);
        const webhook: Webhook = {
          ...before,
          url: wish.url ?? before.url,
          events: wish.events ?? before.events,
          enabled: wish.enabled ?? before.enabled,
          secret: sealed === undefined ? before.secret : sealed,
          machine_ids: wish.machine_ids === undefined ? before.machine_ids : wish.machine_ids,
          armed: wish.enabled ? before.armed + 1 : before.armed,
          updated_at: iso(),
        };
        // It is that of who says where it goes; and one whose key is gone, of who enables it.
        const taken = webhook.url !== before.url || (wish.enabled && !rightsOf(before.key_id, draft.before));
        if (taken) webhook.key_id = caller.key_id;
        // Not only its key: whoever changes it could have more sent to itself.
        for (const reader of [dealer, rightsOf(webhook.key_id, draft.before) ?? dealer]) {
          demandScopes(reader, webhook.events);
          refuseUnreached(reader, wish.machine_ids ?? []);
        }
        draft.put('webhooks', webhook);
        caller.commit(draft);
        return { before, webhook };
      });
      await queue.follow(before, webhook);
      return shown(webhook, caller);
    },
    async remove(input, caller) {
      await state.change((draft) => {
        const dealer = { key_id: caller.key_id, ...caller.during(draft) };
        find(input.webhook_id, dealer, draft.before);
        draft.remove('webhooks', input.webhook_id);
        caller.commit(draft);
      });
      return { deleted: true };
    },
    ...deliveryHandlers({ ...rooms, find }),
  };
}

/** Who deals with one, with the right of that moment. */
type Dealer = Rights & Pick<Caller, 'key_id'>;
type Reader = Pick<Rights, 'may'>;

/** The first scope that reading these events needs and that is not there. */
function missingScope({ may }: Reader, events: readonly string[]) {
  return typesOf(events)
    .map((type) => scopeOfType.get(type))
    .find((scope) => scope && !may(scope));
}

function demandScopes(reader: Reader, events: readonly string[]): void {
  const required_scope = missingScope(reader, events);
  if (!required_scope) return;
  throw new AppError(
    'forbidden',
    `a webhook tells no more than its key may read: ${required_scope} is missing`,
    {
      required_scope,
    },
  );
}

function refuseUnreached({ reaches }: Pick<Rights, 'reaches'>, machines: readonly MachineId[]): void {
  const outside = machines.find((machine) => !reaches(machine));
  if (outside === undefined) return;
  throw new AppError('forbidden', 'the key of this webhook does not reach that machine', {
    machine_id: outside,
  });
}

async function refuseUrl({ guard, resolve }: HandlerRooms, url: string): Promise<void> {
  try {
    await guard.judgeUrl(new URL(url), resolve);
  } catch (error) {
    if (!(error instanceof NotAllowed)) throw error;
    const issues = [{ path: 'url', message: error.message }];
    throw new AppError('validation_failed', `body: url: ${error.message}`, { issues });
  }
}
