// Who may see and change a webhook: a key that may read every event the webhook sends, else it could read them through it.
import type { Caller, Rights } from '../../shared/api/index.ts';
import type { MachineId, WebhookId } from '../../shared/api/route.ts';
import { scopeOfType, typesOf } from '../../shared/api/webhooks.ts';
import { AppError } from '../../shared/errors.ts';
import type { Declared, State, Webhook } from '../state/index.ts';
import type { EventKind } from './delivery-store.ts';
import type { RightsOf } from './subscriptions.ts';

/** A caller, with the rights of that moment. */
export type Editor = Rights & Pick<Caller, 'key_id'>;

export class WebhookAccess {
  readonly #state: State;
  readonly #rightsOf: RightsOf;

  constructor(state: State, rightsOf: RightsOf) {
    this.#state = state;
    this.#rightsOf = rightsOf;
  }

  /** Whether the caller may see and change a webhook. */
  covers(caller: Editor, webhook: Webhook, declared: Declared = this.#state): boolean {
    if (webhook.key_id === caller.key_id) return true;
    const owner = this.#rightsOf(webhook.key_id, declared);
    const reaches = owner ? owner.within(caller.key_id) : caller.reachable() === undefined;
    return reaches && missingScope(caller, webhook.events) === undefined;
  }

  /** Throws webhook_not_found, forbidden. */
  find(id: WebhookId, caller: Editor, declared: Declared = this.#state): Webhook {
    const webhook = declared.webhooks.get(id);
    if (!webhook) throw new AppError('webhook_not_found', 'no such webhook', { webhook_id: id });
    if (this.covers(caller, webhook, declared)) return webhook;
    throw new AppError('forbidden', 'this webhook sends events that this key may not read', {
      webhook_id: id,
    });
  }
}

type Reader = Pick<Rights, 'may'>;

/** The first scope that reading these events needs and the reader lacks. */
function missingScope({ may }: Reader, events: readonly string[]) {
  return typesOf(events)
    .map((type) => scopeOfType.get(type))
    .find((scope) => scope && !may(scope));
}

export function assertScopes(reader: Reader, events: readonly string[]): void {
  const required_scope = missingScope(reader, events);
  if (!required_scope) return;
  const message = `a webhook sends only what its key may read: ${required_scope} is missing`;
  throw new AppError('forbidden', message, { required_scope });
}

export function assertReaches({ reaches }: Pick<Rights, 'reaches'>, machines: readonly MachineId[]): void {
  const outside = machines.find((machine) => !reaches(machine));
  if (outside === undefined) return;
  throw new AppError('forbidden', 'the key of this webhook does not reach that machine', {
    machine_id: outside,
  });
}

/** Whether a caller may read an event itself, at this moment. */
export function readerOf(caller: Caller): (event: EventKind) => boolean {
  const machines = caller.reachable();
  return ({ type, machineId }) => {
    const scope = scopeOfType.get(type);
    if (!scope || !caller.may(scope)) return false;
    return machines === undefined || machines.some((id) => id === machineId);
  };
}
