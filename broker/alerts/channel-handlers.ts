// The REST handlers of alert channels and of their deliveries.
import { type ChannelType, alertChannels as routes } from '../../shared/api/alert-channels.ts';
import type { Api, Caller, Handlers, Input, Reply, Rights } from '../../shared/api/route-table.ts';
import type { ChannelId } from '../../shared/api/shared-schemas.ts';
import { iso } from '../../shared/clock.ts';
import { definedFields, setsNothing } from '../../shared/defined-fields.ts';
import { AppError, fieldError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import { Semaphore } from '../../shared/semaphore.ts';
import { assertUrl } from '../deliveries/address-guard.ts';
import type { DeliveryQueue } from '../deliveries/delivery-queue.ts';
import { deliveryRows } from '../deliveries/delivery-store.ts';
import type { Deliveries } from '../deliveries/index.ts';
import type { RightsOf } from '../deliveries/key-rights-types.ts';
import { testMessage } from '../deliveries/signed-headers.ts';
import { found, notFound, tooMany } from '../find-or-not-found.ts';
import type { History, Row } from '../history/history-database.ts';
import { filtersOf, pageOf, pageOfRows } from '../list-pages-and-filters.ts';
import type { AlertChannel, Declared, State, StateTransaction } from '../state/index.ts';
import type { ChannelReceivers, Sealed } from './deliver-to-channels.ts';

interface ChannelParts {
  state: State;
  history: History;
  rightsOf: RightsOf;
  deliveries: Deliveries;
  receivers: ChannelReceivers;
  queue: DeliveryQueue<AlertChannel>;
}

type Routes = Handlers['alertChannels'];
type Serialized = Reply<Api['alertChannels']['get']>;
/** A caller, with the rights of its key at the time of the request. */
type Editor = Rights & Pick<Caller, 'key_id'>;

const maxChannels = 100;
/** Maximum number of test messages at once. Each may use a connection until its deadline. */
const maxTests = 16;

export class ChannelHandlers implements Routes {
  readonly #parts: ChannelParts;
  readonly #tests = new Semaphore(
    maxTests,
    () => new AppError('unavailable', 'too many tests of channels are running: try again later'),
  );

  constructor(parts: ChannelParts) {
    this.#parts = parts;
  }

  readonly list: Routes['list'] = async (input, caller) => {
    const visible = [...this.#parts.state.alert_channels.values()].filter((one) => this.#covers(caller, one));
    const { items, total } = pageOf(
      routes.list,
      visible.map((one) => this.#withStatus(one)),
      input,
    );
    return { items: await Promise.all(items.map((one) => this.#serialize(one))), total };
  };

  readonly get: Routes['get'] = ({ channel_id }, caller) =>
    this.#serialize(this.#withStatus(this.#find(channel_id, caller)));

  readonly create: Routes['create'] = async (input, caller) => {
    const { deliveries, receivers, state } = this.#parts;
    const { name, type, url, secret = null, user = null, from = null, to = null, enabled = true } = input;
    const id = newId('channel') as ChannelId;
    const sealed = receivers.seal(id, { url, secret });
    const at = { created_at: iso(), updated_at: iso() };
    const fields = { name, type, user, from, to, enabled, armed: 0, key_id: caller.key_id, ...at };
    const channel = { id, url: printable(type, url), sealed, ...fields };
    assertFields(channel, { url, secret });
    await assertUrl(deliveries.guard, url);
    await state.change((transaction) => {
      assertMayRead(caller.during(transaction));
      if (transaction.before.alert_channels.size >= maxChannels) throw tooMany('channels', maxChannels);
      transaction.put('alert_channels', channel);
      caller.commit(transaction, { channel_id: id });
    });
    return this.#serialize(this.#withStatus(channel));
  };

  readonly update: Routes['update'] = async (input, caller) => {
    const { deliveries, queue, state } = this.#parts;
    this.#find(input.channel_id, caller);
    if (input.url !== undefined) await assertUrl(deliveries.guard, input.url);
    const channel = await state.change((transaction) => this.#change(input, caller, transaction));
    await queue.follow(channel.id, input.enabled === true);
    return this.#serialize(this.#withStatus(channel));
  };

  readonly remove: Routes['remove'] = async ({ channel_id }, caller) => {
    await this.#parts.state.change((transaction) => {
      const editor = { key_id: caller.key_id, ...caller.during(transaction) };
      this.#find(channel_id, editor, transaction.before);
      assertUnused(channel_id, transaction.before);
      transaction.remove('alert_channels', channel_id);
      caller.commit(transaction);
    });
    return { deleted: true };
  };

  readonly test: Routes['test'] = async ({ channel_id }, caller) => {
    const { receivers } = this.#parts;
    const channel = this.#find(channel_id, caller);
    if (receivers.disabledReason(channel) === 'secret_unreadable') {
      const message = `the secret of channel ${channel_id} cannot be decrypted: set its url and secret again`;
      throw new AppError('conflict', message, { channel_id });
    }
    // Each test has an id of its own: a receiver or mail program skips an id that it has already seen.
    const message = testMessage('This is a test of your alert channel.', newId('event'));
    const { delivered, status_code, duration, error } = await this.#tests.run(caller.signal, () =>
      receivers.test(channel, message, caller.signal),
    );
    return { delivered, status_code, duration, ...(error !== null && { error }) };
  };

  readonly deliveries: Routes['deliveries'] = async (input, caller) => {
    this.#find(input.channel_id, caller);
    const filters = filtersOf(routes.deliveries, input, { channel_id: ['webhook_id = ?', input.channel_id] });
    const { items, total } = await pageOfRows(this.#parts.history, deliveryRows, filters, input);
    return { items: items.map((row) => this.#serializeDelivery(row, caller)), total };
  };

  readonly redeliver: Routes['redeliver'] = async ({ channel_id, delivery_id }, caller) => {
    const { deliveries, history, queue, receivers } = this.#parts;
    const { store } = deliveries;
    const channel = this.#find(channel_id, caller);
    if (!receivers.isEnabled(channel))
      throw new AppError('conflict', `channel ${channel_id} is disabled: enable it first`, { channel_id });
    const row = await history.write(async (transaction) => {
      const { row, event } = (await store.find(delivery_id, transaction)) ?? {};
      if (!event || row?.webhook_id !== channel_id) throw notFound('delivery', delivery_id);
      if (receivers.obstacle(channel, event)) {
        const message =
          'the key of this channel is not allowed to read this alert, so the channel cannot send it';
        throw new AppError('forbidden', message, { delivery_id });
      }
      await store.request(channel_id, event, transaction, true);
      return (await store.find(delivery_id, transaction))?.row ?? row;
    });
    queue.reread(channel_id);
    return this.#serializeDelivery(row, caller);
  };

  #serializeDelivery(row: Row, caller: Caller) {
    const withAnswers = caller.may('webhooks:write');
    const { webhook_id, ...rest } = this.#parts.deliveries.store.serialize(row, withAnswers);
    return { ...rest, channel_id: webhook_id };
  }

  /** True if the caller may read every alert that a channel sends. */
  #covers(caller: Editor, channel: AlertChannel, declared?: Declared): boolean {
    if (channel.key_id === caller.key_id) return true;
    const owner = this.#parts.rightsOf(channel.key_id, declared);
    const reaches = owner ? owner.within(caller.key_id) : caller.reachable() === undefined;
    return reaches && caller.may('machines:read');
  }

  /** Finds a channel that the caller may see and change. Throws channel_not_found or forbidden. */
  #find(channel_id: string, caller: Editor, declared: Declared = this.#parts.state): AlertChannel {
    const channel = found(declared.alert_channels, 'channel', channel_id);
    if (this.#covers(caller, channel, declared)) return channel;
    const message = `channel ${channel_id} sends alerts that this key is not allowed to read`;
    throw new AppError('forbidden', message, { channel_id });
  }

  #change(input: Input<Api['alertChannels']['update']>, caller: Caller, transaction: StateTransaction) {
    const { channel_id: id, ...changes } = input;
    const { secret, url, ...params } = changes;
    const { receivers, rightsOf } = this.#parts;
    const editor = { key_id: caller.key_id, ...caller.during(transaction) };
    const before = this.#find(id, editor, transaction.before);
    if (setsNothing(changes)) return before;
    const old = receivers.sealedOf(before);
    const sealed = {
      url: url ?? old?.url ?? before.url,
      secret: secret === undefined ? (old?.secret ?? null) : secret,
    };
    assertSecretSent(before.type, old, { url, secret });
    // A channel sends only alerts that its key may read. The caller's key becomes the key of the channel if the request
    // changes where the alerts go, or if the request enables a channel whose key is revoked or expired.
    const moved = (url !== undefined && url !== old?.url) || params.to !== undefined;
    const orphaned = params.enabled === true && !rightsOf(before.key_id, transaction.before);
    const channel: AlertChannel = {
      ...before,
      ...definedFields(params),
      url: printable(before.type, sealed.url),
      // If the old url and secret cannot be decrypted, they stay as they are until a request sets the url again.
      sealed: old || url !== undefined ? receivers.seal(id, sealed) : before.sealed,
      armed: params.enabled ? before.armed + 1 : before.armed,
      key_id: moved || orphaned ? caller.key_id : before.key_id,
      updated_at: iso(),
    };
    assertFields(channel, sealed);
    assertMayRead(editor);
    transaction.put('alert_channels', channel);
    caller.commit(transaction);
    return channel;
  }

  #withStatus(channel: AlertChannel): Omit<Serialized, 'last_delivery'> {
    const { receivers } = this.#parts;
    const disabled_reason = channel.enabled ? receivers.disabledReason(channel) : null;
    const { sealed: _, armed: _armed, key_id: _key, ...rest } = channel;
    return { ...rest, enabled: receivers.isEnabled(channel), disabled_reason };
  }

  async #serialize(channel: Omit<Serialized, 'last_delivery'>): Promise<Serialized> {
    return { ...channel, last_delivery: await this.#parts.deliveries.store.last(channel.id) };
  }
}

/**
 * Returns the URL of a channel for REST answers. For Slack, Discord and ntfy, this is only the origin of the URL and an
 * ellipsis, because the rest is a secret.
 */
function printable(type: ChannelType, url: string): string {
  return type === 'webhook' || type === 'email' ? url : `${new URL(url).origin}/…`;
}

/** Throws validation_failed for fields that do not fit the type of the channel. */
function assertFields({ type, user, from, to }: AlertChannel, { url, secret }: Sealed): void {
  const isMail = type === 'email';
  const { protocol, pathname } = new URL(url);
  if (protocol.startsWith('smtp') !== isMail)
    throw fieldError(
      'body',
      'url',
      isMail ? 'must begin with smtp:// or smtps://' : 'must be an http or https URL',
    );
  if (type === 'ntfy' && !/^\/[\w-]{1,64}$/.test(pathname))
    throw fieldError('body', 'url', 'must end with the name of a topic, as in https://ntfy.sh/my-topic');
  for (const [field, value] of Object.entries({ user, from, to })) {
    if (!isMail && value !== null)
      throw fieldError('body', field, `is only for channels of type email, not for ${type}: leave it out`);
  }
  if (isMail && (from === null || to === null))
    throw fieldError(
      'body',
      from === null ? 'from' : 'to',
      'is missing: e-mail needs a sender and recipients',
    );
  if (isMail && (user === null) !== (secret === null))
    throw fieldError('body', 'secret', 'is the password for `user` at the mail server: set both, or neither');
  if (['slack', 'discord'].includes(type) && secret !== null)
    throw fieldError(
      'body',
      'secret',
      `is not a field of channels of type ${type}, because their url is the secret: leave the field out`,
    );
}

/** Throws validation_failed if a stored password or token would be sent to another server. */
function assertSecretSent(
  type: ChannelType,
  old: Sealed | undefined,
  sent: { url?: string | undefined; secret?: string | null | undefined },
): void {
  if (
    type === 'webhook' ||
    !old ||
    old.secret === null ||
    sent.url === undefined ||
    sent.secret !== undefined
  )
    return;
  const serverOf = (url: string): string => `${new URL(url).protocol}//${new URL(url).host}`;
  if (serverOf(sent.url) === serverOf(old.url)) return;
  throw fieldError(
    'body',
    'secret',
    'must be sent again, or set to null: the new url leads to another server, which must not get the stored secret',
  );
}

/** Throws conflict if rules name the channel, because a rule whose only channel is deleted would send no alerts. */
function assertUnused(channel_id: ChannelId, { alert_rules }: Declared): void {
  const users = [...alert_rules.values()].filter(({ channel_ids }) => channel_ids?.includes(channel_id));
  if (users.length === 0) return;
  const count = users.length === 1 ? '1 alert rule names' : `${users.length} alert rules name`;
  const message = `${count} this channel: change or delete the rules in details.rules first`;
  throw new AppError('conflict', message, { channel_id, rules: users.slice(0, 100).map(({ id }) => id) });
}

function assertMayRead({ may }: Pick<Rights, 'may'>): void {
  if (may('machines:read')) return;
  const required_scope = 'machines:read';
  const message = `a key that creates or changes a channel needs the scope ${required_scope}, because the channel sends alerts`;
  throw new AppError('forbidden', message, { required_scope });
}
