// Decides which alerts are sent to a channel, and sends each delivery in the format of the channel's service.

import { version } from '../../shared/version.ts';
import { attempt, type Outcome } from '../deliveries/attempt-delivery.ts';
import type { Receivers } from '../deliveries/delivery-queue.ts';
import type { EventKind } from '../deliveries/delivery-store.ts';
import type { Deliveries } from '../deliveries/index.ts';
import type { RightsOf } from '../deliveries/key-rights-types.ts';
import { type Message as Delivered, headersOf, signerOf } from '../deliveries/signed-headers.ts';
import type { AlertChannel, State } from '../state/index.ts';
import { jsonFor, type Message, messageOf, type Notification, notification } from './notification-formats.ts';
import { sendMail } from './send-email.ts';

/** Maximum number of e-mails whose remaining recipients are remembered. */
const mostLeft = 1_000;

/** The fields of a channel that are stored encrypted. */
export interface Sealed {
  url: string;
  secret: string | null;
}

export class ChannelReceivers implements Receivers<AlertChannel> {
  readonly #state: State;
  readonly #deliveries: Deliveries;
  readonly #rightsOf: RightsOf;
  /** For each e-mail, the recipients whom the mail server has refused temporarily. Only they get the next attempt. */
  readonly #left = new Map<string, readonly string[]>();

  constructor(state: State, deliveries: Deliveries, rightsOf: RightsOf) {
    this.#state = state;
    this.#deliveries = deliveries;
    this.#rightsOf = rightsOf;
  }

  get byId(): ReadonlyMap<string, AlertChannel> {
    return this.#state.alert_channels;
  }

  isEnabled(channel: AlertChannel): boolean {
    return channel.enabled && this.disabledReason(channel) === null;
  }

  disabledReason(channel: AlertChannel): 'key_revoked' | 'secret_unreadable' | null {
    if (!this.#rightsOf(channel.key_id)) return 'key_revoked';
    return this.sealedOf(channel) ? null : 'secret_unreadable';
  }

  obstacle(channel: AlertChannel, { machineId }: EventKind): 'not_permitted' | undefined {
    return this.#mayRead(channel, machineId) ? undefined : 'not_permitted';
  }

  /** Returns the notification with only the alerts and missing machines that the channel's key may read now. */
  readable(channel: AlertChannel, whole: Notification): Notification {
    const alerts = whole.alerts.filter(
      ({ machine_id }) =>
        this.#mayRead(channel, machine_id) && (machine_id !== null || this.#mayReadAll(channel)),
    );
    const missing = whole.missing.filter(({ machine_id }) => this.#mayRead(channel, machine_id));
    if (alerts.length === whole.alerts.length && missing.length === whole.missing.length) return whole;
    const counts = { opened: 0, repeated: 0, resolved: 0 };
    for (const { step } of alerts) counts[step] += 1;
    return { ...whole, counts, alerts, missing };
  }

  send(channel: AlertChannel, delivered: Delivered, signal: AbortSignal): Promise<Outcome> {
    return attempt(signal, async () => {
      // The body is checked against the schema, because an older version of the broker may have written it.
      const event: unknown = JSON.parse(delivered.body.toString());
      const { data } = event as { data: unknown };
      const whole = notification.parse(data);
      const some = this.readable(channel, whole);
      const isEmpty = some.alerts.length + some.downtimes.length === 0;
      if (isEmpty) return { error: 'the key of this channel may no longer read these alerts' };
      const body =
        some === whole ? delivered.body : Buffer.from(JSON.stringify({ ...(event as object), data: some }));
      return this.#transmit(channel, { ...delivered, body }, messageOf(some), signal);
    });
  }

  /** Sends a test message. Never rejects. */
  test(channel: AlertChannel, delivered: Delivered, signal: AbortSignal): Promise<Outcome> {
    const message = {
      title: `Test of the alert channel ${channel.name}`,
      lines: ['Alerts of your machines will look like this.'],
      isUrgent: false,
    };
    return attempt(signal, () => this.#transmit(channel, delivered, message, signal));
  }

  /** Returns the decrypted parts of a channel; undefined if they cannot be decrypted. */
  sealedOf(channel: AlertChannel): Sealed | undefined {
    const text = this.#deliveries.vault.decrypt(channel.id, channel.sealed);
    // The cast is safe: only seal() makes these texts.
    return text === undefined ? undefined : (JSON.parse(text) as Sealed);
  }

  seal(id: string, sealed: Sealed): string {
    return this.#deliveries.vault.encrypt(id, JSON.stringify(sealed));
  }

  #mayRead({ key_id }: AlertChannel, machineId: string | null): boolean {
    const rights = this.#rightsOf(key_id);
    return rights?.may('machines:read') === true && (machineId === null || rights.reaches(machineId));
  }

  #mayReadAll({ key_id }: AlertChannel): boolean {
    // Alerts that are about no machine need a key without limits. No machine has an empty id, so reaches('') is true
    // only for such a key.
    return this.#rightsOf(key_id)?.reaches('') === true;
  }

  /** Sends a delivery. A webhook gets its JSON body; other channels get `message`, the text for people. */
  async #transmit(
    channel: AlertChannel,
    delivered: Delivered,
    message: Message,
    signal: AbortSignal,
  ): Promise<Outcome> {
    const { sender } = this.#deliveries;
    const { type } = channel;
    const { url, secret } = this.sealedOf(channel) ?? { url: channel.url, secret: null };
    if (type === 'email') return this.#mail(channel, { url, secret }, message, delivered.eventId, signal);
    if (type === 'webhook') {
      const signer = secret === null ? undefined : signerOf(secret);
      const made = (at: number) => ({ headers: headersOf(delivered, signer, at), body: delivered.body });
      return sender.send(url, made, signal);
    }
    const headers = {
      'Content-Type': 'application/json',
      'User-Agent': `Farhand/${version}`,
      ...(type === 'ntfy' && secret !== null && { Authorization: `Bearer ${secret}` }),
    };
    const body = Buffer.from(JSON.stringify(jsonFor(type, url, message)));
    // ntfy accepts JSON only at the root of its URL; the JSON contains the topic.
    return sender.send(type === 'ntfy' ? new URL(url).origin : url, () => ({ headers, body }), signal);
  }

  async #mail(
    channel: AlertChannel,
    { url, secret: password }: Sealed,
    message: Message,
    id: string,
    signal: AbortSignal,
  ): Promise<Outcome> {
    const { user, from, to } = channel;
    const key = `${channel.id} ${id}`;
    const mail = { url, user, password, from: from ?? '', to: this.#left.get(key) ?? to ?? [], message, id };
    return attempt(signal, async (_, ending) => {
      const { answered, left } = await sendMail(mail, this.#deliveries.guard, ending);
      this.#left.delete(key);
      if (left.length > 0) this.#left.set(key, left);
      // The oldest entries may belong to deliveries that were given up.
      for (const old of [...this.#left.keys()].slice(0, -mostLeft)) this.#left.delete(old);
      return answered;
    });
  }
}
