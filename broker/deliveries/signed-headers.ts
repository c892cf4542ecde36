// Makes the headers of a delivery: its event, id and time, and two signatures of its body. One signature is Farhand's
// own, the other follows the specification Standard Webhooks.
import { createHmac, createSecretKey, type KeyObject } from 'node:crypto';
import { iso } from '../../shared/clock.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import { version } from '../../shared/version.ts';

/** The content of a delivery, the same for each attempt. */
export interface Message {
  id: string;
  eventId: string;
  type: string;
  /** The JSON text that is signed and sent. */
  body: Buffer;
}

/**
 * Makes the message for a test of a webhook or an alert channel. Its event is in no event log. The REST interface
 * promises the id `evt_test` for tests of webhooks.
 */
export function testMessage(message: string, id = 'evt_test'): Message {
  const event = { id, type: 'test', timestamp: iso(), data: { message } };
  return { id: newId('delivery'), eventId: id, type: event.type, body: Buffer.from(JSON.stringify(event)) };
}

/** The keys of the two signatures. `plain` is for Farhand's own signature, `standard` for that of Standard Webhooks. */
export interface Signer {
  plain: KeyObject;
  standard: KeyObject;
}

const prefix = 'whsec_';

/**
 * Returns the keys of the two signatures. Each key is usually the secret itself. If the secret begins with `whsec_`,
 * the key of Standard Webhooks is instead the rest of the secret, decoded from base64.
 */
export function signerOf(secret: string): Signer {
  const plain = createSecretKey(secret, 'utf8');
  const standard = secret.startsWith(prefix) ? createSecretKey(secret.slice(prefix.length), 'base64') : plain;
  return { plain, standard };
}

export function headersOf(message: Message, signer: Signer | undefined, at: number): Record<string, string> {
  const seconds = String(Math.floor(at / 1000));
  return {
    'Content-Type': 'application/json',
    'User-Agent': `Farhand-Webhook/${version}`,
    'X-Service-Event': message.type,
    'X-Service-Delivery': message.id,
    'webhook-id': message.eventId,
    'webhook-timestamp': seconds,
    ...(signer && signaturesOf(message, signer, seconds)),
  };
}

function signaturesOf({ eventId, body }: Message, { plain, standard }: Signer, seconds: string) {
  const hex = createHmac('sha256', plain).update(body).digest('hex');
  const base64 = createHmac('sha256', standard)
    .update(`${eventId}.${seconds}.`)
    .update(body)
    .digest('base64');
  return { 'X-Service-Signature': `sha256=${hex}`, 'webhook-signature': `v1,${base64}` };
}
