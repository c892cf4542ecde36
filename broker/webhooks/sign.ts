// The headers of a delivery: what it is, and two signatures of the same bytes (spec 6.4, Standard Webhooks).
import { createHmac } from 'node:crypto';
import { version } from '../../shared/version.ts';

/** What is sent, attempt after attempt the same. */
export interface Message {
  /** Of the event. */
  id: string;
  type: string;
  deliveryId: string;
  /** JSON, as it is signed. */
  body: Buffer;
}

const standard = 'whsec_';

export function headersOf(message: Message, secret: string | undefined, at: number): Record<string, string> {
  const seconds = String(Math.floor(at / 1000));
  return {
    'Content-Type': 'application/json',
    'User-Agent': `Farhand-Webhook/${version}`,
    'X-Service-Event': message.type,
    'X-Service-Delivery': message.deliveryId,
    'webhook-id': message.id,
    'webhook-timestamp': seconds,
    ...(secret !== undefined && {
      'X-Service-Signature': `sha256=${createHmac('sha256', secret).update(message.body).digest('hex')}`,
      'webhook-signature': `v1,${createHmac('sha256', keyOf(secret)).update(`${message.id}.${seconds}.`).update(message.body).digest('base64')}`,
    }),
  };
}

/** Standard Webhooks writes keys as base64 behind a prefix; any other secret is the key itself. */
function keyOf(secret: string): Buffer {
  return secret.startsWith(standard)
    ? Buffer.from(secret.slice(standard.length), 'base64')
    : Buffer.from(secret, 'utf8');
}
