// Verifies the signature of a webhook delivery with WebCrypto, in Node, Deno, Workers and browsers.
import { now } from '../clock.ts';
import { parsed, propertyOf } from './errors-and-envelopes.ts';

export interface WebhookDelivery {
  /** The raw body. Do not parse and serialize it first, because that would change the signed bytes. */
  payload: string | Uint8Array<ArrayBuffer>;
  headers: Headers | Readonly<Record<string, string | readonly string[] | undefined>>;
  secret: string;
  /**
   * Maximum number of milliseconds between the delivery's timestamp and now; 5 minutes by default. With Infinity, a
   * delivery may have any age or no timestamp, so replays are accepted too.
   */
  tolerance?: number;
}

/** The event in a webhook delivery. Its `type` is one that a webhook can subscribe to, or `test`. */
export interface WebhookEvent {
  id: string;
  type: string;
  timestamp: string;
  data: Record<string, unknown>;
  [further: string]: unknown;
}

/** Thrown if a delivery is not genuine, is too old or has a timestamp in the future. */
export class SignatureError extends Error {
  override readonly name = 'SignatureError';
}

const defaultTolerance = 300_000;

/** Resolves with the event of a genuine delivery. Rejects with SignatureError for any other. */
export async function verifyWebhook(delivery: WebhookDelivery): Promise<WebhookEvent> {
  const { payload, headers, secret } = delivery;
  const key = standardKeyOf(secret);
  const body = typeof payload === 'string' ? new TextEncoder().encode(payload) : payload;
  const given = (name: string): string | undefined => headerOf(headers, name);
  const signature = /^sha256=([0-9a-f]{64})$/.exec(given('x-service-signature') ?? '')?.[1];
  if (!signature)
    throw new SignatureError(
      'the header X-Service-Signature is missing or malformed: pass the headers of the request',
    );
  if (!(await signs(new TextEncoder().encode(secret), fromHex(signature), body))) {
    throw new SignatureError(
      'X-Service-Signature does not match the body: check the secret, and pass the raw body',
    );
  }
  await checkTimestamp(delivery, key, body, given);
  const event = parsed(new TextDecoder().decode(body));
  if (!isEvent(event)) throw new SignatureError('the body is not an event');
  return event;
}

/** Checks the headers of Standard Webhooks. Their signature covers the timestamp, which prevents replays. */
async function checkTimestamp(
  { tolerance = defaultTolerance }: WebhookDelivery,
  key: Uint8Array<ArrayBuffer>,
  body: Uint8Array<ArrayBuffer>,
  given: (name: string) => string | undefined,
): Promise<void> {
  const [id, seconds, signatures] = ['webhook-id', 'webhook-timestamp', 'webhook-signature'].map(given);
  const none = id === undefined && seconds === undefined && signatures === undefined;
  if (none && tolerance === Number.POSITIVE_INFINITY) return;
  if (none)
    throw new SignatureError(
      'the headers webhook-id, webhook-timestamp and webhook-signature are missing: pass all headers of the request',
    );
  const head = new TextEncoder().encode(`${id}.${seconds}.`);
  const signed = new Uint8Array(head.length + body.length);
  signed.set(head);
  signed.set(body, head.length);
  const all = (signatures ?? '').split(' ').filter((one) => one.startsWith('v1,'));
  const fit = await Promise.all(all.map((one) => signs(key, fromBase64(one.slice(3)), signed)));
  if (!fit.includes(true))
    throw new SignatureError('webhook-signature does not match the timestamp and the body');
  const age = Math.abs(now() - Number(seconds) * 1000);
  if (!(age <= tolerance)) {
    throw new SignatureError(
      'the delivery’s timestamp is too old or in the future; check the clock of this machine',
    );
  }
}

/** True if an HMAC-SHA256 signature is valid. WebCrypto compares in constant time. */
async function signs(
  secret: Uint8Array<ArrayBuffer>,
  signature: Uint8Array<ArrayBuffer>,
  bytes: Uint8Array<ArrayBuffer>,
): Promise<boolean> {
  const algorithm = { name: 'HMAC', hash: 'SHA-256' };
  const key = await crypto.subtle.importKey('raw', secret, algorithm, false, ['verify']);
  return crypto.subtle.verify('HMAC', key, signature, bytes);
}

/**
 * Returns the key for Standard Webhooks: the decoded base64 text after whsec_. For a secret without this prefix, the
 * key is the bytes of the secret.
 */
function standardKeyOf(secret: string): Uint8Array<ArrayBuffer> {
  const key = secret.startsWith('whsec_') ? fromBase64(secret.slice(6)) : new TextEncoder().encode(secret);
  // WebCrypto rejects an empty key.
  if (key.length === 0) throw new SignatureError('the secret is empty, or is not base64 after whsec_');
  return key;
}

function headerOf(headers: WebhookDelivery['headers'], name: string): string | undefined {
  if (headers instanceof Headers) return headers.get(name) ?? undefined;
  const value = Object.entries(headers).find(([key]) => key.toLowerCase() === name)?.[1];
  // A header that occurs twice is ambiguous, so it counts as missing.
  return typeof value === 'string' ? value : undefined;
}

function fromHex(text: string): Uint8Array<ArrayBuffer> {
  return Uint8Array.from(text.match(/../g) ?? [], (byte) => Number.parseInt(byte, 16));
}

function fromBase64(text: string): Uint8Array<ArrayBuffer> {
  try {
    // atob accepts missing padding, which is refused here.
    if (text.length % 4 !== 0) return new Uint8Array();
    return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  } catch {
    return new Uint8Array();
  }
}

function isEvent(value: unknown): value is WebhookEvent {
  const data = propertyOf(value, 'data');
  return (
    ['id', 'type', 'timestamp'].every((name) => typeof propertyOf(value, name) === 'string') &&
    typeof data === 'object' &&
    data !== null &&
    !Array.isArray(data)
  );
}
